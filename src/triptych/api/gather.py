"""The router's events of one prompt, gathered into a whole answer; and those of several prompts as one sequence."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from triptych.errors import EngineError
from triptych.merge import merge
from triptych.types import (
    ChoiceFinished,
    Event,
    Finished,
    Started,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)

Numbered = tuple[int, Event]  # of which prompt, from 0


@dataclass
class GatheredCall:
    id: str
    name: str
    arguments: str = ""


@dataclass
class GatheredChoice:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: dict[int, GatheredCall] = field(default_factory=dict)  # by index
    ended: ChoiceFinished | None = None

    @property
    def end(self) -> ChoiceFinished:
        if self.ended is None:
            raise EngineError("a choice ended without its terminal event")
        return self.ended

    def take_call(self, delta: ToolCallDelta) -> None:
        call = self.calls.setdefault(delta.index, GatheredCall(delta.id, delta.name))
        call.arguments += delta.arguments


class Answer:
    """What the events of one prompt have given so far."""

    def __init__(self) -> None:
        self.started = Started([])
        self.finished: Finished | None = None
        self._choices: dict[int, GatheredChoice] = {}

    def take(self, event: Event) -> None:
        match event:
            case Started():
                self.started = event
            case TextDelta():
                choice = self.choice(event.choice)
                choice.text += event.text
                choice.token_ids += event.token_ids
                choice.logprobs += event.logprobs
            case ToolCallDelta():
                self.choice(event.choice).take_call(event)
            case ChoiceFinished():
                self.choice(event.choice).ended = event
            case Finished():
                self.finished = event

    def choice(self, index: int) -> GatheredChoice:
        return self._choices.setdefault(index, GatheredChoice())

    @property
    def choices(self) -> list[GatheredChoice]:
        """In the order of their indices. Raises EngineError unless each of them, and the request, has ended."""
        if self.finished is None or not self._choices:
            raise EngineError("the request ended without a terminal event")
        return [self._choices[index] for index in sorted(self._choices)]

    @property
    def end(self) -> Finished:
        if self.finished is None:
            raise EngineError("the request ended without a terminal event")
        return self.finished


def total(usages: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        image_tokens=sum(usage.image_tokens for usage in usages),
    )


async def gather(events: AsyncIterator[Numbered], num_prompts: int) -> list[Answer]:
    """The whole answers. Raises what the router raises. Reads on after `Finished`, so that the router ends in peace."""
    answers = [Answer() for _ in range(num_prompts)]
    async for prompt, event in events:
        answers[prompt].take(event)
    return answers


def numbered(streams: Sequence[AsyncIterator[Event]]) -> AsyncGenerator[Numbered, None]:
    """The events of all prompts as they come. The first failure ends all; closing it closes all."""
    each = [_numbered(prompt, stream) for prompt, stream in enumerate(streams)]
    return each[0] if len(each) == 1 else merge(each)


async def _numbered(prompt: int, stream: AsyncIterator[Event]) -> AsyncGenerator[Numbered, None]:
    assert isinstance(stream, AsyncGenerator)  # what `handle` is, in the router and in every fake
    async with aclosing(stream) as events:
        async for event in events:
            yield prompt, event
