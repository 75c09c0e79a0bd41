"""Whole answers and streams, and clients that go away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.api.conftest import TIMING
from triptych.api.app import create_app
from triptych.config import Config
from triptych.errors import EngineError
from triptych.observe.metrics import Metrics
from triptych.types import ChoiceFinished, Finished, FinishReason, TextDelta, Usage

USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4, "multimodal_tokens": {"image": 8}},
}


def payloads(response: httpx.Response) -> list[Any]:
    """The server-sent events of a stream."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


async def test_whole_answer(api: Any) -> None:
    body = (await api.chat(request_id="x")).json()
    assert body["id"] == "chatcmpl-x"
    assert (body["object"], body["model"], body["usage"]) == ("chat.completion", "demo", USAGE)
    (choice,) = body["choices"]
    assert choice["message"]["content"] == "a cat"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["tool_calls"] == []
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "stop", None)
    assert "timing" not in body
    assert (api.router.num_closed, api.router.num_cancelled) == (1, 0)
    assert api.admission.num_inside == 0


async def test_stop_reason_and_text_only_usage(api: Any) -> None:
    api.router.script = [ChoiceFinished(0, FinishReason.LENGTH, 17), Finished(Usage(2, 1), TIMING)]
    body = (await api.chat()).json()
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("length", 17)
    assert body["choices"][0]["message"]["content"] == ""
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "multimodal_tokens": {}}


async def test_timing_when_asked_for(api: Any) -> None:
    timing = (await api.chat(timing=True)).json()["timing"]
    assert timing["ttft_s"] == 0.2
    assert timing["critical_path"][1] == {"name": "prefill", "start_s": 0.05, "duration_s": 0.15, "detail": "prefill-0"}


async def test_stream(api: Any) -> None:
    api.router.script.insert(1, TextDelta("", 1))  # a token whose text is not final yet makes no chunk
    *chunks, done = payloads(await api.chat(stream=True))
    assert done == "[DONE]"
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""}, {"content": "a "}, {"content": "cat"}, {}
    ]  # fmt: skip
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert all("usage" not in chunk and "timing" not in chunk for chunk in chunks)
    assert (api.router.num_closed, api.router.num_cancelled) == (1, 0)
    assert api.admission.num_inside == 0


@pytest.mark.parametrize("usage", [False, True])
async def test_stream_usage_and_timing_come_last(api: Any, usage: bool) -> None:
    options = {"include_usage": True} if usage else None
    *chunks, done = payloads(await api.chat(stream=True, stream_options=options, timing=True))
    assert done == "[DONE]"
    assert [("timing" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["choices"] == []
    if usage:
        assert chunks[-1]["usage"] == USAGE
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (EngineError("step failed"), "InternalServerError", "Step failed."),
        (RuntimeError("secret"), "InternalServerError", "Internal"),
    ],
)
async def test_error_in_the_stream_ends_it(api: Any, error: Exception, kind: str, text: str) -> None:
    api.router.script = [TextDelta("a", 1), error]
    chunks = payloads(await api.chat(stream=True))
    assert chunks[1]["choices"][0]["delta"] == {"content": "a"}
    assert (chunks[-1]["error"]["type"], chunks[-1]["error"]["code"]) == (kind, 500)
    assert text in chunks[-1]["error"]["message"]
    assert "[DONE]" not in chunks


@pytest.mark.parametrize("stream", [False, True])
async def test_a_router_without_a_terminal_event_is_an_error(api: Any, stream: bool) -> None:
    api.router.script = []
    assert (await api.chat(stream=stream)).status_code == 500
    api.router.script = [TextDelta("a", 1)]
    response = await api.chat(stream=stream)
    assert "error" in (payloads(response)[-1] if stream else response.json())


class RawClient:
    """An ASGI client that can go away at any moment."""

    def __init__(self, router: Any, stream: bool) -> None:
        self._app = create_app(router, Config(), Metrics())
        self._body = json.dumps({"stream": stream, "messages": [{"role": "user", "content": "hi"}]}).encode()
        self.gone = asyncio.Event()
        self.sent: list[Any] = []
        self.broken = False

    async def run(self) -> None:
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "path": "/v1/chat/completions", "raw_path": b"", "query_string": b"", "headers": headers, "root_path": "",
        }  # fmt: skip
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> Any:
        if self._body:
            body, self._body = self._body, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self.broken:
            raise OSError("connection reset")
        self.sent.append(message)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_first", [0, 1])
async def test_client_gone_closes_the_router_iterator_at_once(api: Any, stream: bool, tokens_first: int) -> None:
    api.router.script = [TextDelta("a", 1)] * tokens_first + [asyncio.Event()]
    client = RawClient(api.router, stream)
    running = asyncio.create_task(client.run())
    await asyncio.wait_for(api.router.waiting.wait(), 5)
    assert api.router.num_closed == 0
    client.gone.set()
    await asyncio.wait_for(running, 1)
    assert (api.router.num_closed, api.router.num_cancelled) == (1, 1)


async def test_a_send_that_fails_closes_the_router_iterator(api: Any) -> None:
    api.router.script = [TextDelta("a", 1), TextDelta("b", 2), asyncio.Event()]
    client = RawClient(api.router, stream=True)
    client.broken = True
    await asyncio.wait_for(client.run(), 1)
    assert (api.router.num_closed, api.router.num_cancelled) == (1, 1)


async def test_server_shutdown_closes_the_router_iterator(api: Any) -> None:
    api.router.script = [TextDelta("a", 1), asyncio.Event()]
    running = asyncio.create_task(RawClient(api.router, stream=True).run())
    await asyncio.wait_for(api.router.waiting.wait(), 5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (api.router.num_closed, api.router.num_cancelled) == (1, 1)


async def test_wait_idle_returns_when_the_last_request_left(api: Any) -> None:
    block = asyncio.Event()
    api.router.script.insert(0, block)
    running = asyncio.create_task(api.chat())
    await api.router.waiting.wait()
    assert not await api.admission.wait_idle(0.01)
    block.set()
    assert await api.admission.wait_idle(1)
    assert (await running).status_code == 200
