"""A whole deployment: the router process, its HTTP API and the local workers, from placement to clean end.

Runs in the router process, without torch. Called by `triptych serve`, `router` and `demo`, and by tests as
`async with Deployment(config, placement) as d`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from starlette.types import ASGIApp

from triptych import lent_cores
from triptych.api.admission import Admission
from triptych.api.app import create_app
from triptych.api.keys import Keys
from triptych.api.seam import RouterLike
from triptych.api.server import ApiServer, bind, url_of
from triptych.config import Config
from triptych.curve import JOIN_FILE, tcp_endpoint
from triptych.errors import ConfigError
from triptych.observe.metrics import Metrics
from triptych.observe.startup import describe_worker
from triptych.placement import ROUTER, Pins, Placement, lend_cores
from triptych.runtime_dir import RuntimeDir
from triptych.supervisor import PRELOAD, RestartPolicy, RunWorker, Supervisor, leave_if_imported

__all__ = ["Deployment", "Pins", "Placement", "compose"]

ENVIRONMENT = {  # inherited by the fork server, which reads it when it imports torch
    "OMP_NUM_THREADS": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
WORKER_GRACE_S = 10.0  # until SIGKILL: from SIGTERM, after the running requests were drained, or from its loss
START_TIMEOUT_S = 600.0
POLL_S = 0.05

Say = Callable[[str], None]


class RunningRouter(RouterLike, Protocol):
    """The router with its life, which the API has no part in."""

    closing: bool

    async def start(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Serving:
    """What one router process is made of."""

    router: RunningRouter
    app: ASGIApp
    admission: Admission


Compose = Callable[[Config, str], Serving]


def compose(config: Config, runtime_dir: str) -> Serving:
    """The composition root. Opens the model's files, and no weights."""
    from triptych.models.registry import open_model
    from triptych.prompt.layout import PromptBuilder
    from triptych.router.client import ZmqMailbox
    from triptych.router.registration import Registration
    from triptych.router.router import Router

    spec = open_model(config.model.path, config.model)
    builder = PromptBuilder(spec.path, spec.family)
    metrics, admission = Metrics(), Admission(config.router.max_num_requests)
    control = config.router.control_host
    mailbox = ZmqMailbox(runtime_dir, tcp_endpoint(control, config.router.control_port) if control else "")
    router = Router(config, builder, spec.fingerprint, spec.served_name, spec.max_model_len, mailbox, metrics)
    mailbox.registration = Registration(router.registry)
    metrics.watch(router.registry.workers)
    return Serving(router, create_app(router, config, metrics, admission), admission)


