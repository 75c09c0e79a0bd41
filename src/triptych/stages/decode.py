"""The decode stage: fetches a prompt's KV from its prefill worker as it grows, then goes on sampling.

A failed transfer ends the attempt; the router plans the request anew from the tokens that were already sent.
"""

from __future__ import annotations

from triptych.clock import Clock
from triptych.engine.engine import Engine, StepResult
from triptych.engine.request_state import RequestKey, RequestState
from triptych.errors import TransferError
from triptych.handoff.kv import KVMemory, fetch_blocks
from triptych.messages import (
    AttemptFailed,
    Decode,
    DecodeTiming,
    FetchKV,
    KVPublished,
    KVRefused,
    LeaseReleased,
    Refusal,
    Refused,
)
from triptych.stages.base import Mail
from triptych.stages.requests import RequestFactory
from triptych.types import FinishReason, WorkerAddress


class _Import:
    """The KV of one request on its way from a prefill worker, until the first token that is sampled here."""

    def __init__(self, source: WorkerAddress, now: float) -> None:
        self.source = source
        self.started_s = now
        self.arrived_s = now


class DecodeStage:
    def __init__(
        self,
        engine: Engine,
        requests: RequestFactory,
        memory: KVMemory,
        address: WorkerAddress,
        mail: Mail,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._memory = memory
        self._address = address
        self._mail = mail
        self._clock = clock
        self._imports: dict[RequestKey, _Import] = {}
        self.counters: dict[str, float] = dict.fromkeys(
            ("kv_transfer_blocks_total", "kv_transfer_bytes_total", "kv_transfer_failures_total",
             "kv_transfer_time_seconds_total", "kv_transfer_blocks_avoided_total"), 0.0
        )  # fmt: skip

    def accept(self, message: Decode) -> None:
        refusal = self._requests.refuse(message)
        if refusal is not None:
            self._mail.to_router(Refused(message.request_id, message.attempt, Refusal.TOO_LONG, refusal))
            return
        request = self._requests.build(message, kv_from_elsewhere=True)
        self._imports[request.key] = _Import(message.source, self._clock.now())
        self._engine.submit(request)

    def fetch_kv(self, request: RequestState) -> None:
        """The request has its blocks: ask the prefill worker for all but those that the prefix cache gave."""
        first_block = request.num_cached_tokens // self._requests.block_size
        self.counters["kv_transfer_blocks_avoided_total"] += first_block
        message = FetchKV(*request.key, first_block=first_block, consumer=self._address)
        self._mail.to_worker(self._imports[request.key].source, message)

    def kv_published(self, message: KVPublished) -> None:
        key = RequestKey(message.request_id, message.attempt)
        request = self._engine.scheduler.get(key)
        if request is not None and key in self._imports:
            try:
                self._fetch(request, message)
            except (TransferError, ValueError) as error:
                self.counters["kv_transfer_failures_total"] += 1
                self._give_up(key, f"KV of the prompt did not arrive: {error}")
        self._mail.to_worker(message.handle.owner, LeaseReleased(message.handle.lease_id))

    def _fetch(self, request: RequestState, message: KVPublished) -> None:
        handle, started_s = message.handle, self._clock.now()
        blocks = request.block_table[handle.first_block : handle.first_block + len(handle.blocks)]
        fetch_blocks(self._memory, handle, blocks)
        self.counters["kv_transfer_blocks_total"] += len(blocks)
        self.counters["kv_transfer_bytes_total"] += sum(r.num_bytes for r in handle.blocks)
        self.counters["kv_transfer_time_seconds_total"] += self._clock.now() - started_s
        self._engine.kv_arrived(request, message.num_tokens, message.first_token_id)
        self._imports[request.key].arrived_s = self._clock.now()

    def kv_refused(self, message: KVRefused) -> None:
        self._give_up(RequestKey(message.request_id, message.attempt), message.message)

    def _give_up(self, key: RequestKey, reason: str) -> None:
        request = self._engine.scheduler.get(key)
        if request is not None:
            self._engine.end(request, FinishReason.ERROR)
            self.drop(key)
            self._mail.to_router(AttemptFailed(*key, message=reason, retryable=True))

    def timing_of_first_token(self, key: RequestKey, now: float) -> DecodeTiming | None:
        """Set for the first token that a request gets here after its KV arrived."""
        arrival = self._imports.pop(key, None)
        if arrival is None:
            return None
        return DecodeTiming(arrival.arrived_s - arrival.started_s, now - arrival.arrived_s)

    def after_step(self, result: StepResult) -> None:
        for request in result.admitted_for_kv:
            self.fetch_kv(request)

    def drop(self, key: RequestKey) -> None:
        self._imports.pop(key, None)
