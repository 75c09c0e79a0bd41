"""A deployment without processes: every stage on one compute thread, the router in the event loop that starts it.

The same worker, stages, engine and router as behind the API; only messages and memory stay in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator

import msgspec

from triptych.clock import MonotonicClock
from triptych.config import Config, WorkerConfig
from triptych.errors import ConfigError
from triptych.handoff.leases import Leases
from triptych.models.registry import ModelSpec, open_model
from triptych.observe.metrics import Metrics
from triptych.offline.mail import ComputeMailbox, LoopMailbox
from triptych.prompt.layout import PromptBuilder
from triptych.router.router import Router
from triptych.stages.build import WorkerParts, pool_bytes
from triptych.transport.inproc import InProcTransport
from triptych.types import Stage, WorkerAddress, WorkerInfo
from triptych.worker import Worker, needed_parts, serve

logger = logging.getLogger(__name__)

NAME = "epd-0"
NEVER_S = 1e9


class LocalDeployment:
    """`start`, requests to `router`, `stop`: all in one event loop. The worker computes with `num_threads` threads."""

    router: Router  # from `start` on

    def __init__(self, config: Config, num_threads: int) -> None:
        # Silence says nothing of a thread of this process: all of it may be stopped, or hold the interpreter's lock.
        patient = msgspec.structs.replace(config.router, heartbeat_ttl_s=NEVER_S, probe_s=NEVER_S)
        self._config = msgspec.structs.replace(config, router=patient)
        self._num_threads = num_threads
        self._compute: ComputeThread | None = None
        self._heart: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the weights are loaded. Raises ConfigError."""
        config, mailbox = self._config, LoopMailbox()
        spec = await asyncio.to_thread(open_model, config.model.path, config.model, needed_parts(list(Stage)))
        builder = await asyncio.to_thread(PromptBuilder, spec.path, spec.family)
        self.router = Router(
            config, builder, spec.fingerprint, spec.served_name, spec.max_model_len, mailbox, Metrics()
        )
        await self.router.start()
        self._compute = ComputeThread(config, spec, self._num_threads, mailbox)
        self.router.registry.register(await asyncio.shield(self._compute.ready))
        self._heart = asyncio.create_task(self._beat(self._compute), name="heartbeat")

    async def _beat(self, compute: ComputeThread) -> None:
        """Load and counters, for the router's plans."""
        while True:
            await asyncio.sleep(self._config.router.heartbeat_s)
            if compute.worker is not None:
                self.router.registry.heartbeat(compute.worker.heartbeat(compute.address)())

    async def failed(self) -> str:
        """Waits until the compute thread has died, and says why."""
        if self._compute is None:
            raise ConfigError("the deployment has not been started")
        return await asyncio.shield(self._compute.died)

    async def stop(self) -> None:
        """What still runs is given up. Harmless when done before, or when the start failed."""
        if self._heart is not None:
            self._heart.cancel()
        if self._compute is not None:
            await self._compute.stop()
            self._compute = None
        if hasattr(self, "router"):
            await self.router.close()


class ComputeThread:
    """One worker that hosts every stage, on a thread that begins here. Futures are of the loop that makes it."""

    def __init__(self, config: Config, spec: ModelSpec, num_threads: int, router: LoopMailbox) -> None:
        epoch = secrets.token_hex(8)
        self.address = WorkerAddress(NAME, epoch, f"local://{epoch}", "")
        self.worker: Worker | None = None  # while its loop runs
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[WorkerInfo] = self._loop.create_future()
        self.died: asyncio.Future[str] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._config = config
        self._spec = spec
        self._worker_config = WorkerConfig(
            name=NAME, stages=list(Stage), router_url="", runtime_dir="", num_threads=num_threads
        )
        self._mailbox = ComputeMailbox(self.address, router)
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="triptych-compute", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001  whoever waits in the event loop must hear of it
            self._tell(self._on_death, error)
        finally:
            self._tell(self._ended.set_result, None)

    def _serve(self) -> None:
        config, clock = self._config, MonotonicClock()
        transport = InProcTransport(self.address.epoch, pool_bytes(config, self._spec, self._worker_config.stages))
        leases = Leases(clock, config.handoff.lease_ttl_s)
        try:
            parts = WorkerParts(config, self._spec, transport, leases, self.address, self._mailbox, clock)
            serve(parts, self._worker_config, self._mailbox, self._attend)
        finally:
            transport.close()

    @contextlib.contextmanager
    def _attend(self, worker: Worker, info: WorkerInfo) -> Iterator[None]:
        self.worker = worker
        if self._leaving:  # while it loaded
            worker.abandon()
        self._tell(self._on_ready, info)
        try:
            yield
        finally:
            self.worker = None

    def _tell(self, call: Callable[..., None], value: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, value)

    def _on_ready(self, info: WorkerInfo) -> None:
        if not self.ready.done():
            self.ready.set_result(info)

    def _on_death(self, error: Exception) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
        elif not self.died.done():
            logger.error("the compute thread died", exc_info=error)
            self.died.set_result(f"the compute thread died: {str(error) or type(error).__name__}")

    async def stop(self) -> None:
        """Ends it after the step that runs; or after loading, which nothing ends early."""
        self._leaving = True
        if self.worker is not None:
            self.worker.abandon()
        self._mailbox.wake()
        await self._ended  # not on a pool's thread: there is none when the interpreter exits
        self._thread.join()
        self.ready.cancel()
        self.died.cancel()
