"""A whole deployment: the router process, its HTTP API and the local workers, from placement to clean end.

Runs in the router process, without torch. Called by `triptych serve`, `router` and `demo`, and by tests as
`async with Deployment(config, placement) as d`.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from starlette.types import ASGIApp

from triptych.api.admission import Admission
from triptych.api.app import create_app
from triptych.api.seam import RouterLike
from triptych.api.server import ApiServer, bind, url_of
from triptych.config import Config, WorkerConfig
from triptych.errors import ConfigError
from triptych.observe.metrics import Metrics
from triptych.supervisor import PRELOAD, RestartPolicy, RunWorker, Supervisor
from triptych.types import Stage, WorkerInfo

ENVIRONMENT = {  # inherited by the fork server, which reads it when it imports torch
    "OMP_NUM_THREADS": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
WORKER_GRACE_S = 10.0  # from SIGTERM to SIGKILL, after the running requests were drained
START_TIMEOUT_S = 600.0
POLL_S = 0.05

Say = Callable[[str], None]
Pins = Mapping[str, Sequence[int]]  # cores by worker name, or by group name for all its workers

_LETTERS = {"E": Stage.ENCODE, "P": Stage.PREFILL, "D": Stage.DECODE}


@dataclass(frozen=True)
class Group:
    """Workers that host the same stages."""

    letters: str  # of E, P, D, in this order
    count: int

    @property
    def name(self) -> str:
        return "epd" if self.letters == "EPD" else "-".join(_LETTERS[letter] for letter in self.letters)


@dataclass(frozen=True)
class Placement:
    """Which stages share a worker, and how many workers of each kind there are: `2E/1P/2D`, `1E/1PD`, `EPD`."""

    groups: tuple[Group, ...]

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Raises ConfigError for a form that it cannot read and for a stage that nobody hosts."""
        counts: dict[str, int] = {}
        for part in text.strip().upper().split("/"):
            match = re.fullmatch(r"(\d*)(E?P?D?)", part)
            if match is None or not match[2] or match[1] == "0":
                raise ConfigError(f"placement {text!r}: {part!r} is not a count and letters of EPD, as in 2E/1P/2D")
            counts[match[2]] = counts.get(match[2], 0) + int(match[1] or 1)
        return cls._checked(counts)

    @classmethod
    def from_counts(cls, **counts: int) -> Placement:
        """By group name: `encode=2, prefill_decode=1`. Nothing at all is `EPD`."""
        letters = {"encode": "E", "prefill": "P", "decode": "D", "prefill_decode": "PD", "encode_prefill": "EP"}
        letters["epd"] = "EPD"
        return cls._checked({letters[name]: count for name, count in counts.items() if count} or {"EPD": 1})

    @classmethod
    def _checked(cls, counts: Mapping[str, int]) -> Placement:
        placement = cls(tuple(Group(letters, count) for letters, count in counts.items()))
        hosted = "".join(counts)
        missing = [stage.value for letter, stage in _LETTERS.items() if letter not in hosted]
        if missing:
            raise ConfigError(f"placement {placement}: no worker hosts {' and '.join(missing)}")
        return placement

    def __str__(self) -> str:
        if self.groups == (Group("EPD", 1),):
            return "EPD"
        return "/".join(f"{group.count}{group.letters}" for group in self.groups)

    def workers(self, router_url: str, runtime_dir: str, pins: Pins) -> list[WorkerConfig]:
        """Raises ConfigError for a pin that fits no worker."""
        named = [(group, f"{group.name}-{k}") for group in self.groups for k in range(group.count)]
        unknown = set(pins) - {name for _, name in named} - {group.name for group in self.groups}
        if unknown:
            names = ", ".join(name for _, name in named)
            raise ConfigError(f"--pin {min(unknown)}: there is no such worker; there are {names}")
        workers = []
        for group, name in named:
            cores = list(pins.get(name, pins.get(group.name, ())))
            stages = [_LETTERS[letter] for letter in group.letters]
            threads = max(1, len(cores))
            workers.append(
                WorkerConfig(name=name, stages=stages, router_url=router_url, runtime_dir=runtime_dir, cores=cores, num_threads=threads)
            )
        return workers


class RunningRouter(RouterLike, Protocol):
    """The router with its life, which the API has no part in."""

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
    from triptych.router.router import Router

    spec = open_model(config.model.path, config.model)
    builder = PromptBuilder(spec.path, spec.layout)
    metrics, admission = Metrics(), Admission()
    router = Router(config, builder, spec.fingerprint, ZmqMailbox(runtime_dir), metrics)
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
        self.runtime_dir = runtime_dir
        self._own_runtime_dir = not runtime_dir
        self._pins = pins or {}
        self._say = say
        self._compose = compose
        self._target = target
        self._preload = preload
        self._policy = policy or RestartPolicy()
        self._serving: Serving | None = None
        self._server: ApiServer | None = None
        self._supervisor: Supervisor | None = None
        self._announcer: asyncio.Task[None] | None = None
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
