"""A request's body: read under limits, decoded, and made a struct; and JSON answers. Called by every route.

What is read at once is bounded over all requests, in bytes and in number, so that many bodies cannot fill the memory.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from triptych.api.enumerated import enumerated
from triptych.errors import MalformedRequestError, OverloadedError, RequestTimeoutError, RequestTooLargeError

T = TypeVar("T")

MAX_VALUES = 200_000  # about a tenth of a second to read


MAX_READING = 4096  # bodies at once: slow ones cost little more than their sockets


class BodyReader:
    """`timeout_s` is for one body; `max_reading_bytes` for all that are being read."""

    def __init__(self, max_bytes: int, max_reading_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_reading_bytes = max_reading_bytes
        self._timeout_s = timeout_s
        self.num_reading_bytes = 0
        self.num_reading = 0

    async def read_json(self, request: Request) -> dict[str, Any]:
        """The body as an object. Raises what a client must know of a body that is not one, too large or too slow."""
        require_json(request)
        return decode_object(await self.read(request))

    async def read(self, request: Request) -> bytes:
        """A length above the limit is refused from the header, before a byte of it is read."""
        try:
            declared = int(request.headers.get("content-length", "0"))
        except ValueError:
            raise MalformedRequestError("The `content-length` header is not a number.") from None
        if declared > self._max_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._read(request)
        except TimeoutError:
            raise RequestTimeoutError(f"The body did not arrive within {self._timeout_s} s.") from None
        except ClientDisconnect:
            raise MalformedRequestError("The client went away before the body's end.") from None

    async def _read(self, request: Request) -> bytes:
        if self.num_reading >= MAX_READING:
            raise OverloadedError(f"{MAX_READING} request bodies are being read, the limit; ask again.")
        chunks: list[bytes] = []
        num_bytes = 0
        self.num_reading += 1
        try:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                self.num_reading_bytes += len(chunk)
                if num_bytes > self._max_bytes:
                    raise self._too_large()
                if self.num_reading_bytes > self._max_reading_bytes:
                    raise OverloadedError("Too many bytes of request bodies are being read; ask again.")
                chunks.append(chunk)
            return b"".join(chunks)
        finally:
            self.num_reading -= 1
            self.num_reading_bytes -= num_bytes

    def _too_large(self) -> RequestTooLargeError:
        return RequestTooLargeError(f"The request body is longer than the limit of {self._max_bytes} bytes.")


def require_json(request: Request) -> None:
    """Raises MalformedRequestError, as vLLM does, when the content type is another or none."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise MalformedRequestError("Unsupported media type: only `application/json` is accepted.")


def decode_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; the fields keep their JSON types.

    Raises MalformedRequestError, also for so many values that reading them would hold up every other request.
    """
    if body.count(b",") > MAX_VALUES:  # those of texts count too: no model reads so long a text
        raise MalformedRequestError(f"The body has more than {MAX_VALUES} values.")
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
        raise _malformed(str(error), into) from error


def one_of(values: Iterable[object]) -> str:
    """What an enumerated field must be."""
    names = [str(value) for value in values]
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"


def _malformed(text: str, into: type) -> MalformedRequestError:
    """In our words what msgspec says in its own, such as "Expected `int`, got `str` - at `$.a[0].b`"."""
    reason, _, place = text.partition(" - at `$")
    parts = re.findall(r"[^.\[\]`]+", place)
    if missing := re.fullmatch(r"Object missing required field `(.+)`", reason):
        parts.append(missing[1])
        reason = "is missing"
    elif values := enumerated(into, parts):
        reason = f"must be {one_of(values)}"
    elif types := re.fullmatch(r"Expected (`.+`), got (`.+`)", reason):
        reason = f"must be {types[1]}, not {types[2]}"
    else:
        reason = f"is wrong: {reason[:1].lower()}{reason[1:]}"
    field = ".".join(parts)
    return MalformedRequestError(f"`{field}` {reason}.", param=f"body.{field}")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")
