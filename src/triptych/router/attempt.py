"""One attempt at a request: carries a plan out, message by message, until its last token or until a worker is lost.

The router holds one per running request and feeds it from the mailbox. A lost encode worker is mended here, by
encoding its open items elsewhere; a lost prefill or decode worker ends the attempt, and the router plans a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import NamedTuple

from triptych import messages
from triptych.errors import (
    BadRequestError,
    DeadlineExceededError,
    EngineError,
    GrammarError,
    MediaError,
    WorkerLostError,
)
from triptych.messages import EncodeSource, Refusal, RequestMessage, TokenOutput
from triptych.router.checks import why_impossible
from triptych.router.encode_queue import EncodeJob
from triptych.router.marks import RequestMarks
from triptych.router.parts import RouterParts
from triptych.router.plan import Plan
from triptych.router.registry import RegisteredWorker
from triptych.types import MediaItem, Prompt, PromptItem, Request, SamplingParams, Stage, WorkerAddress


class FromWorker(NamedTuple):
    sender: str
    message: RequestMessage | TokenOutput


class Lost(NamedTuple):
    """A worker's life ended."""

    address: WorkerAddress


class Cut(NamedTuple):
    """Two workers, by name, lost their connection: what one sent to the other may not arrive."""

    name: str
    other: str


class _Late(NamedTuple):
    """The request's time is over."""


class _OpenItem(NamedTuple):
    """An item that was demanded and that its consumer does not hold yet."""

    encoder: RegisteredWorker | None  # None: it waits for one
    consumer: RegisteredWorker


