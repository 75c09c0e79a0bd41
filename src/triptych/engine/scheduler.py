"""Who computes how many tokens in the next step: continuous batching of decode and chunked prefill in one budget.

Pure Python, no torch: the same class runs in a worker, in property tests and in the simulator. One step is one call of
`schedule`; the engine executes it and calls `advance` for each chunk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from triptych.clock import Clock
from triptych.config import EngineConfig
from triptych.engine.kv_blocks import KVBlockPool
from triptych.engine.request_state import RequestKey, RequestState, Status
from triptych.engine.step_times import StepTimes
from triptych.types import FinishReason

EVEN_TOKENS = 1024  # of a prompt: up to these all are alike, and go in order of arrival


class ScheduledChunk(NamedTuple):
    """The next `num_tokens` tokens of one request; `samples` when they reach its last token."""

    request: RequestState
    num_tokens: int
    samples: bool


class ScheduledStep(NamedTuple):
    chunks: list[ScheduledChunk]  # decode rows first
    admitted_for_kv: list[RequestState]  # got their blocks now and wait for another worker to fill them

    @property
    def num_prompt_tokens(self) -> int:
        """Before the requests advance: afterwards others decode."""
        return sum(chunk.num_tokens for chunk in self.chunks if not chunk.request.is_decoding)


class Scheduler:
    """Holds every live request of one engine, in order of arrival, and hands out KV blocks.

    `has_embedding` tells whether an item's embedding is here; `demand(request, num_computed_tokens)` is called when a
    request cannot go on without items that nobody was asked for (it was preempted, or a prefix was evicted).
    `may_sample` tells whether all is here that a request's next token depends on.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: KVBlockPool,
        clock: Clock,
        has_embedding: Callable[[str], bool],
        demand: Callable[[RequestState, int], None],
        may_sample: Callable[[RequestState], bool] = lambda _: True,
    ) -> None:
        self._config = config
        self._pool = pool
        self._clock = clock
        self._has_embedding = has_embedding
        self._demand = demand
        self._may_sample = may_sample
        self._waiting: OrderedDict[RequestKey, RequestState] = OrderedDict()
        self._running: OrderedDict[RequestKey, RequestState] = OrderedDict()  # all that hold blocks
        self.step_times = StepTimes()
        self._num_arrivals = 0
        self._num_prompt_tokens = 0  # computed so far, of all requests
        self.num_preemptions = 0
        self.num_prefix_queries_tokens = 0
        self.num_prefix_hit_tokens = 0

    @property
    def waiting(self) -> Iterable[RequestState]:
        return self._waiting.values()

    @property
    def running(self) -> Iterable[RequestState]:
        return self._running.values()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, request: RequestState) -> None:
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        self._waiting[request.key] = request
        if not request.kv_from_elsewhere:  # the items that its cached blocks cover are not asked for
            request.pinned_blocks = self._cached_blocks(request)
            self._pool.acquire(request.pinned_blocks)
        num_cached = len(request.pinned_blocks) * self._config.block_size
        request.place = self._num_prompt_tokens + max(len(request.token_ids) - num_cached - EVEN_TOKENS, 0)

    def get(self, key: RequestKey) -> RequestState | None:
        return self._running.get(key) or self._waiting.get(key)

    def num_cached_tokens(self, request: RequestState) -> int:
        """Tokens that the prefix cache covers now, of those that need not be computed."""
        return len(self._cached_blocks(request)) * self._config.block_size

    def _cached_blocks(self, request: RequestState) -> list[int]:
        most = request.num_reusable_tokens // self._config.block_size
        return self._pool.find_prefix(request.block_hashes()[:most])

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep:
        """Decode rows first, then prompts, running and waiting ones alike, most urgent first and within the budget."""
        budget = self._config.max_num_batched_tokens
        chunks: dict[RequestKey, ScheduledChunk] = {}
        preempted_before = self.num_preemptions
        decoding = [request for request in self._running.values() if request.is_decoding]
        prompts = [request for request in self._running.values() if not request.is_decoding]
        for request in decoding:
            if budget and request.key in self._running:
                budget -= self._plan_chunk(request, budget, chunks)
        if chunks:
            budget = min(budget, self.step_times.prompt_tokens_within(self._config.decode_stall_s))
        admitted: list[RequestState] = []
        has_room = True  # one that finds no blocks is not overtaken
        for request in sorted([*prompts, *self._waiting.values()], key=self._urgency):
            if request.key not in self._running:
                if not has_room or self.num_preemptions > preempted_before:
                    continue
                has_room = self._admit(request, budget, admitted)
            if budget and request.key in self._running and request.status is not Status.WAITING_FOR_KV:
                budget -= self._plan_chunk(request, budget, chunks)
        return ScheduledStep(list(chunks.values()), admitted)

    def _urgency(self, request: RequestState) -> tuple[int, int, int]:
        """By priority, then by arrival; but a long prompt is put back by the tokens that it has beyond `EVEN_TOKENS`.

        Until so many were computed since it came, its own among them, shorter ones that come later go before it.
        """
        return request.priority, request.place, request.arrival

    def _plan_chunk(self, request: RequestState, budget: int, chunks: dict[RequestKey, ScheduledChunk]) -> int:
        """Plan the request's next chunk if it can go on; the number of tokens it takes."""
        num_tokens = min(self._num_ready_tokens(request, request.num_computed_tokens), budget)
        if num_tokens == 0 or not self._make_room(request, request.num_computed_tokens + num_tokens, chunks):
            return 0
        request.set_status(Status.RUNNING, self._clock.now())
        samples = num_tokens == request.num_tokens_to_compute
        chunks[request.key] = ScheduledChunk(request, num_tokens, samples)
        return num_tokens

    def _num_ready_tokens(self, request: RequestState, num_computed_tokens: int) -> int:
        """Tokens up to the first placeholder whose embedding is missing; 0 sets WAITING_FOR_EMBEDDINGS.

        The last token waits until it can be sampled from.
        """
        for item in request.uncovered_items(num_computed_tokens):
            if not self._has_embedding(item.mm_hash):
                if item.mm_hash not in request.demanded:
                    self._demand(request, num_computed_tokens)
                ready = max(item.placeholder.offset - num_computed_tokens, 0) if self._config.overlap_encode else 0
                if ready == 0 and request.status is not Status.WAITING_FOR_EMBEDDINGS:
                    request.set_status(Status.WAITING_FOR_EMBEDDINGS, self._clock.now(), item.mm_hash)
                return ready
        return len(request.token_ids) - num_computed_tokens - (not self._may_sample(request))

    def _admit(self, request: RequestState, budget: int, admitted: list[RequestState]) -> bool:
        """Give blocks to a waiting request if it can go on with them; False where there are none.

        One that lacks embeddings holds up nobody.
        """
        if len(self._running) >= self._config.max_num_seqs:
            return False
        if request.kv_from_elsewhere:
            if self._finds_more_in_the_next_step(request, admitted):
                return True
            if not self._take_blocks(request, len(request.token_ids)):
                return False
            request.set_status(Status.WAITING_FOR_KV, self._clock.now())
            admitted.append(request)
            return True
        if budget == 0:
            return True
        num_cached = self.num_cached_tokens(request)
        num_tokens = min(self._num_ready_tokens(request, num_cached), budget)
        return num_tokens == 0 or self._take_blocks(request, num_cached + num_tokens)

    def _finds_more_in_the_next_step(self, request: RequestState, admitted: list[RequestState]) -> bool:
        """Whether a block that it lacks is fetched for another one: then there is no need to fetch it twice."""
        num_cached = len(self._cached_blocks(request))
        most = request.num_reusable_tokens // self._config.block_size
        missing = request.block_hashes()[num_cached:most]
        return any(missing[:1] == other.block_hashes()[num_cached : num_cached + 1] for other in admitted if missing)

    def _take_blocks(self, request: RequestState, num_tokens: int) -> bool:
        """Move a waiting request to the running ones with blocks for its first `num_tokens` tokens."""
        cached = self._cached_blocks(request)
        num_new = self._num_blocks(num_tokens) - len(cached)
        while num_new > self._pool.num_free_without(cached):
            if not self._unpin_last(but=request):
                return False
        self._pool.acquire(cached)
        self._unpin(request)
        request.block_table = cached + self._pool.allocate(num_new)
        request.num_committed_blocks = len(cached)
        request.num_computed_tokens = len(cached) * self._config.block_size
        if request.status is not Status.PREEMPTED:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_prefix_queries_tokens += len(request.token_ids)
            self.num_prefix_hit_tokens += request.num_computed_tokens
        del self._waiting[request.key]
        self._running[request.key] = request
        return True

    def _make_room(self, request: RequestState, num_tokens: int, chunks: dict[RequestKey, ScheduledChunk]) -> bool:
        """Allocate the blocks that are missing for `num_tokens`, preempting less urgent ones if it must be."""
        num_new = self._num_blocks(num_tokens) - len(request.block_table)
        while num_new > self._pool.num_free:
            if self._unpin_last():
                continue
            preemptable = (r for r in self._running.values() if self._may_preempt(r))
            victim = max(preemptable, key=lambda r: (r.priority, r.arrival), default=None)
            if victim is None or (victim is request and len(self._running) == 1):
                return False  # blocks are leased to other workers: wait until they are released
            self._preempt(victim)
            chunks.pop(victim.key, None)
            if victim is request:
                return False
        if num_new > 0:
            request.block_table += self._pool.allocate(num_new)
        return True

    def _unpin_last(self, but: RequestState | None = None) -> bool:
        """Let others have the cached blocks of the waiting request that would be the last to use them.

        What it loses so it computes again, and asks for the items that lie there.
        """
        pinning = (r for r in self._waiting.values() if r.pinned_blocks and r is not but)
        last = max(pinning, key=self._urgency, default=None)
        if last is not None:
            self._unpin(last)
        return last is not None

    def _unpin(self, request: RequestState) -> None:
        self._pool.release(request.pinned_blocks)
        request.pinned_blocks = []

    def _may_preempt(self, request: RequestState) -> bool:
        return not request.is_reserved and request.status is not Status.WAITING_FOR_KV

    def reserve(self, request: RequestState) -> bool:
        """Give a running request blocks for all its tokens, if they are free now, and keep it from being preempted.

        A decode worker sets blocks aside for a prompt only when this worker is sure to finish it. Otherwise each could
        wait for blocks that the other holds: there for prompts that cannot go on here, here for finished ones.
        """
        if request.is_reserved or request.key not in self._running:
            return request.is_reserved
        num_new = self._num_blocks(len(request.token_ids)) - len(request.block_table)
        while num_new > self._pool.num_free:
            if not self._unpin_last():
                return False
        request.block_table += self._pool.allocate(max(num_new, 0))
        request.is_reserved = True
        return True

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def _preempt(self, request: RequestState) -> None:
        """Take the request's blocks; it is computed again, from its embeddings and all its tokens so far."""
        self._free_blocks(request)
        request.num_computed_tokens = 0
        request.kv_from_elsewhere = False
        request.set_status(Status.PREEMPTED, self._clock.now())
        del self._running[request.key]
        self._waiting[request.key] = request
        self._waiting.move_to_end(request.key, last=False)
        self.num_preemptions += 1

    # -- after the step ------------------------------------------------------------------------------------------------

    def step_took(self, step: ScheduledStep, duration_s: float) -> None:
        """How much the next steps may take on is learnt from the last ones. Call it before `advance`."""
        num_decode_rows = sum(chunk.request.is_decoding for chunk in step.chunks)
        self.step_times.add(step.num_prompt_tokens, num_decode_rows, duration_s)

    def advance(self, request: RequestState, num_tokens: int) -> None:
        """`num_tokens` more tokens of the request have their KV; full blocks become findable."""
        if not request.is_decoding:
            self._num_prompt_tokens += num_tokens
        request.num_computed_tokens += num_tokens
        hashes = request.block_hashes()
        for index in range(request.num_committed_blocks, request.num_computed_tokens // self._config.block_size):
            self._pool.commit(request.block_table[index], hashes[index])
            request.num_committed_blocks = index + 1

    def kv_arrived(self, request: RequestState, num_tokens: int) -> None:
        """Another worker's KV covers the first `num_tokens` tokens; the prefix cache here may have covered more."""
        self.advance(request, max(num_tokens - request.num_computed_tokens, 0))

    def finish(self, request: RequestState, reason: FinishReason | None) -> None:
        """Free everything that the request holds. `reason` None: it goes on elsewhere."""
        self._free_blocks(request)
        request.finish_reason = reason
        request.set_status(Status.FINISHED, self._clock.now())
        self._running.pop(request.key, None)
        self._waiting.pop(request.key, None)

    def _free_blocks(self, request: RequestState) -> None:
        self._unpin(request)
        self._pool.release(request.block_table)
        request.block_table = []
        request.num_committed_blocks = 0
        request.is_reserved = False

    def check(self) -> None:
        """Raise AssertionError unless statuses and blocks agree."""
        for request in self._waiting.values():
            assert not request.block_table, f"{request.key} waits and holds blocks"
        for request in self._running.values():
            covered = len(request.block_table) * self._config.block_size
            assert request.num_computed_tokens <= covered, f"{request.key} computed more than its blocks hold"
        self._pool.check()
