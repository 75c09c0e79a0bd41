"""A worker's own memory cut into slots: the producer's half of every transport.

Runs in every worker, on its compute thread; called by the transports, which own the memory beneath.
"""

from __future__ import annotations

import contextlib
import mmap

from triptych.messages import Range
from triptych.transport.base import ALIGNMENT_BYTES, Slot
from triptych.transport.ranges import Ranges


class MemoryPool:
    """Slots in one mapping. `view` is all of it, read-only: what consumers get to see."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._memory = memoryview(mapping)
        self.view = self._memory.toreadonly()
        self._ranges = Ranges(len(mapping))
        self._slots: dict[int, Slot] = {}  # by offset

    def allocate(self, num_bytes: int) -> Slot:
        if num_bytes < 0:
            raise ValueError(f"a slot cannot have {num_bytes} bytes")
        # A slot of no bytes takes a line too, so that its offset is its own.
        aligned = max(_round_up(num_bytes, ALIGNMENT_BYTES), ALIGNMENT_BYTES)
        slot = Slot(self._ranges.allocate(aligned), num_bytes)
        self._slots[slot.offset] = slot
        return slot

    def memory(self, slot: Slot) -> memoryview:
        self._require(slot)
        return self._memory[slot.offset : slot.offset + slot.num_bytes]

    def free(self, slot: Slot) -> None:
        self._require(slot)
        del self._slots[slot.offset]
        self._ranges.free(slot.offset)

    def _require(self, slot: Slot) -> None:
        # By identity: an equal slot may be a later allocation, and freeing that would free another's bytes.
        if self._slots.get(slot.offset) is not slot:
            raise ValueError(f"{slot} is not allocated")

    @property
    def used_bytes(self) -> int:
        return self._ranges.used_bytes

    def check(self) -> None:
        self._ranges.check()
        sizes = sum(max(_round_up(slot.num_bytes, ALIGNMENT_BYTES), ALIGNMENT_BYTES) for slot in self._slots.values())
        if sizes != self._ranges.used_bytes:
            raise AssertionError(f"slots have {sizes} bytes, {self._ranges.used_bytes} are used")

    def close(self) -> None:
        """Unmap, or leave that to the last view when tensors or consumers in this process still hold some."""
        self.view.release()
        unmap(self._memory)


def map_size(pool_bytes: int) -> int:
    """Whole pages, as the kernel maps them. Raises ValueError when there are none."""
    if pool_bytes <= 0:
        raise ValueError(f"a pool must have bytes, not {pool_bytes}")
    return _round_up(pool_bytes, mmap.PAGESIZE)


def part(pool: memoryview, range: Range) -> memoryview:
    """The bytes of `range`. Raises ValueError when it is not inside the pool."""
    if range.offset < 0 or range.num_bytes < 0 or range.offset + range.num_bytes > len(pool):
        raise ValueError(f"{range} is not inside a pool of {len(pool)} bytes")
    return pool[range.offset : range.offset + range.num_bytes]


def unmap(view: memoryview) -> None:
    """Unmap what `view` is of. If there are other views, the mapping goes with the last of them."""
    mapping = view.obj
    view.release()
    if isinstance(mapping, mmap.mmap):
        with contextlib.suppress(BufferError):
            mapping.close()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
