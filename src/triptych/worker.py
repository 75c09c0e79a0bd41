"""One worker process: hosts any subset of the stages around one compute thread, and keeps the router informed.

The loop is `Worker.run`: receive, step every stage, send. A second thread registers and heartbeats over HTTP, so that
a long forward does not make a healthy worker look lost.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from triptych import messages
from triptych.clock import MonotonicClock
from triptych.config import Config, WorkerConfig
from triptych.curve import Join, load_join, tcp_endpoint
from triptych.errors import ConfigError, TriptychError
from triptych.handoff.leases import Leases
from triptych.heartbeat import CurveLine, Heart, HttpLine
from triptych.kernels import library
from triptych.lent_cores import LentCores
from triptych.messages import (
    Decode,
    Drain,
    EmbeddingPublished,
    EncodeItems,
    Envelope,
    FetchKV,
    ItemFailed,
    KVPublished,
    KVRefused,
    LeaseReleased,
    PeerLost,
    Prefill,
    Probe,
    Probed,
    Refusal,
    Refused,
)
from triptych.models.family import Part
from triptych.models.registry import open_model
from triptych.stages.base import Mail, Stage
from triptych.stages.build import WorkerParts, load_encode, load_language, pool_bytes
from triptych.stages.encode import EncodeStage
from triptych.stages.language import LanguageStage
from triptych.transport.base import Transport
from triptych.transport.mailbox import Mailbox, router_endpoint, worker_endpoint
from triptych.transport.select import select_transport
from triptych.types import Heartbeat, Load, WeightsReport, WorkerAddress, WorkerInfo
from triptych.types import Stage as StageName

logger = logging.getLogger(__name__)

TICK_S = 0.25
IDLE_WAIT_S = 0.25
ENCODE_PATIENCE_S = 2.0  # that prompts may keep the tower of the same worker waiting
SLOW_TO_LOAD_BYTES = 256 << 20  # less than this is loaded before anybody wonders


class Inbox(Mail, Protocol):
    """`transport.mailbox.Mailbox`, or an in-memory twin of it in `local` or `testing`."""

    def receive(self, timeout_s: float) -> list[Envelope]: ...

    def forget(self, epoch: str) -> None: ...


class WakingInbox(Inbox, Protocol):
    def wake(self) -> None:
        """End a `receive` that waits; may be called from any thread."""
        ...


class Attend(Protocol):
    """What goes on beside the loop while it runs, such as a heartbeat."""

    def __call__(self, loop: Worker, info: WorkerInfo, /) -> AbstractContextManager[object]: ...


class StageSet(NamedTuple):
    """The hosted stages; None for what this worker does not host."""

    encode: EncodeStage | None
    language: LanguageStage | None

    @property
    def hosted(self) -> list[Stage]:
        return [stage for stage in self if stage is not None]

    def load(self, num_leases: int) -> Load:
        load = self.language.load() if self.language else Load()
        if self.encode:
            load = msgspec.structs.replace(
                load,
                num_waiting_embeds=self.encode.num_waiting_embeds(),
                cached_embeds=self.encode.num_cached_embeds(),
            )
        return msgspec.structs.replace(load, num_leases=num_leases)


class Worker:
    """The compute thread's side of a worker. `load` and `counters` are replaced whole, for the heartbeat's thread."""

    def __init__(
        self,
        stages: StageSet,
        mailbox: Inbox,
        transport: Transport,
        leases: Leases,
        cores: LentCores | None = None,
    ) -> None:
        self.stages = stages
        self.load = Load()
        self.counters: dict[str, float] = {}
        self._mailbox = mailbox
        self._transport = transport
        self._leases = leases
        self._cores = cores or LentCores()
        self._routes = merge_routes(stages.hosted)
        self._draining = False
        self._abandoned = False
        self._next_tick_s = 0.0
        self._encoded_s = 0.0  # when the tower last had a turn

    def run(self) -> None:
        """Until told to drain, and then until no request is left; or until abandoned."""
        busy = False
        while not (self._abandoned or (self._draining and self.num_live() == 0)):
            busy = self.turn(0.0 if busy else IDLE_WAIT_S)

    def turn(self, timeout_s: float) -> bool:
        """Receive, step every stage once; whether any of them had work. What leaves was sent by the stages."""
        received = self._mailbox.receive(timeout_s)
        self._cores.take()
        for envelope in received:
            self._dispatch(envelope)
        language, encode = self.stages.language, self.stages.encode
        worked = language.step() if language else False
        if encode:
            worked |= encode.step(forward=self._may_encode())
        self._tick()
        if not worked and not (encode and encode.is_preprocessing):
            self._cores.lend()
        return worked

    def _may_encode(self) -> bool:
        """A prompt whose embeddings are here goes before new embeddings: it is nearer to its first token.

        For a while: then an item gets its turn between two chunks.
        """
        language, now = self.stages.language, time.monotonic()
        if language is None or not language.is_prefilling or now - self._encoded_s > ENCODE_PATIENCE_S:
            self._encoded_s = now
            return True
        return False

    def _dispatch(self, envelope: Envelope) -> None:
        body = envelope.body
        if envelope.version != messages.PROTOCOL_VERSION:
            logger.warning("message of protocol %d from %s dropped", envelope.version, envelope.sender)
        elif isinstance(body, LeaseReleased):
            self._leases.release(body.lease_id)
        elif isinstance(body, PeerLost):
            self._leases.drop_consumer(body.epoch)
            self._transport.forget(body.epoch)
            self._mailbox.forget(body.epoch)
        elif isinstance(body, Probe):
            self._mailbox.to_router(Probed(body.probe_id, self._probe()))
        elif isinstance(body, Drain):
            self._draining = True
        elif self._draining and isinstance(body, Prefill | Decode):
            reason = "the worker is leaving"
            self._mailbox.to_router(Refused(body.request_id, body.attempt, Refusal.DRAINING, reason))
        elif receivers := self._routes.get(type(body)):
            for receive in receivers:
                receive(body)
        else:
            self._refuse(body)

    def _refuse(self, body: messages.Body) -> None:
        """No stage here takes it: whoever waits for an answer gets one. What asks for none is dropped."""
        reason = f"this worker does not take {type(body).__name__}"
        if isinstance(body, Prefill | Decode):
            self._mailbox.to_router(Refused(body.request_id, body.attempt, Refusal.STAGE_NOT_HOSTED, reason))
        elif isinstance(body, EncodeItems):
            for mm_hash in body.mm_hashes:
                self._mailbox.to_router(ItemFailed(body.request_id, body.attempt, mm_hash, reason, bad_media=False))
        elif isinstance(body, FetchKV):
            self._mailbox.to_worker(body.consumer, KVRefused(body.request_id, body.attempt, reason))
        elif isinstance(body, EmbeddingPublished | KVPublished):
            self._mailbox.to_worker(body.handle.owner, LeaseReleased(body.handle.lease_id))

    def _probe(self) -> str:
        """The first stage that cannot do real work says why."""
        try:
            for stage in self.stages.hosted:
                stage.probe()
        except (TriptychError, RuntimeError) as error:
            return str(error) or type(error).__name__
        return ""

    def _tick(self) -> None:
        now = time.monotonic()
        if now < self._next_tick_s:
            return
        self._next_tick_s = now + TICK_S
        self._leases.expire()
        counters = {"leases_expired_total": float(self._leases.num_expired), **self._transport.counters}
        for stage in self.stages.hosted:
            stage.tick()
            counters.update(stage.counters)
        self.counters = counters
        self.load = self.stages.load(len(self._leases))

    def num_live(self) -> int:
        """Requests and leases that this worker is still needed for."""
        return sum(stage.num_live() for stage in self.stages.hosted) + len(self._leases)

    def heartbeat(self, address: WorkerAddress) -> Callable[[], Heartbeat]:
        """What the heartbeat's thread calls."""
        return lambda: Heartbeat(address.name, address.epoch, self.load, self.counters, self._draining)

    def abandon(self) -> None:
        """Leave at once: the router counts this life as over. May be called from any thread."""
        self._abandoned = True

    def on_signals(self) -> None:
        """SIGTERM: leave when the running requests are done; a second one: at once."""

        def terminate(signum: int, frame: FrameType | None) -> None:
            if self._draining:
                os._exit(1)
            self._draining = True

        signal.signal(signal.SIGTERM, terminate)
        # A supervised worker ignores Ctrl-C already (`supervisor.worker_main`); one that was started by hand drains.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, terminate)


