"""The plan of one attempt at a request: its prefill worker and its decode worker.

Encode workers are not planned: `encode_queue.py` chooses them late, item by item.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

from triptych.block_hash import BlockHash
from triptych.router.policy import most_room, rendezvous_order
from triptych.router.prefix_index import PrefixIndex
from triptych.router.registry import RegisteredWorker, Registry
from triptych.types import Prompt, Stage

PREFIX_TOKENS = 64  # the part of a prompt that decides between workers that are equal: conversations begin alike
RUNNING_TOKENS = 32  # prompt tokens that weigh as much as one request that runs on the worker


class Plan(NamedTuple):
    prefill: RegisteredWorker
    decode: RegisteredWorker
    prefix: list[BlockHash] = []  # of the prompt, where several prefill workers could have it

    @property
    def decode_elsewhere(self) -> bool:
        return self.prefill is not self.decode


def make_plan(prompt: Prompt, cache_salt: str, registry: Registry, prefixes: PrefixIndex, session_id: str = "") -> Plan:
    """Raises NoCapacityError naming the stage that no live worker hosts."""
    candidates = registry.require(Stage.PREFILL)
    prefix = prefixes.hashes(prompt, cache_salt) if len(candidates) > 1 else []
    prefill = _choose_prefill(candidates, prompt, prefix, prefixes, session_id or _beginning(prompt, cache_salt))
    if Stage.DECODE in prefill.info.stages:
        decode = prefill  # the KV is there already
    else:
        decode = _choose_decode(registry.require(Stage.DECODE), registry.cut_off_from(prefill.name), prompt)
    if prompt.items:
        registry.require(Stage.ENCODE)
    return Plan(prefill, decode, prefix)


def _choose_prefill(
    workers: list[RegisteredWorker], prompt: Prompt, prefix: list[BlockHash], prefixes: PrefixIndex, affinity: str
) -> RegisteredWorker:
    """The one that is predicted to have the prompt computed first; of equal ones, that of prompts which begin alike."""
    order = {name: k for k, name in enumerate(rendezvous_order(affinity, [worker.name for worker in workers]))}

    def ready_s(worker: RegisteredWorker) -> float:
        num_cached_tokens = prefixes.num_cached_tokens(worker.address.epoch, prefix)
        num_tokens = worker.num_inflight_tokens + len(prompt.token_ids) - num_cached_tokens
        return (num_tokens + RUNNING_TOKENS * worker.num_inflight_requests) * worker.seconds_a_prompt_token

    return min(workers, key=lambda worker: (ready_s(worker), order[worker.name]))


def _choose_decode(
    workers: list[RegisteredWorker], cut_until_s: Mapping[str, float], prompt: Prompt
) -> RegisteredWorker:
    """The one with most room that the prefill worker reaches. It may reach none: then the link that was cut first is
    tried first, for it is the likeliest to be whole again."""
    reached = {worker.name: worker for worker in workers if worker.name not in cut_until_s}
    if not reached:
        return min(workers, key=lambda worker: cut_until_s[worker.name])
    return reached[most_room({name: w.decode_load for name, w in reached.items()}, len(prompt.token_ids))]


def _beginning(prompt: Prompt, cache_salt: str) -> str:
    """Equal for prompts that begin alike: salt, first tokens, and the items whose placeholders begin among them."""
    state = blake2b(cache_salt.encode(), digest_size=16)
    state.update(repr(prompt.token_ids[:PREFIX_TOKENS]).encode())
    for item in prompt.items:
        if item.placeholder.offset < PREFIX_TOKENS:
            state.update(item.mm_hash.encode())
    return state.hexdigest()
