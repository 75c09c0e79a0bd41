"""The bodies of chat answers, whole and in chunks, in OpenAI's form. Built from router events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from triptych import __version__
from triptych.api.errors import error_body
from triptych.api.gather import Answer, GatheredChoice
from triptych.api.generation import Shown
from triptych.api.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs
from triptych.api.sse import DONE, data
from triptych.api.usage import RunningUsage, UsageBody, usage_body
from triptych.types import ChoiceFinished, Event, Finished, Started, TextDelta, Timing, ToolCallDelta

SYSTEM_FINGERPRINT = f"triptych-{__version__}"


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct, frozen=True):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[ToolCall] = []
    reasoning: None = None


class Choice(msgspec.Struct, frozen=True):
    message: AssistantMessage
    finish_reason: str
    stop_reason: str | int | None
    index: int
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | None = None


class FunctionCallDelta(msgspec.Struct, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallPart(msgspec.Struct, frozen=True):
    """The first part of a call has `id`, `type` and the name; the others go on with the arguments."""

    index: int
    function: FunctionCallDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPart] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    model: str
    created: int  # seconds of the epoch
    choices: list[Choice]
    usage: UsageBody
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str = SYSTEM_FINGERPRINT
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    timing: Timing | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    id: str
    model: str
    created: int
    choices: list[ChunkChoice]
    usage: UsageBody | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str = SYSTEM_FINGERPRINT
    prompt_token_ids: list[int] | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET


class ChatForm:
    """`echoed` is text that stands before each choice's own."""

    def __init__(self, shown: Shown, echoed: str = "", num_choices: int = 1) -> None:
        self._shown = shown
        self._echoed = echoed
        self._num_choices = num_choices

    def whole(self, answers: Sequence[Answer]) -> ChatCompletion:
        (answer,) = answers
        shown = self._shown
        choices = [self._choice(index, choice) for index, choice in enumerate(answer.choices)]
        scored = answer.started.prompt_logprobs
        return ChatCompletion(
            shown.response_id,
            shown.model,
            shown.created,
            choices,
            usage_body(answer.end.usage),
            prompt_logprobs=prompt_logprobs(scored) if scored else None,
            prompt_token_ids=answer.started.prompt_token_ids if shown.token_ids else None,
            timing=answer.end.timing if shown.timing else UNSET,
        )

    def _choice(self, index: int, gathered: GatheredChoice) -> Choice:
        shown, ended = self._shown, gathered.end
        calls = [ToolCall(call.id, FunctionCall(call.name, call.arguments)) for call in gathered.calls.values()]
        text = self._echoed + gathered.text
        return Choice(
            AssistantMessage(text if text or not calls else None, tool_calls=calls),
            ended.finish_reason.value,
            ended.stop_reason,
            index,
            chat_logprobs(gathered.logprobs, shown.tokens_as_ids) if shown.logprobs else None,
            gathered.token_ids if shown.token_ids else None,
        )

    def stream(self) -> ChatStream:
        return ChatStream(self._shown, self._echoed, self._num_choices)


class ChatStream:
    def __init__(self, shown: Shown, echoed: str, num_choices: int) -> None:
        self._shown = shown
        self._echoed = echoed
        self._num_choices = num_choices
        self._usage = RunningUsage()
        self._finished: Finished | None = None
        self._opened = False

    def event(self, prompt: int, event: Event) -> Iterator[bytes]:
        if isinstance(event, Started):
            self._usage.started(prompt, event)
        elif isinstance(event, TextDelta):
            self._usage.output(prompt, event.choice, event.num_output_tokens)
        if not self._opened:
            self._opened = True
            yield from self._opening(event)
        match event:
            case TextDelta():
                yield from self._text(event)
            case ToolCallDelta():
                yield data(self._chunk([ChunkChoice(event.choice, Delta(tool_calls=[_part(event)]))]))
            case ChoiceFinished():
                ending = ChunkChoice(event.choice, Delta(), event.finish_reason.value, event.stop_reason)
                yield data(self._chunk([ending]))
            case Finished():
                self._finished = event

    def end(self) -> Iterator[bytes]:
        """The usage and the timing, where they were asked for."""
        shown, end = self._shown, self._finished
        assert end is not None, "only a finished stream ends"
        if shown.include_usage or shown.timing:
            usage = usage_body(end.usage) if shown.include_usage else UNSET
            yield data(self._chunk([], usage, timing=end.timing if shown.timing else UNSET))
        yield DONE

    def failed(self, error: Exception) -> Iterator[bytes]:
        yield data(error_body(error))

    def _opening(self, first: Event) -> Iterator[bytes]:
        ids = first.prompt_token_ids if self._shown.token_ids and isinstance(first, Started) else UNSET
        for index in range(self._num_choices):
            choice = ChunkChoice(index, Delta(role="assistant", content=""))
            yield data(self._chunk([choice], prompt_token_ids=ids if index == 0 else UNSET))
            if self._echoed:
                yield data(self._chunk([ChunkChoice(index, Delta(content=self._echoed))]))

    def _text(self, event: TextDelta) -> Iterator[bytes]:
        """A token whose text is not final yet makes a chunk only where more than text was asked for."""
        shown = self._shown
        if not event.text and not ((shown.logprobs or shown.token_ids) and event.token_ids):
            return
        choice = ChunkChoice(
            event.choice,
            Delta(content=event.text),
            logprobs=chat_logprobs(event.logprobs, shown.tokens_as_ids) if shown.logprobs else None,
            token_ids=event.token_ids if shown.token_ids else UNSET,
        )
        yield data(self._chunk([choice]))

    def _chunk(
        self,
        choices: list[ChunkChoice],
        usage: UsageBody | UnsetType = UNSET,
        *,
        prompt_token_ids: list[int] | UnsetType = UNSET,
        timing: Timing | UnsetType = UNSET,
    ) -> ChatChunk:
        shown = self._shown
        if shown.continuous_usage and usage is UNSET:
            usage = self._usage.body()
        return ChatChunk(
            shown.response_id,
            shown.model,
            shown.created,
            choices,
            usage,
            prompt_token_ids=prompt_token_ids,
            timing=timing,
        )


def _part(delta: ToolCallDelta) -> ToolCallPart:
    if delta.name:
        return ToolCallPart(delta.index, FunctionCallDelta(delta.name, delta.arguments), delta.id, "function")
    return ToolCallPart(delta.index, FunctionCallDelta(arguments=delta.arguments))
