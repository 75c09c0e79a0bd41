"""One attempt at a request: carries a plan out, message by message, until its last token or until a worker is lost.

The router holds one per running request and feeds it from the mailbox. A lost encode worker is mended here, by
encoding its open items elsewhere; a lost prefill or decode worker ends the attempt, and the router plans a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import NamedTuple

from triptych import messages
from triptych.clock import Clock
from triptych.errors import (
    BadRequestError,
    DeadlineExceededError,
    EngineError,
    MediaError,
    WorkerLostError,
)
from triptych.messages import EncodeSource, RequestMessage, TokenOutput
from triptych.observe.metrics import Metrics
from triptych.router.client import RouterMailbox
from triptych.router.marks import RequestMarks
from triptych.router.plan import Plan, choose_encoder
from triptych.router.registry import RegisteredWorker, Registry
from triptych.types import MediaItem, Prompt, PromptItem, Request, SamplingParams, WorkerAddress


class FromWorker(NamedTuple):
    sender: str
    message: RequestMessage | TokenOutput


class Lost(NamedTuple):
    """A worker's life ended."""

    address: WorkerAddress


class _OpenItem(NamedTuple):
    """An item that was demanded and that its consumer does not hold yet."""

    encoder: RegisteredWorker
    consumer: RegisteredWorker


class _Charge(NamedTuple):
    """What this attempt counts for in a worker's load."""

    worker: RegisteredWorker
    num_requests: int
    num_embeds: int


