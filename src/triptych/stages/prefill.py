"""The prefill stage: takes prompts, and hands their KV to decode workers chunk by chunk.

It answers a `Prefill` with the embeddings that it lacks. When decode runs elsewhere, KV of finished blocks goes out
while later chunks run, and the first token, which it samples itself, goes with the last block.
"""

from __future__ import annotations

from triptych.clock import Clock
from triptych.engine.engine import Engine, StepResult
from triptych.engine.request_state import RequestKey, RequestState
from triptych.handoff.kv import KVProducer
from triptych.messages import (
    Accepted,
    BlocksChanged,
    FetchKV,
    KVPublished,
    KVRefused,
    ListBlocks,
    Prefill,
    Refused,
)
from triptych.stages.base import Mail
from triptych.stages.requests import RequestFactory
from triptych.types import WorkerAddress


class _Export:
    """The KV of one request on its way to a decode worker."""

    def __init__(self, request: RequestState) -> None:
        self.request = request
        self.consumer: WorkerAddress | None = None
        self.num_published_blocks = 0
        self.held_blocks: list[int] = []  # referenced here after the engine let the request go
        self.first_token_id: int | None = None
        self.sampled_s: float | None = None  # when its first token came
        self.ended = False  # with its first token: there is nothing to hand off


class PrefillStage:
    def __init__(
        self,
        engine: Engine,
        requests: RequestFactory,
        kv: KVProducer,
        mail: Mail,
        clock: Clock,
        ttl_s: float,
        *,
        overlap: bool = True,
    ) -> None:
        """With `overlap` KV leaves while later tokens of its prompt are computed, else all at the end."""
        self._engine = engine
        self._requests = requests
        self._kv = kv
        self._mail = mail
        self._clock = clock
        self._ttl_s = ttl_s
        self._overlap = overlap
        self._exports: dict[RequestKey, _Export] = {}
        self.counters: dict[str, float] = {"kv_transfer_blocks_sent_total": 0.0, "kv_transfer_bytes_sent_total": 0.0}

    def accept(self, message: Prefill) -> None:
        key = RequestKey(message.request_id, message.attempt)
        if key in self._exports or self._engine.scheduler.get(key) is not None:
            return  # a second one of the same attempt
        request = self._requests.accept(
            message, decode_elsewhere=message.decode_elsewhere, has_siblings=message.has_siblings
        )
        if isinstance(request, Refused):
            self._mail.to_router(request)
            return
        num_cached_tokens, needed = self._engine.submit(request)
        if message.decode_elsewhere:
            self._exports[request.key] = _Export(request)
        self._mail.to_router(Accepted(message.request_id, message.attempt, num_cached_tokens, needed))

    def fetch_kv(self, message: FetchKV) -> None:
        """A decode worker has room for the request: publish what is there, and from now on what follows."""
        export = self._exports.get(RequestKey(message.request_id, message.attempt))
        if export is None:
            reason = "the prefill worker holds no KV of this request"
            self._mail.to_worker(message.consumer, KVRefused(message.request_id, message.attempt, reason))
            return
        if not export.ended:  # else the router tells the decode worker, when it has the token
            export.consumer = message.consumer
            self._publish(export)

    def after_step(self, result: StepResult) -> None:
        """Publish the blocks that this step filled; let go of requests that go on elsewhere."""
        for request, token_id, finish_reason, _ in result.sampled:
            export = self._exports.get(request.key)
            if export is None:
                continue
            export.sampled_s = self._clock.now()
            export.ended = finish_reason is not None
            if not export.ended:
                export.held_blocks = list(request.block_table)
                export.first_token_id = token_id
                self._engine.pool.acquire(export.held_blocks)
        for request in result.advanced:
            export = self._exports.get(request.key)
            if export is not None and not export.ended:
                self._publish(export)
        if result.num_prompt_tokens:
            self._tell_of_blocks()

    def list_blocks(self, message: ListBlocks) -> None:
        self._mail.to_router(BlocksChanged(self._engine.pool.cached_hashes(), [], is_all=True))

    def _tell_of_blocks(self) -> None:
        """At the end of a step over prompts, whose blocks the next request may share; the rest can wait for a tick."""
        stored, removed = self._engine.pool.take_changes()
        if stored or removed:
            self._mail.to_router(BlocksChanged(stored, removed))

    def _publish(self, export: _Export) -> None:
        """Lease what is computed and not yet published, once the prompt is sure to be finished.

        The last message carries the first token.
        """
        if export.consumer is None:
            return
        request, block_size = export.request, self._requests.block_size
        is_last = export.first_token_id is not None
        num_tokens = request.num_computed_tokens
        num_blocks = -(-num_tokens // block_size) if is_last else num_tokens // block_size
        first = export.num_published_blocks
        blocks = (export.held_blocks or request.block_table)[first:num_blocks]
        if not blocks and not is_last:
            return
        if not is_last and not (self._overlap and self._engine.reserve(request)):
            return  # the decode worker must not set blocks aside for what may never come
        pool = self._engine.pool
        pool.acquire(blocks)
        handle = self._kv.publish(blocks, first, export.consumer, request.key, lambda: pool.release(blocks))
        export.num_published_blocks = max(first, num_blocks)
        covered = num_tokens if is_last else num_blocks * block_size
        self.counters["kv_transfer_blocks_sent_total"] += len(blocks)
        self.counters["kv_transfer_bytes_sent_total"] += sum(r.num_bytes for r in handle.blocks)
        message = KVPublished(*request.key, handle=handle, num_tokens=covered, first_token_id=export.first_token_id)
        self._mail.to_worker(export.consumer, message)
        if is_last:
            self.drop(request.key)

    def drop(self, key: RequestKey) -> None:
        """Forget the hand-off of a request; blocks that are leased stay until their leases end."""
        export = self._exports.pop(key, None)
        if export is not None:
            self._engine.pool.release(export.held_blocks)

    def tick(self) -> None:
        """Free KV that no decode worker came for."""
        self._tell_of_blocks()
        now = self._clock.now()
        for key, export in list(self._exports.items()):
            if export.sampled_s is not None and now - export.sampled_s > self._ttl_s:
                self.drop(key)

    def num_live(self) -> int:
        return len(self._exports)
