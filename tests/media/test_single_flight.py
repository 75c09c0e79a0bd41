"""One run for all who ask: results and errors are shared, cancels are not."""

from __future__ import annotations

import asyncio

import pytest

from triptych.errors import MediaError
from triptych.media.single_flight import SingleFlight


class Job:
    """Runs until told what to do."""

    def __init__(self) -> None:
        self.num_starts = 0
        self.num_cancels = 0
        self.end: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def __call__(self) -> bytes:
        self.num_starts += 1
        try:
            return await asyncio.shield(self.end)
        except asyncio.CancelledError:
            self.num_cancels += 1
            raise


async def started(flights: SingleFlight[bytes], job: Job, count: int, key: str = "k") -> list[asyncio.Task[bytes]]:
    tasks = [asyncio.create_task(flights.run(key, job)) for _ in range(count)]
    await asyncio.sleep(0.01)
    return tasks


async def test_one_run_for_all_who_ask_meanwhile() -> None:
    flights, job = SingleFlight[bytes](), Job()
    tasks = await started(flights, job, 5)
    job.end.set_result(b"x")
    assert await asyncio.gather(*tasks) == [b"x"] * 5
    assert job.num_starts == 1
    assert len(flights) == 0
    assert await flights.run("k", job) == b"x"
    assert job.num_starts == 2, "what is over is not kept"


async def test_other_keys_run_apart() -> None:
    flights, job = SingleFlight[bytes](), Job()
    tasks = await started(flights, job, 1) + await started(flights, job, 1, key="other")
    job.end.set_result(b"x")
    await asyncio.gather(*tasks)
    assert job.num_starts == 2


@pytest.mark.parametrize("gone", [0, 1, 2])
async def test_a_cancel_ends_one_waiter_whoever_began(gone: int) -> None:
    flights, job = SingleFlight[bytes](), Job()
    tasks = await started(flights, job, 3)
    tasks[gone].cancel()
    await asyncio.sleep(0.01)
    assert tasks[gone].cancelled()
    job.end.set_result(b"x")
    left = [task for k, task in enumerate(tasks) if k != gone]
    assert await asyncio.gather(*left) == [b"x", b"x"]
    assert (job.num_starts, job.num_cancels) == (1, 0)


async def test_the_run_ends_with_the_last_waiter_and_the_next_begins_anew() -> None:
    flights, job = SingleFlight[bytes](), Job()
    for task in await started(flights, job, 3):
        task.cancel()
    await asyncio.sleep(0.01)
    assert job.num_cancels == 1
    assert len(flights) == 0
    [task] = await started(flights, job, 1)
    job.end.set_result(b"x")
    assert await task == b"x"
    assert job.num_starts == 2


async def test_everybody_gets_an_error_of_its_own() -> None:
    flights, job = SingleFlight[bytes](), Job()
    tasks = await started(flights, job, 3)
    job.end.set_exception(MediaError("broken"))
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(error) for error in errors] == ["broken"] * 3
    assert len({id(error) for error in errors}) == 3
    for k, error in enumerate(errors):
        assert isinstance(error, MediaError)
        error.param = f"messages.{k}"
    assert [error.param for error in errors if isinstance(error, MediaError)] == [f"messages.{k}" for k in range(3)]
