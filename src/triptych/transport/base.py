"""The seam between the hand-off and the way bytes move: one leased pool a process, and pulls from other pools.

Runs in every worker, on its one compute thread; called by `handoff/`. The transports are `ShmTransport`, its in-memory
twin `InProcTransport`, and `TcpTransport`; `tests/transport/test_contract.py` holds all to what is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from triptych.messages import Range
from triptych.types import WorkerAddress

ALIGNMENT_BYTES = 64  # a cache line, and the widest vector load


class Slot(NamedTuple):
    """A piece of the own pool. `free` takes the very object that `allocate` returned, not an equal one."""

    offset: int
    num_bytes: int


class Fetch(Protocol):
    """Ranges of another pool on their way here. Made by `Transport.fetch`; used on the compute thread."""

    @property
    def done(self) -> bool:
        """Whether `views` answers at once. True from the start where the other pool is mapped."""
        ...

    def views(self) -> list[memoryview]:
        """Once done: a read-only view of each range, good until `close`.

        Raises PeerLostError when the owner is gone or lives under another epoch, another TransferError when the bytes
        did not come, and ValueError when the owner does not have the ranges to give.
        """
        ...

    def close(self) -> None:
        """The views are not needed any more; what has not arrived is given up. Idempotent."""
        ...


class Transport(Protocol):
    """One worker's end: its own pool as the producer, fetches from other pools as the consumer."""

    name: str  # "auto", "shm", "tcp" or "inproc"
    pool_path: str  # unix socket that hands out the pool, for `WorkerAddress.pool`; "" without one
    data_endpoint: str  # where the pool is served over TCP, for `WorkerAddress.data`; "" without one

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

    def offer(self, ranges: Sequence[Range]) -> bytes:
        """A ticket with which these ranges, and no others, can be fetched until `withdraw`. Without a network nobody
        asks for one: it is empty. Raises ValueError when a range is not inside the pool."""
        ...

    def withdraw(self, ticket: bytes) -> None:
        """The lease is over. A transfer that runs goes on: the checksum tells whether it was late. Idempotent."""
        ...

    def fetch(self, owner: WorkerAddress, ranges: Sequence[Range], ticket: bytes = b"") -> Fetch:
        """Begin to fetch; never waits for the network. The own pool is read in place when the owner is this worker.

        Raises what `Fetch.views` does where that is known at once. A pool that was mapped once stays readable after
        its owner's death, until `forget` or the first fetch from a later life of the same name.
        """
        ...

    def on_arrival(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, when a fetch is done."""
        ...

    def forget(self, owner_epoch: str) -> None:
        """Let go of a dead peer's pool; fetches from it that run fail. Harmless when unknown."""
        ...

    @property
    def counters(self) -> dict[str, float]:
        """Totals since the start, by metric name without prefix."""
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
