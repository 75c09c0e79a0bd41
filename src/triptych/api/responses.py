"""OpenAI's Responses request, turned into `types.Request`. Nothing is kept between calls: `store` is answered false.

Called by `api/app.py` in the router process.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from triptych.api.body import convert
from triptych.api.call import Call
from triptych.api.chat import ChatRequest
from triptych.api.fields import Caller, GenerationFields, JsonSchema, Served
from triptych.api.generation import read_request
from triptych.api.response_answer import ResponseForm
from triptych.api.response_body import NamedFunction, ResponseFunction, TextBody, TextFormat
from triptych.api.response_input import read_input
from triptych.api.sampling import MAX_LOGPROBS, Ids, check_model, given, in_range, read_max_tokens
from triptych.api.structure import of_schema
from triptych.api.tools import Function, FunctionName, NamedTool, Tool, read_tools
from triptych.api.unsupported import CHAT, RESPONSES, elsewhere, refuse_unsupported
from triptych.errors import BadRequestError, MalformedRequestError, UnsupportedFieldError
from triptych.types import Structure, ToolChoice

LOGPROBS = "message.output_text.logprobs"
FUNCTION_PARAM = ""  # a tool is its function: there is no object around it, as in chat


class TextFields(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Every field of a responses request that is implemented. null is the same as leaving a field out."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextFields | None = None
    tools: list[ResponseFunction] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    user: str | None = None
    # as vLLM has them
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    session_id: str | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


REFUSED = elsewhere(ResponsesRequest, RESPONSES, ChatRequest, CHAT)
SHARED = (  # of `GenerationFields`, by the same name
    "stream", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "cache_salt", "priority", "session_id",
)  # fmt: skip


def parse_response(body: dict[str, Any], served: Served, caller: Caller) -> Call:
    """Raises MalformedRequestError, UnsupportedFieldError, BadRequestError or NotFoundError, naming the field."""
    asked = convert(body, ResponsesRequest)
    check_model(asked.model, served)
    refuse_unsupported(body, REFUSED)
    for wanted in asked.include or []:
        if wanted != LOGPROBS:
            why = f"`include` may have nothing but {LOGPROBS}: {wanted[:80]!r} is not implemented."
            raise UnsupportedFieldError(why, param="include")
    ids = Ids("resp_", asked.request_id, caller)
    messages, images = read_input(asked.input, asked.instructions)
    max_tokens = None
    if asked.max_output_tokens is not None:
        max_tokens = read_max_tokens("max_output_tokens", asked.max_output_tokens, served)
    offer = read_tools(*_tools(asked), FUNCTION_PARAM)
    fields = GenerationFields(**{name: getattr(asked, name) for name in SHARED})
    request = msgspec.structs.replace(
        read_request(fields, served, caller, ids, max_tokens, _num_logprobs(asked)),
        max_tokens_param="max_output_tokens",
        messages_param="input",
        function_param=FUNCTION_PARAM,
        messages=messages,
        images=images,
        tools=offer.tools,
        tool_choice=offer.choice,
        forced_tool=offer.forced,
        parallel_tool_calls=given(asked.parallel_tool_calls, True),
        structure=_structure(asked.text),
        processor_options=given(asked.mm_processor_kwargs, {}),
        media_options=given(asked.media_io_kwargs, {}),
    )
    if request.structure is not None and request.tool_choice is ToolChoice.REQUIRED:
        raise BadRequestError("`text.format` excludes a `tool_choice` that demands a call.", param="text.format")
    return Call([request], _form(asked, ids, served), bool(asked.stream), ids.header)


def _num_logprobs(asked: ResponsesRequest) -> int | None:
    wanted = LOGPROBS in (asked.include or [])
    if not wanted and not asked.top_logprobs:
        return None
    return in_range("top_logprobs", given(asked.top_logprobs, 0), 0, MAX_LOGPROBS)


def _tools(asked: ResponsesRequest) -> tuple[list[Tool], Literal["none", "auto", "required"] | NamedTool | None]:
    """As chat has them: there a function stands in an object of its own."""
    tools = [
        Tool("function", Function(tool.name, tool.description, tool.parameters, tool.strict))
        for tool in asked.tools or []
    ]
    choice = asked.tool_choice
    if isinstance(choice, NamedFunction):
        return tools, NamedTool("function", FunctionName(choice.name))
    return tools, choice if tools else None if choice == "auto" else choice


def _structure(text: TextFields | None) -> Structure | None:
    form = text.format if text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Structure("json_object", "", "text.format")
    if form.schema is None:
        raise MalformedRequestError("`text.format.schema` is missing.", param="body.text.format.schema")
    return of_schema("text.format", JsonSchema(form.name, form.description, form.schema, form.strict))


def _form(asked: ResponsesRequest, ids: Ids, served: Served) -> ResponseForm:
    form = asked.text.format if asked.text is not None else None
    return ResponseForm(
        response_id=ids.response,
        model=served.model_name,
        created_at=int(time.time()),
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        metadata=given(asked.metadata, {}),
        parallel_tool_calls=given(asked.parallel_tool_calls, True),
        temperature=given(asked.temperature, 1.0),
        top_p=given(asked.top_p, 1.0),
        text=TextBody(form or TextFormat("text")),
        tool_choice=given(asked.tool_choice, "auto"),
        tools=given(asked.tools, []),
        top_logprobs=given(asked.top_logprobs, 0),
        user=asked.user,
        logprobs=_num_logprobs(asked) is not None,
    )