class Attempt:
    def __init__(
        self,
        number: int,
        request: Request,
        prompt: Prompt,
        media: Mapping[str, MediaItem],
        plan: Plan,
        registry: Registry,
        mailbox: RouterMailbox,
        metrics: Metrics,
        marks: RequestMarks,
        clock: Clock,
        deadline_s: float,
        max_encodes: int,
    ) -> None:
        self.number = number
        self.request_id = request.request_id
        self.plan = plan
        self.num_cached_tokens = 0
        self._request = request
        self._prompt = prompt
        self._media = media
        self._registry = registry
        self._mailbox = mailbox
        self._metrics = metrics
        self._marks = marks
        self._clock = clock
        self._deadline_s = deadline_s
        self._max_encodes = max_encodes
        self._inbox: asyncio.Queue[FromWorker | Lost] = asyncio.Queue()
        self._encoders = dict(plan.encoders)  # who prepares which item; changes when an encoder is lost
        self._failures: dict[str, list[str]] = {}  # by item: the encode workers that failed it
        self._open: dict[str, _OpenItem] = {}
        self._involved: dict[str, WorkerAddress] = {}  # by epoch: everyone who may hold something of this attempt
        self._charges: list[_Charge] = []
        self._early: dict[int, TokenOutput] = {}  # by index: outputs that overtook an earlier one
        self._decode_began = False

    def deliver(self, event: FromWorker | Lost) -> None:
        self._inbox.put_nowait(event)

    # -- the way through the plan --------------------------------------------------------------------------------------

    async def run(self, output_ids: list[int]) -> AsyncGenerator[TokenOutput, None]:
        """Submit, then tokens as they come. `output_ids` are those of earlier attempts.

        Raises WorkerLostError when the attempt must be planned anew, MediaError, EngineError, DeadlineExceededError.
        """
        self._prepare_items()
        self._submit(output_ids)
        next_index = len(output_ids)
        while True:
            event = await self._next_event()
            if isinstance(event, Lost):
                self._on_lost(event.address)
            elif isinstance(event.message, TokenOutput):
                self._early[event.message.index] = event.message
            else:
                self._on_message(event.sender, event.message, output_ids)
            while (output := self._early.pop(next_index, None)) is not None:
                next_index += len(output.token_ids)
                self._decode_began |= output.decode is not None
                yield output
                if output.finish_reason is not None:
                    return

    async def _next_event(self) -> FromWorker | Lost:
        left_s = self._deadline_s - self._clock.now()
        try:
            # Not wait_for: in Python 3.11 it swallows a cancel that comes together with a message.
            async with asyncio.timeout(left_s):
                return await self._inbox.get()
        except TimeoutError:
            raise DeadlineExceededError("the request did not end within its deadline") from None

    def _submit(self, output_ids: list[int]) -> None:
        message = messages.Prefill(*self._prompt_fields(output_ids), decode_elsewhere=self.plan.decode_elsewhere)
        self._charge(self.plan.prefill, num_requests=1)
        self._send(self.plan.prefill, message)

    def _start_decode(self, output_ids: list[int]) -> None:
        message = messages.Decode(*self._prompt_fields(output_ids), source=self.plan.prefill.address)
        self._charge(self.plan.decode, num_requests=1)
        self._marks.decode_sent()
        self._send(self.plan.decode, message)

    def _prompt_fields(
        self, output_ids: list[int]
    ) -> tuple[str, int, list[int], int, list[PromptItem], SamplingParams, str]:
        """Of `messages.PromptMessage`, in its order."""
        request, token_ids = self._request, self._prompt.token_ids + output_ids
        numbers = (request.request_id, self.number, token_ids, len(output_ids))
        return (*numbers, self._prompt.items, request.sampling, request.cache_salt)

    def _on_message(self, sender: str, message: RequestMessage, output_ids: list[int]) -> None:
        match message:
            case messages.Accepted():
                self._on_accepted(message, output_ids)
            case messages.Refused():
                if message.reason.retryable:
                    raise WorkerLostError(f"{sender} refused the request: {message.message}")
                raise BadRequestError(message.message)
            case messages.EmbeddingsNeeded():
                consumer = self.plan.prefill if sender == self.plan.prefill.name else self.plan.decode
                self._demand(message.mm_hashes, consumer)
            case messages.ItemEncoded():
                self._marks.item_encoded(message, sender)
                if message.source is not EncodeSource.FORWARD:
                    self._metrics.encode_avoided(message.source)
            case messages.ItemFailed():
                self._on_item_failed(sender, message)
            case messages.ItemHeld():
                self._on_item_held(sender, message)
            case messages.AttemptFailed():
                kind = WorkerLostError if message.retryable else EngineError
                raise kind(message.message)
            case _:
                raise EngineError(f"{sender} sent the router a {type(message).__name__}")

    def _on_accepted(self, message: messages.Accepted, output_ids: list[int]) -> None:
        self.num_cached_tokens = message.num_cached_tokens
        self._demand(message.needed, self.plan.prefill)
        needed = set(message.needed)
        for mm_hash in self._media:
            if mm_hash not in needed:
                ends = [item.placeholder.end for item in self._prompt.items if item.mm_hash == mm_hash]
                covered = max(ends) <= message.num_cached_tokens
                self._metrics.encode_avoided("prefix_cache" if covered else "embedding_cache")
        if self.plan.decode_elsewhere:
            self._start_decode(output_ids)

    # -- encoding ------------------------------------------------------------------------------------------------------

    def _prepare_items(self) -> None:
        """Give every encode worker its items, so that it decodes and preprocesses them before they are demanded."""
        by_encoder: dict[str, tuple[RegisteredWorker, list[MediaItem]]] = {}
        for mm_hash, encoder in self._encoders.items():
            by_encoder.setdefault(encoder.name, (encoder, []))[1].append(self._media[mm_hash])
        for encoder, its_items in by_encoder.values():
            self._send_items(encoder, its_items)

    def _send_items(self, encoder: RegisteredWorker, items: list[MediaItem]) -> None:
        to_encode = [messages.ItemToEncode(i.modality, i.mm_hash, i.content, i.metadata) for i in items]
        self._charge(encoder, num_embeds=sum(item.metadata.num_embeds for item in items))
        self._send(encoder, messages.PrepareItems(self._request.request_id, self.number, to_encode))

    def _demand(self, mm_hashes: list[str], consumer: RegisteredWorker) -> None:
        by_encoder: dict[str, list[str]] = {}
        for mm_hash in mm_hashes:
            if self._registry.find(self._encoders[mm_hash].name, self._encoders[mm_hash].address.epoch) is None:
                self._move_item(mm_hash)
            self._open[mm_hash] = _OpenItem(self._encoders[mm_hash], consumer)
            self._marks.item_demanded(mm_hash)
            by_encoder.setdefault(self._encoders[mm_hash].name, []).append(mm_hash)
        for hashes in by_encoder.values():
            message = messages.EncodeItems(self._request.request_id, self.number, hashes, consumer.address)
            self._send(self._encoders[hashes[0]], message)

    def _move_item(self, mm_hash: str) -> None:
        """Choose another encode worker and bring it the item."""
        item = self._media[mm_hash]
        self._encoders[mm_hash] = choose_encoder(item, self._registry, {}, frozenset(self._failures.get(mm_hash, ())))
        self._send_items(self._encoders[mm_hash], [item])

    def _encode_elsewhere(self, mm_hash: str, failed: str, reason: str) -> None:
        """Demand an open item again, on another encode worker where there is one."""
        failures = self._failures.setdefault(mm_hash, [])
        failures.append(failed)
        if len(failures) > self._max_encodes:
            raise EngineError(f"an image could not be encoded: {reason}")
        consumer = self._open[mm_hash].consumer
        self._move_item(mm_hash)
        self._demand([mm_hash], consumer)

    def _on_item_held(self, sender: str, message: messages.ItemHeld) -> None:
        self._marks.item_held(message.mm_hash)
        item = self._open.get(message.mm_hash)
        if item is not None and item.consumer.name == sender:
            del self._open[message.mm_hash]

    def _on_item_failed(self, sender: str, message: messages.ItemFailed) -> None:
        if message.bad_media:
            raise MediaError(message.message, param="messages")
        if message.mm_hash in self._open:
            self._encode_elsewhere(message.mm_hash, sender, message.message)

    def _on_lost(self, address: WorkerAddress) -> None:
        """Raises WorkerLostError when the plan cannot go on without the worker."""
        if address.epoch in (self.plan.decode.address.epoch, self.plan.prefill.address.epoch) and self._needs(address):
            raise WorkerLostError(f"{address.name} was lost")
        for mm_hash, item in list(self._open.items()):
            if item.encoder.address.epoch == address.epoch:
                self._encode_elsewhere(mm_hash, address.name, f"{address.name} was lost")

    def _needs(self, address: WorkerAddress) -> bool:
        """The prefill worker is done with the request once a token of the decode worker has followed its own."""
        return address.epoch == self.plan.decode.address.epoch or not self._decode_began

    # -- book-keeping --------------------------------------------------------------------------------------------------

    def _send(self, worker: RegisteredWorker, message: messages.Body) -> None:
        self._involved[worker.address.epoch] = worker.address
        self._mailbox.send(worker.address, message)

    def _charge(self, worker: RegisteredWorker, *, num_requests: int = 0, num_embeds: int = 0) -> None:
        worker.num_inflight_requests += num_requests
        worker.num_inflight_embeds += num_embeds
        self._charges.append(_Charge(worker, num_requests, num_embeds))

    def close(self) -> None:
        """Free what every worker still holds of this attempt; harmless where that is nothing."""
        for address in self._involved.values():
            if self._registry.find(address.name, address.epoch) is not None:
                self._mailbox.send(address, messages.Cancel(self._request.request_id, self.number))
        for worker, num_requests, num_embeds in self._charges:
            worker.num_inflight_requests -= num_requests
            worker.num_inflight_embeds -= num_embeds
        self._charges.clear()
