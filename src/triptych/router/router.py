"""The router: every request's way from its media's headers to its last token, on one page in `Router.handle`.

Runs in the API process's event loop. It never decodes a pixel and computes no tensor; it keeps each request's media
until the request ends, so that any lost worker can be replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from triptych import messages
from triptych.clock import Clock, MonotonicClock
from triptych.config import Config
from triptych.errors import (
    BadRequestError,
    MediaError,
    NoCapacityError,
    OverloadedError,
    TriptychError,
    WorkerLostError,
)
from triptych.media.fetch import MediaFetcher
from triptych.media.hash import mm_hash
from triptych.media.probe import probe_image
from triptych.observe.metrics import Metrics
from triptych.prompt.detokenize import IncrementalDetokenizer
from triptych.prompt.layout import PromptBuilder, num_characters
from triptych.router.attempt import Attempt, FromWorker, Lost
from triptych.router.client import RouterMailbox
from triptych.router.encode_queue import EncodeQueue
from triptych.router.health import Probes
from triptych.router.marks import RequestMarks
from triptych.router.output import RequestOutput
from triptych.router.plan import Plan, make_plan
from triptych.router.registry import Registry
from triptych.types import (
    Event,
    Finished,
    ImageInput,
    MediaItem,
    Modality,
    Prompt,
    Request,
    Stage,
    Usage,
    WorkerAddress,
)

logger = logging.getLogger(__name__)

SWEEP_S = 0.25
MOST_CHARACTERS_A_TOKEN = 16  # on the average of a whole prompt; prose has four or five


class Router:
    """`fingerprint` covers the model's weights, processor and dtype; `max_model_len` is what the model allows."""

    def __init__(
        self,
        config: Config,
        builder: PromptBuilder,
        fingerprint: str,
        model_name: str,
        max_model_len: int,
        mailbox: RouterMailbox,
        metrics: Metrics,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._builder = builder
        self._fingerprint = fingerprint
        self._mailbox = mailbox
        self._metrics = metrics
        self._clock = clock or MonotonicClock()
        self._fetcher = MediaFetcher(config.media)
        self._attempts: dict[tuple[str, int], Attempt] = {}
        self._joined = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.model_name = model_name
        self._model_limit = max_model_len
        self.registry = Registry(
            messages.version_hash(fingerprint, config.engine.block_size),
            config.router.heartbeat_ttl_s,
            self._clock,
            self._worker_lost,
            self._worker_joined,
        )
        self.encodes = EncodeQueue(self.registry, config.encode.order, config.encode.window_embeds)
        self._probes = Probes(self.registry, mailbox, config.router)
        self.num_running = 0
        self.closing = False  # admission is over; what runs may end

    async def start(self) -> None:
        self._mailbox.start(self._on_envelope)
        self._tasks = [
            asyncio.create_task(self._sweep(), name="router-sweep"),
            asyncio.create_task(self._probes.run(), name="router-probes"),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fetcher.close()
        await self._mailbox.close()

    # -- a request -----------------------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> AsyncGenerator[Event, None]:
        """`TextDelta`s, then one `Finished`; or a TriptychError. Closing it cancels the request in every stage."""
        marks = RequestMarks(request.request_id, self._clock)
        self._metrics.request_started()
        self.num_running += 1
        try:
            self._admit()
            with marks.fetch():
                media = await self._fetch(request.images)
            with marks.plan():
                prompt = self._lay_out(request, media)
                request = self._bound_output(request, prompt)
                plan = make_plan(prompt, request.cache_salt, self.registry)
            async with aclosing(self._run(request, prompt, media, plan, marks)) as events:
                async for event in events:
                    yield event
        except TriptychError as error:
            if isinstance(error, MediaError) and error.param is None:
                error.param = "messages"
            marks.failed(error)
            self._metrics.failed(error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if marks.cancelled():
                self._metrics.cancelled()
            raise
        finally:
            self.num_running -= 1
            self._metrics.request_ended()
            marks.log()

    def _admit(self) -> None:
        """Before any work on media. Raises OverloadedError."""
        if self.closing:
            raise OverloadedError("the server is shutting down")
        limit = self._config.router.max_num_requests
        if self.num_running > limit:  # this one counts already
            raise OverloadedError(f"{limit} requests are in flight, the limit; ask again")
        for stage in (Stage.PREFILL, Stage.DECODE):
            self.registry.require(stage)

    async def _fetch(self, images: list[ImageInput]) -> list[MediaItem]:
        """Fetch all images at once; metadata and identity from their headers and bytes."""
        limit = self._config.media.max_images
        if len(images) > limit:
            raise BadRequestError(f"the request has {len(images)} images, the limit is {limit}", param="messages")
        tasks = [asyncio.create_task(self._fetcher.fetch(image.url)) for image in images]
        try:
            contents = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if not images:
            return []
        # On a thread: hashing tens of megabytes would hold up every other request's tokens.
        return await asyncio.to_thread(lambda: [self._media_item(*pair) for pair in zip(images, contents, strict=True)])

    def _media_item(self, image: ImageInput, content: bytes) -> MediaItem:
        size = probe_image(content, self._config.media)
        options = f"background={self._config.media.background}"
        identity = mm_hash(content, Modality.IMAGE, options, self._fingerprint, image.uuid)
        return MediaItem(Modality.IMAGE, identity, content, self._builder.layout.image_metadata(size))

    def _lay_out(self, request: Request, media: list[MediaItem]) -> Prompt:
        """Raises BadRequestError for text that cannot fit, before it is tokenized: that would hold up everybody."""
        length, limit = num_characters([request.messages, request.template_kwargs]), self.max_model_len
        if length > MOST_CHARACTERS_A_TOKEN * limit:
            raise BadRequestError(
                f"the messages have {length} characters, more than fit into the model's limit of {limit} tokens",
                param="messages",
            )
        return self._builder.build(
            request.messages,
            media,
            add_generation_prompt=request.add_generation_prompt,
            template_kwargs=request.template_kwargs,
        )

    def _bound_output(self, request: Request, prompt: Prompt) -> Request:
        """Set max_tokens to what was asked for or what fits. Raises BadRequestError where that is impossible."""
        room = self.max_model_len - len(prompt.token_ids)
        if room < 1:
            raise BadRequestError(
                f"the prompt has {len(prompt.token_ids)} tokens, the model's limit is {self.max_model_len}",
                param="messages",
            )
        if request.max_tokens is not None and request.max_tokens > room:
            raise BadRequestError(
                f"{len(prompt.token_ids)} prompt tokens and max_tokens={request.max_tokens} exceed the model's limit "
                f"of {self.max_model_len}",
                param="max_tokens",
            )
        sampling = msgspec.structs.replace(request.sampling, max_tokens=request.max_tokens or room)
        return msgspec.structs.replace(request, sampling=sampling)

    async def _run(
        self, request: Request, prompt: Prompt, media: list[MediaItem], plan: Plan, marks: RequestMarks
    ) -> AsyncGenerator[Event, None]:
        """Carry the plan out; after the loss of a worker, plan anew from the tokens so far."""
        output = RequestOutput(request, self._detokenizer(request))
        by_hash = {item.mm_hash: item for item in media}
        deadline_s = marks.arrived_s + self._config.router.deadline_s
        num_cached_tokens: int | None = None
        for number in range(self._config.router.max_attempts):
            attempt = Attempt(
                number, request, prompt, by_hash, plan, self.registry, self.encodes, self._mailbox, self._metrics,
                marks, self._clock, deadline_s, self._config.router.max_attempts,
            )  # fmt: skip
            marks.planned(plan, len(by_hash))
            try:
                async with aclosing(self._tokens(attempt, output.token_ids)) as tokens:
                    async for token in tokens:
                        delta = output.push(token)
                        marks.token(token)
                        self._metrics_of_token(marks, len(output.token_ids))
                        yield delta
                        if output.finish_reason is not None:
                            break
            except (WorkerLostError, NoCapacityError) as error:
                logger.warning("request_id=%s attempt=%d ended: %s", request.request_id, number, error)
                if number + 1 == self._config.router.max_attempts:
                    raise
            num_cached_tokens = attempt.num_cached_tokens if num_cached_tokens is None else num_cached_tokens
            if output.finish_reason is not None:
                break
            plan = await self._plan_anew(request, prompt, deadline_s)
        yield self._finish(prompt, media, output, num_cached_tokens or 0, marks)

    def _detokenizer(self, request: Request) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(
            self._builder.tokenizer,
            skip_special_tokens=request.skip_special_tokens,
            stop=request.stop,
            include_stop_str=request.include_stop_str_in_output,
        )

    async def _tokens(self, attempt: Attempt, output_ids: list[int]) -> AsyncGenerator[messages.TokenOutput, None]:
        key = (attempt.request_id, attempt.number)
        self._attempts[key] = attempt
        try:
            async with aclosing(attempt.run(list(output_ids))) as tokens:
                async for token in tokens:
                    yield token
        finally:
            del self._attempts[key]
            attempt.close()

    async def _plan_anew(self, request: Request, prompt: Prompt, deadline_s: float) -> Plan:
        """A plan over the workers that are left, or over one that is started again within the time for that."""
        give_up_s = min(self._clock.now() + self._config.router.capacity_wait_s, deadline_s)
        while True:
            try:
                return make_plan(prompt, request.cache_salt, self.registry)
            except NoCapacityError:
                left_s = give_up_s - self._clock.now()
                if left_s <= 0:
                    raise
                self._joined.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._joined.wait()

    def _metrics_of_token(self, marks: RequestMarks, num_output_tokens: int) -> None:
        if num_output_tokens == 1:
            self._metrics.first_token(marks.ttft_s)
        else:
            self._metrics.inter_token(marks.gap_s)

    def _finish(
        self, prompt: Prompt, media: list[MediaItem], output: RequestOutput, num_cached_tokens: int, marks: RequestMarks
    ) -> Finished:
        assert output.finish_reason is not None, "only a finished output gets here"
        usage = Usage(
            prompt_tokens=len(prompt.token_ids),
            completion_tokens=len(output.token_ids),
            cached_tokens=num_cached_tokens,
            image_tokens=sum(item.placeholder.length for item in prompt.items),
        )
        timing = marks.finished(output.finish_reason, usage)
        self._metrics.finished(usage, output.finish_reason, timing)
        return Finished(output.finish_reason, output.stop_reason, usage, timing)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _on_envelope(self, envelope: messages.Envelope) -> None:
        """Deliver to the attempt that it is about; what is late, or of a worker's earlier life, is dropped."""
        if self.registry.find(envelope.sender, envelope.epoch) is None:
            return
        body = envelope.body
        if isinstance(body, messages.StepOutput):
            for output in body.outputs:
                self._deliver(envelope.sender, output)
        elif isinstance(body, messages.Probed):
            self._probes.answered(envelope.sender, body)
        elif isinstance(body, messages.RequestMessage):
            self._deliver(envelope.sender, body)

    def _deliver(self, sender: str, message: messages.RequestMessage | messages.TokenOutput) -> None:
        attempt = self._attempts.get((message.request_id, message.attempt))
        if attempt is not None:
            attempt.deliver(FromWorker(sender, message))

    def _worker_joined(self) -> None:
        self._joined.set()
        self.encodes.pump()

    def _worker_lost(self, address: WorkerAddress) -> None:
        self._mailbox.forget(address)
        for worker in self.registry.workers():
            self._mailbox.send(worker.address, messages.PeerLost(address.name, address.epoch))
        self._probes.lost(address)
        for attempt in self._attempts.values():
            attempt.deliver(Lost(address))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.registry.sweep()
            self.encodes.pump()  # a worker may have passed its probe again

    def drain(self, name: str) -> bool:
        """Tell a worker to finish what it has and leave; it gets nothing new. False: there is none of this name."""
        worker = next((worker for worker in self.registry.workers() if worker.name == name), None)
        if worker is not None:
            worker.draining = True
            self._mailbox.send(worker.address, messages.Drain())
        return worker is not None

    @property
    def max_model_len(self) -> int:
        """What the model allows and every worker's KV blocks hold, in tokens."""
        return min([self._model_limit, *(worker.info.max_model_len for worker in self.registry.workers())])

    def ready(self) -> bool:
        """Every stage has a live worker."""
        return not self.closing and all(self.registry.live(stage) for stage in Stage)

    async def health(self) -> dict[str, str]:
        """Probe every worker with real work: "" or what is wrong, by worker name."""
        return await self._probes.probe_all()
