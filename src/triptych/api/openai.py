"""The chat request as OpenAI's and vLLM's users send it, turned into `types.Request`, and errors into their body.

Runs in the router process, called by `api/app.py`. Looks at names, types and ranges only: media, tokens and lengths
are the router's.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from triptych.api.content import ChatMessage, read_messages
from triptych.api.unsupported import refuse_unsupported
from triptych.errors import (
    BadRequestError,
    MalformedRequestError,
    NotFoundError,
    TriptychError,
    UnsupportedFieldError,
)
from triptych.types import Request, SamplingParams

T = TypeVar("T")
N = TypeVar("N", int, float)

MAX_STOP_STRINGS = 4
SEED_RANGE = 2**63
INT_RANGE = 2**63  # what the wire format carries
TOKEN_ID_RANGE = 2**31
GREEDY_BELOW = 1e-5  # of temperature, as in vLLM: logits divided by less overflow
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
TEMPLATE_NAMES = frozenset(  # the chat template's own variables, which a request may not replace
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
    }
)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatRequest(msgspec.Struct, frozen=True):
    """The fields of a chat request that are implemented. null is the same as leaving a field out."""

    messages: list[ChatMessage]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    timing: bool | None = None  # ours: the answer carries the request's timeline


class ChatCall(msgspec.Struct, frozen=True):
    """A checked request with what only the API needs of it."""

    request: Request
    response_id: str
    stream: bool
    include_usage: bool
    timing: bool


def parse_chat(body: bytes, *, model_name: str, max_model_len: int) -> ChatCall:
    """Raises MalformedRequestError, UnsupportedFieldError, BadRequestError or NotFoundError, naming the field."""
    fields = decode_object(body)
    chat = convert(fields, ChatRequest)
    if chat.model is not None and chat.model != model_name:
        raise NotFoundError(f"The model `{chat.model[:200]}` does not exist.", param="model")
    refuse_unsupported(fields)
    _check_stream_options(chat)
    messages, images = read_messages(chat.messages)
    max_tokens = _max_tokens(chat, max_model_len)
    stop = [chat.stop] if isinstance(chat.stop, str) else chat.stop or []
    if len(stop) > MAX_STOP_STRINGS or not all(stop):
        raise BadRequestError(f"`stop` must be 1 to {MAX_STOP_STRINGS} strings, none of them empty.", param="stop")
    response_id, request_id = _ids(chat.request_id)
    request = Request(
        request_id=request_id,
        messages=messages,
        images=images,
        sampling=_sampling(chat, max_tokens),
        max_tokens=max_tokens,
        stop=stop,
        include_stop_str_in_output=_or(chat.include_stop_str_in_output, False),
        skip_special_tokens=_or(chat.skip_special_tokens, True),
        add_generation_prompt=_or(chat.add_generation_prompt, True),
        template_kwargs=_template_kwargs(chat),
        cache_salt=chat.cache_salt or "",
        priority=_in_range("priority", _or(chat.priority, 0), -INT_RANGE, INT_RANGE - 1),
    )
    include_usage = chat.stream_options is not None and bool(chat.stream_options.include_usage)
    return ChatCall(request, response_id, bool(chat.stream), include_usage, bool(chat.timing))


def decode_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; the fields keep their JSON types."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise MalformedRequestError(f"The body is not a JSON object: {reason}.") from error
    except UnicodeDecodeError as error:
        raise MalformedRequestError("The body is not UTF-8.") from error


def convert(fields: Mapping[str, Any], into: type[T]) -> T:
    """`fields` as the struct `into`. Raises MalformedRequestError with `body.<field>` as its param."""
    try:
        return msgspec.convert(fields, into)
    except msgspec.ValidationError as error:
        raise MalformedRequestError(f"{error}.", param=_param(str(error))) from error


def _param(message: str) -> str:
    """The field of msgspec's message: "Expected `int`, got `str` - at `$.a[0].b`" gives `body.a.0.b`."""
    path = re.search(r" - at `\$(.*)`$", message)
    missing = re.search(r"missing required field `([^`]+)`", message)
    parts = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", path[1]) if path else ""
    return f"body{parts}" + (f".{missing[1]}" if missing else "")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _in_range(field: str, value: N, low: float, high: float, why: str = "") -> N:
    if not low <= value <= high or value == math.inf:
        raise BadRequestError(why or f"`{field}` must be from {low} to {high}.", param=field)
    return value


