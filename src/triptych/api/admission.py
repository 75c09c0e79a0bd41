"""The door of the API: open while serving, closed while the process drains, and full at a number of requests.

Runs in the router process. A request takes its place when its body is read, so that bodies that never come keep nobody
out; it is waited for from its arrival on.
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
        self.num_arriving = 0  # whose bodies are being read
        self._max_inside = max_inside
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def arrive(self) -> Iterator[None]:
        """Held while the body is read and until `enter`. Raises OverloadedError when closed or full."""
        if not self.open:
            raise OverloadedError("The server is shutting down.")
        self._require_room()
        self.num_arriving += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_arriving -= 1
            self._left()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """By a request that arrived, though the door was closed meanwhile; held until the answer is out.

        Raises OverloadedError when full.
        """
        self._require_room()
        self.num_inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            self._left()

    def _require_room(self) -> None:
        if self.num_inside >= self._max_inside:
            raise OverloadedError(f"{self._max_inside} requests are in flight, the limit; ask again.")

    def _left(self) -> None:
        if self.num_inside + self.num_arriving == 0:
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
