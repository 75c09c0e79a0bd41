"""Allocates ranges of bytes: best fit, lowest address first, neighbours coalesce. Pure numbers, no memory.

Runs in every worker; called by `MemoryPool`.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from triptych.errors import PoolExhaustedError


class Ranges:
    """The free and the used ranges of `capacity` bytes. Sizes are taken as they are: the caller aligns."""

    def __init__(self, capacity: int) -> None:
        if capacity <= 0:
            raise ValueError(f"capacity must be positive, not {capacity}")
        self.capacity = capacity
        self.used_bytes = 0
        self._used: dict[int, int] = {}  # offset to size
        self._free: list[tuple[int, int]] = [(0, capacity)]  # (offset, size) by offset, for coalescing
        self._by_size: list[tuple[int, int]] = [(capacity, 0)]  # (size, offset): the same ranges, for best fit

    def allocate(self, size: int) -> int:
        """The offset of a range of `size` bytes. Raises PoolExhaustedError when none is long enough."""
        if size <= 0:
            raise ValueError(f"size must be positive, not {size}")
        place = bisect_left(self._by_size, (size, 0))
        if place == len(self._by_size):
            largest = self._by_size[-1][0] if self._by_size else 0
            raise PoolExhaustedError(
                f"no {size} bytes in one piece: {self.used_bytes} of {self.capacity} are used, "
                f"the longest free range has {largest}"
            )
        free_size, offset = self._by_size.pop(place)
        index = bisect_left(self._free, (offset, 0))
        if free_size == size:
            del self._free[index]
        else:
            self._free[index] = (offset + size, free_size - size)
            insort(self._by_size, (free_size - size, offset + size))
        self._used[offset] = size
        self.used_bytes += size
        return offset

    def free(self, offset: int) -> None:
        """Give the range at `offset` back. Raises ValueError when none is used there."""
        size = self._used.pop(offset, None)
        if size is None:
            raise ValueError(f"no range is used at offset {offset}")
        self.used_bytes -= size
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._take(index)
        if index > 0:
            before_offset, before_size = self._free[index - 1]
            if before_offset + before_size == offset:
                index -= 1
                offset = before_offset
                size += self._take(index)
        self._free.insert(index, (offset, size))
        insort(self._by_size, (size, offset))

    def _take(self, index: int) -> int:
        """Remove a free range that is about to become part of a longer one; returns its size."""
        offset, size = self._free.pop(index)
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        return size

    @property
    def num_free_ranges(self) -> int:
        return len(self._free)

    def check(self) -> None:
        """Raises AssertionError unless used and free ranges tile the capacity and no two free ones touch."""
        tiles = sorted([(o, s, True) for o, s in self._used.items()] + [(o, s, False) for o, s in self._free])
        end, after_free = 0, False
        for offset, size, used in tiles:
            if offset != end or size <= 0:
                raise AssertionError(f"range at {offset} of {size} bytes does not begin where the last ended, {end}")
            if after_free and not used:
                raise AssertionError(f"free range at {offset} was not coalesced with the one before it")
            end, after_free = offset + size, not used
        if end != self.capacity:
            raise AssertionError(f"ranges end at {end} of {self.capacity}")
        if self._by_size != sorted((size, offset) for offset, size in self._free):
            raise AssertionError("the two orders of the free list differ")
        if self.used_bytes != sum(self._used.values()):
            raise AssertionError("used_bytes is off")
