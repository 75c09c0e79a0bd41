"""Who encodes what, and when: by predicted finish, smallest request first, one forward an item."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.workers import D, E, P, Told, info
from triptych.config import EncodeConfig
from triptych.router.encode_queue import EVEN_EMBEDS, EncodeJob, EncodeQueue
from triptych.router.registry import RegisteredWorker
from triptych.types import Stage


class Drive:
    """A queue over workers that are told by hand when they are done; `given` is (request, item, worker) in order."""

    def __init__(self, *workers: tuple[str, list[Stage]], window_embeds: int = 100, **config: Any) -> None:
        self.told = Told(*(info(name, stages) for name, stages in workers))
        self.queue = EncodeQueue(self.told.registry, EncodeConfig(window_embeds=window_embeds, **config))
        self.given: list[tuple[str, str, str]] = []
        self.open: dict[tuple[str, str], RegisteredWorker] = {}

    def worker(self, name: str) -> RegisteredWorker:
        return next(worker for worker in self.told.registry.workers() if worker.name == name)

    def demand(
        self,
        request: str,
        *items: str,
        embeds: int = 100,
        consumer: str = "",
        avoid: Sequence[str] = (),
        priority: int = 0,
        prompt_tokens: int = 0,
    ) -> None:
        key = (request, 0)
        self.queue.demand(
            [
                EncodeJob(
                    key, item, embeds, consumer, avoid, self._start(request, item), lambda: prompt_tokens, priority
                )
                for item in items
            ]
        )

    def _start(self, request: str, item: str) -> Any:
        def start(worker: RegisteredWorker) -> None:
            self.given.append((request, item, worker.name))
            self.open[request, item] = worker

        return start

    def done(self, request: str, item: str) -> None:
        self.queue.encoded(item, self.open.pop((request, item)))

    def run(self) -> list[str]:
        """Every item that is given out is done at once, in the order in which it was; the items' order."""
        while self.open:
            self.done(*next(iter(self.open)))
        return [item for _, item, _ in self.given]


def test_a_worker_has_two_items_at_hand_and_the_others_wait() -> None:
    drive = Drive(("e0", [E]))
    drive.demand("r", "a", "b", "c", "d")
    assert drive.given == [("r", "a", "e0"), ("r", "b", "e0")]
    drive.done("r", "a")
    assert drive.given[2:] == [("r", "c", "e0")]
    assert drive.run() == ["a", "b", "c", "d"]
    drive.queue.check()


def test_small_items_fill_the_window() -> None:
    drive = Drive(("e0", [E]), window_embeds=100)
    drive.demand("r", *"abcdefghijklmnop", embeds=20)
    assert len(drive.given) == 5


def test_items_of_one_request_fan_out_over_the_encode_workers() -> None:
    drive = Drive(("e0", [E]), ("e1", [E]))
    drive.demand("r", "a", "b", "c", "d", "e")
    assert sorted(worker for _, _, worker in drive.given) == ["e0", "e0", "e1", "e1"]


