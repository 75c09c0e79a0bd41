"""The door of the API: open while serving, closed while the process drains, and full at a number of requests.

Runs in the router process. Counts the requests inside, from their arrival, before a byte of a body is read, to the last
byte of the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from triptych.errors import OverloadedError


class Admission:
    def __init__(self, max_inside: int) -> None:
        self.open = True
        self.num_inside = 0
        self._max_inside = max_inside
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Held until the answer is out. Raises OverloadedError when closed or full."""
        if not self.open:
            raise OverloadedError("The server is shutting down.")
        if self.num_inside >= self._max_inside:
            raise OverloadedError(f"{self._max_inside} requests are in flight, the limit; ask again.")
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
