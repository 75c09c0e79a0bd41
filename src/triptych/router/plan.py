"""The plan of one attempt at a request: its prefill worker and its decode worker.

Encode workers are not planned: `encode_queue.py` chooses them late, item by item.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

from triptych.router.policy import by_affinity, least_loaded
from triptych.router.registry import RegisteredWorker, Registry
from triptych.types import Prompt, Stage

PREFIX_TOKENS = 64  # the part of a prompt that decides its prefill worker: conversations begin alike


class Plan(NamedTuple):
    prefill: RegisteredWorker
    decode: RegisteredWorker

    @property
    def decode_elsewhere(self) -> bool:
        return self.prefill is not self.decode


def make_plan(prompt: Prompt, cache_salt: str, registry: Registry, session_id: str = "") -> Plan:
    """Raises NoCapacityError naming the stage that no live worker hosts."""
    affinity = f"session {session_id}" if session_id else _prefix_key(prompt, cache_salt)
    prefill = _choose(registry, Stage.PREFILL, lambda loads: by_affinity(affinity, loads, 1))
    if Stage.DECODE in prefill.info.stages:
        decode = prefill  # the KV is there already
    else:
        decode = _choose(registry, Stage.DECODE, least_loaded)
    if prompt.items:
        registry.require(Stage.ENCODE)
    return Plan(prefill, decode)


def _choose(registry: Registry, stage: Stage, pick: Callable[[dict[str, float]], str]) -> RegisteredWorker:
    workers = {worker.name: worker for worker in registry.require(stage)}
    return workers[pick({name: float(worker.num_inflight_requests) for name, worker in workers.items()})]


def _prefix_key(prompt: Prompt, cache_salt: str) -> str:
    """Equal for prompts that begin alike: salt, first tokens, and the items whose placeholders begin among them."""
    state = blake2b(cache_salt.encode(), digest_size=16)
    state.update(repr(prompt.token_ids[:PREFIX_TOKENS]).encode())
    for item in prompt.items:
        if item.placeholder.offset < PREFIX_TOKENS:
            state.update(item.mm_hash.encode())
    return state.hexdigest()
