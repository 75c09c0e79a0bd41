"""Requests, configurations and a driver for tests of the engine's pure parts: no torch, no model."""

from __future__ import annotations

import numpy as np

from triptych.clock import ManualClock
from triptych.config import EngineConfig
from triptych.engine.kv_blocks import KVBlockPool
from triptych.engine.request_state import PositionTable, RequestKey, RequestState, Status
from triptych.engine.scheduler import ScheduledStep, Scheduler
from triptych.types import FinishReason, Grid, ItemMetadata, Modality, Placeholder, PromptItem, SamplingParams

BLOCK_SIZE = 4
IMAGE_TOKEN = 7


def item(mm_hash: str, offset: int, length: int) -> PromptItem:
    return PromptItem(
        Modality.IMAGE, mm_hash, Placeholder(offset, length), ItemMetadata(Grid(1, 2, 2 * length), length, length)
    )


def make_request(
    name: str,
    token_ids: list[int],
    items: list[PromptItem] | None = None,
    *,
    sampling: SamplingParams | None = None,
    cache_salt: str = "",
    num_output_tokens: int = 0,
    kv_from_elsewhere: bool = False,
    has_siblings: bool = False,
    priority: int = 0,
    block_size: int = BLOCK_SIZE,
    now: float = 0.0,
) -> RequestState:
    num_prompt_tokens = len(token_ids) - num_output_tokens
    return RequestState(
        RequestKey(name, 0),
        list(token_ids),
        num_prompt_tokens,
        items or [],
        sampling or SamplingParams(max_tokens=1000),
        PositionTable(np.broadcast_to(np.arange(num_prompt_tokens), (3, num_prompt_tokens)), 0),
        cache_salt=cache_salt,
        block_size=block_size,
        now=now,
        priority=priority,
        kv_from_elsewhere=kv_from_elsewhere,
        has_siblings=has_siblings,
    )


def distinct_tokens(seed: int, count: int) -> list[int]:
    """Tokens that no other seed has."""
    return [1000 * (seed + 1) + k for k in range(count)]


class Drive:
    """A scheduler with an engine's part played by hand: what is scheduled is computed, what samples gets a token."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        max_num_batched_tokens: int = 64,
        max_num_seqs: int = 32,
        prefix_caching: bool = True,
        overlap_encode: bool = True,
    ) -> None:
        self.config = EngineConfig(
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            overlap_encode=overlap_encode,
        )
        self.clock = ManualClock()
        self.pool = KVBlockPool(num_blocks + 1, prefix_caching)
        self.here: set[str] = set()  # embeddings
        self.demands: list[tuple[str, int]] = []
        self.scheduler = Scheduler(self.config, self.pool, self.clock, self.here.__contains__, self._demand)

    def _demand(self, request: RequestState, num_computed_tokens: int) -> None:
        self.demands.append((request.key.request_id, num_computed_tokens))
        request.demanded.update(i.mm_hash for i in request.items if i.mm_hash not in self.here)

    def add(self, *requests: RequestState) -> None:
        for request in requests:
            self.scheduler.add(request)

    def land(self, mm_hash: str) -> None:
        """The embedding arrives."""
        self.here.add(mm_hash)
        for request in [*self.scheduler.running, *self.scheduler.waiting]:
            request.demanded.discard(mm_hash)

    def schedule(self) -> dict[str, int]:
        """One step without its execution: tokens by request, in order."""
        return planned(self.scheduler.schedule())

    def step(self, finish_at: int | None = None) -> dict[str, int]:
        """One whole step; requests that reach `finish_at` output tokens finish."""
        self.clock.advance(1.0)
        step = self.scheduler.schedule()
        assert sum(chunk.num_tokens for chunk in step.chunks) <= self.config.max_num_batched_tokens
        self.scheduler.check()
        for request, num_tokens, samples in step.chunks:
            self.scheduler.advance(request, num_tokens)
            if samples:
                request.token_ids.append(5)
            if finish_at is not None and request.num_output_tokens >= finish_at:
                self.scheduler.finish(request, FinishReason.LENGTH)
        self.scheduler.check()
        return planned(step)

    def statuses(self) -> dict[str, Status]:
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        return {request.key.request_id: request.status for request in requests}


def planned(step: ScheduledStep) -> dict[str, int]:
    return {chunk.request.key.request_id: chunk.num_tokens for chunk in step.chunks}
