"""From an exception to the answer that OpenAI's clients expect. Used by every route, and inside streams."""

from __future__ import annotations

import re
import time

import msgspec
from starlette.responses import Response

from triptych.api.body import json_response
from triptych.errors import AuthenticationError, OverloadedError, RateLimitError, TriptychError
from triptych.observe.logging import canonical_line
from triptych.observe.metrics import Metrics


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
        return ErrorBody(ErrorDetail(_sentence(error), error.type, error.param, error.status))
    return ErrorBody(ErrorDetail("Internal error.", "InternalServerError", None, 500))


def _sentence(error: TriptychError) -> str:
    """The message, which names the field at fault: what runs behind the API often knows the reason alone."""
    text, field = error.message, (error.param or "").removeprefix("body.")
    if field not in text:
        text = f"`{field}`: {text}"
    elif re.match(r"[a-z]+[ ,]", text):  # a word, and not the name of something
        text = text[0].upper() + text[1:]
    return text if text.endswith((".", "?", "!")) else f"{text}."


def error_response(error: Exception) -> Response:
    body = error_body(error)
    headers = {}
    if isinstance(error, OverloadedError | RateLimitError):
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(body, body.error.code, headers)


def count_refused(error: TriptychError, metrics: Metrics, request_id: str, started_s: float) -> None:
    """For a request that the router never hears of: it is counted and logged here. Times are of `time.monotonic`."""
    metrics.failed(error)
    canonical_line(request_id=request_id, status=error.status, e2e_s=time.monotonic() - started_s, error=error)
