"""One request from a client's side, and how it ended: exactly one of answered, refused with an error, or cancelled.

Everything else is a broken promise of the server: `Broken` says which.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, NamedTuple

import httpx

PATH = "/v1/chat/completions"


class Answer(NamedTuple):
    text: str
    num_tokens: int
    finish_reason: str


class End(NamedTuple):
    """`answer` or `error` is set; neither where the client went away."""

    answer: Answer | None = None
    error: str = ""
    status: int = 0


class BrokenError(Exception):
    """The server broke a promise: no end, two ends, something after the end, a connection that was cut."""


async def ask(client: httpx.AsyncClient, body: dict[str, Any], cancel_after_s: float | None = None) -> End:
    """Raises BrokenError. With `cancel_after_s` the client goes away then, unless it has its answer already."""
    asking = _stream(client, body) if body["stream"] else _whole(client, body)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(cancel_after_s):
                return await asking
    except httpx.HTTPError as error:
        raise BrokenError(f"the connection failed: {type(error).__name__}: {error}") from error
    return End()


async def _whole(client: httpx.AsyncClient, body: dict[str, Any]) -> End:
    response = await client.post(PATH, json=body)
    if response.status_code != 200:
        return _error(response.status_code, response.content)
    found = response.json()
    choice = found["choices"][0]
    return End(Answer(choice["message"]["content"], found["usage"]["completion_tokens"], choice["finish_reason"]))


async def _stream(client: httpx.AsyncClient, body: dict[str, Any]) -> End:
    async with client.stream("POST", PATH, json=body) as response:
        if response.status_code != 200:
            return _error(response.status_code, await response.aread())
        events = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    return read_events(events)


def read_events(events: list[str]) -> End:
    """The end of a whole stream. Raises BrokenError unless it has one, and that is the last."""
    text, num_tokens, finish_reason = "", 0, ""
    for position, event in enumerate(events):
        is_last = position == len(events) - 1
        if event == "[DONE]":
            if not is_last or not finish_reason:
                raise BrokenError(f"[DONE] at {position} of {len(events)}, finish_reason {finish_reason!r}")
            return End(Answer(text, num_tokens, finish_reason))
        chunk = json.loads(event)
        if "error" in chunk:
            if not is_last:
                raise BrokenError("an event after an error")
            return End(error=chunk["error"]["message"], status=chunk["error"]["code"])
        for choice in chunk["choices"]:
            if finish_reason:
                raise BrokenError("a choice after its end")
            text += choice["delta"].get("content") or ""
            finish_reason = choice["finish_reason"] or ""
        if chunk.get("usage"):
            num_tokens = chunk["usage"]["completion_tokens"]
    raise BrokenError(f"the stream stopped after {len(events)} events without an end")


def _error(status: int, content: bytes) -> End:
    try:
        return End(error=json.loads(content)["error"]["message"], status=status)
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenError(f"status {status} with a body that is no error: {content[:200]!r}") from error
