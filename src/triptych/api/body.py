"""Reading a request body under a limit, and writing JSON. Called by `api/app.py` and `api/admin.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from triptych.errors import MalformedRequestError, RequestTooLargeError


def require_json(request: Request) -> None:
    """Raises MalformedRequestError, as vLLM does, when the content type is another or none."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise MalformedRequestError("Unsupported media type: only `application/json` is accepted.")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body's bytes. A length above the limit is refused from the header, before a byte of it is read."""
    try:
        declared = int(request.headers.get("content-length", "0"))
    except ValueError:
        raise MalformedRequestError("The `content-length` header is not a number.") from None
    if declared > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect:
        raise MalformedRequestError("The client went away before the body's end.") from None
    return b"".join(chunks)


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"The request body is longer than the limit of {max_bytes} bytes.")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")
