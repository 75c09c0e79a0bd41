"""The seam between the hand-off and the way bytes move: one leased pool a process, and pulls from other pools.

Runs in every worker, on its one compute thread; called by `handoff/`. The transports are `ShmTransport` and its
in-memory twin `InProcTransport`; `tests/transport/test_contract.py` holds both to what is said here.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from triptych.messages import Range
from triptych.types import WorkerAddress

ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load


class Slot(NamedTuple):
    """A piece of the own pool. `free` takes the very object that `allocate` returned, not an equal one."""

    offset: int
    num_bytes: int


class Transport(Protocol):
    """One worker's end: its own pool as the producer, read-only views of other pools as the consumer."""

    name: str  # "shm" or "inproc"; a label of metrics
    pool_path: str  # unix socket that hands out the pool, for `WorkerAddress.pool`; "" for inproc

    def allocate(self, num_bytes: int) -> Slot:
        """A 64-byte aligned slot; zero bytes are legal. Its content is whatever was there.

        Raises PoolExhaustedError when no free range is long enough.
        """
        ...

    def memory(self, slot: Slot) -> memoryview:
        """The slot's bytes, writable. Raises ValueError when it is not allocated."""
        ...

    def free(self, slot: Slot) -> None:
        """Give the slot back; readers that still look at it will see whatever comes next. A second free raises
        ValueError, also after the same range was allocated anew."""
        ...

    def fetch(self, owner: WorkerAddress, range: Range) -> memoryview:
        """A read-only view of the owner's bytes, without a copy; the own pool when the owner is this worker.

        Raises PeerLostError when the owner is gone or lives under another epoch, and ValueError when the range is
        not inside its pool. Once a pool is mapped it stays readable after its owner's death, until `forget` or the
        first fetch from a later life of the same name.
        """
        ...

    def forget(self, owner_epoch: str) -> None:
        """Let go of a dead peer's pool. Its memory goes when the last view of it does. Harmless when unknown."""
        ...

    @property
    def used_bytes(self) -> int:
        """Bytes of the own pool that are not free, with what alignment adds."""
        ...

    def check(self) -> None:
        """Raises AssertionError when the pool's books do not add up."""
        ...

    def close(self) -> None:
        """Leave nothing behind: no thread, no file, and no descriptor once the last view is gone. Idempotent."""
        ...
