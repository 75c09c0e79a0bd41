"""A deployment in the foreground of a terminal: until SIGINT or SIGTERM, or until a worker is given up.

Used by `triptych serve`, `router` and `demo`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

from triptych.launch import Deployment, Say
from triptych.observe.startup import curl_line

T = TypeVar("T")


async def serve(deployment: Deployment, say: Say, then: Callable[[], Awaitable[int | None]] | None = None) -> int:
    """Until SIGINT or SIGTERM; a second one forces. Gives the exit code, or raises what kept it from starting.

    `then` runs once all is ready; an exit code from it ends the deployment.
    """
    loop = asyncio.get_running_loop()
    told = asyncio.Event()

    def on_signal() -> None:
        if told.is_set():
            say("forced to stop")
            deployment.force()
        else:
            say("stopping; once more to force")
            told.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        return await _until_told(deployment, told, say, then)
    finally:
        await deployment.stop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _until_told(
    deployment: Deployment, told: asyncio.Event, say: Say, then: Callable[[], Awaitable[int | None]] | None
) -> int:
    if await _before(told, deployment.start()) is None:
        return 0
    if then is not None:
        answered = await _before(told, then())
        code = 0 if answered is None else answered.result()
        if code is not None:
            return code
    elif deployment.placement is not None:
        say(curl_line(deployment.url, deployment.router.model_name, deployment.needs_key))
    failed = await _before(told, deployment.failed())
    if failed is None:
        return 0
    say(failed.result())
    return 1


async def _before(told: asyncio.Event, work: Awaitable[T]) -> asyncio.Future[T] | None:
    """`work`, done, or None when we were told to stop first and it was cancelled. Raises what `work` raises."""
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(told.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    done = task.done()
    task.cancel()
    stopping.cancel()
    await asyncio.gather(task, stopping, return_exceptions=True)
    if not done:
        return None
    task.result()
    return task
