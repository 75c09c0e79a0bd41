"""Several streams of events as one, each event as it comes: the choices of a request, the prompts of a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class _Ended(NamedTuple):
    """Of one stream, by itself or by a failure."""

    error: Exception | None


async def merge(
    streams: Iterable[AsyncGenerator[T, None]],
    begun_by: Callable[[T], Iterable[AsyncGenerator[T, None]]] = lambda _: (),
) -> AsyncGenerator[T, None]:
    """What the streams yield, and those that an event begins. The first failure ends all; closing it closes all."""
    queue: asyncio.Queue[T | _Ended] = asyncio.Queue()
    tasks = [asyncio.create_task(_feed(stream, queue)) for stream in streams]
    num_open = len(tasks)
    try:
        while num_open:
            entry = await queue.get()
            if isinstance(entry, _Ended):
                if entry.error is not None:
                    raise entry.error
                num_open -= 1
                continue
            begun = [asyncio.create_task(_feed(stream, queue)) for stream in begun_by(entry)]
            tasks += begun
            num_open += len(begun)
            yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _feed(stream: AsyncGenerator[T, None], queue: asyncio.Queue[T | _Ended]) -> None:
    try:
        async with aclosing(stream) as events:
            async for event in events:
                queue.put_nowait(event)
        queue.put_nowait(_Ended(None))
    except Exception as error:  # noqa: BLE001  raised again by the one who reads the queue
        queue.put_nowait(_Ended(error))
