"""What `LLM` returns, and how it is collected from the router's events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from triptych.errors import EngineError, TriptychError
from triptych.types import (
    ChoiceFinished,
    Event,
    Finished,
    FinishReason,
    Started,
    TextDelta,
    Timing,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made. `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `logprobs` has one entry a token where they were asked for, else none."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string or stop token id
    logprobs: Sequence[TokenLogprobs] = ()
    tool_calls: Sequence[ToolCall] = ()


@dataclass(frozen=True)
class RequestOutput:
    """The `n` answers to one conversation or prompt. `prompt` is the text that `generate` was given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]  # every position that an image fills included
    outputs: Sequence[CompletionOutput]
    usage: Usage
    timing: Timing
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()


class BatchError(TriptychError):
    """One of several conversations or prompts failed, as `__cause__` says, and the others were cancelled.

    `index` is its place; `outputs` has what was finished by then, and None for the rest.
    """

    def __init__(self, error: TriptychError, index: int, outputs: Sequence[RequestOutput | None]) -> None:
        done = sum(output is not None for output in outputs)
        super().__init__(
            f"number {index} of {len(outputs)} failed when {done} were finished: {error.message}", param=error.param
        )
        self.status, self.type, self.retryable = error.status, error.type, error.retryable
        self.index = index
        self.outputs = outputs


@dataclass
class _Choice:
    """A choice while it grows. `tool_calls` are id, name and arguments so far, by their index."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tool_calls: dict[int, ToolCall] = field(default_factory=dict)
    end: ChoiceFinished | None = None

    def call(self, delta: ToolCallDelta) -> None:
        before = self.tool_calls.get(delta.index, ToolCall("", "", ""))
        self.tool_calls[delta.index] = ToolCall(
            before.id or delta.id, before.name or delta.name, before.arguments + delta.arguments
        )

    def output(self, index: int) -> CompletionOutput:
        if self.end is None:
            raise EngineError("a choice ended without a terminal event")
        return CompletionOutput(
            index=index,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=self.end.finish_reason,
            stop_reason=self.end.stop_reason,
            logprobs=tuple(self.logprobs),
            tool_calls=tuple(self.tool_calls[k] for k in sorted(self.tool_calls)),
        )


class Collector:
    """Takes one request's events in their order."""

    def __init__(self, num_choices: int) -> None:
        self._choices = [_Choice() for _ in range(num_choices)]
        self._started: Started | None = None
        self._end: Finished | None = None

    def push(self, event: Event) -> None:
        match event:
            case Started():
                self._started = event
            case TextDelta():
                choice = self._choices[event.choice]
                choice.text.append(event.text)
                choice.token_ids += event.token_ids
                choice.logprobs += event.logprobs
            case ToolCallDelta():
                self._choices[event.choice].call(event)
            case ChoiceFinished():
                self._choices[event.choice].end = event
            case Finished():
                self._end = event

    def output(self, request_id: str, prompt: str | None) -> RequestOutput:
        if self._started is None or self._end is None:
            raise EngineError("the request ended without a terminal event")
        return RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=tuple(self._started.prompt_token_ids),
            outputs=tuple(choice.output(k) for k, choice in enumerate(self._choices)),
            usage=self._end.usage,
            timing=self._end.timing,
            prompt_logprobs=tuple(self._started.prompt_logprobs),
        )
