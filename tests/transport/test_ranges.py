"""Ranges never overlap, coalesce back to one, and take the best fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import PoolExhaustedError
from triptych.transport.ranges import Ranges

# A size allocates, a fraction frees the range at that place among those in use.
OPERATIONS = st.lists(st.one_of(st.integers(1, 300), st.floats(0, 1, exclude_max=True)), max_size=80)


@given(OPERATIONS)
def test_ranges_never_overlap_and_coalesce_back_to_one(operations: list[int | float]) -> None:
    ranges = Ranges(1000)
    used: dict[int, int] = {}
    for operation in operations:
        if isinstance(operation, int):
            try:
                offset = ranges.allocate(operation)
            except PoolExhaustedError:
                assert longest_gap(used, 1000) < operation
                continue
            assert all(offset + operation <= o or o + size <= offset for o, size in used.items())
            assert 0 <= offset <= 1000 - operation
            used[offset] = operation
        elif used:
            offset = sorted(used)[int(operation * len(used))]
            del used[offset]
            ranges.free(offset)
        ranges.check()
        assert ranges.used_bytes == sum(used.values())
    for offset in used:
        ranges.free(offset)
    ranges.check()
    assert (ranges.used_bytes, ranges.num_free_ranges) == (0, 1)
    assert ranges.allocate(1000) == 0


def longest_gap(used: dict[int, int], capacity: int) -> int:
    ends = [0, *(offset + size for offset, size in sorted(used.items()))]
    starts = [*sorted(used), capacity]
    return max(start - end for start, end in zip(starts, ends, strict=True))


def test_the_best_fit_is_taken() -> None:
    ranges = Ranges(100)
    offsets = [ranges.allocate(size) for size in (30, 10, 20, 10, 30)]
    for offset in (offsets[0], offsets[2]):
        ranges.free(offset)
    assert ranges.allocate(20) == offsets[2]
    assert ranges.allocate(15) == offsets[0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        Ranges(0)
    ranges = Ranges(10)
    with pytest.raises(ValueError, match="positive"):
        ranges.allocate(0)
    with pytest.raises(ValueError, match="offset 3"):
        ranges.free(3)
    ranges.allocate(10)
    with pytest.raises(PoolExhaustedError, match="longest free range has 0"):
        ranges.allocate(1)
