"""Affinity that moves as few keys as possible and yields to balance."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from triptych.router.policy import LOAD_BOUND, by_affinity, least_loaded, rendezvous_order

KEYS = [f"item-{k}" for k in range(600)]
NAMES = [f"encode-{k}" for k in range(6)]


def test_the_order_is_a_permutation_that_the_key_alone_decides() -> None:
    for key in KEYS[:50]:
        order = rendezvous_order(key, NAMES)
        assert sorted(order) == NAMES
        assert order == rendezvous_order(key, NAMES[::-1])


def test_only_the_keys_of_a_worker_that_left_move() -> None:
    before = {key: rendezvous_order(key, NAMES)[0] for key in KEYS}
    gone = NAMES[2]
    after = {key: rendezvous_order(key, [name for name in NAMES if name != gone])[0] for key in KEYS}
    assert {key for key in KEYS if before[key] != after[key]} == {key for key in KEYS if before[key] == gone}


def test_a_new_worker_takes_keys_from_all_and_moves_none_between_the_others() -> None:
    before = {key: rendezvous_order(key, NAMES)[0] for key in KEYS}
    after = {key: rendezvous_order(key, [*NAMES, "new"])[0] for key in KEYS}
    moved = {key for key in KEYS if before[key] != after[key]}
    assert {after[key] for key in moved} == {"new"}
    assert {before[key] for key in moved} == set(NAMES)


def test_keys_spread_evenly() -> None:
    counts = Counter(rendezvous_order(key, NAMES)[0] for key in KEYS)
    assert min(counts.values()) > 0.6 * len(KEYS) / len(NAMES)


def test_equal_keys_meet_in_one_worker_while_it_has_room() -> None:
    loads = dict.fromkeys(NAMES, 10.0)
    favourite = rendezvous_order("item", NAMES)[0]
    assert by_affinity("item", loads, 1) == favourite
    assert by_affinity("item", loads | {favourite: 12.0}, 0.5) == favourite


def test_a_worker_beyond_its_share_yields_to_the_next_in_the_keys_order() -> None:
    first, second, *_ = rendezvous_order("item", NAMES)
    loads = dict.fromkeys(NAMES, 10.0) | {first: 30.0}
    assert by_affinity("item", loads, 1) == second


@given(
    st.dictionaries(st.sampled_from(NAMES), st.floats(0, 1000), min_size=1),
    st.floats(0, 500),
    st.text(max_size=5),
)
def test_load_stays_within_the_bound_or_goes_to_the_least_loaded(
    loads: dict[str, float], weight: float, key: str
) -> None:
    chosen = by_affinity(key, loads, weight)
    within = loads[chosen] + weight <= LOAD_BOUND * (sum(loads.values()) + weight) / len(loads)
    assert within or loads[chosen] == min(loads.values())


@given(st.lists(st.sampled_from(KEYS), max_size=80))
def test_many_requests_for_few_items_never_pile_up_on_one_worker(keys: list[str]) -> None:
    loads = dict.fromkeys(NAMES[:3], 0.0)
    for key in keys:
        loads[by_affinity(key, loads, 1)] += 1
    assert max(loads.values()) <= LOAD_BOUND * len(keys) / 3 + 1


def test_the_least_loaded_is_chosen_and_ties_go_by_name() -> None:
    assert least_loaded({"b": 1.0, "a": 2.0}) == "b"
    assert least_loaded({"b": 1.0, "a": 1.0, "c": 1.0}) == "a"
