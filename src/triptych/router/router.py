"""The router: every request's way from its media's headers to its last token, on one page in `Router.handle`.

Runs in the API process's event loop. It never decodes a pixel and computes no tensor; it keeps each request's media
until the request ends, so that any lost worker can be replaced.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing

from triptych import messages
from triptych.clock import Clock, MonotonicClock
from triptych.config import Config
from triptych.errors import OverloadedError, TriptychError
from triptych.observe.metrics import Metrics
from triptych.prompt.detokenize import IncrementalDetokenizer
from triptych.prompt.layout import PromptBuilder
from triptych.prompt.tool_calls import ToolCallParser
from triptych.prompt.vocabulary import Vocabulary
from triptych.router.attempt import Cut, FromWorker, Lost
from triptych.router.choice import Attempts, Choice, run_side_by_side
from triptych.router.client import RouterMailbox
from triptych.router.constraints import call_format, constrain
from triptych.router.encode_queue import EncodeQueue
from triptych.router.health import Probes
from triptych.router.marks import RequestMarks
from triptych.router.media import MediaReader
from triptych.router.output import RequestOutput
from triptych.router.parts import RouterParts
from triptych.router.prefix_index import PrefixIndex
from triptych.router.prompts import bound_output, lay_out, read_by
from triptych.router.registry import RegisteredWorker, Registry
from triptych.types import Event, Finished, MediaItem, Prompt, Request, Stage, Usage, WorkerAddress

logger = logging.getLogger(__name__)

SWEEP_S = 0.25


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
        self._mailbox = mailbox
        self._metrics = metrics
        self._clock = clock or MonotonicClock()
        self._media = MediaReader(config.media, builder.layout, fingerprint)
        self.vocabulary = Vocabulary(builder.tokenizer, builder.vocab_size)
        self._attempts: Attempts = {}
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
        self.encodes = EncodeQueue(self.registry, config.encode)
        self.prefixes = PrefixIndex(config.engine.block_size)
        self._parts = RouterParts(
            config.router, self.registry, self.encodes, self.prefixes, mailbox, metrics, self._clock,
            eager_encode=config.encode.demand == "eager",
        )  # fmt: skip
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
        await self._media.close()
        await self._mailbox.close()

    # -- a request -----------------------------------------------------------------------------------------------------

    async def handle(self, request: Request) -> AsyncGenerator[Event, None]:
        """`Started`, the events of each choice, `Finished`; or a TriptychError. Closing it cancels every stage."""
        marks = RequestMarks(request.request_id, self._clock)
        staged = self._media.staging.open(request.messages_param)
        self._metrics.request_started()
        self.num_running += 1
        try:
            self.admit(self.num_running - 1, request.deadline_s)
            if request.images:
                self.registry.require(Stage.ENCODE)
            with marks.fetch():
                request = await constrain(request, self._builder)  # first: it needs no media
                media = await self._media.read(request, staged)
            with marks.plan():
                prompt = lay_out(self._builder, request, media, self.max_model_len)
                media = read_by(prompt, media)
                request = bound_output(request, prompt, self.max_model_len)
                choices = [self._choice(index, request, prompt, media, marks) for index in range(request.n)]
                plan = await choices[0].next_plan()
            async with aclosing(run_side_by_side(choices, plan)) as events:
                async for event in events:
                    yield event
            yield self._finish(prompt, choices, marks)
        except TriptychError as error:
            marks.failed(error)
            self._metrics.failed(error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if marks.cancelled():
                self._metrics.cancelled()
            raise
        finally:
            staged.close()
            self.num_running -= 1
            self._metrics.request_ended()
            marks.log()

    async def lay_out(self, request: Request) -> Prompt:
        """The request's prompt, its images' headers read, without running it. Raises as `handle` does."""
        with self._media.staging.open() as staged:
            return lay_out(self._builder, request, await self._media.read(request, staged), self.max_model_len)

    def admit(self, num_others: int | None = None, deadline_s: float | None = None) -> None:
        """Before any work on a request. Raises OverloadedError with the time after which to ask again."""
        if self.closing:
            raise OverloadedError("the server is shutting down")
        limit = self._config.router.max_num_requests
        if (self.num_running if num_others is None else num_others) >= limit:
            raise OverloadedError(f"{limit} requests are in flight, the limit; ask again")
        for stage in (Stage.PREFILL, Stage.DECODE):
            self.registry.require(stage)
        backlog_s, most_s = self.backlog_s(), self._config.router.max_backlog_s
        most_s = most_s if deadline_s is None else min(most_s, deadline_s)
        if backlog_s > most_s:
            error = OverloadedError(f"{backlog_s:.0f} s of work wait, the limit is {most_s:g} s; ask again")
            error.retry_after_s = math.ceil(backlog_s - most_s)
            raise error

    def backlog_s(self) -> float:
        """Predicted time until a new request would be begun, by the stage that is furthest behind."""
        prompts_s = (w.num_inflight_tokens * w.seconds_a_prompt_token for w in self.registry.live(Stage.PREFILL))
        return max(min(prompts_s, default=0.0), self.encodes.backlog_s())

    def _choice(
        self, index: int, request: Request, prompt: Prompt, media: list[MediaItem], marks: RequestMarks
    ) -> Choice:
        """The first choice keeps the request's own marks: its way to the first token is the request's."""
        detokenizer = IncrementalDetokenizer(
            self._builder.tokenizer,
            skip_special_tokens=request.skip_special_tokens,
            stop=request.stop,
            include_stop_str=request.include_stop_str_in_output,
            min_tokens=request.sampling.min_tokens,
        )
        calls = call_format(request, self._builder)
        parser = ToolCallParser(calls, request.tools, choice=index) if calls else None
        output = RequestOutput(request, detokenizer, self.vocabulary, parser, index)
        if index > 0:
            marks = RequestMarks(request.request_id, self._clock)
        return Choice(index, request, prompt, media, output, self._parts, marks, self._attempts, self._joined)

    def _finish(self, prompt: Prompt, choices: list[Choice], marks: RequestMarks) -> Finished:
        reasons = [choice.output.finish_reason for choice in choices]
        assert reasons[0] is not None, "only finished choices get here"
        usage = Usage(
            prompt_tokens=len(prompt.token_ids),
            completion_tokens=sum(len(choice.output.token_ids) for choice in choices),
            cached_tokens=choices[0].num_cached_tokens,
            image_tokens=sum(item.placeholder.length for item in prompt.items),
        )
        timing = marks.finished(reasons[0], usage)
        self._metrics.finished(usage, reasons[0], timing, len(choices))
        return Finished(usage, timing)

    # -- workers -------------------------------------------------------------------------------------------------------

    def _on_envelope(self, envelope: messages.Envelope) -> None:
        """Deliver to the attempt that it is about; what is late, or of a worker's earlier life, is dropped."""
        if self.registry.find(envelope.sender, envelope.epoch) is None:
            return
        body = envelope.body
        if isinstance(body, messages.StepOutput):
            for output in body.outputs:
                self._deliver(envelope.sender, output)
        elif isinstance(body, messages.BlocksChanged):
            self.prefixes.changed(envelope.epoch, body)
        elif isinstance(body, messages.Probed):
            self._probes.answered(envelope.sender, body)
        elif isinstance(body, messages.LinkLost):
            self._link_lost(envelope.sender, body.name)
        elif isinstance(body, messages.RequestMessage):
            self._deliver(envelope.sender, body)

    def _deliver(self, sender: str, message: messages.RequestMessage | messages.TokenOutput) -> None:
        attempt = self._attempts.get((message.request_id, message.attempt))
        if attempt is not None:
            attempt.deliver(FromWorker(sender, message))

    def _worker_joined(self, worker: RegisteredWorker) -> None:
        self._joined.set()
        if Stage.PREFILL in worker.info.stages:
            self._mailbox.send(worker.address, messages.ListBlocks())
        self.encodes.pump()

    def _worker_lost(self, address: WorkerAddress) -> None:
        self._mailbox.forget(address)
        for worker in self.registry.workers():
            self._mailbox.send(worker.address, messages.PeerLost(address.name, address.epoch))
        self._probes.lost(address)
        self.prefixes.forget(address.epoch)
        for attempt in self._attempts.values():
            attempt.deliver(Lost(address))

    def _link_lost(self, name: str, other: str) -> None:
        self.registry.cut(name, other)
        for attempt in self._attempts.values():
            attempt.deliver(Cut(name, other))

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
