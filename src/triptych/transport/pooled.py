"""What transports over mapped memory share: an own pool to publish from, and mapped pools of peers to read.

Runs in every worker, on its compute thread. `shm.py` and `inproc.py` say where the memory is and how a peer's is found.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from triptych.messages import Range
from triptych.transport.base import Slot
from triptych.transport.peers import MappedPeers
from triptych.transport.pool import MemoryPool, part
from triptych.types import WorkerAddress


class Mapped(NamedTuple):
    """A `Fetch` that has nothing to wait for."""

    ranges: list[memoryview]
    done: bool = True

    def views(self) -> list[memoryview]:
        return self.ranges

    def close(self) -> None:
        """The views are the pool's own."""


class PooledTransport:
    """All of `transport.base.Transport` but its names and `close`. `view_of` maps the pool of a peer, or raises."""

    pool_path: str
    data_endpoint = ""

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

    @property
    def view(self) -> memoryview:
        """All of the own pool, read-only."""
        return self._pool.view

    def offer(self, ranges: Sequence[Range]) -> bytes:
        for each in ranges:
            part(self._pool.view, each)
        return b""

    def withdraw(self, ticket: bytes) -> None:
        """Who has mapped the pool needs no ticket."""

    def fetch(self, owner: WorkerAddress, ranges: Sequence[Range], ticket: bytes = b"") -> Mapped:
        view = self._pool.view if owner.epoch == self._epoch else self._peers.view(owner)
        return Mapped([part(view, each) for each in ranges])

    def on_arrival(self, wake: Callable[[], None]) -> None:
        """All is done at once."""

    def forget(self, owner_epoch: str) -> None:
        self._peers.forget(owner_epoch)

    @property
    def counters(self) -> dict[str, float]:
        return {}

    @property
    def used_bytes(self) -> int:
        return self._pool.used_bytes

    def check(self) -> None:
        self._pool.check()
        self._peers.check()

    def close(self) -> None:
        raise NotImplementedError

    def _close_pool(self) -> bool:
        """Let go of all memory; False when that was done before."""
        if self._closed:
            return False
        self._closed = True
        self._peers.close()
        self._pool.close()
        return True
