"""Every lease ends once, by whatever way, and none is left."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from triptych.clock import ManualClock
from triptych.handoff.leases import Leases

TTL_S = 10.0
CONSUMERS = st.sampled_from(["a", "b", "c"])
REQUESTS = st.tuples(st.sampled_from(["r", "s"]), st.integers(0, 1))


class LeasesMachine(RuleBasedStateMachine):
    """Random operations beside a model: which leases are out, since when, and how often each was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.leases = Leases(self.clock, TTL_S)
        self.out: dict[int, tuple[str, tuple[str, int], float]] = {}
        self.freed: dict[int, int] = {}  # by order of grant
        self.ids: list[int] = []
        self.num_expired = 0
        self.lives: dict[str, int] = {}  # by consumer; a restarted one has another epoch

    def epoch_of(self, consumer: str) -> str:
        return f"{consumer}{self.lives.get(consumer, 0)}"

    @rule(epoch=CONSUMERS, request=REQUESTS)
    def grant(self, epoch: str, request: tuple[str, int]) -> None:
        epoch = self.epoch_of(epoch)
        number = len(self.ids)
        self.freed[number] = 0
        lease_id = self.leases.grant(f"worker {epoch}", epoch, request, partial(self.count, number))
        assert lease_id not in self.ids
        self.ids.append(lease_id)
        self.out[lease_id] = (epoch, request, self.clock.now() + TTL_S)

    def count(self, number: int) -> None:
        self.freed[number] += 1

    @rule(choice=st.integers(0, 30))
    def release(self, choice: int) -> None:
        lease_id = self.ids[choice] if choice < len(self.ids) else 10_000
        assert self.leases.release(lease_id) == (lease_id in self.out)
        self.out.pop(lease_id, None)

    @rule(epoch=CONSUMERS)
    def drop_consumer(self, epoch: str) -> None:
        self.lives[epoch] = self.lives.get(epoch, 0) + 1
        epoch = f"{epoch}{self.lives[epoch] - 1}"
        ended = [i for i, lease in self.out.items() if lease[0] == epoch]
        assert self.leases.drop_consumer(epoch) == len(ended)
        self.end(ended)

    @rule(seconds=st.floats(0, 6))
    def expire_later(self, seconds: float) -> None:
        self.clock.advance(seconds)
        ended = [i for i, lease in self.out.items() if lease[2] <= self.clock.now()]
        assert self.leases.expire() == len(ended)
        self.num_expired += len(ended)
        self.end(ended)

    def end(self, lease_ids: list[int]) -> None:
        for lease_id in lease_ids:
            del self.out[lease_id]

    @invariant()
    def each_is_freed_once_when_it_ends(self) -> None:
        self.leases.check()
        assert len(self.leases) == len(self.out)
        assert self.leases.num_expired == self.num_expired
        for number, lease_id in enumerate(self.ids):
            assert self.freed[number] == (lease_id not in self.out)

    def teardown(self) -> None:
        self.clock.advance(TTL_S)
        self.leases.expire()
        assert len(self.leases) == 0
        assert all(times == 1 for times in self.freed.values())


TestLeasesMachine = LeasesMachine.TestCase
TestLeasesMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_free_may_come_back_to_the_leases(clock: ManualClock, leases: Leases) -> None:
    freed: list[str] = []
    other = leases.grant("p0", "one", ("r", 0), lambda: freed.append("other"))

    def free() -> None:
        freed.append("first")
        assert not leases.release(first)
        leases.release(other)

    first = leases.grant("p0", "one", ("r", 0), free)
    assert leases.release(first)
    assert freed == ["first", "other"]
    assert len(leases) == 0


def test_free_may_end_leases_that_are_about_to_end_with_it(leases: Leases) -> None:
    freed: list[int] = []
    ids: list[int] = []

    def free(number: int) -> None:
        freed.append(number)
        leases.release(ids[1 - number])

    ids.extend(leases.grant("p0", "one", ("r", 0), partial(free, number)) for number in range(2))
    assert leases.drop_consumer("one") == 1
    assert sorted(freed) == [0, 1]


def test_a_free_that_fails_is_not_called_again(clock: ManualClock, leases: Leases) -> None:
    calls: list[str] = []

    def fail() -> None:
        calls.append("fail")
        raise RuntimeError("broken")

    leases.grant("p0", "one", ("r", 0), fail)
    leases.grant("p0", "one", ("r", 0), lambda: calls.append("next"))
    clock.advance(60)
    with pytest.raises(RuntimeError, match="broken"):
        leases.expire()
    assert leases.expire() == 1
    assert calls == ["fail", "next"]
    assert leases.num_expired == 2


def test_a_lease_to_a_dead_consumer_is_over_at_once() -> None:
    """A message of the dead one may still be read after the news of its death."""
    leases, freed = Leases(ManualClock(), ttl_s=60.0), []
    leases.drop_consumer("dead")
    lease_id = leases.grant("decode-0", "dead", ("r", 0), lambda: freed.append(True))
    assert freed == [True]
    assert len(leases) == 0
    assert not leases.release(lease_id)
