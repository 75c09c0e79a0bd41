"""The objects of the Responses API, as OpenAI's clients read them: the response, its items, its stream's events."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from triptych.api.logprobs import ChatLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class ResponseFunction(msgspec.Struct, frozen=True):
    """A tool of the request, and of the response that echoes it."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextBody(msgspec.Struct, frozen=True):
    format: TextFormat


class OutputText(msgspec.Struct, frozen=True):
    text: str
    logprobs: list[ChatLogprob] = []
    annotations: list[dict[str, Any]] = []
    type: Literal["output_text"] = "output_text"


class OutputMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str  # JSON
    status: ItemStatus


OutputItem = OutputMessage | OutputCall


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    total_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct, frozen=True):
    message: str
    code: str = "server_error"


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created_at: int  # seconds of the epoch
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputItem]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    text: TextBody
    tool_choice: Literal["none", "auto", "required"] | NamedFunction
    tools: list[ResponseFunction]
    top_logprobs: int
    user: str | None
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    object: Literal["response"] = "response"
    background: Literal[False] = False
    store: Literal[False] = False
    previous_response_id: None = None
    truncation: Literal["disabled"] = "disabled"


# -- events: `type` and `sequence_number` are in each ------------------------------------------------------------------


class TypedEvent(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    sequence_number: int


class ResponseEvent(TypedEvent, frozen=True, kw_only=True):
    response: ResponseBody


class ItemEvent(TypedEvent, frozen=True, kw_only=True):
    output_index: int
    item: OutputItem


class PartEvent(TypedEvent, frozen=True, kw_only=True):
    item_id: str
    output_index: int
    part: OutputText
    content_index: int = 0


class TextDeltaEvent(TypedEvent, frozen=True, kw_only=True):
    item_id: str
    output_index: int
    delta: str
    logprobs: list[ChatLogprob]
    content_index: int = 0


class TextDoneEvent(TypedEvent, frozen=True, kw_only=True):
    item_id: str
    output_index: int
    text: str
    logprobs: list[ChatLogprob]
    content_index: int = 0


class ArgumentsDeltaEvent(TypedEvent, frozen=True, kw_only=True):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(TypedEvent, frozen=True, kw_only=True):
    item_id: str
    output_index: int
    name: str
    arguments: str
