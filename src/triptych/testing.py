"""In-memory twins of what lies between processes, and a whole deployment in one process, for tests and experiments.

`Cluster` runs the real router, stages, hand-off and engine; only the mailboxes are local. Messages cross as bytes, so
the wire format is exercised. With `FakeTower` and `FakeRunner` no model runs, and the right output is known by formula.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import defaultdict, deque
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from triptych import messages
from triptych.clock import Clock, MonotonicClock
from triptych.config import Config
from triptych.engine.batch import SequenceChunk, StepLogits
from triptych.engine.logprobs import score
from triptych.engine.runner import ModelRunner
from triptych.handoff.leases import Leases
from triptych.media.decode import DecodeJob, Pixels, decode_pixels
from triptych.models.registry import ModelSpec
from triptych.models.vision import VisionRunner
from triptych.observe.metrics import Metrics
from triptych.placement import Placement
from triptych.prompt.layout import PromptBuilder
from triptych.router.client import OnEnvelope
from triptych.router.router import Router
from triptych.stages.build import WorkerParts, build_encode, build_language, kv_memory, pool_bytes, to_patches
from triptych.stages.encode import VisionTower
from triptych.stages.language import LanguageStage
from triptych.stages.preprocess import InlinePreprocessor
from triptych.transport.base import Transport
from triptych.transport.inproc import InProcTransport
from triptych.transport.select import LOOPBACK
from triptych.transport.tcp import TcpTransport
from triptych.types import Grid, Prompt, Stage, WeightsReport, WorkerAddress, WorkerInfo
from triptych.worker import StageSet, Worker

ROUTER = "router"


class LocalNetwork:
    """Mailboxes by epoch. A message to a worker that is gone is dropped, as it is between processes."""

    def __init__(self) -> None:
        self.inboxes: dict[str, deque[bytes]] = {}
        self.on_envelope: OnEnvelope | None = None
        self._to_router: defaultdict[str, deque[bytes]] = defaultdict(deque)  # by sender's epoch
        self.num_sent: defaultdict[str, int] = defaultdict(int)  # by message type

    def post(self, epoch: str, body: messages.Body, sender: str, sender_epoch: str) -> None:
        self.num_sent[type(body).__name__] += 1
        self.deliver(epoch, messages.encode(body, sender, sender_epoch), sender_epoch)

    def deliver(self, epoch: str, frame: bytes, sender_epoch: str) -> None:
        """Put any bytes into a mailbox."""
        if epoch in self.inboxes:
            self.inboxes[epoch].append(frame)
        elif epoch == ROUTER:
            self._to_router[sender_epoch].append(frame)

    def deliver_to_router(self, rng: random.Random) -> bool:
        """Deliver in an order that keeps each sender's own and mixes the senders at random, as sockets do."""
        delivered = False
        for sender_epoch in rng.sample(sorted(self._to_router), len(self._to_router)):
            frames = self._to_router[sender_epoch]
            for _ in range(rng.randint(0, len(frames))):
                delivered = True
                envelope = _decoded(frames.popleft())
                if self.on_envelope is not None and envelope is not None:
                    self.on_envelope(envelope)
            if not frames:
                del self._to_router[sender_epoch]
        return delivered or bool(self._to_router)


class LocalRouterMailbox:
    """The in-memory twin of `router.client.ZmqMailbox`."""

    def __init__(self, network: LocalNetwork) -> None:
        self._network = network

    def start(self, on_envelope: OnEnvelope) -> None:
        self._network.on_envelope = on_envelope

    def send(self, address: WorkerAddress, body: messages.Body) -> None:
        self._network.post(address.epoch, body, ROUTER, "")

    def forget(self, address: WorkerAddress) -> None:
        self._network.inboxes.pop(address.epoch, None)

    async def close(self) -> None:
        self._network.on_envelope = None


class LocalMailbox:
    """The in-memory twin of `transport.mailbox.Mailbox`."""

    def __init__(self, network: LocalNetwork, name: str, epoch: str) -> None:
        self._network = network
        self._name = name
        self._epoch = epoch
        network.inboxes[epoch] = deque()

    def to_router(self, body: messages.Body) -> None:
        self._network.post(ROUTER, body, self._name, self._epoch)

    def to_worker(self, address: WorkerAddress, body: messages.Body) -> None:
        self._network.post(address.epoch, body, self._name, self._epoch)

    def forget(self, epoch: str) -> None:
        """The network forgets for all."""

    def receive(self, timeout_s: float) -> list[messages.Envelope]:
        inbox = self._network.inboxes.get(self._epoch)
        if not inbox:
            return []
        frames, received = list(inbox), []
        inbox.clear()
        for frame in frames:
            envelope = _decoded(frame)
            if envelope is not None:
                received.append(envelope)
        return received


