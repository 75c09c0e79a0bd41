"""An event loop on a thread of its own, and how other threads wait for it.

So callers need no loop, and may have one that runs, as notebooks do. Waiting ends at Ctrl-C: what was waited for is
cancelled, and has ended before the exception goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from triptych.errors import EngineError

T = TypeVar("T")


class _End(NamedTuple):
    """The last entry of a stream. `error` None: it came to its end."""

    error: BaseException | None


class Stream(Generic[T]):
    """The items of an asynchronous generator that runs in the loop, for one reader on another thread.

    `with Stream(...) as items`: left early, the generator is cancelled and has ended when the block is over.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, items: AsyncGenerator[T, None]) -> None:
        self._loop = loop
        self._items = items
        self._queue: SimpleQueue[T | _End] = SimpleQueue()
        self._task: asyncio.Task[None] | None = None  # the loop's own
        self._ended = False
        loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._on_done)

    async def _run(self) -> None:
        async with aclosing(self._items) as items:
            async for item in items:
                self._queue.put(item)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        # A reader that cancels does not read on: whoever reads this was still waiting when the loop closed.
        error = EngineError("closed before the end") if task.cancelled() else task.exception()
        self._queue.put(_End(error))

    def __enter__(self) -> Iterator[T]:
        return self._read()

    def _read(self) -> Iterator[T]:
        while not isinstance(entry := self._queue.get(), _End):  # Ctrl-C raises here
            yield entry
        self._ended = True
        if entry.error is not None:
            raise entry.error

    def __exit__(self, *exc_info: object) -> None:
        if self._ended:
            return
        self._loop.call_soon_threadsafe(self._cancel)
        while not isinstance(self._queue.get(), _End):
            pass

    def _cancel(self) -> None:
        assert self._task is not None, "it began before"
        self._task.cancel()


class LoopThread:
    """The loop runs from the start until `close`. Every method may be called from any thread but its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._pool = ThreadPoolExecutor(thread_name_prefix=name)  # the loop's own way to end one starts a thread
        self._loop.set_default_executor(self._pool)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._pool.shutdown()
            asyncio.set_event_loop(None)
            self._loop.close()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def stream(self, items: AsyncGenerator[T, None]) -> Stream[T]:
        return Stream(self._loop, items)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns or raises."""

        async def items() -> AsyncGenerator[tuple[T], None]:
            yield (await coroutine,)

        with self.stream(items()) as stream:
            ((value,),) = stream
        return value

    def close(self) -> None:
        """Cancel what still runs, wait for its end, then for the thread's. Idempotent."""
        if self._loop.is_closed():
            return
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
