"""The in-memory twin of `ShmTransport`, for workers that live in one process: `EPD`, and `triptych.testing`.

Runs on the compute thread of each worker in the process; called by `handoff/`. Pools find each other by epoch in
one dict of the process.
"""

from __future__ import annotations

import mmap

from triptych.errors import PeerLostError
from triptych.transport.pool import MemoryPool, map_size
from triptych.transport.pooled import PooledTransport
from triptych.types import WorkerAddress

_pools: dict[str, MemoryPool] = {}  # by epoch, of every open transport in this process


class InProcTransport(PooledTransport):
    """A pool of private memory. Two workers of one process may run on two threads: each touches only its own pool."""

    name = "inproc"
    pool_path = ""

    def __init__(self, epoch: str, pool_bytes: int) -> None:
        if epoch in _pools:
            raise ValueError(f"epoch {epoch} has a pool in this process already")
        # Anonymous pages instead of a bytearray: aligned, and not touched before they are used.
        mapping = mmap.mmap(-1, map_size(pool_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        super().__init__(epoch, mapping, _view_of)
        _pools[epoch] = self._pool

    def close(self) -> None:
        if self._close_pool():
            del _pools[self._epoch]


def _view_of(owner: WorkerAddress) -> memoryview:
    """A view of our own, as a mapping would be: it outlives the owner's. Raises PeerLostError."""
    pool = _pools.get(owner.epoch)
    if pool is None:
        raise PeerLostError(f"worker {owner.name} of epoch {owner.epoch} has no pool in this process")
    return pool.view[:]
