"""Affinity that moves as few keys as possible, and room for KV."""

from __future__ import annotations

from collections import Counter

from triptych.router.policy import DecodeLoad, most_room, rendezvous_order

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


def test_requests_go_where_they_are_fewest_and_ties_go_by_name() -> None:
    assert most_room({"b": DecodeLoad(1, 50, 100), "a": DecodeLoad(2, 10, 100)}, 10) == "b"
    assert most_room({name: DecodeLoad(1, 0, 100) for name in "bac"}, 10) == "a"


def test_a_worker_without_room_for_the_kv_is_passed_over() -> None:
    loads = {"a": DecodeLoad(0, 95, 100), "b": DecodeLoad(7, 80, 100), "c": DecodeLoad(9, 20, 100)}
    assert most_room(loads, 5) == "a"
    assert most_room(loads, 20) == "b"
    assert most_room(loads, 50) == "c"


def test_where_nobody_has_room_the_one_that_lacks_least_is_chosen() -> None:
    assert most_room({"a": DecodeLoad(0, 100, 100), "b": DecodeLoad(5, 90, 100)}, 40) == "b"


def test_a_worker_that_has_not_said_its_size_has_room() -> None:
    assert most_room({"a": DecodeLoad(0, 500, 0), "b": DecodeLoad(1, 0, 100)}, 40) == "a"
