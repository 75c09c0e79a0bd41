"""The engine of a prefill worker, a decode worker, or both: schedule, execute, sample, advance.

One thread owns it. It knows requests, embeddings and KV blocks; it knows nothing of other workers: the stages feed it
and carry its results away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from triptych.clock import Clock
from triptych.config import EngineConfig
from triptych.engine.batch import Drawn, EmbeddingSlice, SampleRow, SequenceChunk, StepLogits
from triptych.engine.encoder_cache import EncoderCache
from triptych.engine.kv_blocks import KVBlockPool
from triptych.engine.matchers import Matchers
from triptych.engine.request_state import RequestKey, RequestState, Status
from triptych.engine.scheduler import ScheduledChunk, ScheduledStep, Scheduler
from triptych.errors import EngineError, GrammarError
from triptych.messages import Logprobs
from triptych.types import FinishReason

if TYPE_CHECKING:
    import torch


class Runner(Protocol):
    """Executes a step; `engine/runner.py` in a worker, `testing.FakeRunner` in tests of what is around it."""

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepLogits: ...


Sampler = Callable[["torch.Tensor", list[SampleRow]], list[Drawn]]


class Sampled(NamedTuple):
    """A token that a request got in this step, and the finish reason if it was its last."""

    request: RequestState
    token_id: int
    finish_reason: FinishReason | None
    logprobs: Logprobs | None


class StepResult(NamedTuple):
    advanced: list[RequestState]  # every request that computed tokens
    sampled: list[Sampled]
    failed: list[RequestState]  # those that got no token and cannot go on; `failure` says why
    admitted_for_kv: list[RequestState]
    num_prompt_tokens: int  # computed by this step, tokens of earlier attempts and of preempted requests included

    @property
    def did_work(self) -> bool:
        return bool(self.advanced or self.admitted_for_kv)


class StepError(Exception):
    """A forward failed. `requests` were in it; `admitted_for_kv` only got their blocks, and are as good as before."""

    def __init__(self, requests: list[RequestState], admitted_for_kv: list[RequestState], reason: str) -> None:
        super().__init__(reason)
        self.requests = requests
        self.admitted_for_kv = admitted_for_kv


class Engine:
    """Continuous batching over one model's language part.

    `on_demand(request, mm_hashes)` is called when embeddings are needed that were not asked for when the request came.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        sampler: Sampler,
        matchers: Matchers,
        pool: KVBlockPool,
        eos_token_ids: Sequence[int],
        max_model_len: int,
        clock: Clock,
        on_demand: Callable[[RequestState, list[str]], None],
    ) -> None:
        self.pool = pool
        self.embeddings: EncoderCache[torch.Tensor] = EncoderCache(config.embedding_cache_bytes)
        self.scheduler = Scheduler(config, pool, clock, self.embeddings.__contains__, self._demand, matchers.may_sample)
        self._runner = runner
        self._sampler = sampler
        self._matchers = matchers
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self.max_kv_tokens = pool.num_blocks * config.block_size
        self._clock = clock
        self._on_demand = on_demand

    def submit(self, request: RequestState) -> tuple[int, list[str]]:
        """Take a request; returns the cached tokens and the mm_hashes of the embeddings that it lacks."""
        num_cached_tokens = self.scheduler.num_cached_tokens(request)
        self.scheduler.add(request)
        if request.kv_from_elsewhere:
            return num_cached_tokens, []
        return num_cached_tokens, self._claim_embeddings(request, num_cached_tokens)

    def _claim_embeddings(self, request: RequestState, num_covered_tokens: int) -> list[str]:
        """Hold on to the embeddings that are here; mark and return those that are not, each once."""
        missing: dict[str, None] = {}
        for item in request.uncovered_items(num_covered_tokens):
            if item.mm_hash in self.embeddings:
                self.embeddings.acquire(item.mm_hash, request.key)
            elif item.mm_hash not in request.demanded:
                missing[item.mm_hash] = None
        request.demanded.update(missing)
        return list(missing)

    def _demand(self, request: RequestState, num_computed_tokens: int) -> None:
        missing = self._claim_embeddings(request, num_computed_tokens)
        if missing:
            self._on_demand(request, missing)

    def reserve(self, request: RequestState) -> bool:
        """Whether the request is sure to finish its prompt: its embeddings are here to stay, and all its blocks."""
        uncovered = request.uncovered_items(request.num_computed_tokens)
        if any(item.mm_hash not in self.embeddings for item in uncovered):
            return False
        for item in uncovered:
            self.embeddings.acquire(item.mm_hash, request.key)
        return self.scheduler.reserve(request)

    def wants_embedding(self, mm_hash: str) -> bool:
        """Whether a live request waits for it and it is not here."""
        return mm_hash not in self.embeddings and any(mm_hash in r.demanded for r in self._requests())

    def num_embeds_of(self, mm_hash: str) -> int:
        """Of an item that a live request waits for; 0 when none does."""
        items = (item for r in self._requests() if mm_hash in r.demanded for item in r.items)
        return next((item.metadata.num_embeds for item in items if item.mm_hash == mm_hash), 0)

    def add_embedding(self, mm_hash: str, embedding: torch.Tensor) -> None:
        """An embedding arrived; every request that waits for it may go on."""
        self.embeddings.put(mm_hash, embedding, embedding.numel() * embedding.element_size())
        for request in self._requests():
            if mm_hash in request.demanded:
                request.demanded.remove(mm_hash)
                self.embeddings.acquire(mm_hash, request.key)
                if request.status is Status.WAITING_FOR_EMBEDDINGS:
                    ready = Status.RUNNING if request.block_table else Status.WAITING
                    request.set_status(ready, self._clock.now())
        self.embeddings.shrink()

    def forget_demand(self, key: RequestKey, mm_hash: str) -> None:
        """The embedding that was asked for will not come; the scheduler asks anew when it still matters."""
        request = self.scheduler.get(key)
        if request is not None:
            request.demanded.discard(mm_hash)

    def cancel(self, key: RequestKey) -> bool:
        """Nobody waits for the request any more. It may have ended long ago, and kept something for its siblings."""
        request = self.scheduler.get(key)
        if request is not None:
            self.end(request, FinishReason.ABORT)
        self.embeddings.release_all(key)
        return request is not None

    def end(self, request: RequestState, reason: FinishReason | None) -> None:
        """Free all that the request holds here but the embeddings that its siblings need; `cancel` frees those."""
        self.scheduler.finish(request, reason)
        if not request.has_siblings:
            self.embeddings.release_all(request.key)
        self.embeddings.shrink()

    def step(self) -> StepResult:
        """One forward over what can run now; returns what it led to. Raises StepError when the forward fails."""
        step = self.scheduler.schedule()
        started_s = self._clock.now()
        try:
            drawn = self._execute(step) if step.chunks else []
        except (RuntimeError, ValueError, IndexError) as error:  # torch's own, out of memory among them
            raise StepError([chunk.request for chunk in step.chunks], step.admitted_for_kv, str(error)) from error
        num_prompt_tokens = step.num_prompt_tokens
        if step.chunks:
            self.scheduler.step_took(step, self._clock.now() - started_s)
        requests = [chunk.request for chunk in step.chunks]
        sampled = self._advance(step, drawn)
        failed = [request for request in requests if request.failure]
        return StepResult(requests, sampled, failed, step.admitted_for_kv, num_prompt_tokens)

    def _execute(self, step: ScheduledStep) -> list[Drawn]:
        chunks = [self._sequence_chunk(chunk) for chunk in step.chunks]
        output = self._runner.forward(chunks)
        scores = iter(output.scores)
        for chunk, (request, _, _) in zip(chunks, step.chunks, strict=True):
            if chunk.scoring is not None:
                request.add_scores(chunk.first_position, next(scores))
        sampling = [chunk.request for chunk in step.chunks if chunk.samples]
        drawn = {place: Drawn(token_id) for place, token_id in output.tokens.items()}
        rows = {place: self._sample_row(request) for place, request in enumerate(sampling) if place not in drawn}
        if rows:
            drawn.update(zip(rows, self._sampler(output.logits, list(rows.values())), strict=True))
        return [drawn[place] for place in range(len(sampling))]

    def _sample_row(self, request: RequestState) -> SampleRow:
        """A grammar that cannot be followed fails its own request and no other of the step."""
        mask = None
        try:
            mask = self._matchers.mask(request)
        except (EngineError, GrammarError) as error:
            request.fail(error)
        return SampleRow(request.sampling, request.token_ids, request.num_prompt_tokens, mask)

    def _sequence_chunk(self, chunk: ScheduledChunk) -> SequenceChunk:
        request, start = chunk.request, chunk.request.num_computed_tokens
        end = start + chunk.num_tokens
        row = SampleRow(request.sampling, request.token_ids, request.num_prompt_tokens)  # masks wait for the forward
        return SequenceChunk(
            token_ids=request.token_ids[start:end],
            first_position=start,
            positions=request.positions.slice(start, end),
            block_table=request.block_table,
            embeddings=self._embedding_slices(request, start, end),
            sample=chunk.samples,
            scoring=request.scoring(start, end),
            greedy=chunk.samples and row.is_greedy,
        )

    def _embedding_slices(self, request: RequestState, start: int, end: int) -> list[EmbeddingSlice]:
        """The rows of each item's embedding that fall into tokens `start` to `end`."""
        slices = []
        for item in request.uncovered_items(start):
            placeholder = item.placeholder
            if placeholder.offset >= end:
                break
            embedding = self.embeddings.get(item.mm_hash)
            assert embedding is not None, "the scheduler stops before a missing embedding"
            first, last = max(start, placeholder.offset), min(end, placeholder.end)
            rows = embedding[first - placeholder.offset : last - placeholder.offset]
            slices.append(EmbeddingSlice(first - start, rows))
        return slices

    def _advance(self, step: ScheduledStep, drawn: list[Drawn]) -> list[Sampled]:
        sampled, tokens = [], iter(drawn)
        for request, num_tokens, samples in step.chunks:
            self.scheduler.advance(request, num_tokens)
            self._release_used_embeddings(request)
            if samples:
                token_id, logprobs = next(tokens)
                self._accept(request, token_id)
                if not request.failure:
                    sampled.append(Sampled(request, token_id, self._finish_reason(request, token_id), logprobs))
        return sampled

    def _accept(self, request: RequestState, token_id: int) -> None:
        if request.matcher is not None and not request.failure:
            try:
                request.matcher.accept(token_id)
            except (GrammarError, ValueError) as error:  # ValueError: logits that are not numbers drew what is masked
                request.fail(error)
        if not request.failure:
            request.token_ids.append(token_id)

    def _release_used_embeddings(self, request: RequestState) -> None:
        """What is computed needs its embedding only if the request is preempted; until then others may evict it."""
        still_needed = {item.mm_hash for item in request.items_still_needed()}
        for item in request.items:
            if item.mm_hash not in still_needed:
                self.embeddings.release(item.mm_hash, request.key)

    def _finish_reason(self, request: RequestState, token_id: int) -> FinishReason | None:
        sampling = request.sampling
        if request.num_output_tokens >= sampling.min_tokens:
            if token_id in sampling.stop_token_ids:
                request.stop_token_id = token_id
                return FinishReason.STOP
            if token_id in self._eos_token_ids and not sampling.ignore_eos:
                return FinishReason.STOP
        if request.matcher is not None and request.matcher.is_finished:
            request.ends_in_text = token_id not in self._eos_token_ids
            return FinishReason.STOP
        if request.num_output_tokens >= sampling.max_tokens or len(request.token_ids) >= self._max_model_len:
            return FinishReason.LENGTH
        return None

    def kv_arrived(self, request: RequestState, num_tokens: int, first_token_id: int | None) -> FinishReason | None:
        """Another worker's KV covers `num_tokens` tokens; with the first token the request begins to decode here."""
        self.scheduler.kv_arrived(request, num_tokens)
        if first_token_id is None:
            return None
        request.token_ids.append(first_token_id)
        request.set_status(Status.RUNNING, self._clock.now())
        return self._finish_reason(request, first_token_id)

    def _requests(self) -> list[RequestState]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def check(self) -> None:
        """Raise AssertionError unless the books agree; with no request left, nothing may be held."""
        self.scheduler.check()
        self.embeddings.check()
        if not len(self.scheduler):
            assert self.embeddings.num_referenced == 0, "an embedding is referenced by a request that is gone"
