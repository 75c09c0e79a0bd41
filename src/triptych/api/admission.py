"""The door of the API: open while serving, closed while the process drains. Counts the requests inside.

Runs in the router process. The router has its own limit of requests in flight; this one is for stopping.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from triptych.errors import OverloadedError


class Admission:
    def __init__(self) -> None:
        self.open = True
        self.num_inside = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Held from the request's arrival to the last byte of its answer. Raises OverloadedError when closed."""
        if not self.open:
            raise OverloadedError("The server is shutting down.")
        self.num_inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if self.num_inside == 0:
                self._idle.set()

    def close(self) -> None:
        self.open = False

    async def wait_idle(self, timeout_s: float) -> bool:
        """True when the last request left in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
