"""Which of several workers: pure functions over names and loads, the same in the router and in the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

LOAD_BOUND = 1.25  # a worker may have this many times its fair share before affinity yields to balance


def rendezvous_order(key: str, names: list[str]) -> list[str]:
    """The names in an order that depends on the key alone: when one leaves, only its own keys move.

    Highest random weight hashing (Thaler and Ravishankar, 1998).
    """
    return sorted(names, key=lambda name: blake2b(f"{name}\0{key}".encode(), digest_size=8).digest())


def by_affinity(key: str, loads: Mapping[str, float], weight: float) -> str:
    """The first worker in the key's order that has room for `weight` more within the bound.

    Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, 2018): equal keys meet in one worker
    until it is busier than its share.
    """
    bound = LOAD_BOUND * (sum(loads.values()) + weight) / len(loads)
    order = rendezvous_order(key, list(loads))
    return next((name for name in order if loads[name] + weight <= bound), min(order, key=lambda name: loads[name]))


def least_loaded(loads: Mapping[str, float]) -> str:
    """Ties go to the name that sorts first."""
    return min(sorted(loads), key=lambda name: loads[name])
