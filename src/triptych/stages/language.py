"""What prefill and decode share: one engine, the embeddings that it receives, the tokens that it sends.

A worker that hosts prefill, decode or both has one `LanguageStage`; the two halves that talk to other workers are
`prefill.py` and `decode.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from triptych.clock import Clock
from triptych.engine.engine import Engine, Sampled, StepError
from triptych.engine.request_state import RequestKey, RequestState
from triptych.errors import LinkError, TransferError
from triptych.handoff.arriving import Arriving
from triptych.handoff.embedding import fetch_embedding
from triptych.messages import (
    AttemptFailed,
    Cancel,
    Decode,
    EmbeddingPublished,
    FetchKV,
    ItemHeld,
    ItemLost,
    KVPublished,
    KVRefused,
    LeaseReleased,
    ListBlocks,
    Prefill,
    StepOutput,
    TokenOutput,
)
from triptych.stages.base import Mail, Routes
from triptych.stages.decode import DecodeStage
from triptych.stages.prefill import PrefillStage
from triptych.transport.base import Transport
from triptych.types import FinishReason, Load

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class _Arrival:
    """A published embedding that this worker has not taken in or declined yet."""

    def __init__(self, message: EmbeddingPublished, now: float) -> None:
        self.message = message
        self.started_s = now
        self.arriving: Arriving[torch.Tensor] | None = None


class LanguageStage:
    """`prefill` or `decode` is None when the worker does not host it; the worker refuses its messages."""

    def __init__(
        self,
        engine: Engine,
        prefill: PrefillStage | None,
        decode: DecodeStage | None,
        transport: Transport,
        mail: Mail,
        clock: Clock,
        probe: Callable[[], None],
        kv_bytes: int,
        embed_width: int,
    ) -> None:
        self._engine = engine
        self._prefill = prefill
        self._decode = decode
        self._transport = transport
        self._mail = mail
        self._clock = clock
        self._probe = probe
        self.kv_bytes = kv_bytes
        self._embed_width = embed_width
        self._arrivals: list[_Arrival] = []
        self.is_prefilling = False  # the last step computed tokens of a prompt
        self.counters: dict[str, float] = dict.fromkeys(
            ("engine_steps_total", "engine_step_time_seconds_total", "prompt_tokens_computed_total",
             "embed_transfer_items_total", "embed_transfer_bytes_total", "embed_transfer_time_seconds_total",
             "embed_transfer_failures_total"), 0.0
        )  # fmt: skip

    def routes(self) -> Routes:
        routes: dict[type, Callable[..., None]] = {EmbeddingPublished: self.embedding_published, Cancel: self.cancel}
        if self._prefill:
            routes[Prefill] = self._prefill.accept
            routes[FetchKV] = self._prefill.fetch_kv
            routes[ListBlocks] = self._prefill.list_blocks
        if self._decode:
            routes[Decode] = self._decode.accept
            routes[KVPublished] = self._decode.kv_published
            routes[KVRefused] = self._decode.kv_refused
        return routes

    # -- embeddings ----------------------------------------------------------------------------------------------------

    def embedding_published(self, message: EmbeddingPublished) -> None:
        self._arrivals.append(_Arrival(message, self._clock.now()))
        self._land()

    def _land(self) -> bool:
        """Fetch what is published and not here, take in what has arrived; whether an arrival came to its end."""
        before = len(self._arrivals)
        self._arrivals = [arrival for arrival in self._arrivals if not self._take(arrival)]
        return len(self._arrivals) < before

    def _take(self, arrival: _Arrival) -> bool:
        """Copy the embedding into this worker's own memory and release the producer's lease; False: not here yet."""
        message = arrival.message
        key = RequestKey(message.request_id, message.attempt)
        try:
            if self._engine.wants_embedding(message.mm_hash):
                if arrival.arriving is None and not self._is_coming(message.mm_hash):
                    self._require_shape(message)
                    arrival.arriving = fetch_embedding(self._transport, message.handle)
                if arrival.arriving is None or not arrival.arriving.done:
                    return False
                self._engine.add_embedding(message.mm_hash, arrival.arriving.land())
                self.counters["embed_transfer_items_total"] += 1
                self.counters["embed_transfer_bytes_total"] += message.handle.range.num_bytes
            elif arrival.arriving is not None:
                arrival.arriving.close()
        except (TransferError, ValueError) as error:
            logger.warning("request_id=%s item=%s embedding lost: %s", key.request_id, message.mm_hash[:12], error)
            self.counters["embed_transfer_failures_total"] += 1
            if isinstance(error, LinkError):  # to ask anew would bring it from the same worker
                lost = ItemLost(*key, mm_hash=message.mm_hash, owner=message.handle.owner.name, message=str(error))
                self._mail.to_router(lost)
            else:
                self._engine.forget_demand(key, message.mm_hash)
        else:
            duration_s = self._clock.now() - arrival.started_s
            self.counters["embed_transfer_time_seconds_total"] += duration_s
            self._mail.to_router(ItemHeld(*key, mm_hash=message.mm_hash, transfer_s=duration_s))
        self._mail.to_worker(message.handle.owner, LeaseReleased(message.handle.lease_id))
        return True

    def _require_shape(self, message: EmbeddingPublished) -> None:
        """Raises ValueError for an embedding that is not of the item that a request here waits for."""
        expected = (self._engine.num_embeds_of(message.mm_hash), self._embed_width)
        if message.handle.shape != expected:
            raise ValueError(f"an embedding of shape {list(message.handle.shape)}, not {list(expected)}")

    def _is_coming(self, mm_hash: str) -> bool:
        """Another request's fetch of the same item runs."""
        return any(a.arriving is not None and a.message.mm_hash == mm_hash for a in self._arrivals)

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One engine step over what has arrived; KV and tokens leave as soon as it is done."""
        landed = self._land()
        if self._decode:
            landed |= self._decode.land()
        started_s = self._clock.now()
        try:
            result = self._engine.step()
        except StepError as error:
            self._fail_step(error)
            return True
        self.is_prefilling = result.num_prompt_tokens > 0
        if result.advanced:
            self.counters["engine_steps_total"] += 1
            self.counters["prompt_tokens_computed_total"] += result.num_prompt_tokens
            self.counters["engine_step_time_seconds_total"] += self._clock.now() - started_s
        for request in result.failed:
            self._fail(request, f"the answer cannot go on: {request.failure}", bad_grammar=request.is_own_failure)
        outputs = [self._output(sampled) for sampled in result.sampled]
        if outputs:
            self._mail.to_router(StepOutput(outputs))
        if self._prefill:
            self._prefill.after_step(result)
        if self._decode:
            self._decode.fetch_admitted(result.admitted_for_kv)
        for request, _, finish_reason, _ in result.sampled:
            if finish_reason is not None or request.decode_elsewhere:
                self._engine.end(request, finish_reason)
        return result.did_work or landed

    def _output(self, sampled: Sampled) -> TokenOutput:
        request, token_id, finish_reason, logprobs = sampled
        now = self._clock.now()
        return TokenOutput(
            *request.key,
            index=request.num_output_tokens - 1,
            token_ids=[token_id],
            finish_reason=finish_reason,
            stop_token_id=request.stop_token_id,
            ends_in_text=request.ends_in_text,
            prefill=request.first_token_timing(now),
            decode=self._decode.timing_of_first_token(request.key, now) if self._decode else None,
            logprobs=[] if logprobs is None else [logprobs],
            prompt_logprobs=request.prompt_logprobs if request.num_output_tokens == 1 else [],
        )

    def _fail_step(self, error: StepError) -> None:
        """A step that raised ends every request that was in it; the worker goes on with the others."""
        logger.error("an engine step failed", exc_info=error)
        if self._decode:
            self._decode.fetch_admitted(error.admitted_for_kv)
        for request in error.requests:
            self._fail(request, f"the engine failed: {error}")

    def _fail(self, request: RequestState, reason: str, *, bad_grammar: bool = False) -> None:
        """For good: another worker would do no better."""
        self._engine.end(request, FinishReason.ERROR)
        self._drop(request.key)
        self._mail.to_router(AttemptFailed(*request.key, message=reason, retryable=False, bad_grammar=bad_grammar))

    def cancel(self, message: Cancel) -> None:
        key = RequestKey(message.request_id, message.attempt)
        self._engine.cancel(key)
        self._drop(key)

    def _drop(self, key: RequestKey) -> None:
        if self._prefill:
            self._prefill.drop(key)
        if self._decode:
            self._decode.drop(key)

    # -- life ----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        if self._prefill:
            self._prefill.tick()
        scheduler = self._engine.scheduler
        self.counters["num_preemptions_total"] = float(scheduler.num_preemptions)
        self.counters["prefix_cache_queries_total"] = float(scheduler.num_prefix_queries_tokens)
        self.counters["prefix_cache_hits_total"] = float(scheduler.num_prefix_hit_tokens)
        self.counters["kv_cache_evictions_total"] = float(self._engine.pool.num_evictions)
        for half in (self._prefill, self._decode):
            if half:
                self.counters.update(half.counters)

    def probe(self) -> None:
        self._probe()

    def num_live(self) -> int:
        halves = (half.num_live() for half in (self._prefill, self._decode) if half)
        return len(self._engine.scheduler) + len(self._arrivals) + sum(halves)

    def load(self) -> Load:
        scheduler, pool = self._engine.scheduler, self._engine.pool
        waiting, running = list(scheduler.waiting), list(scheduler.running)
        return Load(
            num_waiting=len(waiting),
            num_running=len(running),
            num_waiting_tokens=sum(r.num_tokens_to_compute for r in [*waiting, *running] if not r.kv_from_elsewhere),
            num_free_blocks=pool.num_free,
            num_total_blocks=pool.num_blocks,
            max_kv_tokens=self._engine.max_kv_tokens,
            prompt_token_s=scheduler.step_times.prompt_token_s,
        )

    def check(self) -> None:
        self._engine.check()
