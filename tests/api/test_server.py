"""The HTTP server on a real socket: requests that are no HTTP, and headers that do not arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.api import server
from triptych.api.server import ApiServer, bind

ASK = b"GET /x HTTP/1.1\r\nhost: a\r\n"


async def slow(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers after twice the time that headers have."""
    await asyncio.sleep(0.4)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def connected(app: ASGIApp = slow) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    sock = bind("127.0.0.1", 0)
    running = ApiServer(app, sock)
    await running.start()
    reader, writer = await asyncio.open_connection(*sock.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        await running.stop()


async def error_of(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Of an answer that ends the connection."""
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.split(": ") for line in lines[1:])
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    assert headers["content-length"] == str(len(body))
    error: dict[str, Any] = msgspec.json.decode(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert int(lines[0].split()[1]) == error["code"]
    return error["code"], error["type"]


@pytest.mark.parametrize(
    "request_bytes",
    [b"hello\r\n\r\n", b"POST /x HTTP/1.1\r\ncontent-length: many\r\n\r\n", b"GET /x HTTP/1.1\r\na b: c\r\n\r\n"],
)
async def test_what_is_no_http(request_bytes: bytes) -> None:
    async with connected() as (reader, writer):
        writer.write(request_bytes)
        assert await error_of(reader) == (400, "Bad Request")


@pytest.mark.parametrize("begun", [b"", ASK])
async def test_headers_that_do_not_arrive(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(server, "HEADERS_S", 0.2)
    async with connected() as (reader, writer):
        writer.write(begun)
        assert await error_of(reader) == (408, "RequestTimeoutError")


@pytest.mark.parametrize("line", [b"x: " + b"a" * 70_000, b"a:b\r\n" * 20_000])
async def test_headers_that_grow_and_grow(line: bytes) -> None:
    async with connected() as (reader, writer):
        writer.write(ASK + line)
        assert await error_of(reader) == (431, "HeadersTooLargeError")


async def test_bodies_and_many_requests_are_no_headers() -> None:
    post = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 200000\r\n\r\n" + b"a" * 200_000
    async with connected() as (reader, writer):
        for sent in (post, post + ASK, b"\r\n"):
            writer.write(sent)
            await asyncio.sleep(0.05)
        for _ in range(3):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(2) == b"ok"


async def test_no_error_stands_in_an_answer_that_has_begun() -> None:
    async def begins(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"some", "more_body": True})
        await asyncio.sleep(10)

    async with connected(begins) as (reader, writer):
        writer.write(ASK + b"\r\n")
        assert (await reader.readuntil(b"some\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(b"no HTTP\r\n\r\n")
        assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_headers_of_a_later_request_that_do_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """And answers may take as long as they take, one behind the other."""
    monkeypatch.setattr(server, "HEADERS_S", 0.2)
    async with connected() as (reader, writer):
        writer.write(2 * (ASK + b"\r\n") + ASK)
        for _ in range(2):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(2) == b"ok"
        assert await error_of(reader) == (408, "RequestTimeoutError")