def merge_routes(stages: list[Stage]) -> dict[type, list[Callable[[Any], None]]]:
    """One message may concern several stages: `Cancel` does."""
    routes: defaultdict[type, list[Callable[[Any], None]]] = defaultdict(list)
    for stage in stages:
        for kind, receive in stage.routes().items():
            routes[kind].append(receive)
    return dict(routes)


def run(config: Config, worker: WorkerConfig) -> None:
    """Load the stages, register, serve until drained. SIGTERM drains, a second one forces."""
    if worker.cores:
        os.sched_setaffinity(0, worker.cores)
    if config.handoff.transport == "inproc" and set(worker.stages) != set(StageName):
        raise ConfigError(f"worker {worker.name} does not host every stage: handoff.transport must be auto")
    spec = open_model(config.model.path, config.model, needed_parts(worker.stages))
    join = load_join(worker.join_file) if worker.join_file else None
    epoch, clock = secrets.token_hex(8), MonotonicClock()
    mailbox = open_mailbox(worker, epoch, join)
    try:
        size = pool_bytes(config, spec, worker.stages)
        transport = select_transport(
            config.handoff, size, worker.name, epoch, worker.runtime_dir, worker.host, worker.data_port
        )
    except BaseException:
        mailbox.close()
        raise
    transport.on_arrival(mailbox.wake)
    address = WorkerAddress(
        worker.name, epoch, mailbox.endpoint, transport.pool_path, transport.data_endpoint, mailbox.key
    )
    leases = Leases(clock, config.handoff.lease_ttl_s)

    def heart(loop: Worker, info: WorkerInfo) -> Heart:
        loop.on_signals()
        line = CurveLine(join, worker.name, epoch) if join else HttpLine(worker.router_url)
        return Heart(line, info, loop.heartbeat(address), config.router.heartbeat_s, loop.abandon)

    try:
        serve(WorkerParts(config, spec, transport, leases, address, mailbox, clock), worker, mailbox, heart)
    finally:
        mailbox.close()
        transport.close()


