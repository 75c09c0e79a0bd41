"""An event loop on its own thread, and readers of it on others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest

from triptych.errors import EngineError
from triptych.offline.loop import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread("test-loop")
    yield loop
    loop.close()


class Counting:
    """Counts up to `end`, and keeps how it ended."""

    def __init__(self, end: int) -> None:
        self._end = end
        self.how = "never began"
        self.waiting = threading.Event()

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self._end):
                yield number
            self.waiting.set()
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # cleaning up takes a while
            self.how = "cancelled"
            raise


async def fail() -> None:
    raise ValueError("broken")


async def thread_name() -> str:
    return threading.current_thread().name


def test_a_coroutine_runs_on_the_loops_thread_and_returns_its_value(loop: LoopThread) -> None:
    assert loop.run(thread_name()) == "test-loop"


def test_what_it_raises_is_raised_in_the_callers_thread(loop: LoopThread) -> None:
    with pytest.raises(ValueError, match="broken"):
        loop.run(fail())
    assert loop.run(thread_name()) == "test-loop", "and the loop goes on"


async def test_a_caller_may_have_a_running_loop_of_its_own(loop: LoopThread) -> None:
    assert loop.run(thread_name()) == "test-loop"


def test_a_stream_gives_all_items_in_order(loop: LoopThread) -> None:
    async def items() -> AsyncGenerator[int, None]:
        for number in range(100):
            yield number

    with loop.stream(items()) as stream:
        assert list(stream) == list(range(100))


def test_a_stream_that_is_left_early_has_ended_when_the_block_is_over(loop: LoopThread) -> None:
    counting = Counting(3)
    with loop.stream(counting.items()) as stream:
        assert next(stream) == 0
        counting.waiting.wait()
    assert counting.how == "cancelled"


def test_an_exception_in_the_block_ends_the_stream_and_goes_on(loop: LoopThread) -> None:
    counting = Counting(1)

    def interrupted() -> None:
        with loop.stream(counting.items()):
            counting.waiting.wait()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert counting.how == "cancelled"


def test_closing_the_loop_wakes_those_who_wait_for_it() -> None:
    loop, counting = LoopThread("test-loop"), Counting(0)
    errors: list[Exception] = []

    def read() -> None:
        try:
            with loop.stream(counting.items()) as stream:
                next(stream)
        except EngineError as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    counting.waiting.wait()
    loop.close()
    reader.join(10)
    assert counting.how == "cancelled"
    assert [str(error) for error in errors] == ["closed before the end"]
    loop.close()  # a second time
    assert "test-loop" not in {thread.name for thread in threading.enumerate()}
