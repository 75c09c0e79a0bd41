"""Several streams as one: all that they yield, the first failure, and that nothing goes on behind a closed one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

import pytest

from triptych.merge import merge


class Streams:
    """Remembers which of its streams were closed."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def __call__(self, name: str, number: int, error: Exception | None = None) -> AsyncGenerator[str, None]:
        try:
            for k in range(number):
                await asyncio.sleep(0)
                yield f"{name}{k}"
            if error is not None:
                raise error
        finally:
            self.closed.append(name)


async def test_all_events_each_stream_in_its_order() -> None:
    streams = Streams()
    events = [event async for event in merge([streams("a", 3), streams("b", 0), streams("c", 2)])]
    assert sorted(events) == ["a0", "a1", "a2", "c0", "c1"]
    assert [event for event in events if event[0] == "a"] == ["a0", "a1", "a2"]
    assert sorted(streams.closed) == ["a", "b", "c"]
    assert [event async for event in merge(list[AsyncGenerator[str, None]]())] == []


async def test_an_event_begins_further_streams() -> None:
    streams = Streams()

    def begun_by(event: str) -> Iterable[AsyncGenerator[str, None]]:
        return [streams("b", 2), streams("c", 1)] if event == "a0" else []

    events = [event async for event in merge([streams("a", 1)], begun_by)]
    assert events[0] == "a0"
    assert sorted(events[1:]) == ["b0", "b1", "c0"]


async def test_the_first_failure_ends_all() -> None:
    streams = Streams()
    with pytest.raises(ValueError, match="broken"):
        async for _ in merge([streams("a", 1, ValueError("broken")), streams("b", 10**9)]):
            pass
    assert sorted(streams.closed) == ["a", "b"]


async def test_closing_it_closes_all() -> None:
    streams = Streams()
    async with aclosing(merge([streams("a", 10**9), streams("b", 10**9)])) as events:
        await anext(events)
    assert sorted(streams.closed) == ["a", "b"]
