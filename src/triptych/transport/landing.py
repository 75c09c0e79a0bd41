"""Where bytes from the network land: a bounded piece of memory, reused, because the first touch of a page is dear.

Used in the I/O thread alone. A slot is freed when its bytes were copied out, or after the connection that could still
write to it is closed, and never before: so nothing can land late in memory that has another use.
"""

from __future__ import annotations

import asyncio
import mmap

from triptych.errors import PoolExhaustedError
from triptych.transport.base import Slot
from triptych.transport.pool import MemoryPool, map_size

LANDING_BYTES = 64 << 20  # in flight or not copied yet


class Landing:
    def __init__(self, num_bytes: int = LANDING_BYTES) -> None:
        self._num_bytes = map_size(num_bytes)
        self._pool = MemoryPool(_memory(self._num_bytes))
        self._freed = asyncio.Event()

    async def take(self, num_bytes: int) -> LandingSlot:
        """Waits for room. What is larger than all of it gets memory of its own."""
        if num_bytes > self._num_bytes:
            own = MemoryPool(_memory(map_size(num_bytes)))
            return LandingSlot(own, own.allocate(num_bytes), self)
        while True:
            try:
                return LandingSlot(self._pool, self._pool.allocate(num_bytes), self)
            except PoolExhaustedError:
                self._freed.clear()
                await self._freed.wait()

    def wake(self) -> None:
        """There is more room: who waits tries again."""
        self._freed.set()

    @property
    def used_bytes(self) -> int:
        return self._pool.used_bytes

    def close(self) -> None:
        self._pool.close()


class LandingSlot:
    """Memory for one fetch."""

    def __init__(self, pool: MemoryPool, slot: Slot, landing: Landing) -> None:
        self._pool = pool
        self._slot = slot
        self._landing = landing
        self.memory = pool.memory(slot)

    def free(self) -> None:
        self._pool.free(self._slot)
        self._landing.wake()


def _memory(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
