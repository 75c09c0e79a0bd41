"""What transports over mapped memory share: an own pool to publish from, and mapped pools of peers to read.

Runs in every worker, on its compute thread. `shm.py` and `inproc.py` say where the memory is and how a peer's is found.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

from triptych.messages import Range
from triptych.transport.base import Slot
from triptych.transport.peers import MappedPeers
from triptych.transport.pool import MemoryPool, part
from triptych.types import WorkerAddress


class PooledTransport:
    """All of `transport.base.Transport` but its names and `close`. `view_of` maps the pool of a peer, or raises."""

    def __init__(self, epoch: str, mapping: mmap.mmap, view_of: Callable[[WorkerAddress], memoryview]) -> None:
        self._epoch = epoch
        self._pool = MemoryPool(mapping)
        self._peers = MappedPeers(view_of)
        self._closed = False

    def allocate(self, num_bytes: int) -> Slot:
        return self._pool.allocate(num_bytes)

    def memory(self, slot: Slot) -> memoryview:
        return self._pool.memory(slot)

    def free(self, slot: Slot) -> None:
        self._pool.free(slot)

    def fetch(self, owner: WorkerAddress, range: Range) -> memoryview:
        if owner.epoch == self._epoch:
            return part(self._pool.view, range)
        return part(self._peers.view(owner), range)

    def forget(self, owner_epoch: str) -> None:
        self._peers.forget(owner_epoch)

    @property
    def used_bytes(self) -> int:
        return self._pool.used_bytes

    def check(self) -> None:
        self._pool.check()
        self._peers.check()

    def _close_pool(self) -> bool:
        """Let go of all memory; False when that was done before."""
        if self._closed:
            return False
        self._closed = True
        self._peers.close()
        self._pool.close()
        return True
