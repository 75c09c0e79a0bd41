"""Embeddings that a worker holds: referenced by requests, or evictable in the order of their last use.

One class for both ends: an encode worker keeps what it published, a prefill worker what it received. It counts bytes
and knows nothing of tensors; the owner is told of each eviction.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class _Entry(Generic[Value]):
    __slots__ = ("num_bytes", "owners", "value")

    def __init__(self, value: Value, num_bytes: int) -> None:
        self.value = value
        self.num_bytes = num_bytes
        self.owners: set[Hashable] = set()


class EncoderCache(Generic[Value]):
    """At most `capacity_bytes` of evictable entries; referenced ones are never evicted, so they may exceed it."""

    def __init__(self, capacity_bytes: int, on_evict: Callable[[Value], None] = lambda _: None) -> None:
        self._capacity_bytes = capacity_bytes
        self._on_evict = on_evict
        self._entries: dict[str, _Entry[Value]] = {}
        self._evictable: OrderedDict[str, None] = OrderedDict()
        self._held_by: dict[Hashable, set[str]] = {}
        self.used_bytes = 0
        self.num_evictions = 0

    def __contains__(self, mm_hash: str) -> bool:
        return mm_hash in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_referenced(self) -> int:
        return len(self._entries) - len(self._evictable)

    def get(self, mm_hash: str) -> Value | None:
        """The value, counted as used now; None if it is not held."""
        entry = self._entries.get(mm_hash)
        if entry is None:
            return None
        if mm_hash in self._evictable:
            self._evictable.move_to_end(mm_hash)
        return entry.value

    def put(self, mm_hash: str, value: Value, num_bytes: int) -> None:
        """Hold a value that is not held yet. It is evictable at once: acquire it before the next `put`."""
        if mm_hash in self._entries:
            raise ValueError(f"{mm_hash} is held already")
        self._entries[mm_hash] = _Entry(value, num_bytes)
        self._evictable[mm_hash] = None
        self.used_bytes += num_bytes

    def acquire(self, mm_hash: str, owner: Hashable) -> None:
        """`owner` needs the entry to stay. Acquiring twice is the same as once."""
        self._entries[mm_hash].owners.add(owner)
        self._evictable.pop(mm_hash, None)
        self._held_by.setdefault(owner, set()).add(mm_hash)

    def release(self, mm_hash: str, owner: Hashable) -> None:
        """`owner` no longer needs the entry. Harmless if it held none."""
        entry = self._entries.get(mm_hash)
        if entry is None or owner not in entry.owners:
            return
        entry.owners.remove(owner)
        held = self._held_by[owner]
        held.remove(mm_hash)
        if not held:
            del self._held_by[owner]
        if not entry.owners:
            self._evictable[mm_hash] = None

    def release_all(self, owner: Hashable) -> None:
        for mm_hash in list(self._held_by.get(owner, ())):
            self.release(mm_hash, owner)

    def shrink(self) -> None:
        """Evict, least recently used first, until the capacity holds or only referenced entries are left."""
        while self.used_bytes > self._capacity_bytes and self.evict_one():
            pass

    def evict_one(self) -> bool:
        """Evict the least recently used evictable entry; False if there is none."""
        if not self._evictable:
            return False
        mm_hash, _ = self._evictable.popitem(last=False)
        entry = self._entries.pop(mm_hash)
        self.used_bytes -= entry.num_bytes
        self.num_evictions += 1
        self._on_evict(entry.value)
        return True

    def check(self) -> None:
        """Raise AssertionError unless the books agree."""
        assert self.used_bytes == sum(entry.num_bytes for entry in self._entries.values()), "bytes do not add up"
        for mm_hash, entry in self._entries.items():
            assert (mm_hash in self._evictable) == (not entry.owners), f"{mm_hash} is evictable with owners"
            assert all(mm_hash in self._held_by[owner] for owner in entry.owners), f"{mm_hash} has a stranger"
        held = sum(len(hashes) for hashes in self._held_by.values())
        assert held == sum(len(entry.owners) for entry in self._entries.values()), "owners do not add up"