class Attempt:
    def __init__(
        self,
        number: int,
        request: Request,
        prompt: Prompt,
        media: Mapping[str, MediaItem],
        plan: Plan,
        parts: RouterParts,
        marks: RequestMarks,
        deadline_s: float,
    ) -> None:
        self.number = number
        self.request_id = request.request_id
        self._key = (request.request_id, number)
        self.plan = plan
        self.num_cached_tokens = 0
        self._request = request
        self._prompt = prompt
        self._media = media
        self._registry = parts.registry
        self._encodes = parts.encodes
        self._prefixes = parts.prefixes
        self._mailbox = parts.mailbox
        self._metrics = parts.metrics
        self._marks = marks
        self._clock = parts.clock
        self._deadline_s = deadline_s
        self._max_encodes = parts.config.max_attempts
        self._eager = parts.eager_encode
        self._inbox: asyncio.Queue[FromWorker | Lost | Cut | _Late] = asyncio.Queue()
        self._failures: dict[str, list[str]] = {}  # by item: the encode workers that failed it
        self._open: dict[str, _OpenItem] = {}
        self._involved: dict[str, WorkerAddress] = {}  # by epoch: everyone who may hold something of this attempt
        self._charged: list[RegisteredWorker] = []  # those that count this attempt among their requests
        self._num_kv_tokens = 0  # that each of these has of this attempt
        self._num_uncomputed_tokens = 0  # that the prefill worker's load has of this attempt
        self._early: dict[int, TokenOutput] = {}  # by index: outputs that overtook an earlier one
        self._decode_began = False

    def deliver(self, event: FromWorker | Lost | Cut) -> None:
        self._inbox.put_nowait(event)

    # -- the way through the plan --------------------------------------------------------------------------------------

    async def run(self, output_ids: list[int]) -> AsyncGenerator[TokenOutput, None]:
        """Submit, then tokens as they come. `output_ids` are those of earlier attempts.

        Raises WorkerLostError when the attempt must be planned anew; MediaError, GrammarError, EngineError,
        DeadlineExceededError.
        """
        self._num_kv_tokens = len(self._prompt.token_ids) + len(output_ids)
        self._require_plan()
        self._submit(output_ids)
        self._demand_new_items()
        next_index = len(output_ids)
        # One timer, and no timeout around each wait: that would cost every token.
        left_s = self._deadline_s - self._clock.now()
        deadline = asyncio.get_running_loop().call_later(left_s, self._inbox.put_nowait, _Late())
        try:
            while True:
                self._take(await self._inbox.get(), output_ids)
                while (output := self._early.pop(next_index, None)) is not None:
                    next_index += len(output.token_ids)
                    self._prefilled()
                    self._grow(len(output.token_ids))
                    if output.decode is not None and not self._decode_began:
                        self._decode_began = True
                        self._registry.reached(self.plan.prefill.name, self.plan.decode.name)
                    yield output
                    if output.finish_reason is not None:
                        return
        finally:
            deadline.cancel()

    def _take(self, event: FromWorker | Lost | Cut | _Late, output_ids: list[int]) -> None:
        match event:
            case FromWorker(sender, message):
                self._require_possible(event)
                if isinstance(message, TokenOutput):
                    self._early[message.index] = message
                else:
                    self._on_message(sender, message, output_ids)
            case Lost(address):
                self._on_lost(address)
            case Cut():
                self._on_cut(event)
            case _Late():
                raise DeadlineExceededError("the request did not end within its deadline")

    def _require_possible(self, event: FromWorker) -> None:
        """Raises EngineError for what no worker of this build says."""
        sender, message = event
        if reason := why_impossible(message, self._media, self._num_kv_tokens):
            raise EngineError(f"{sender} sent {type(message).__name__} that cannot be: {reason}")

    def _require_plan(self) -> None:
        """A worker may be lost between the plan and now; of that `deliver` told nobody, and nobody else will."""
        for worker in (self.plan.prefill, self.plan.decode):
            if self._registry.find(worker.name, worker.address.epoch) is None:
                raise WorkerLostError(f"{worker.name} was lost before the attempt began")

    def _submit(self, output_ids: list[int]) -> None:
        message = messages.Prefill(
            *self._prompt_fields(output_ids),
            decode_elsewhere=self.plan.decode_elsewhere,
            has_siblings=self._request.n > 1,
        )
        self._charge(self.plan.prefill)
        self._prefixes.expect(self.plan.prefill.address.epoch, self.plan.prefix)
        self._discharge_tokens(-len(message.token_ids))
        self._send(self.plan.prefill, message)

    def _start_decode(self, output_ids: list[int]) -> None:
        message = messages.Decode(*self._prompt_fields(output_ids), source=self.plan.prefill.address)
        self._charge(self.plan.decode)
        self._marks.decode_sent()
        self._send(self.plan.decode, message)

    def _prompt_fields(
        self, output_ids: list[int]
    ) -> tuple[str, int, list[int], int, list[PromptItem], SamplingParams, str, int]:
        """Of `messages.PromptMessage`, in its order."""
        request, token_ids = self._request, self._prompt.token_ids + output_ids
        numbers = (request.request_id, self.number, token_ids, len(output_ids))
        return (*numbers, self._prompt.items, request.sampling, request.cache_salt, request.priority)

    def _on_message(self, sender: str, message: RequestMessage, output_ids: list[int]) -> None:
        match message:
            case messages.Accepted():
                self._on_accepted(message, output_ids)
            case messages.Refused():
                if message.reason is Refusal.DRAINING:
                    self._leaves(sender)
                if message.reason.retryable:
                    raise WorkerLostError(f"{sender} refused the request: {message.message}")
                if message.reason is Refusal.INVALID:  # of our own making
                    raise EngineError(f"{sender} refused the request: {message.message}")
                raise BadRequestError(message.message)
            case messages.EmbeddingsNeeded():
                self._on_embeddings_needed(sender, message.mm_hashes)
            case messages.ItemEncoded():
                self._marks.item_encoded(message, sender)
                self._on_item_encoded(sender, message)
                if message.source is not EncodeSource.FORWARD:
                    self._metrics.encode_avoided(message.source)
            case messages.ItemFailed():
                self._on_item_failed(sender, message)
            case messages.ItemLost():
                self._registry.cut(sender, message.owner)
                self._on_item_lost(message.mm_hash, message.owner, sender, message.message)
            case messages.ItemHeld():
                self._on_item_held(sender, message)
            case messages.AttemptFailed(bad_grammar=True):
                structure = self._request.structure
                raise GrammarError(message.message, param=structure.param if structure is not None else "tools")
            case messages.AttemptFailed():
                kind = WorkerLostError if message.retryable else EngineError
                raise kind(message.message)
            case _:
                raise EngineError(f"{sender} sent the router a {type(message).__name__}")

    def _leaves(self, name: str) -> None:
        """It will not take the next attempt either; its heartbeat would say so only later."""
        for worker in (self.plan.prefill, self.plan.decode):
            worker.draining |= worker.name == name

    def _on_accepted(self, message: messages.Accepted, output_ids: list[int]) -> None:
        self.num_cached_tokens = message.num_cached_tokens
        self._discharge_tokens(message.num_cached_tokens)
        self._demand([mm_hash for mm_hash in message.needed if mm_hash not in self._open], self.plan.prefill)
        for mm_hash in self._media.keys() - set(message.needed):
            ends = [item.placeholder.end for item in self._prompt.items if item.mm_hash == mm_hash]
            covered = max(ends) <= message.num_cached_tokens
            self._metrics.encode_avoided("prefix_cache" if covered else "embedding_cache")
        if self.plan.decode_elsewhere:
            self._start_decode(output_ids)

    # -- encoding ------------------------------------------------------------------------------------------------------

    def _demand_new_items(self) -> None:
        """What no worker ever encoded, nobody can hold: it need not wait for the prefill worker's answer.

        All of them where that is to be measured (`encode.demand`).
        """
        is_wanted = (lambda mm_hash: True) if self._eager else self._encodes.is_new
        self._demand([mm_hash for mm_hash in self._media if is_wanted(mm_hash)], self.plan.prefill)

    def _demand(self, mm_hashes: Iterable[str], consumer: RegisteredWorker) -> None:
        """Raises NoCapacityError where nobody is left who could encode."""
        jobs = []
        for mm_hash in mm_hashes:
            self._open[mm_hash] = _OpenItem(None, consumer)
            self._marks.item_demanded(mm_hash)
            jobs.append(self._encode_job(mm_hash, consumer))
        if jobs:
            self._registry.require(Stage.ENCODE)
            self._encodes.demand(jobs)

    def _on_embeddings_needed(self, sender: str, mm_hashes: Iterable[str]) -> None:
        """An item that was on its way to the sender already did not arrive: its encode worker failed it."""
        consumer = self.plan.prefill if sender == self.plan.prefill.name else self.plan.decode
        for mm_hash in mm_hashes:
            item = self._open.get(mm_hash)
            if item is not None and item.encoder is not None and item.consumer is consumer:
                self._encode_elsewhere(mm_hash, item.encoder.name, f"its embedding did not arrive at {sender}")
            else:
                self._demand([mm_hash], consumer)

    def _encode_job(self, mm_hash: str, consumer: RegisteredWorker) -> EncodeJob:
        return EncodeJob(
            key=self._key,
            mm_hash=mm_hash,
            num_embeds=self._media[mm_hash].metadata.num_embeds,
            consumer=consumer.name,
            avoid=[*self._failures.get(mm_hash, ()), *self._registry.cut_off_from(consumer.name)],
            start=lambda encoder: self._encode_at(encoder, mm_hash, consumer),
            prompt_tokens=lambda: self._num_uncomputed_tokens if consumer is self.plan.prefill else 0,
            priority=self._request.priority,
        )

    def _encode_at(self, encoder: RegisteredWorker, mm_hash: str, consumer: RegisteredWorker) -> None:
        """Bring the item to the encode worker that was chosen for it, and say for whom."""
        item = self._media[mm_hash]
        self._open[mm_hash] = _OpenItem(encoder, consumer)
        self._marks.item_given(mm_hash, encoder.name)
        to_encode = messages.ItemToEncode(item.modality, item.mm_hash, item.content, item.metadata, item.decoding)
        self._send(encoder, messages.PrepareItems(*self._key, [to_encode]))
        self._send(encoder, messages.EncodeItems(*self._key, [mm_hash], consumer.address))

    def _encode_elsewhere(self, mm_hash: str, failed: str, reason: str) -> None:
        """Demand an open item again, from another encode worker where there is one."""
        failures = self._failures.setdefault(mm_hash, [])
        failures.append(failed)
        if len(failures) > self._max_encodes:
            raise EngineError(f"an image could not be encoded: {reason}")
        self._encodes.failed(mm_hash, self._key)
        self._demand([mm_hash], self._open[mm_hash].consumer)

    def _on_item_encoded(self, sender: str, message: messages.ItemEncoded) -> None:
        encoder = self._open[message.mm_hash].encoder if message.mm_hash in self._open else None
        if encoder is not None and encoder.name == sender:
            self._encodes.encoded(message.mm_hash, encoder)

    def _on_item_held(self, sender: str, message: messages.ItemHeld) -> None:
        self._marks.item_held(message.mm_hash)
        item = self._open.get(message.mm_hash)
        if item is not None and item.consumer.name == sender:
            del self._open[message.mm_hash]
            if item.encoder is not None:
                self._registry.reached(item.encoder.name, sender)
                # The consumer's word can overtake the encode worker's `ItemEncoded`.
                self._encodes.encoded(message.mm_hash, item.encoder)

    def _on_item_failed(self, sender: str, message: messages.ItemFailed) -> None:
        if message.bad_media:
            raise MediaError(message.message, param=self._media[message.mm_hash].param)
        if message.mm_hash in self._open:
            self._encode_elsewhere(message.mm_hash, sender, message.message)

    def _on_item_lost(self, mm_hash: str, encoder: str, consumer: str, reason: str) -> None:
        """The consumer does not get it from there. It may be on its way from elsewhere already."""
        item = self._open.get(mm_hash)
        if item is None or item.encoder is None:
            return
        if (item.encoder.name, item.consumer.name) == (encoder, consumer):
            self._encode_elsewhere(mm_hash, encoder, reason)

    def _on_cut(self, cut: Cut) -> None:
        """Raises WorkerLostError when KV was to go between the two."""
        reason = f"{cut.name} and {cut.other} cannot reach each other"
        if {self.plan.prefill.name, self.plan.decode.name} == set(cut) and not self._decode_began:
            raise WorkerLostError(reason)
        for mm_hash in list(self._open):
            self._on_item_lost(mm_hash, cut.name, cut.other, reason)
            self._on_item_lost(mm_hash, cut.other, cut.name, reason)

    def _on_lost(self, address: WorkerAddress) -> None:
        """Raises WorkerLostError when the plan cannot go on without the worker."""
        if address.epoch in (self.plan.decode.address.epoch, self.plan.prefill.address.epoch) and self._needs(address):
            raise WorkerLostError(f"{address.name} was lost")
        for mm_hash, item in list(self._open.items()):
            if item.encoder is not None and item.encoder.address.epoch == address.epoch:
                self._encode_elsewhere(mm_hash, address.name, f"{address.name} was lost")
            elif item.encoder is None:
                self._registry.require(Stage.ENCODE)

    def _needs(self, address: WorkerAddress) -> bool:
        """The prefill worker is done with the request once a token of the decode worker has followed its own."""
        return address.epoch == self.plan.decode.address.epoch or not self._decode_began

    # -- book-keeping --------------------------------------------------------------------------------------------------

    def _send(self, worker: RegisteredWorker, message: messages.Body) -> None:
        self._involved[worker.address.epoch] = worker.address
        self._mailbox.send(worker.address, message)

    def _charge(self, worker: RegisteredWorker) -> None:
        worker.num_inflight_requests += 1
        worker.num_kv_tokens += self._num_kv_tokens
        self._charged.append(worker)

    def _grow(self, num_tokens: int) -> None:
        self._num_kv_tokens += num_tokens
        for worker in self._charged:
            worker.num_kv_tokens += num_tokens

    def _prefilled(self) -> None:
        """The first token has come: its prompt is no load any more."""
        if self._num_uncomputed_tokens:
            self._discharge_tokens(self._num_uncomputed_tokens)
            self._encodes.pump()

    def _discharge_tokens(self, num_tokens: int) -> None:
        self.plan.prefill.num_inflight_tokens -= num_tokens
        self._num_uncomputed_tokens -= num_tokens

    def close(self) -> None:
        """Free what every worker still holds of this attempt; harmless where that is nothing."""
        self._discharge_tokens(self._num_uncomputed_tokens)  # first, for encodes are planned with what is left
        self._encodes.cancel(self._key)
        for address in self._involved.values():
            if self._registry.find(address.name, address.epoch) is not None:
                self._mailbox.send(address, messages.Cancel(*self._key))
        for worker in self._charged:
            worker.num_inflight_requests -= 1
            worker.num_kv_tokens -= self._num_kv_tokens
        if self._charged:  # it was submitted
            self._prefixes.settle(self.plan.prefill.address.epoch, self.plan.prefix)
        self._charged.clear()