def _check_stream_options(chat: ChatRequest) -> None:
    if chat.stream_options is None:
        return
    if not chat.stream:
        raise BadRequestError("`stream_options` needs `stream`: true.", param="stream_options")
    if chat.stream_options.continuous_usage_stats:
        raise UnsupportedFieldError(
            "`stream_options.continuous_usage_stats` is not implemented.", param="stream_options.continuous_usage_stats"
        )


def _max_tokens(chat: ChatRequest, max_model_len: int) -> int | None:
    """`max_completion_tokens` goes before the older `max_tokens`. Whether the prompt leaves room is the router's."""
    field = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    value = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    if value is None:
        return None
    why = f"`{field}` must be from 1 to {max_model_len}, the longest prompt and output of this model."
    return _in_range(field, value, 1, max_model_len, why)


def _sampling(chat: ChatRequest, max_tokens: int | None) -> SamplingParams:
    temperature = _in_range(
        "temperature", _or(chat.temperature, 1.0), 0, math.inf, "`temperature` must not be negative."
    )
    top_p = _in_range("top_p", _or(chat.top_p, 1.0), 0, 1)
    if top_p == 0:
        raise BadRequestError("`top_p` must be above 0.", param="top_p")
    top_k = _in_range("top_k", _or(chat.top_k, 0), -1, INT_RANGE - 1)
    seed = _in_range("seed", _or(chat.seed, secrets.randbelow(SEED_RANGE)), -SEED_RANGE, SEED_RANGE - 1)
    most = INT_RANGE - 1 if max_tokens is None else max_tokens
    why = "`min_tokens` must be from 0 to the request's limit of tokens."
    stop_token_ids = chat.stop_token_ids or []
    for token_id in stop_token_ids:
        _in_range("stop_token_ids", token_id, 0, TOKEN_ID_RANGE - 1)
    return SamplingParams(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=top_p,
        top_k=max(top_k, 0),  # vLLM's -1 is off, as 0 is
        min_p=_in_range("min_p", _or(chat.min_p, 0.0), 0, 1),
        seed=seed % SEED_RANGE,
        min_tokens=_in_range("min_tokens", _or(chat.min_tokens, 0), 0, most, why),
        stop_token_ids=stop_token_ids,
        ignore_eos=_or(chat.ignore_eos, False),
    )


def _template_kwargs(chat: ChatRequest) -> dict[str, object]:
    kwargs = chat.chat_template_kwargs or {}
    if taken := TEMPLATE_NAMES & kwargs.keys():
        names = ", ".join(sorted(taken))
        raise BadRequestError(f"`chat_template_kwargs` may not set {names}.", param="chat_template_kwargs")
    return dict(kwargs)


def _ids(given: str | None) -> tuple[str, str]:
    """The answer's id, and the request's own, which is unique even where clients repeat theirs."""
    if given is None:
        unique = f"chatcmpl-{secrets.token_hex(8)}"
        return unique, unique
    if not REQUEST_ID.fullmatch(given):
        raise BadRequestError("`request_id` must be 1 to 128 letters, digits or any of . _ : -", param="request_id")
    return f"chatcmpl-{given}", f"chatcmpl-{given}-{secrets.token_hex(4)}"


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: int  # the HTTP status


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def error_body(error: Exception) -> ErrorBody:
    """The body of every error answer. What is not a TriptychError is our bug; its text stays in the log."""
    if isinstance(error, TriptychError):
        return ErrorBody(ErrorDetail(error.message, error.type, error.param, error.status))
    return ErrorBody(ErrorDetail("Internal error.", "InternalServerError", None, 500))