def set_environment() -> None:
    """Before the first process that imports torch. What the user has set stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def silence(line: str) -> None:
    """The `say` of tests."""


class Deployment:
    """Router, API and workers. `placement` None: a router alone, whose workers are started by hand.

    `compose` and `target` (what runs in a worker) are replaced by tests.
    """

    def __init__(
        self,
        config: Config,
        placement: Placement | None,
        *,
        pins: Pins | None = None,
        lend_cores: bool = False,
        runtime_dir: str = "",
        say: Say = silence,
        compose: Compose = compose,
        target: RunWorker | None = None,
        preload: Sequence[str] = PRELOAD,
        policy: RestartPolicy | None = None,
    ) -> None:
        self.config = config
        self.placement = placement
        self.url = ""
        self.runtime_dir = ""  # holds the unix sockets; set by `start`
        self._given_dir = runtime_dir
        self._runtime_dir: RuntimeDir | None = None
        self._pins = pins or {}
        self._lend_cores = lend_cores
        self._allowed_cores: list[int] = []  # of workers, where the router is pinned
        self._say = say
        self._compose = compose
        self._target = target
        self._preload = preload
        self._policy = policy or RestartPolicy()
        self._serving: Serving | None = None
        self._server: ApiServer | None = None
        self._supervisor: Supervisor | None = None
        self._announcer: asyncio.Task[None] | None = None
        self._announced: set[str] = set()  # epochs
        self._pids: dict[str, int] = {}  # of the lives that registered last, by worker's name
        self._lost_s: dict[int, float] = {}  # when a life that still runs was first missing, by pid
        self._forced = asyncio.Event()

    async def __aenter__(self) -> Deployment:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns when every stage has a live worker. Raises ConfigError when that cannot be."""
        if self.placement is not None:
            leave_if_imported()
        started_s = time.monotonic()
        set_environment()
        self._pin_router()
        api = self.config.api
        sock = bind(api.host, api.port)  # first: nothing heavy starts for a port that is taken
        self.url = url_of(sock)
        try:
            self._runtime_dir = RuntimeDir(self._given_dir)
            self.runtime_dir = self._runtime_dir.path
            serving = self._serving = self._compose(self.config, self.runtime_dir)
        except BaseException:
            sock.close()
            raise
        self._server = ApiServer(serving.app, sock)
        await serving.router.start()
        await self._server.start()
        self._announcer = asyncio.create_task(self._announce(serving.router), name="announce")
        if self.join_file:
            self._say(
                f"workers of other hosts need a copy of {self.join_file}, which is a secret: "
                f"triptych worker --join-file FILE --host THEIR_ADDRESS"
            )
        if self.placement is None:
            how = f"--join-file {self.join_file}" if self.join_file else f"--router {self.url}"
            self._say(f"the router listens on {self.url}; workers need {how} --runtime-dir {self.runtime_dir}")
            return
        await self._start_workers(self.placement, serving.router)
        self._say(f"ready after {time.monotonic() - started_s:.1f} s: {self.url}")

    def _pin_router(self) -> None:
        """Before there are other threads: they, and children that are told nothing else, run where this one may."""
        if cores := self._pins.get(ROUTER):
            self._allowed_cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, cores)

    async def _start_workers(self, placement: Placement, router: RunningRouter) -> None:
        workers = placement.workers(self.url, self.runtime_dir, self._pins)
        workers = [msgspec.structs.replace(w, allowed_cores=self._allowed_cores) for w in workers]
        if self._lend_cores:
            workers = lend_cores(workers)
            lent_cores.create(self.runtime_dir, 1 + max(core for w in workers for core in w.cores))
        if self.join_file:  # the others may be on other hosts
            host = self.config.router.control_host
            workers = [msgspec.structs.replace(w, join_file=self.join_file, host=host) for w in workers]
        self._say(f"model {router.model_name} on {placement}, up to {router.max_model_len} tokens")
        self._say(f"runtime files in {self.runtime_dir}")
        self._supervisor = Supervisor(
            self.config,
            self._target,
            policy=self._policy,
            preload=self._preload,
            on_death=router.registry.lost,
            say=self._say,
        )
        self._supervisor.start(workers)
        names = {worker.name for worker in workers}
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (router.ready() and names <= {w.info.address.name for w in router.registry.workers()}):
            if self._supervisor.failed.done():
                raise ConfigError(self._supervisor.failed.result())
            if time.monotonic() > deadline_s:
                raise ConfigError(f"the workers were not ready within {START_TIMEOUT_S:.0f} s")
            await asyncio.sleep(POLL_S)
        self._announce_new(router)

    async def _announce(self, router: RunningRouter) -> None:
        while True:
            self._announce_new(router)
            self._kill_what_hangs(router)
            await asyncio.sleep(POLL_S)

    def _kill_what_hangs(self, router: RunningRouter) -> None:
        """A life that was declared lost, or left, ends by itself. One that cannot is in the way of its next life."""
        if self._supervisor is None:
            return
        registered, now = {worker.info.address.name for worker in router.registry.workers()}, time.monotonic()
        hanging = {pid for name, pid in self._pids.items() if name not in registered} & self._supervisor.pids()
        self._lost_s = {pid: self._lost_s.get(pid, now) for pid in hanging}
        for name, pid in self._pids.items():
            if now - self._lost_s.get(pid, now) > WORKER_GRACE_S:
                self._say(f"{name} (pid {pid}) was lost and does not end: it is killed")
                self._supervisor.kill(name)

    def _announce_new(self, router: RunningRouter) -> None:
        """A line for every life of a worker that registered."""
        for worker in router.registry.workers():
            if worker.info.address.epoch not in self._announced:
                self._announced.add(worker.info.address.epoch)
                self._pids[worker.info.address.name] = worker.info.pid
                self._say(describe_worker(worker.info))

    async def failed(self) -> str:
        """Waits until a worker is given up, and says why."""
        if self._supervisor is None:
            await asyncio.Event().wait()
        assert self._supervisor is not None
        return await asyncio.shield(self._supervisor.failed)

    @property
    def join_file(self) -> str:
        """Of a deployment that spans hosts, written when the router starts; else ""."""
        return f"{self.runtime_dir}/{JOIN_FILE}" if self.config.router.control_host else ""

    @property
    def needs_key(self) -> bool:
        """Whether the API asks its clients for a key."""
        return bool(Keys.load(self.config.api.api_keys_file))

    @property
    def router(self) -> RunningRouter:
        if self._serving is None:
            raise ConfigError("the deployment has not been started")
        return self._serving.router

    def pid(self, worker_name: str) -> int | None:
        """None while the worker does not run."""
        return self._supervisor.pid(worker_name) if self._supervisor is not None else None

    def kill(self, worker_name: str) -> None:
        """kill -9, for tests of recovery; the supervisor starts the worker again."""
        if self._supervisor is not None:
            self._supervisor.kill(worker_name)

    def force(self) -> None:
        """Do not wait for running requests any longer, and kill the workers."""
        self._forced.set()
        if self._supervisor is not None:
            self._supervisor.kill_all()

    async def stop(self) -> None:
        """Admission, running requests, workers, router, sockets, files: in this order. Harmless when done before."""
        if self._serving is not None:
            self._serving.admission.close()
            self._serving.router.closing = True
            await self._drain(self._serving.admission)
        if self._supervisor is not None:  # before the API: workers heartbeat and leave over it
            await self._supervisor.stop(0.0 if self._forced.is_set() else WORKER_GRACE_S)
        if self._announcer is not None:
            self._announcer.cancel()
            await asyncio.gather(self._announcer, return_exceptions=True)
        if self._serving is not None:
            await self._serving.router.close()
        if self._server is not None:
            await self._server.stop()
        if self._runtime_dir is not None:
            self._runtime_dir.close()
            self._runtime_dir = None
        if self._allowed_cores:
            os.sched_setaffinity(0, self._allowed_cores)
            self._allowed_cores = []
        self._serving = self._server = self._supervisor = self._announcer = None

    async def _drain(self, admission: Admission) -> None:
        if num_running := admission.num_inside + admission.num_arriving:
            self._say(f"waiting for {num_running} running requests")
        idle = asyncio.create_task(admission.wait_idle(self.config.router.drain_s))
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait({idle, forced}, return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, forced):
            task.cancel()
        await asyncio.gather(idle, forced, return_exceptions=True)
