"""The cache of embeddings: referenced entries stay, the others go in the order of their last use, and once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from triptych.engine.encoder_cache import EncoderCache

NAMES = st.sampled_from("abcdef")
OWNERS = st.sampled_from([1, 2, 3])


class CacheAgainstModel(RuleBasedStateMachine):
    """The model: sizes in order of last use, owners by name, and what was evicted."""

    @initialize(capacity_bytes=st.integers(0, 25))
    def make(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.evicted: list[int] = []
        self.cache: EncoderCache[int] = EncoderCache(capacity_bytes, self.evicted.append)
        self.sizes: dict[str, int] = {}
        self.owners: dict[str, set[int]] = {}
        self.values: dict[str, int] = {}
        self.free_order: list[str] = []  # evictable, the next to go first
        self.num_put = 0
        self.expect_evicted: list[int] = []

    def evict(self) -> None:
        name = self.free_order.pop(0)
        self.expect_evicted.append(self.values.pop(name))
        del self.sizes[name], self.owners[name]

    def let_go(self, name: str, owner: int) -> None:
        if owner in self.owners.get(name, ()):
            self.owners[name].remove(owner)
            if not self.owners[name]:
                self.free_order.append(name)

    @rule(name=NAMES, num_bytes=st.integers(0, 12))
    def put(self, name: str, num_bytes: int) -> None:
        if name in self.sizes:
            with pytest.raises(ValueError, match="held already"):
                self.cache.put(name, 0, num_bytes)
            return
        self.num_put += 1
        self.cache.put(name, self.num_put, num_bytes)
        self.sizes[name], self.owners[name], self.values[name] = num_bytes, set(), self.num_put
        self.free_order.append(name)

    @rule(name=NAMES, owner=OWNERS)
    def acquire(self, name: str, owner: int) -> None:
        if name in self.sizes:
            self.cache.acquire(name, owner)
            self.owners[name].add(owner)
            if name in self.free_order:
                self.free_order.remove(name)

    @rule(name=NAMES, owner=OWNERS)
    def release(self, name: str, owner: int) -> None:
        self.cache.release(name, owner)
        self.let_go(name, owner)

    @rule(owner=OWNERS)
    def release_all(self, owner: int) -> None:
        held = [name for name in self.owners if owner in self.owners[name]]
        if len(held) > 1:  # in no promised order: one by one keeps the model simple
            held = held[:1]
            self.cache.release(held[0], owner)
        else:
            self.cache.release_all(owner)
        for name in held:
            self.let_go(name, owner)

    @rule(name=NAMES)
    def get(self, name: str) -> None:
        assert self.cache.get(name) == self.values.get(name)
        if name in self.free_order:
            self.free_order.remove(name)
            self.free_order.append(name)

    @rule()
    def shrink(self) -> None:
        self.cache.shrink()
        while sum(self.sizes.values()) > self.capacity_bytes and self.free_order:
            self.evict()

    @rule()
    def evict_one(self) -> None:
        assert self.cache.evict_one() == bool(self.free_order)
        if self.free_order:
            self.evict()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()
            assert self.evicted == self.expect_evicted
            assert {name for name in "abcdef" if name in self.cache} == set(self.sizes)
            assert len(self.cache) == len(self.sizes)
            assert self.cache.used_bytes == sum(self.sizes.values())
            assert self.cache.num_referenced == sum(bool(owners) for owners in self.owners.values())
            assert self.cache.num_evictions == len(self.evicted)


TestCacheAgainstModel = CacheAgainstModel.TestCase
TestCacheAgainstModel.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_capacity_zero_keeps_an_entry_only_while_it_is_referenced() -> None:
    evicted: list[str] = []
    cache: EncoderCache[str] = EncoderCache(0, evicted.append)
    cache.put("a", "A", 10)
    cache.acquire("a", "r")
    cache.shrink()
    assert cache.get("a") == "A"
    cache.release("a", "r")
    cache.shrink()
    assert "a" not in cache
    assert evicted == ["A"]


def test_referenced_entries_may_exceed_the_capacity() -> None:
    cache: EncoderCache[str] = EncoderCache(10)
    for name in "abc":
        cache.put(name, name, 10)
        cache.acquire(name, "r")
    cache.shrink()
    assert (cache.used_bytes, len(cache)) == (30, 3)
    assert not cache.evict_one()


def test_an_entry_stays_until_its_last_owner_released_it() -> None:
    cache: EncoderCache[str] = EncoderCache(0)
    cache.put("a", "A", 1)
    cache.acquire("a", 1)
    cache.acquire("a", 1)
    cache.acquire("a", 2)
    cache.release("a", 1)
    assert not cache.evict_one()
    cache.release("a", 2)
    assert cache.evict_one()


def test_release_all_lets_go_of_everything_that_one_owner_holds() -> None:
    cache: EncoderCache[str] = EncoderCache(0)
    for name in "abc":
        cache.put(name, name, 1)
        cache.acquire(name, 1)
    cache.acquire("b", 2)
    cache.release_all(1)
    cache.release_all(1)
    cache.shrink()
    assert [name for name in "abc" if name in cache] == ["b"]
    cache.check()


def test_the_callback_is_called_once_an_entry() -> None:
    evicted: list[str] = []
    cache: EncoderCache[str] = EncoderCache(2, evicted.append)
    for name in "abcd":
        cache.put(name, name, 1)
    cache.get("a")
    cache.shrink()
    cache.shrink()
    assert evicted == ["b", "c"]
