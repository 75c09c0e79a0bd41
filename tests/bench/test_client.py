"""One request over a real socket, well and badly answered; no time is asserted."""

from __future__ import annotations

import socket

import pytest

from triptych.bench.client import Target, get, send
from triptych.bench.http1 import ProtocolError, ResponseParser
from triptych.bench.metrics import RequestRecord
from triptych.bench.requests import text_request
from triptych.errors import ConfigError

from .mock_server import MockServer


async def ask(server: MockServer, model: str, timeout_s: float = 20.0, tokens: int = 6) -> tuple[RequestRecord, str]:
    target = Target.parse(server.url, model)
    return await send(target, text_request("hello", tokens), [], 0.0, 0.0, timeout_s)


async def test_every_token_of_a_plain_stream_is_seen(server: MockServer) -> None:
    record, text = await ask(server, "plain")
    assert (record.failure, record.num_output_tokens, len(record.chunk_s)) == ("", 6, 6)
    assert (record.num_prompt_tokens, record.num_cached_tokens) == (10, 2)
    assert text == " w0 w1 w2 w3 w4 w5"
    assert record.sent_s <= record.chunk_s[0] <= record.chunk_s[-1] <= record.end_s
    assert record.chunk_s == sorted(record.chunk_s)


async def test_tokens_are_counted_by_usage_when_a_chunk_carries_several(server: MockServer) -> None:
    record, _ = await ask(server, "bundled")
    assert (record.failure, record.num_output_tokens, len(record.chunk_s)) == ("", 6, 2)


async def test_slow_tokens_arrive_one_after_the_other(server: MockServer) -> None:
    record, _ = await ask(server, "slow")
    assert record.failure == ""
    assert len(set(record.chunk_s)) == 6


async def test_tokens_without_text_are_seen_at_the_end(server: MockServer) -> None:
    record, text = await ask(server, "silent")
    assert (record.failure, record.num_output_tokens, len(record.chunk_s), text) == ("", 6, 1, "")


@pytest.mark.parametrize(
    ("model", "reason", "detail"),
    [
        ("refused", "http_503", "full"),
        ("cut", "cut", "closed"),
        ("error", "error_event", "lost"),
        ("short", "wrong_count", "5 of 6"),
        ("no-usage", "no_usage", ""),
        ("garbage", "malformed", ""),
    ],
)
async def test_failures_have_a_reason(server: MockServer, model: str, reason: str, detail: str) -> None:
    record, _ = await ask(server, model)
    assert record.failure == reason
    assert detail in record.detail
    assert record.end_s >= record.sent_s


async def test_a_request_that_takes_too_long_has_failed(server: MockServer) -> None:
    record, _ = await ask(server, "slow", timeout_s=0.2, tokens=1000)
    assert record.failure == "timeout"


async def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    record, _ = await send(Target.parse(f"http://127.0.0.1:{port}", "m"), text_request("x", 1), [], 0.0, 0.0, 5.0)
    assert record.failure == "connect"


async def test_get(server: MockServer) -> None:
    status, body = await get(Target.parse(server.url + "/v1", "m"), "/v1/models", 5.0)
    assert (status, b"plain" in body) == (200, True)


def test_urls() -> None:
    assert Target.parse("https://a.b/c/v1/", "m") == Target("a.b", 443, "/c", True, "m")
    assert Target.parse("http://[::1]:81", "m").port == 81
    for bad in ("ftp://x", "127.0.0.1:80", "http://x:port"):
        with pytest.raises(ConfigError, match="url"):
            Target.parse(bad, "m")


# -- bytes -------------------------------------------------------------------------------------------------------------

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n1;x=y\r\n \r\n10\r\n0123456789abcdef\r\n0\r\n\r\n"
)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_chunks_cut_anywhere(step: int) -> None:
    parser = ResponseParser()
    body = b"".join(piece for k in range(0, len(CHUNKED), step) for piece in parser.feed(CHUNKED[k : k + step]))
    assert (body, parser.status, parser.complete) == (b"hello 0123456789abcdef", 200, True)


@pytest.mark.parametrize("step", [1, 1000])
def test_lengths_closes_and_continue(step: int) -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 No\r\ncontent-length: 3\r\n\r\nabcd"
    parser = ResponseParser()
    body = b"".join(piece for k in range(0, len(data), step) for piece in parser.feed(data[k : k + step]))
    assert (body, parser.status, parser.complete) == (b"abc", 404, True)

    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.0 200 OK\r\n\r\nall") == [b"all"]
    assert not parser.complete
    assert parser.end()

    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nall")
    assert not parser.end()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseParser().feed(data)
