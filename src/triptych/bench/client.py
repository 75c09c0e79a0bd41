"""One streamed chat completion over one connection, timed. Called by `load.py`, many at once in one event loop.

The clock is read once for all that the socket delivers at once. A failure of any kind ends in a record with its reason.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import msgspec

from triptych.bench.http1 import ProtocolError, ResponseParser
from triptych.bench.metrics import RequestRecord
from triptych.bench.requests import Request
from triptych.errors import ConfigError

MAX_DETAIL = 200  # characters of an error that are kept


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()  # empty or null: none


_decode = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    path: str  # of the API's root, without a slash at its end
    tls: bool
    model: str

    @staticmethod
    def parse(url: str, model: str) -> Target:
        """`url` with or without /v1 at its end. Raises ConfigError."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"url: {url}: no such port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url: {url} is not of the form http://host:port")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return Target(parts.hostname, port or (443 if tls else 80), path, tls, model)

    def head(self, method: str, path: str, length: int = 0) -> bytes:
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@dataclass
class Answer:
    """What came back, on the monotonic clock."""

    sent_s: float
    end_s: float = 0.0
    status: int = 0
    chunk_s: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    usage: _Usage | None = None
    finished: bool = False  # a finish reason or [DONE] came
    error: tuple[str, str] | None = None  # reason, detail


class _Exchange(asyncio.Protocol):
    """One request and its answer; `done` is set at the end, however it comes."""

    def __init__(self, head: bytes, body: bytes, streamed: bool) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answer = Answer(time.monotonic())
        self.plain = bytearray()  # the body of an answer that is no stream
        self._streamed = streamed
        self._request = (head, body)
        self._parser = ResponseParser()
        self._line = b""  # of which the end has not come
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self.answer.sent_s = time.monotonic()
        self._transport.writelines(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        try:
            for piece in self._parser.feed(data):
                self._read(piece, now_s)
        except (ProtocolError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._end(now_s, ("malformed", str(error)))
        else:
            if self._parser.complete:
                self._end(now_s)

    def eof_received(self) -> None:
        now_s = time.monotonic()
        self._end(now_s, None if self._parser.end() else ("cut", "the connection closed in the middle"))

    def connection_lost(self, error: Exception | None) -> None:
        now_s = time.monotonic()
        self._end(now_s, ("cut", str(error or "the connection closed in the middle")))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self, now_s: float, error: tuple[str, str] | None = None) -> None:
        if not self.done.done():
            self.answer.end_s, self.answer.error, self.answer.status = now_s, error, self._parser.status
            self.done.set_result(None)

    def _read(self, piece: bytes, now_s: float) -> None:
        if not self._streamed or self._parser.status != 200:
            self.plain += piece
            return
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def _event(self, data: bytes, now_s: float) -> None:
        answer = self.answer
        if data == b"[DONE]":
            answer.finished = True
            self._end(now_s)
            return
        chunk = _decode(data)
        if (error := bytes(chunk.error)) not in (b"", b"null"):
            self._end(now_s, ("error_event", error.decode()))
        if chunk.usage is not None:
            answer.usage = chunk.usage
        for choice in chunk.choices:
            delta, ends = choice.delta, choice.finish_reason is not None
            if delta.content:
                answer.text.append(delta.content)
            seen = delta.content or delta.reasoning_content or delta.reasoning or choice.token_ids
            if seen or (ends and not answer.chunk_s):  # tokens without text are seen at the end
                answer.chunk_s.append(now_s)
            answer.finished = answer.finished or ends


async def _exchange(target: Target, head: bytes, body: bytes, timeout_s: float) -> _Exchange:
    """Ends always, with the failure in the answer."""
    loop = asyncio.get_running_loop()
    exchange = _Exchange(head, body, streamed=bool(body))
    tls = ssl.create_default_context() if target.tls else None
    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(lambda: exchange, target.host, target.port, ssl=tls)
            await exchange.done
    except TimeoutError:
        exchange.answer.error = ("timeout", f"not over after {timeout_s:g} s")
        exchange.answer.end_s = time.monotonic()
    except OSError as error:
        exchange.answer.error = ("connect", str(error))
        exchange.answer.end_s = time.monotonic()
    finally:
        exchange.close()
    return exchange


def _failure(exchange: _Exchange, request: Request) -> tuple[str, str]:
    """Reason and detail; two empty texts for a request that is as asked."""
    answer = exchange.answer
    if answer.error is not None:
        return answer.error
    if answer.status != 200:
        return f"http_{answer.status}", exchange.plain.decode(errors="replace")
    if not answer.finished:
        return "cut", "the stream ended without a finish reason"
    if answer.usage is None:
        return "no_usage", "no chunk carried usage"
    if not answer.chunk_s:
        return "no_token", "no chunk carried a token"
    if answer.usage.completion_tokens != request.output_tokens:
        return "wrong_count", f"{answer.usage.completion_tokens} of {request.output_tokens} output tokens"
    return "", ""


async def send(
    target: Target, request: Request, answers: list[str], start_s: float, due_s: float, timeout_s: float
) -> tuple[RequestRecord, str]:
    """What was seen of one request, and the text of its answer. `start_s` and `due_s` are of the monotonic clock."""
    body = request.body(target.model, answers)
    exchange = await _exchange(target, target.head("POST", "/v1/chat/completions", len(body)), body, timeout_s)
    answer, usage = exchange.answer, exchange.answer.usage or _Usage()
    failure, detail = _failure(exchange, request)
    details = usage.prompt_tokens_details or _Details()
    record = RequestRecord(
        index=request.index,
        kind=request.kind,
        num_images=request.num_images,
        asked_output_tokens=request.output_tokens,
        due_s=due_s - start_s,
        sent_s=answer.sent_s - start_s,
        chunk_s=[arrival_s - start_s for arrival_s in answer.chunk_s],
        end_s=answer.end_s - start_s,
        num_prompt_tokens=usage.prompt_tokens,
        num_cached_tokens=details.cached_tokens or 0,
        num_output_tokens=usage.completion_tokens,
        failure=failure,
        detail=detail[:MAX_DETAIL],
    )
    return record, "".join(answer.text)


async def get(target: Target, path: str, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of a GET, 200 or not; status 0 when nothing whole came."""
    exchange = await _exchange(target, target.head("GET", path), b"", timeout_s)
    if exchange.answer.error is not None:
        return 0, exchange.answer.error[1].encode()
    return exchange.answer.status, bytes(exchange.plain)