def test_a_small_request_goes_before_a_large_one_that_came_earlier() -> None:
    drive = Drive(("e0", [E]))
    drive.demand("first", "x", "y")  # keeps the worker busy
    drive.demand("large", *(f"l{k}" for k in range(6)), embeds=EVEN_EMBEDS // 4)
    drive.demand("small", "s0", "s1")
    assert drive.run()[2:4] == ["s0", "s1"]


def test_requests_that_are_not_large_go_in_order_of_arrival() -> None:
    drive = Drive(("e0", [E]))
    drive.demand("first", "x", "y")
    drive.demand("second", *(f"l{k}" for k in range(6)))
    drive.demand("third", "s0")
    assert drive.run()[-1] == "s0"


def test_an_item_that_is_demanded_twice_counts_once_for_the_size_of_its_request() -> None:
    drive = Drive(("e0", [E]))
    drive.demand("first", "x", "y")
    for _ in range(2):
        drive.demand("second", "l0", embeds=EVEN_EMBEDS - 100)
    drive.demand("third", "s0")
    assert drive.run()[2:] == ["l0", "s0"]


def test_what_a_large_request_was_given_does_not_soon_put_it_before_a_small_one() -> None:
    drive = Drive(("e0", [E]))
    drive.demand("large", *(f"l{k}" for k in range(8)), embeds=EVEN_EMBEDS)
    for k in range(4):
        drive.done("large", f"l{k}")
    drive.demand("small", "s0")
    assert drive.run()[6:8] == ["s0", "l6"]  # two were at hand


def test_by_arrival_nobody_overtakes() -> None:
    drive = Drive(("e0", [E]), order="arrival")
    drive.demand("first", "x", "y")
    drive.demand("large", *(f"l{k}" for k in range(6)))
    drive.demand("small", "s0", "s1")
    assert drive.run()[-2:] == ["s0", "s1"]


@pytest.mark.parametrize("order", ["smallest", "arrival"])
def test_a_lower_priority_goes_first(order: str) -> None:
    drive = Drive(("e0", [E]), order=order)
    drive.demand("first", "x", "y")
    drive.demand("later", "b0", priority=5)
    drive.demand("sooner", *(f"a{k}" for k in range(6)), priority=-1)
    drive.demand("usual", "u0")
    assert drive.run()[2:] == [*(f"a{k}" for k in range(6)), "u0", "b0"]


def test_a_large_request_is_not_passed_by_for_ever() -> None:
    drive = Drive(("e0", [E]))
    drive.demand("large", *(f"l{k}" for k in range(10)), embeds=EVEN_EMBEDS)
    done = 0
    while len([g for g in drive.given if g[0] == "large"]) < 10:
        drive.demand(f"small{done}", f"s{done}", embeds=EVEN_EMBEDS)
        drive.done(*next(iter(drive.open)))
        done += 1
        assert done < 60
    assert done > 10  # others went before some of its items


def test_an_item_that_is_on_its_way_is_not_queued_again() -> None:
    drive = Drive(("e0", [E]), ("e1", [E]))
    drive.demand("r", "a")
    drive.demand("s", "a")
    assert len({worker for _, _, worker in drive.given}) == 1
    assert drive.worker(drive.given[0][2]).num_inflight_items == 1


def test_an_item_that_two_wait_for_is_given_out_for_both() -> None:
    drive = Drive(("e0", [E]))
    drive.demand("x", "x0", "x1")
    drive.demand("r", "a")
    drive.demand("s", "a")
    drive.done("x", "x0")
    assert drive.given[2:] == [("r", "a", "e0"), ("s", "a", "e0")]


def test_a_second_demand_goes_to_the_worker_that_encoded_the_item() -> None:
    drive = Drive(*((f"e{k}", [E]) for k in range(4)))
    assert drive.queue.is_new("a")
    drive.demand("r", "a")
    drive.run()
    first = drive.given[0][2]
    assert not drive.queue.is_new("a")
    for k in range(20):
        drive.demand(f"busy{k}", f"b{k}")
    drive.demand("s", "a")
    assert drive.given[-1] == ("s", "a", first)


def test_after_the_loss_of_its_worker_an_item_goes_to_another() -> None:
    drive = Drive(("e0", [E]), ("e1", [E]))
    drive.demand("r", "a")
    lost = drive.given[0][2]
    drive.told.registry.lost(lost)
    drive.queue.failed("a", ("r", 0))
    drive.demand("r", "a", avoid=[lost])
    assert drive.given[1][2] != lost
    drive.run()
    drive.queue.check()


def test_a_worker_that_failed_the_item_is_avoided_unless_there_is_no_other() -> None:
    drive = Drive(("e0", [E]), ("e1", [E]))
    drive.demand("r", "a", avoid=["e0"])
    drive.demand("s", "b", avoid=["e0", "e1"])
    assert drive.given[0][2] == "e1"
    assert len(drive.given) == 2


def test_a_worker_with_prompts_before_it_helps_only_when_that_is_sooner() -> None:
    drive = Drive(("e0", [E]), ("epd0", [E, P, D]), window_embeds=1000)
    drive.worker("epd0").num_inflight_tokens = 500  # 0.6 s at the rate of an unknown worker; an item takes 0.2 s
    drive.demand("r", *"abcdefgh", consumer="epd0")
    helped = [item for _, item, worker in drive.given if worker == "epd0"]
    assert helped == ["a", "b", "c"], "fewer than the other, and those that it would wait for first"
    idle = Drive(("e0", [E]), ("epd0", [E, P, D]))
    idle.demand("r", "a", consumer="epd0")
    assert idle.given == [("r", "a", "epd0")], "of two that are idle the one that needs the embedding"


def test_a_worker_helps_with_the_next_prompt_whatever_comes_after_it() -> None:
    """Each request has 0.6 s of prompt on `epd0` and 1.6 s of images: one of the four is `epd0`'s."""
    drive = Drive(("e0", [E]), ("epd0", [E, P, D]))
    worker = drive.worker("epd0")
    for k in range(8):
        worker.num_inflight_tokens += 500
        drive.demand(f"r{k}", *(f"{k}{item}" for item in "abcd"), embeds=200, consumer="epd0", prompt_tokens=500)
    num_done = 0
    while drive.open:
        oldest, item = min(drive.open)
        newest = max(request for request, _ in drive.open)
        assert int(newest[1:]) - int(oldest[1:]) <= 1, "an image that nobody waits for yet"
        num_done += 1
        if num_done % 4 == 0:  # and its prompt is read
            worker.num_inflight_tokens -= 500
        drive.done(oldest, item)
    assert num_done == 32
    assert {worker for _, _, worker in drive.given} == {"e0", "epd0"}


def test_measured_rates_decide() -> None:
    drive = Drive(("slow", [E]), ("fast", [E]), window_embeds=1000)
    drive.worker("slow").counters = {"encode_time_seconds_total": 30.0, "encode_embeds_total": 1000.0}
    drive.worker("fast").counters = {"encode_time_seconds_total": 10.0, "encode_embeds_total": 1000.0}
    drive.demand("r", *"abcdefgh")
    workers = [worker for _, _, worker in drive.given]
    assert (workers.count("fast"), workers.count("slow")) == (6, 2)


def test_cancel_takes_an_attempts_items_out_and_makes_room() -> None:
    drive = Drive(("e0", [E]))
    drive.demand("gone", "a", "b", "c")
    drive.demand("stays", "d", "a")
    drive.queue.cancel(("gone", 0))
    assert ("stays", "d", "e0") in drive.given
    assert len([g for g in drive.given if g[0] == "gone"]) == 2
    drive.open = {key: worker for key, worker in drive.open.items() if key[0] == "stays"}
    drive.run()
    drive.queue.check()
    assert drive.worker("e0").num_inflight_embeds == 0


def test_suspect_and_draining_workers_get_nothing() -> None:
    drive = Drive(("e0", [E]), ("e1", [E]))
    drive.worker("e0").suspect = "broken"
    drive.demand("r", "a", "b", "c")
    assert {worker for _, _, worker in drive.given} == {"e1"}
    drive.worker("e0").suspect = ""
    drive.queue.pump()
    assert drive.given[-1] == ("r", "c", "e0")


events = st.lists(
    st.tuples(st.sampled_from(["demand", "done", "fail", "cancel"]), st.integers(0, 4), st.integers(0, 7)), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(events=events, order=st.sampled_from(["smallest", "arrival"]))
def test_whatever_happens_every_demand_is_given_out_once_and_nothing_is_left(
    events: list[tuple[str, int, int]], order: str
) -> None:
    drive = Drive(("e0", [E]), ("e1", [E]), ("epd", [E, P, D]), order=order)
    demanded: list[tuple[str, str]] = []
    cancelled: set[str] = set()
    for number, (kind, request_number, item_number) in enumerate(events):
        request, item = f"r{request_number}", f"i{item_number}"
        if kind == "demand" and request not in cancelled and (request, item) not in demanded:
            demanded.append((request, item))
            drive.demand(request, item, embeds=10 + 60 * item_number, priority=request_number % 3 - 1)
        elif kind == "cancel":
            cancelled.add(request)
            drive.queue.cancel((request, 0))
            drive.open = {key: worker for key, worker in drive.open.items() if key[0] != request}
        elif drive.open:
            key = list(drive.open)[number % len(drive.open)]
            if kind == "done":
                drive.done(*key)
            else:
                del drive.open[key]
                drive.queue.failed(key[1], (key[0], 0))
    drive.run()
    drive.queue.check()
    given = [(request, item) for request, item, _ in drive.given]
    assert sorted(given) == sorted(set(given))
    assert {pair for pair in demanded if pair[0] not in cancelled} <= set(given)
    for worker in drive.told.registry.workers():
        assert (worker.num_inflight_items, worker.num_inflight_embeds) == (0, 0)


@pytest.mark.parametrize("count", [1, 3])
def test_equal_items_meet_in_one_worker_even_after_a_restart_of_the_router(count: int) -> None:
    """Among workers that are equally free, the item alone decides."""
    chosen = set()
    for _ in range(3):
        drive = Drive(*((f"e{k}", [E]) for k in range(count)))
        drive.demand("r", "the item")
        chosen.add(drive.given[0][2])
    assert len(chosen) == 1


@pytest.mark.parametrize(("placement", "chosen"), [("dedicated", {"e0", "e1"}), ("colocated", {"epd0"})])
def test_a_fixed_placement_uses_workers_of_one_kind(placement: str, chosen: set[str]) -> None:
    drive = Drive(("e0", [E]), ("e1", [E]), ("epd0", [E, P, D]), encode_on=placement)
    drive.demand("r", *"abcdefgh")
    drive.run()
    assert {worker for _, _, worker in drive.given} == chosen


def test_a_fixed_placement_without_such_workers_uses_those_that_are_there() -> None:
    drive = Drive(("epd0", [E, P, D]), encode_on="dedicated")
    drive.demand("r", "a")
    assert drive.given == [("r", "a", "epd0")]


def test_the_backlog_is_the_time_until_a_new_item_would_be_begun() -> None:
    drive = Drive(("e0", [E]), ("e1", [E]))
    assert drive.queue.backlog_s() == 0.0
    drive.demand("r", "a", "b", "c", "d", "e", "f", embeds=100)  # two each are given out, 2 ms an embed
    assert drive.queue.backlog_s() == pytest.approx(0.4 + 0.2)


def test_without_fan_out_the_items_of_a_request_go_to_one_worker() -> None:
    drive = Drive(("e0", [E]), ("e1", [E]), fan_out=False)
    drive.demand("r", "a", "b", "c", "d")
    drive.demand("s", "e", "f")
    drive.run()
    workers = {request: {w for r, _, w in drive.given if r == request} for request in ("r", "s")}
    assert len(workers["r"]) == len(workers["s"]) == 1
    assert workers["r"] != workers["s"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_without_fan_out_an_item_leaves_a_worker_that_failed_it_or_was_lost(is_lost: bool) -> None:
    drive = Drive(("e0", [E]), ("e1", [E]), fan_out=False)
    drive.demand("r", "a", "b")
    failed = drive.given[0][2]
    if is_lost:
        drive.told.registry.lost(failed)
    drive.queue.failed("a", ("r", 0))  # "b" is with that worker still, as far as the queue knows
    drive.demand("r", "a", avoid=[failed])
    assert drive.given[2][2] != failed


def test_where_every_worker_is_to_be_avoided_the_one_with_fewest_reasons_is_taken() -> None:
    drive = Drive(("e0", [E]), ("e1", [E]))
    for k in range(8):
        drive.demand(f"r{k}", f"x{k}", avoid=["e0", "e0", "e1"])
    drive.run()
    assert {worker for _, _, worker in drive.given} == {"e1"}
