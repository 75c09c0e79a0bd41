"""A router that plays a script, and a client of the API in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from triptych.api.admission import Admission
from triptych.api.app import create_app
from triptych.config import ApiConfig, Config
from triptych.errors import ConfigError
from triptych.observe.metrics import Metrics
from triptych.types import (
    ChoiceFinished,
    Event,
    Finished,
    FinishReason,
    Heartbeat,
    Load,
    Prompt,
    Request,
    Span,
    Stage,
    Started,
    TextDelta,
    Timing,
    Usage,
    WeightsReport,
    WorkerAddress,
    WorkerInfo,
)

TIMING = Timing(0.2, 0.5, [Span("fetch", 0.0, 0.05), Span("prefill", 0.05, 0.15, "prefill-0")], [], [])
STARTED = Started(list(range(12)), num_cached_tokens=4, num_image_tokens=8)
STOPPED = ChoiceFinished(0, FinishReason.STOP, None)
FINISHED = Finished(Usage(12, 3, cached_tokens=4, image_tokens=8), TIMING)


def worker_info(name: str = "encode-0", version_hash: str = "v1") -> WorkerInfo:
    return WorkerInfo(
        address=WorkerAddress(name, "e1", f"ipc:///tmp/{name}", ""),
        stages=[Stage.ENCODE],
        version_hash=version_hash,
        model="demo",
        max_model_len=100,
        weights=WeightsReport(1, 3, 10, 30, 0.5),
        pid=7,
    )


@dataclass
class FakeWorker:
    info: WorkerInfo
    load: Load = field(default_factory=Load)
    counters: dict[str, float] = field(default_factory=dict)
    state: str = "live"


class FakeRegistry:
    def __init__(self) -> None:
        self.known: dict[str, FakeWorker] = {}

    def register(self, info: WorkerInfo) -> None:
        if info.version_hash != "v1":
            raise ConfigError("another model")
        self.known[info.address.name] = FakeWorker(info)

    def heartbeat(self, beat: Heartbeat) -> bool:
        worker = self.known.get(beat.name)
        if worker is None or worker.info.address.epoch != beat.epoch:
            return False
        worker.load, worker.counters = beat.load, beat.counters
        return True

    def leave(self, name: str, epoch: str) -> None:
        self.known.pop(name, None)

    def lost(self, name: str) -> None:
        self.known.pop(name, None)

    def workers(self) -> Sequence[FakeWorker]:
        return list(self.known.values())


class FakeVocabulary:
    """Token `k` is the character of code point `k`."""

    size = 200

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def name(self, token_id: int) -> str:
        return f"<{token_id}>"


class FakeRouter:
    """Plays `script`: events are yielded, exceptions raised, an `asyncio.Event` waited for."""

    model_name = "demo"
    max_model_len = 100
    num_running = 0

    def __init__(self) -> None:
        self.registry = FakeRegistry()
        self.vocabulary = FakeVocabulary()
        self.refusal: Exception | None = None  # what `admit` raises
        self.script: list[Event | Exception | asyncio.Event] = [
            STARTED,
            TextDelta("a ", 1),
            TextDelta("cat", 2),
            STOPPED,
            FINISHED,
        ]
        self.requests: list[Request] = []
        self.num_closed = 0
        self.drained: list[str] = []
        self.num_cancelled = 0  # closed before the end of the script
        self.waiting = asyncio.Event()  # set while the script waits
        self.is_ready = True
        self.sick: dict[str, str] = {}

    async def handle(self, request: Request) -> AsyncGenerator[Event, None]:
        self.requests.append(request)
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    self.waiting.set()
                    await step.wait()
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            self.num_cancelled += 1
            raise
        finally:
            self.num_closed += 1

    def admit(self) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def lay_out(self, request: Request) -> Prompt:
        """A token a character of the prompt or of the messages' texts, and one an image."""
        self.requests.append(request)
        text = request.prompt if request.prompt is not None else f"{len(request.messages)}"
        tokens = [ord(character) for character in text] if isinstance(text, str) else text
        return Prompt(tokens + [7] * len(request.images))

    def drain(self, name: str) -> bool:
        self.drained.append(name)
        return name == "encode-0"

    def ready(self) -> bool:
        return self.is_ready

    async def health(self) -> dict[str, str]:
        return self.sick


@dataclass
class Api:
    """All that a test of the API touches."""

    router: FakeRouter
    metrics: Metrics
    admission: Admission
    http: httpx.AsyncClient

    async def post(self, path: str, **fields: object) -> httpx.Response:
        return await self.http.post(path, json=fields)

    async def chat(self, **fields: object) -> httpx.Response:
        body: dict[str, object] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
        return await self.http.post("/v1/chat/completions", json=body | fields)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Api]:
    """The API with these settings of `ApiConfig`."""
    router, metrics, admission = FakeRouter(), Metrics(), Admission(16)
    config = Config(api=ApiConfig(**({"max_body_bytes": 20_000} | settings)))
    app = create_app(router, config, metrics, admission)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield Api(router, metrics, admission, client)


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with serving() as running:
        yield running
