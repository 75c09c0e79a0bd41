"""What a producer keeps for its consumers, and until when. Pure Python; the bytes belong to whoever granted the lease.

Runs in every worker, on its compute thread; called by `embedding.py`, `kv.py` and the stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from triptych.clock import Clock


class _Lease(NamedTuple):
    consumer: str  # name, for the reader of a debugger
    consumer_epoch: str
    request: tuple[str, int]  # request_id and attempt, for the same reader
    free: Callable[[], None]
    expires_s: float  # on the clock of this process


class Leases:
    """Each lease ends once: released, expired, or ended with its consumer; then `free` is called.

    A lease is gone before its `free` runs, so `free` may come back here, and one that raises is not called again.
    """

    def __init__(self, clock: Clock, ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._leases: dict[int, _Lease] = {}  # in order of id, so in order of expiry: there is one ttl
        self._next_id = 1
        self._dead_epochs: set[str] = set()  # one short string a death
        self.num_expired = 0  # since the start; a metric

    def grant(self, consumer: str, consumer_epoch: str, request: tuple[str, int], free: Callable[[], None]) -> int:
        """The id of a new lease, unique in this process's life. A lease to a dead consumer is over at once."""
        lease_id = self._next_id
        self._next_id += 1
        if consumer_epoch in self._dead_epochs:
            free()
            return lease_id
        self._leases[lease_id] = _Lease(consumer, consumer_epoch, request, free, self._clock.now() + self._ttl_s)
        return lease_id

    def release(self, lease_id: int) -> bool:
        """The consumer is done. False when the lease is unknown: a second or a late release does no harm."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        lease.free()
        return True

    def drop_consumer(self, epoch: str) -> int:
        """End all leases of a dead consumer, those granted later too; returns how many."""
        self._dead_epochs.add(epoch)
        return self._release_all([i for i, lease in self._leases.items() if lease.consumer_epoch == epoch])

    def expire(self) -> int:
        """End the leases whose time is over; returns how many."""
        now_s = self._clock.now()
        num_expired = 0
        while self._leases:
            lease_id, lease = next(iter(self._leases.items()))
            if lease.expires_s > now_s:
                break
            num_expired += 1
            self.num_expired += 1
            self.release(lease_id)
        return num_expired

    def _release_all(self, lease_ids: list[int]) -> int:
        return sum(self.release(lease_id) for lease_id in lease_ids)

    def __len__(self) -> int:
        return len(self._leases)

    def check(self) -> None:
        """Raises AssertionError unless ids and expiries stand in one order, which `expire` relies on."""
        last_id, last_expires_s = 0, float("-inf")
        for lease_id, lease in self._leases.items():
            if not last_id < lease_id < self._next_id:
                raise AssertionError(f"lease {lease_id} stands after {last_id}; the next is {self._next_id}")
            if lease.expires_s < last_expires_s:
                raise AssertionError(f"lease {lease_id} expires before the one granted before it")
            last_id, last_expires_s = lease_id, lease.expires_s
