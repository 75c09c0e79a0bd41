"""Which of several workers: pure functions over names and loads, the same in the router and in the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple


def rendezvous_order(key: str, names: list[str]) -> list[str]:
    """The names in an order that depends on the key alone: when one leaves, only its own keys move.

    Highest random weight hashing (Thaler and Ravishankar, 1998).
    """
    return sorted(names, key=lambda name: blake2b(f"{name}\0{key}".encode(), digest_size=8).digest())


class DecodeLoad(NamedTuple):
    """What a decode worker has to do, in requests and in tokens whose KV it holds or is about to."""

    num_requests: int
    num_kv_tokens: int
    max_kv_tokens: int  # 0: not known yet


def most_room(loads: Mapping[str, DecodeLoad], num_tokens: int) -> str:
    """The worker with the fewest requests among those that have room for the KV of `num_tokens` more.

    Where none has, the one that lacks least. Ties go to the name that sorts first.
    """

    def missing(load: DecodeLoad) -> int:
        return max(load.num_kv_tokens + num_tokens - load.max_kv_tokens, 0) if load.max_kv_tokens else 0

    return min(sorted(loads), key=lambda name: (missing(loads[name]), loads[name].num_requests))