def serve(parts: WorkerParts, worker: WorkerConfig, mailbox: WakingInbox, attend: Attend) -> None:
    """Load the stages on the calling thread and run their loop there, until it ends."""
    torch.set_num_threads(worker.num_threads)
    library.set_num_threads(worker.num_threads)
    cores = LentCores(worker)
    loaded = load_stages(parts, worker, mailbox.wake)
    loop = Worker(loaded.stages, mailbox, parts.transport, parts.leases, cores)
    try:
        with attend(loop, worker_info(parts, worker, loaded)):
            loop.run()
    finally:
        if loaded.stages.encode:
            loaded.stages.encode.close()


def open_mailbox(worker: WorkerConfig, epoch: str, join: Join | None) -> Mailbox:
    """Raises ConfigError for an address that is not safe to listen on, or cannot be had."""
    if join is not None:
        return Mailbox(worker.name, epoch, tcp_endpoint(worker.host, worker.port), join.router, join)
    if worker.host:
        raise ConfigError(f"worker {worker.name}: to listen on {worker.host} it needs the keys of a join file")
    for stale in Path(worker.runtime_dir).glob(f"{worker.name}-????????.sock"):
        stale.unlink(missing_ok=True)  # of an earlier life that was killed
    endpoint = worker_endpoint(worker.runtime_dir, worker.name, epoch)
    return Mailbox(worker.name, epoch, endpoint, router_endpoint(worker.runtime_dir))


def needed_parts(stages: Sequence[StageName]) -> list[Part]:
    language = StageName.PREFILL in stages or StageName.DECODE in stages
    return ([Part.VISION] if StageName.ENCODE in stages else []) + ([Part.LANGUAGE] if language else [])


class LoadedStages(NamedTuple):
    stages: StageSet
    weights: WeightsReport
    kv_layout: str
    kernels: dict[str, str]  # as in `WorkerInfo`


def load_stages(parts: WorkerParts, worker: WorkerConfig, wake: Callable[[], None]) -> LoadedStages:
    """Load what the hosted stages need of the weights, and nothing else. `wake` ends a wait for messages."""
    encode = language = None
    kv_layout = ""
    reports, native = [], {}
    if StageName.ENCODE in worker.stages:
        encode, report, native[Part.VISION] = load_encode(parts, wake, _log_progress("vision"))
        reports.append(report)
    if StageName.PREFILL in worker.stages or StageName.DECODE in worker.stages:
        try:
            loaded = load_language(parts, worker.stages, _log_progress("language"))
            language, report, native[Part.LANGUAGE], kv_layout = loaded
        except BaseException:  # the process may live on without this worker
            if encode is not None:
                encode.close()
            raise
        reports.append(report)
    weights = WeightsReport(
        shards_read=min(sum(r.shards_read for r in reports), reports[0].shards_total),
        shards_total=reports[0].shards_total,
        bytes_read=sum(r.bytes_read for r in reports),
        bytes_total=reports[0].bytes_total,
        load_s=sum(r.load_s for r in reports),
    )
    logger.info(
        "stages=%s shards=%d/%d bytes=%d/%d load_s=%.2f", ",".join(worker.stages), weights.shards_read,
        weights.shards_total, weights.bytes_read, weights.bytes_total, weights.load_s,
    )  # fmt: skip
    kernels = {part.value: "native" if is_native else "torch" for part, is_native in native.items()}
    return LoadedStages(StageSet(encode, language), weights, kv_layout, kernels)


def _log_progress(part: str) -> Callable[[int, int], None]:
    """A line at each quarter of the bytes: enough for a large checkpoint on a slow disk, little for a small one."""
    reported = 0

    def progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal reported
        if total_bytes < SLOW_TO_LOAD_BYTES:
            return
        quarter = 4 * done_bytes // max(total_bytes, 1)
        if quarter > reported:
            reported = quarter
            logger.info("part=%s loaded=%d%% of %.1f MB", part, 25 * quarter, total_bytes / 1e6)

    return progress


def worker_info(parts: WorkerParts, worker: WorkerConfig, loaded: LoadedStages) -> WorkerInfo:
    return WorkerInfo(
        address=parts.address,
        stages=worker.stages,
        version_hash=messages.version_hash(parts.spec.fingerprint, parts.config.engine.block_size),
        model=parts.spec.served_name,
        max_model_len=parts.max_model_len if Part.LANGUAGE in needed_parts(worker.stages) else parts.spec.max_model_len,
        weights=loaded.weights,
        pid=os.getpid(),
        cores=worker.cores,
        kv_layout=loaded.kv_layout,
        kernels=loaded.kernels,
        supervised=worker.supervised,
    )
