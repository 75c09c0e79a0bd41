"""Who computes what in a step: the budget, order, preemption, and that everybody finishes. No torch, no model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.requests import BLOCK_SIZE, IMAGE_TOKEN, Drive, distinct_tokens, item, make_request
from triptych.engine.request_state import RequestState, Status
from triptych.engine.scheduler import EVEN_TOKENS
from triptych.types import FinishReason


def text(name: str, num_tokens: int, priority: int = 0) -> RequestState:
    return make_request(name, distinct_tokens(ord(name[0]), num_tokens), priority=priority)


# -- budget and order --------------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    drive = Drive(max_num_batched_tokens=10)
    drive.add(text("a", 25))
    assert [drive.step() for _ in range(4)] == [{"a": 10}, {"a": 10}, {"a": 5}, {"a": 1}]


def test_decode_comes_first_and_prefill_gets_what_is_left() -> None:
    drive = Drive(max_num_batched_tokens=10)
    drive.add(text("a", 3), text("b", 3))
    drive.step()
    drive.add(text("c", 30))
    assert list(drive.step().items()) == [("a", 1), ("b", 1), ("c", 8)]
    assert list(drive.step().items()) == [("a", 1), ("b", 1), ("c", 8)]


def test_prefill_goes_in_order_of_arrival() -> None:
    drive = Drive(max_num_batched_tokens=10)
    drive.add(text("a", 12), text("b", 12), text("c", 12))
    assert [drive.step() for _ in range(3)] == [{"a": 10}, {"a": 2, "b": 8}, {"a": 1, "b": 4, "c": 5}]


def test_only_a_chunk_that_reaches_the_last_token_samples() -> None:
    drive = Drive(max_num_batched_tokens=10)
    request = text("a", 12)
    drive.add(request)
    (chunk,) = drive.scheduler.schedule().chunks
    assert not chunk.samples
    drive.scheduler.advance(request, chunk.num_tokens)
    (chunk,) = drive.scheduler.schedule().chunks
    assert chunk.samples


def test_no_more_than_max_num_seqs_hold_blocks() -> None:
    drive = Drive(max_num_seqs=2)
    drive.add(*(text(name, 4) for name in "abc"))
    assert drive.step() == {"a": 4, "b": 4}
    assert drive.step() == {"a": 1, "b": 1}
    drive.scheduler.finish(next(iter(drive.scheduler.running)), FinishReason.STOP)
    assert drive.step() == {"b": 1, "c": 4}


def test_prompts_that_are_not_long_go_in_order_of_arrival() -> None:
    drive = Drive(num_blocks=8)
    drive.add(text("a", 20))
    drive.step()
    drive.add(text("b", 20), text("c", 4))
    assert drive.step() == {"a": 1}
    assert drive.statuses() == {"a": Status.RUNNING, "b": Status.WAITING, "c": Status.WAITING}


def long_and_short(*, num_steps_before: int) -> Drive:
    """A prompt of four times EVEN_TOKENS has run for a while when a short one comes; a step computes half of them."""
    drive = Drive(num_blocks=2000, max_num_batched_tokens=EVEN_TOKENS // 2)
    drive.add(text("z", 4 * EVEN_TOKENS))
    for _ in range(num_steps_before):
        assert drive.step() == {"z": EVEN_TOKENS // 2}
    drive.add(text("a", 6))
    return drive


def test_a_short_prompt_goes_before_a_long_one_that_runs() -> None:
    assert long_and_short(num_steps_before=5).step() == {"a": 6, "z": EVEN_TOKENS // 2 - 6}


def test_a_long_prompt_is_put_back_by_no_more_than_what_it_has_beyond_the_others() -> None:
    assert long_and_short(num_steps_before=7).step() == {"z": EVEN_TOKENS // 2}


def test_a_finished_request_frees_all_its_blocks() -> None:
    drive = Drive(num_blocks=8)
    drive.add(text("a", 20))
    drive.step(finish_at=1)
    assert len(drive.scheduler) == 0
    assert drive.pool.num_free == drive.pool.num_blocks


# -- priority ----------------------------------------------------------------------------------------------------------


def test_a_lower_priority_goes_first_then_the_earlier_prompt() -> None:
    drive = Drive(max_num_batched_tokens=10)
    drive.add(text("a", 4, priority=1), text("b", 6), text("c", 8, priority=-5), text("d", 10))
    assert [drive.step() for _ in range(4)] == [
        {"c": 8, "b": 2},
        {"c": 1, "b": 4, "d": 5},
        {"c": 1, "b": 1, "d": 5, "a": 3},
        {"c": 1, "b": 1, "d": 1, "a": 1},
    ]


def test_no_ageing_lifts_a_request_over_a_lower_priority() -> None:
    drive = Drive(num_blocks=60, max_num_batched_tokens=8)
    drive.add(text("z", 40, priority=1))
    for name in "abcdefghijklmnopqrstuvwxy":
        drive.add(text(name, 8))
        assert "z" not in drive.step(finish_at=1)


def test_the_highest_number_is_preempted_first_then_the_latest_arrival() -> None:
    drive = Drive(num_blocks=8, prefix_caching=False)
    drive.add(text("a", 8, priority=7), text("b", 8), text("c", 8), text("d", 8))
    assert len(drive.step()) == 4
    assert drive.step() == {"b": 1, "c": 1}  # each needs a third block: a has to give two, then d
    assert drive.statuses() == {"a": Status.PREEMPTED, "b": Status.RUNNING, "c": Status.RUNNING, "d": Status.PREEMPTED}
    assert [drive.scheduler.num_preemptions, drive.pool.num_free] == [2, 2]


def test_a_request_does_not_preempt_one_of_a_lower_priority_for_itself() -> None:
    drive = Drive(num_blocks=4, prefix_caching=False)
    drive.add(text("a", 8, priority=1), text("b", 8))
    drive.step()
    assert drive.step() == {"b": 1}
    assert drive.statuses() == {"a": Status.PREEMPTED, "b": Status.RUNNING}


# -- embeddings --------------------------------------------------------------------------------------------------------


def with_image(name: str, before: int, length: int, after: int, mm_hash: str) -> RequestState:
    tokens = distinct_tokens(ord(name[0]), before + length + after)
    tokens[before : before + length] = [IMAGE_TOKEN] * length
    return make_request(name, tokens, [item(mm_hash, before, length)])


def test_a_chunk_stops_at_the_first_missing_embedding_and_goes_on_when_it_lands() -> None:
    drive = Drive()
    drive.add(with_image("a", 5, 6, 3, "x"))
    assert drive.step() == {"a": 5}
    assert drive.step() == {}
    assert drive.statuses() == {"a": Status.WAITING_FOR_EMBEDDINGS}
    drive.land("x")
    assert drive.step() == {"a": 9}


def test_each_image_that_lands_unlocks_the_tokens_up_to_the_next() -> None:
    drive = Drive()
    tokens = [1, *[IMAGE_TOKEN] * 3, 2, *[IMAGE_TOKEN] * 3, 3]
    drive.add(make_request("a", tokens, [item("x", 1, 3), item("y", 5, 3)]))
    drive.land("y")
    assert drive.step() == {"a": 1}
    drive.land("x")
    assert drive.step() == {"a": 8}


def test_a_blocked_request_does_not_hold_up_later_ones() -> None:
    drive = Drive()
    drive.add(with_image("a", 0, 6, 3, "x"), text("b", 4))
    assert drive.step() == {"b": 4}
    assert drive.statuses() == {"a": Status.WAITING_FOR_EMBEDDINGS, "b": Status.RUNNING}


def test_a_request_whose_first_token_is_blocked_holds_no_block() -> None:
    drive = Drive()
    drive.add(with_image("a", 0, 6, 3, "x"))
    drive.step()
    assert drive.pool.num_free == drive.pool.num_blocks


def test_without_overlap_a_prompt_waits_for_all_its_embeddings() -> None:
    drive = Drive(overlap_encode=False)
    drive.add(with_image("a", 4, 6, 3, "x"))
    assert drive.step() == {}
    assert drive.demands == [("a", 0)]
    drive.land("x")
    assert drive.step() == {"a": 13}


def test_a_missing_embedding_is_demanded_once() -> None:
    drive = Drive()
    drive.add(with_image("a", 2, 6, 3, "x"))
    for _ in range(4):
        drive.step()
    assert drive.demands == [("a", 0)]


# -- prefix cache ------------------------------------------------------------------------------------------------------


def test_an_equal_prompt_computes_its_last_token_only_in_the_last_block() -> None:
    drive = Drive()
    drive.add(make_request("a", distinct_tokens(0, 12)))
    drive.step(finish_at=1)
    again = make_request("b", distinct_tokens(0, 12))
    drive.add(again)
    assert drive.scheduler.num_cached_tokens(again) == 8  # the third block holds the last token
    assert drive.step() == {"b": 4}
    assert again.num_cached_tokens == 8
    assert (drive.scheduler.num_prefix_queries_tokens, drive.scheduler.num_prefix_hit_tokens) == (24, 8)


def test_a_longer_prompt_reuses_every_full_block() -> None:
    drive = Drive()
    drive.add(make_request("a", distinct_tokens(0, 12)))
    drive.step(finish_at=1)
    drive.add(make_request("b", [*distinct_tokens(0, 12), 1]))
    assert drive.step() == {"b": 1}


def test_a_cached_image_needs_no_embedding() -> None:
    drive = Drive()
    drive.land("x")
    drive.add(with_image("a", 0, 8, 1, "x"))
    drive.step(finish_at=1)
    drive.here.clear()
    drive.add(with_image("a", 0, 8, 1, "x"))
    assert drive.step() == {"a": 1}
    assert drive.demands == []


def test_running_requests_share_the_blocks_of_an_equal_prefix() -> None:
    drive = Drive()
    drive.add(make_request("a", distinct_tokens(0, 12)))
    drive.step()
    drive.add(make_request("b", distinct_tokens(0, 12)))
    drive.step()
    a, b = drive.scheduler.running
    assert a.block_table[:2] == b.block_table[:2]
    assert a.block_table[2] != b.block_table[2]


def test_another_salt_reuses_nothing() -> None:
    drive = Drive()
    drive.add(make_request("a", distinct_tokens(0, 12), cache_salt="1"))
    drive.step(finish_at=1)
    drive.add(make_request("b", distinct_tokens(0, 12), cache_salt="2"))
    assert drive.step() == {"b": 12}


# -- preemption --------------------------------------------------------------------------------------------------------


def test_the_latest_arrival_is_preempted_and_everybody_finishes() -> None:
    drive = Drive(num_blocks=6, prefix_caching=False)
    requests = [text("a", 8), text("b", 8), text("c", 8)]
    drive.add(*requests)
    assert drive.step() == {"a": 8, "b": 8, "c": 8}
    assert drive.step() == {"a": 1, "b": 1}  # both need a third block, c has two
    assert drive.statuses() == {"a": Status.RUNNING, "b": Status.RUNNING, "c": Status.PREEMPTED}
    assert drive.scheduler.num_preemptions == 1
    for _ in range(60):
        drive.step(finish_at=10)
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * 3
    assert [request.num_output_tokens for request in requests] == [10] * 3
    assert drive.pool.num_free == drive.pool.num_blocks


def test_a_preempted_request_is_first_in_line_and_keeps_its_tokens() -> None:
    drive = Drive(num_blocks=4, prefix_caching=False)
    first, second, third = text("a", 8), text("b", 8), text("c", 4)
    drive.add(first, second)
    drive.step()
    drive.add(third)
    assert drive.step() == {"a": 1}
    assert [r.key.request_id for r in drive.scheduler.waiting] == ["b", "c"]
    drive.scheduler.finish(first, FinishReason.STOP)
    assert drive.step() == {"b": 9, "c": 4}  # its prompt and the token that it had got
    assert second.num_output_tokens == 2


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    drive = Drive(num_blocks=4)
    first, second = text("a", 8), text("b", 8)
    drive.add(first, second)
    drive.step()
    drive.step()
    drive.scheduler.finish(first, FinishReason.STOP)
    assert drive.step() == {"b": 5}  # one of its two blocks was taken, the later one
    assert second.num_cached_tokens == 0  # what it reports is what it found when it came


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    drive = Drive(num_blocks=5, prefix_caching=False)
    drive.add(text("a", 8), text("b", 8))
    drive.step()
    drive.pool.allocate(1)
    drive.add(text("c", 1))
    assert drive.step() == {"a": 1}
    assert drive.statuses()["c"] is Status.WAITING


# -- KV from and to other workers --------------------------------------------------------------------------------------


def test_kv_from_elsewhere_gets_all_its_blocks_and_waits() -> None:
    drive = Drive(max_num_batched_tokens=4)
    request = make_request("a", distinct_tokens(0, 18), kv_from_elsewhere=True)
    drive.add(request)
    step = drive.scheduler.schedule()
    assert (step.chunks, step.admitted_for_kv) == ([], [request])
    assert request.status is Status.WAITING_FOR_KV
    assert len(request.block_table) == 5
    assert drive.step() == {}


def test_kv_that_another_request_fetches_now_is_not_fetched_twice() -> None:
    drive = Drive()
    prompt = distinct_tokens(0, 18)
    first, second = (make_request(name, prompt, kv_from_elsewhere=True) for name in ("a", "b"))
    other = make_request("c", distinct_tokens(1, 18), kv_from_elsewhere=True)
    drive.add(first, second, other)
    assert drive.scheduler.schedule().admitted_for_kv == [first, other]
    drive.scheduler.kv_arrived(first, 18)
    assert drive.scheduler.schedule().admitted_for_kv == [second]
    assert second.num_cached_tokens == 16
    assert second.block_table[:4] == first.block_table[:4]


def test_without_a_prefix_cache_equal_kv_is_fetched_one_after_the_other() -> None:
    drive = Drive(prefix_caching=False)
    requests = [make_request(name, distinct_tokens(0, 18), kv_from_elsewhere=True) for name in "abc"]
    drive.add(*requests)
    assert [drive.scheduler.schedule().admitted_for_kv for _ in range(3)] == [[request] for request in requests]


def test_kv_that_arrived_can_be_found_by_others() -> None:
    drive = Drive()
    request = make_request("a", distinct_tokens(0, 10), kv_from_elsewhere=True)
    drive.add(request)
    drive.step()
    drive.scheduler.kv_arrived(request, 4)
    drive.scheduler.kv_arrived(request, 10)
    assert drive.scheduler.num_cached_tokens(make_request("b", distinct_tokens(0, 10))) == 8
    request.token_ids.append(3)
    request.set_status(Status.RUNNING, 0.0)
    assert drive.step() == {"a": 1}


def test_a_request_that_waits_for_kv_is_not_preempted() -> None:
    drive = Drive(num_blocks=4, prefix_caching=False)
    drive.add(text("a", 4), make_request("b", distinct_tokens(1, 12), kv_from_elsewhere=True))
    assert drive.step() == {"a": 4}
    for _ in range(3):
        assert drive.step() == {}
    assert drive.statuses() == {"a": Status.PREEMPTED, "b": Status.WAITING_FOR_KV}
    assert drive.scheduler.num_preemptions == 1


def test_a_request_alone_waits_for_leased_blocks_instead_of_preempting_itself() -> None:
    drive = Drive(num_blocks=4, prefix_caching=False)
    leased = drive.pool.allocate(2)
    drive.add(text("a", 8))
    assert drive.step() == {"a": 8}
    for _ in range(5):
        assert drive.step() == {}
    assert drive.scheduler.num_preemptions == 0
    drive.pool.release(leased)
    assert drive.step() == {"a": 1}


def test_a_prompt_that_leases_leave_no_room_for_waits_and_is_admitted_later() -> None:
    drive = Drive(num_blocks=4)
    leased = drive.pool.allocate(3)
    drive.add(text("a", 8))
    assert drive.step() == {}
    assert drive.statuses() == {"a": Status.WAITING}
    drive.pool.release(leased)
    assert drive.step() == {"a": 8}


def test_a_reserved_request_has_all_its_blocks_and_is_not_preempted() -> None:
    drive = Drive(num_blocks=6, prefix_caching=False, max_num_batched_tokens=12)
    first, second = text("a", 8), text("b", 12)
    drive.add(first, second)
    assert drive.step() == {"a": 8, "b": 4}
    assert drive.scheduler.reserve(second)
    assert len(second.block_table) == 3
    drive.pool.allocate(1)
    assert drive.step() == {"b": 8}  # a needs a third block: it gives way itself
    assert drive.statuses() == {"a": Status.PREEMPTED, "b": Status.RUNNING}


def test_what_lacks_free_blocks_or_waits_is_not_reserved() -> None:
    drive = Drive(num_blocks=4, max_num_batched_tokens=4)
    first, second = text("a", 12), text("b", 13)
    drive.add(first, second)
    drive.step()
    assert not drive.scheduler.reserve(second)
    drive.pool.allocate(2)
    assert not drive.scheduler.reserve(first)
    assert len(first.block_table) == 1


# -- no starvation -----------------------------------------------------------------------------------------------------

arrivals = st.tuples(
    st.integers(0, 10),  # step
    st.integers(1, 20),  # tokens
    st.sampled_from(["text", "image", "kv"]),
    st.integers(0, 2),  # which tokens: equal ones share a prefix
    st.integers(1, 8),  # output tokens
    st.integers(-1, 1),  # priority
)
Arrival = tuple[int, int, str, int, int, int]


class Crowd:
    """Requests that come and go; embeddings and KV land a step after they were asked for."""

    def __init__(self, drive: Drive, wanted: list[Arrival]) -> None:
        self.drive = drive
        self.coming = sorted(
            (
                (step, self.request(k, num_tokens, kind, seed, priority), output)
                for k, (step, num_tokens, kind, seed, output, priority) in enumerate(wanted)
            ),
            key=lambda arrival: arrival[0],
        )
        self.outputs = {request.key: output for _, request, output in self.coming}
        self.requests = [request for _, request, _ in self.coming]
        self.in_flight: list[RequestState] = []

    def request(self, index: int, num_tokens: int, kind: str, seed: int, priority: int) -> RequestState:
        tokens = distinct_tokens(seed, num_tokens)
        if kind != "image":
            return make_request(f"{index}", tokens, priority=priority, kv_from_elsewhere=kind == "kv")
        offset = num_tokens // 3
        length = max(num_tokens // 2, 1)
        tokens[offset : offset + length] = [IMAGE_TOKEN] * length
        return make_request(f"{index}", tokens[:num_tokens], [item(f"x{seed}", offset, length)], priority=priority)

    def turn(self, now: int) -> None:
        scheduler, drive = self.drive.scheduler, self.drive
        while self.coming and self.coming[0][0] <= now:
            scheduler.add(self.coming.pop(0)[1])
        for request in [r for r in [*scheduler.waiting, *scheduler.running] if r.demanded]:
            for mm_hash in list(request.demanded):
                drive.land(mm_hash)
        arrived, self.in_flight = self.in_flight, []
        for request in arrived:
            scheduler.kv_arrived(request, len(request.token_ids))
            request.token_ids.append(5)
            request.set_status(Status.RUNNING, drive.clock.now())
        step = scheduler.schedule()
        scheduler.check()
        assert sum(c.num_tokens for c in step.chunks) <= drive.config.max_num_batched_tokens
        assert sum(1 for _ in scheduler.running) <= drive.config.max_num_seqs
        assert all(c.num_tokens > 0 for c in step.chunks)
        self.in_flight = step.admitted_for_kv
        for request, num_tokens, samples in step.chunks:
            scheduler.advance(request, num_tokens)
            if samples:
                request.token_ids.append(5)
        for request in list(scheduler.running):
            if request.num_output_tokens >= self.outputs[request.key] and request not in self.in_flight:
                scheduler.finish(request, FinishReason.LENGTH)
        scheduler.check()


@settings(max_examples=300, deadline=None)
@given(
    wanted=st.lists(arrivals, min_size=1, max_size=8),
    num_blocks=st.integers(7, 16),
    budget=st.integers(1, 24),
    max_num_seqs=st.integers(1, 5),
    caching=st.booleans(),
)
def test_whatever_comes_everybody_finishes(
    wanted: list[Arrival], num_blocks: int, budget: int, max_num_seqs: int, caching: bool
) -> None:
    drive = Drive(
        num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, prefix_caching=caching
    )
    assert num_blocks * BLOCK_SIZE >= 20 + 8, "the longest request fits alone"
    crowd = Crowd(drive, wanted)
    for now in range(2000):
        crowd.turn(now)
        if not crowd.coming and not len(drive.scheduler):
            break
    assert [request.finish_reason for request in crowd.requests] == [FinishReason.LENGTH] * len(wanted)
    assert drive.pool.num_free == drive.pool.num_blocks


@pytest.mark.parametrize("status", ["waiting", "running", "blocked", "kv"])
def test_finishing_in_any_status_frees_everything(status: str) -> None:
    drive = Drive(num_blocks=8)
    request = {
        "waiting": text("a", 40),
        "running": text("a", 8),
        "blocked": with_image("a", 5, 4, 1, "x"),
        "kv": make_request("a", distinct_tokens(0, 8), kv_from_elsewhere=True),
    }[status]
    if status == "waiting":
        drive.pool.allocate(8)
    free = drive.pool.num_free
    drive.add(request)
    drive.step()
    drive.step()
    drive.scheduler.finish(request, FinishReason.ABORT)
    assert drive.pool.num_free == free
    assert drive.scheduler.get(request.key) is None
    assert request.status is Status.FINISHED
    drive.scheduler.check()
