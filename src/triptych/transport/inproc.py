"""The in-memory twin of `ShmTransport`, for workers that live in one process: `EPD`, and `triptych.testing`.

Runs on the compute thread of each worker in the process; called by `handoff/`. Pools find each other by epoch in
one dict of the process.
"""

from __future__ import annotations

import mmap

from triptych.errors import PeerLostError
from triptych.messages import Range
from triptych.transport.base import Slot
from triptych.transport.peers import MappedPeers
from triptych.transport.pool import MemoryPool, map_size, part
from triptych.types import WorkerAddress

_pools: dict[str, MemoryPool] = {}  # by epoch, of every open transport in this process


class InProcTransport:
    """A pool of private memory. Two workers of one process may run on two threads: each touches only its own pool."""

    name = "inproc"
    pool_path = ""

    def __init__(self, epoch: str, pool_bytes: int) -> None:
        if epoch in _pools:
            raise ValueError(f"epoch {epoch} has a pool in this process already")
        # Anonymous pages instead of a bytearray: aligned, and not touched before they are used.
        mapping = mmap.mmap(-1, map_size(pool_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._epoch = epoch
        self._pool = MemoryPool(mapping)
        self._peers = MappedPeers(_view_of)
        self._closed = False
        _pools[epoch] = self._pool

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

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        del _pools[self._epoch]
        self._peers.close()
        self._pool.close()


def _view_of(owner: WorkerAddress) -> memoryview:
    """A view of our own, as a mapping would be: it outlives the owner's. Raises PeerLostError."""
    pool = _pools.get(owner.epoch)
    if pool is None:
        raise PeerLostError(f"worker {owner.name} of epoch {owner.epoch} has no pool in this process")
    return pool.view[:]
