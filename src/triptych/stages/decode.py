"""The decode stage: fetches a prompt's KV from its prefill worker as it grows, then goes on sampling.

A failed transfer ends the attempt; the router plans the request anew from the tokens that were already sent.
"""

from __future__ import annotations

from triptych.clock import Clock
from triptych.engine.engine import Engine
from triptych.engine.request_state import RequestKey, RequestState
from triptych.errors import LinkError, TransferError
from triptych.handoff.arriving import Arriving
from triptych.handoff.kv import KVMemory, fetch_blocks, skip_blocks
from triptych.messages import (
    AttemptFailed,
    Decode,
    DecodeTiming,
    FetchKV,
    KVHandle,
    KVPublished,
    KVRefused,
    LeaseReleased,
    LinkLost,
    Refused,
)
from triptych.stages.base import Mail
from triptych.stages.checks import require_next_blocks
from triptych.stages.requests import RequestFactory
from triptych.types import WorkerAddress


class _Transfer:
    """Blocks of one message on their way into the blocks of their request."""

    def __init__(self, message: KVPublished, arriving: Arriving[None], handle: KVHandle, now: float) -> None:
        self.message = message
        self.arriving = arriving
        self.handle = handle  # without the blocks that were here already
        self.started_s = now
        self.landed = False


class _Import:
    """The KV of one request on its way from a prefill worker, until the first token that is sampled here."""

    def __init__(self, request: RequestState, source: WorkerAddress, now: float) -> None:
        self.request = request
        self.source = source
        self.started_s = now
        self.arrived_s = now
        self.submitted = False
        self.waiting: list[KVPublished] = []  # leased, and not fetched before the engine has blocks for it
        self.transfers: list[_Transfer] = []  # in the order of their tokens; they may land in another
        self.next_block = 0  # the first that was not published yet
        self.is_complete = False  # the last message, with the first token, has come


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
        key = RequestKey(message.request_id, message.attempt)
        if key in self._imports or self._engine.scheduler.get(key) is not None:
            return  # a second one of the same attempt
        request = self._requests.accept(message, kv_from_elsewhere=True)
        if isinstance(request, Refused):
            self._mail.to_router(request)
            return
        self._imports[request.key] = _Import(request, message.source, self._clock.now())
        fetch = FetchKV(message.request_id, message.attempt, consumer=self._address)
        self._mail.to_worker(message.source, fetch)

    def kv_published(self, message: KVPublished) -> None:
        """Blocks are set aside here only now that the prompt is sure to be finished (`Scheduler.reserve`)."""
        arrival = self._imports.get(RequestKey(message.request_id, message.attempt))
        if arrival is None:
            self._release(message)
            return
        try:
            num_tokens, vocab = len(arrival.request.token_ids), self._requests.vocab
            size, is_complete = self._requests.block_size, arrival.is_complete
            require_next_blocks(message, arrival.next_block, num_tokens, size, vocab, is_complete)
        except ValueError as error:
            self._release(message)
            self._fail(arrival, error)
            return
        arrival.next_block = message.handle.first_block + len(message.handle.blocks)
        arrival.is_complete = message.first_token_id is not None
        arrival.waiting.append(message)
        if not arrival.submitted:
            arrival.submitted = True
            self._engine.submit(arrival.request)
        elif arrival.request.block_table:
            self._fetch_waiting(arrival)

    def fetch_admitted(self, requests: list[RequestState]) -> None:
        """These got their blocks in the step that is over."""
        for request in requests:
            self._fetch_waiting(self._imports[request.key])

    def _fetch_waiting(self, arrival: _Import) -> None:
        """Begin to fetch what is published, now that the request has blocks for it."""
        while arrival.waiting:
            message = arrival.waiting.pop(0)
            try:
                arrival.transfers.append(self._fetch(arrival.request, message))
            except (TransferError, ValueError) as error:
                self._release(message)
                self._fail(arrival, error)
                return
        self._land(arrival)

    def _fetch(self, request: RequestState, message: KVPublished) -> _Transfer:
        num_cached = request.num_cached_tokens // self._requests.block_size
        handle = skip_blocks(message.handle, num_cached)
        blocks = request.block_table[handle.first_block : handle.first_block + len(handle.blocks)]
        return _Transfer(message, fetch_blocks(self._memory, handle, blocks), handle, self._clock.now())

    def land(self) -> bool:
        """Take in what has arrived since the last call; whether anything has."""
        landed = [self._land(arrival) for arrival in list(self._imports.values()) if arrival.transfers]
        return any(landed)

    def _land(self, arrival: _Import) -> bool:
        """Copy what is here to its blocks, and go on in order; a transfer that fails ends the attempt."""
        done = [transfer for transfer in arrival.transfers if transfer.arriving.done and not transfer.landed]
        for transfer in done:
            try:
                transfer.arriving.land()
            except (TransferError, ValueError) as error:
                self._fail(arrival, error)
                return True
            transfer.landed = True
            self._release(transfer.message)
        while arrival.transfers and arrival.transfers[0].landed:
            self._advance(arrival, arrival.transfers.pop(0))
        return bool(done)

    def _advance(self, arrival: _Import, transfer: _Transfer) -> None:
        message, num_blocks = transfer.message, len(transfer.handle.blocks)
        self.counters["kv_transfer_blocks_avoided_total"] += len(message.handle.blocks) - num_blocks
        self.counters["kv_transfer_blocks_total"] += num_blocks
        self.counters["kv_transfer_bytes_total"] += sum(r.num_bytes for r in transfer.handle.blocks)
        self.counters["kv_transfer_time_seconds_total"] += self._clock.now() - transfer.started_s
        self._engine.kv_arrived(arrival.request, message.num_tokens, message.first_token_id)
        arrival.arrived_s = self._clock.now()

    def _fail(self, arrival: _Import, error: Exception) -> None:
        self.counters["kv_transfer_failures_total"] += 1
        if isinstance(error, LinkError):
            source = arrival.source
            self._mail.to_router(LinkLost(source.name, source.epoch))
        self._give_up(arrival.request.key, f"KV of the prompt did not arrive: {error}")

    def _release(self, message: KVPublished) -> None:
        self._mail.to_worker(message.handle.owner, LeaseReleased(message.handle.lease_id))

    def kv_refused(self, message: KVRefused) -> None:
        self._give_up(RequestKey(message.request_id, message.attempt), message.message)

    def _give_up(self, key: RequestKey, reason: str) -> None:
        if key in self._imports:
            self._engine.cancel(key)
            self.drop(key)
            self._mail.to_router(AttemptFailed(*key, message=reason, retryable=True))

    def timing_of_first_token(self, key: RequestKey, now: float) -> DecodeTiming | None:
        """Set for the first token that a request gets here after its KV arrived."""
        arrival = self._imports.pop(key, None)
        if arrival is None:
            return None
        return DecodeTiming(arrival.arrived_s - arrival.started_s, now - arrival.arrived_s)

    def drop(self, key: RequestKey) -> None:
        """Forget the hand-off of a request that ended; what it did not fetch is released."""
        arrival = self._imports.pop(key, None)
        if arrival is None:
            return
        for transfer in arrival.transfers:
            transfer.arriving.close()
            if not transfer.landed:
                self._release(transfer.message)
        for message in arrival.waiting:
            self._release(message)

    def num_live(self) -> int:
        return len(self._imports)
