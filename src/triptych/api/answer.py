"""The bodies of chat answers, whole and in chunks, in OpenAI's form. Built by `api/stream.py` from router events."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from triptych import __version__
from triptych.types import ChoiceFinished, Finished, Timing, Usage

SYSTEM_FINGERPRINT = f"triptych-{__version__}"


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    multimodal_tokens: dict[str, int]  # by modality


class UsageBody(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class AssistantMessage(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[None] = []
    reasoning: None = None


class Choice(msgspec.Struct, frozen=True):
    message: AssistantMessage
    finish_reason: str
    stop_reason: str | int | None
    index: int = 0
    logprobs: None = None
    token_ids: None = None


class Delta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    delta: Delta
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    index: int = 0
    logprobs: None = None


class Completion(msgspec.Struct, frozen=True):
    id: str
    model: str
    created: int  # seconds of the epoch
    choices: list[Choice]
    usage: UsageBody
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str = SYSTEM_FINGERPRINT
    timing: Timing | UnsetType = UNSET


class Chunk(msgspec.Struct, frozen=True):
    id: str
    model: str
    created: int
    choices: list[ChunkChoice]
    usage: UsageBody | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str = SYSTEM_FINGERPRINT
    timing: Timing | UnsetType = UNSET


class AnswerForm(msgspec.Struct, frozen=True):
    """What is the same in every body of one answer, and what the request asked to see."""

    response_id: str
    model: str
    include_usage: bool = False
    timing: bool = False
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    def completion(self, text: str, ended: ChoiceFinished, end: Finished) -> Completion:
        choice = Choice(AssistantMessage(text), ended.finish_reason.value, ended.stop_reason)
        return Completion(
            self.response_id, self.model, self.created, [choice], usage_body(end.usage), timing=self._timing(end)
        )

    def opening(self) -> Chunk:
        return self._chunk([ChunkChoice(Delta(role="assistant", content=""))])

    def delta(self, text: str) -> Chunk:
        return self._chunk([ChunkChoice(Delta(content=text))])

    def choice_end(self, ended: ChoiceFinished) -> Chunk:
        return self._chunk([ChunkChoice(Delta(), ended.finish_reason.value, ended.stop_reason)])

    def ending(self, end: Finished) -> Chunk | None:
        """The last chunk: the usage and the timing, where they were asked for."""
        if not self.include_usage and not self.timing:
            return None
        usage = usage_body(end.usage) if self.include_usage else UNSET
        return self._chunk([], usage=usage, timing=self._timing(end))

    def _chunk(
        self, choices: list[ChunkChoice], usage: UsageBody | UnsetType = UNSET, timing: Timing | UnsetType = UNSET
    ) -> Chunk:
        return Chunk(self.response_id, self.model, self.created, choices, usage, timing=timing)

    def _timing(self, end: Finished) -> Timing | UnsetType:
        return end.timing if self.timing else UNSET


def usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            usage.cached_tokens, {"image": usage.image_tokens} if usage.image_tokens else {}
        ),
    )
