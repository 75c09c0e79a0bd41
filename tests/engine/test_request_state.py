"""One request's own books: positions, hashes, what is left to compute, and where its time went."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.requests import BLOCK_SIZE, IMAGE_TOKEN, item, make_request
from triptych.clock import ManualClock
from triptych.engine.request_state import PositionTable, Status

PROMPT_POSITIONS = np.array([[0, 1, 1, 1, 2], [0, 1, 1, 2, 3], [0, 1, 2, 2, 3]], dtype=np.int64)
DELTA = -1  # the sixth token stands at position 4


def whole_table(end: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.stack([[*axis, *(k + DELTA for k in range(5, end))] for axis in PROMPT_POSITIONS.tolist()])


@given(start=st.integers(0, 12), length=st.integers(0, 8))
def test_a_slice_of_positions_is_a_slice_of_the_whole_table(start: int, length: int) -> None:
    positions = PositionTable(PROMPT_POSITIONS, DELTA).slice(start, start + length)
    assert positions.shape == (3, length)
    assert (positions == whole_table(30)[:, start : start + length]).all()


def test_positions_over_the_border_of_prompt_and_output() -> None:
    assert PositionTable(PROMPT_POSITIONS, DELTA).slice(3, 7).tolist() == [[1, 2, 4, 5], [2, 3, 4, 5], [2, 3, 4, 5]]


def test_times_by_status_sum_to_the_total() -> None:
    clock = ManualClock(100.0)
    request = make_request("r", [1, 2, 3], now=clock.now())
    for seconds, status in (
        (1.0, Status.WAITING_FOR_EMBEDDINGS),
        (2.0, Status.RUNNING),
        (4.0, Status.PREEMPTED),
        (8.0, Status.WAITING_FOR_EMBEDDINGS),
        (16.0, Status.WAITING),
        (32.0, Status.RUNNING),
    ):
        clock.advance(seconds)
        request.set_status(status, clock.now(), "x" if status is Status.WAITING_FOR_EMBEDDINGS else "")
    clock.advance(64.0)
    timing = request.first_token_timing(clock.now())
    assert timing is not None
    assert (timing.queue_s, timing.embed_wait_s, timing.prefill_s) == (1.0 + 8.0 + 32.0, 2.0 + 16.0, 4.0 + 64.0)
    assert timing.queue_s + timing.embed_wait_s + timing.prefill_s == clock.now() - 100.0
    assert timing.blocking_item == "x"


@given(st.lists(st.tuples(st.sampled_from(list(Status)), st.integers(0, 10)), max_size=12))
def test_no_second_is_lost_whatever_the_way(changes: list[tuple[Status, int]]) -> None:
    clock = ManualClock()
    request = make_request("r", [1])
    for status, seconds in changes:
        request.set_status(status, clock.now())
        clock.advance(seconds)
    timing = request.first_token_timing(clock.now())
    assert timing is not None
    assert timing.queue_s + timing.embed_wait_s + timing.prefill_s == clock.now()


def test_the_first_token_is_timed_once() -> None:
    request = make_request("r", [1])
    assert request.first_token_timing(1.0) is not None
    assert request.first_token_timing(2.0) is None


def test_a_request_that_was_prefilled_elsewhere_is_not_timed_here() -> None:
    assert make_request("r", [1], kv_from_elsewhere=True).first_token_timing(1.0) is None


@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(0, 30), max_size=6))
def test_hashes_made_step_by_step_equal_those_made_at_once(token_ids: list[int], cuts: list[int]) -> None:
    items = [item("x", 3, 6)]
    growing = make_request("r", [], items)
    for cut in [*sorted(cuts), len(token_ids)]:
        growing.token_ids = token_ids[: min(cut, len(token_ids))]
        growing.block_hashes()
    at_once = make_request("r", token_ids, items).block_hashes()
    assert growing.block_hashes() == at_once
    assert len(at_once) == len(token_ids) // BLOCK_SIZE


def test_only_the_last_sampled_token_left_means_decoding() -> None:
    def is_decoding(num_computed_tokens: int, num_output_tokens: int) -> bool:
        request = make_request("r", [1, 2, 3, *[9] * num_output_tokens], num_output_tokens=num_output_tokens)
        request.num_computed_tokens = num_computed_tokens
        return request.is_decoding

    assert not is_decoding(2, 0)  # the last token of the prompt
    assert is_decoding(3, 1)
    assert not is_decoding(0, 1)  # it was preempted


def test_tokens_of_an_earlier_attempt_count_as_output() -> None:
    request = make_request("r", [1, 2, 3, 4], num_output_tokens=3)
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens_to_compute) == (1, 3, 4)


@pytest.mark.parametrize(("num_covered", "names"), [(0, "xy"), (4, "xy"), (5, "y"), (8, "y"), (9, "")])
def test_an_item_is_covered_when_its_last_token_is(num_covered: int, names: str) -> None:
    request = make_request("r", [IMAGE_TOKEN] * 10, [item("x", 1, 4), item("y", 6, 3)])
    assert "".join(i.mm_hash for i in request.uncovered_items(num_covered)) == names