def _decoded(frame: bytes) -> messages.Envelope | None:
    """None for what a mailbox between processes drops."""
    try:
        envelope = messages.decode(frame)
    except msgspec.DecodeError:
        return None
    return envelope if envelope.version == messages.PROTOCOL_VERSION else None


# -- models that are formulas ------------------------------------------------------------------------------------------


class FakeTower:
    """Embeddings whose every number is the mean of the item's patches."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.num_forwards = 0

    def encode(self, items: Sequence[tuple[NDArray[np.float32], Grid]]) -> list[torch.Tensor]:
        self.num_forwards += 1
        merge = self._spec.family.vision.merge_size
        rows = [(fake_feature(patches), g.t * g.h * g.w // merge**2) for patches, g in items]
        return [torch.full((n, self._spec.embed_width), value) for value, n in rows]

    def probe(self) -> None:
        return None


class FakeRunner:
    """Keeps one number a token in the KV: its id, or its embedding's number. Each output is a formula of all of them.

    A block that was lost, swapped or written late changes the output: `fake_output` gives the right one.
    """

    def __init__(self, kv: torch.Tensor, vocab: int) -> None:
        self._kv = kv[:, 0, 0, 0, :, 0]  # [num_blocks, block_size]
        self._vocab = vocab
        self.num_forwards = 0

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepLogits:
        self.num_forwards += 1
        contexts = [self._write(chunk) for chunk in chunks]
        sampling = [self._logits(c) for c, chunk in zip(contexts, chunks, strict=True) if chunk.sample]
        scores = []
        for context, chunk in zip(contexts, chunks, strict=True):
            if chunk.scoring is not None:
                token_ids, num_top = chunk.scoring
                ends = range(chunk.first_position + 1, chunk.first_position + 1 + len(token_ids))
                scores.append(score(torch.stack([self._logits(context[:end]) for end in ends]), token_ids, num_top))
        return StepLogits(torch.stack(sampling) if sampling else torch.empty((0, self._vocab)), scores)

    def _write(self, chunk: SequenceChunk) -> list[float]:
        """The numbers of the sequence up to the chunk's end, as the KV has them."""
        numbers = torch.tensor(chunk.token_ids, dtype=torch.float32)
        for offset, rows in chunk.embeddings:
            numbers[offset : offset + len(rows)] = rows[:, 0].float()
        block_size = self._kv.shape[1]
        for i, number in enumerate(numbers.tolist(), chunk.first_position):
            self._kv[chunk.block_table[i // block_size], i % block_size] = number
        end = chunk.first_position + len(chunk.token_ids)
        context: list[float] = self._kv[chunk.block_table].reshape(-1)[:end].tolist()
        return context

    def _logits(self, context: Sequence[float]) -> torch.Tensor:
        next_token = torch.tensor(_next_token(context, self._vocab))
        return torch.nn.functional.one_hot(next_token, self._vocab).float()


def fake_feature(patches: NDArray[np.float32]) -> float:
    return float(round(float(patches.mean()) * 1000) % 997)


def _next_token(numbers: Sequence[float], vocab: int) -> int:
    """Byte-sized, so that every output is plain text of a byte-level vocabulary."""
    return int(sum((i + 1) * number for i, number in enumerate(numbers))) % min(vocab, 200)


def fake_output(prompt: Prompt, features: dict[str, float], num_tokens: int, vocab: int) -> list[int]:
    """What `FakeRunner` must produce for a prompt whose items have these features, by mm_hash."""
    numbers = [float(token_id) for token_id in prompt.token_ids]
    for item in prompt.items:
        numbers[item.placeholder.offset : item.placeholder.end] = [features[item.mm_hash]] * item.placeholder.length
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(_next_token(numbers, vocab))
        numbers.append(float(output[-1]))
    return output


# -- a deployment in one process ---------------------------------------------------------------------------------------


class LocalWorker(NamedTuple):
    """One worker of a `Cluster`, with what a test may want to look into."""

    worker: Worker
    address: WorkerAddress
    transport: Transport
    leases: Leases
    tower: VisionTower | None

    def counter(self, name: str) -> float:
        for stage in self.worker.stages.hosted:
            stage.tick()
            if name in stage.counters:
                return stage.counters[name]
        return 0.0


class Cluster:
    """`async with Cluster(spec, config, "1E/1P/1D") as cluster`: workers take turns in one task, in random order.

    With `handoff.transport = tcp` embeddings and KV cross real sockets on loopback. `fake` replaces the model by
    formulas. `seed` decides the order of turns.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: Config,
        placement: str,
        *,
        fake: bool = False,
        seed: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.spec = spec
        self.config = config
        self.network = LocalNetwork()
        self.workers: dict[str, LocalWorker] = {}
        self.metrics = Metrics()
        self.placed = Placement.parse(placement).workers("", "", {})
        self._fake = fake
        self._random = random.Random(seed)
        self._clock = clock or MonotonicClock()
        self._pump: asyncio.Task[None] | None = None
        self.builder = PromptBuilder(spec.path, spec.family)
        self.router: Router

    async def __aenter__(self) -> Cluster:
        self.router = Router(
            self.config,
            self.builder,
            self.spec.fingerprint,
            self.spec.served_name,
            self.spec.max_model_len,
            LocalRouterMailbox(self.network),
            self.metrics,
            self._clock,
        )
        await self.router.start()
        for worker in self.placed:
            self.add(worker.name, worker.stages)
        self._pump = asyncio.create_task(self._take_turns())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._pump is not None
        self._pump.cancel()
        failures = await asyncio.gather(self._pump, return_exceptions=True)
        await self.router.close()
        for local in self.workers.values():
            local.transport.close()
        for failure in failures:
            if isinstance(failure, Exception):
                raise failure

    async def _take_turns(self) -> None:
        while True:
            order = list(self.workers.values())
            self._random.shuffle(order)
            worked = [local.worker.turn(0.0) for local in order]
            for local in order:
                self.router.registry.heartbeat(local.worker.heartbeat(local.address)())
            worked.append(self.network.deliver_to_router(self._random))
            await asyncio.sleep(0 if any(worked) else 0.001)

    def add(self, name: str, stages: list[Stage]) -> LocalWorker:
        """Start a worker: a new one, or the next life of one that was killed."""
        epoch = secrets.token_hex(8)
        memory = InProcTransport(epoch, pool_bytes(self.config, self.spec, stages))
        over_tcp = self.config.handoff.transport == "tcp"
        transport: Transport = TcpTransport(memory, epoch, LOOPBACK, always=True) if over_tcp else memory
        address = WorkerAddress(name, epoch, f"local://{epoch}", "", transport.data_endpoint)
        leases = Leases(self._clock, self.config.handoff.lease_ttl_s)
        mailbox = LocalMailbox(self.network, name, epoch)
        parts = WorkerParts(self.config, self.spec, transport, leases, address, mailbox, self._clock)
        tower = self._tower() if Stage.ENCODE in stages else None
        stage_set = StageSet(
            build_encode(parts, InlinePreprocessor(to_patches(self.spec, self._decode)), tower) if tower else None,
            self._language(parts, stages) if set(stages) & {Stage.PREFILL, Stage.DECODE} else None,
        )
        local = LocalWorker(Worker(stage_set, mailbox, transport, leases), address, transport, leases, tower)
        self.workers[name] = local
        version = messages.version_hash(self.spec.fingerprint, self.config.engine.block_size)
        self.router.registry.register(
            WorkerInfo(address, stages, version, self.spec.served_name, parts.max_model_len, WeightsReport(), pid=0)
        )
        return local

    def _decode(self, job: DecodeJob) -> Pixels:
        return decode_pixels(job, self.config.media.max_image_pixels)

    def _tower(self) -> VisionTower:
        return FakeTower(self.spec) if self._fake else VisionRunner.load(self.spec)

    def _language(self, parts: WorkerParts, stages: list[Stage]) -> LanguageStage:
        memory = kv_memory(parts)
        if self._fake:
            return build_language(
                parts, stages, memory, FakeRunner(memory.tensor, self.spec.family.text.vocab), _nothing
            )
        runner = ModelRunner.load(self.spec, memory.tensor)
        return build_language(parts, stages, memory, runner, runner.probe)

    def kill(self, name: str) -> None:
        """As kill -9 does: the worker says nothing more, and the router hears of it at once."""
        local = self.workers.pop(name)
        self.network.inboxes.pop(local.address.epoch, None)
        local.transport.close()
        self.router.registry.lost(name)

    async def until_idle(self, timeout_s: float = 10.0) -> None:
        """Wait until no worker holds anything of any request. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while any(local.worker.num_live() for local in self.workers.values()) or any(self.network.inboxes.values()):
                await asyncio.sleep(0.002)

    def check(self) -> None:
        """Raise AssertionError unless every worker's books agree and nothing is leased."""
        for local in self.workers.values():
            for stage in local.worker.stages.hosted:
                stage.check()
            local.transport.check()
            local.leases.check()
            assert len(local.leases) == 0, f"{local.address.name} still leases"


def _nothing() -> None:
    return None
