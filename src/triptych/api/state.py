"""How the server is: health, readiness, version, load, topology, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from triptych import __version__
from triptych.api.body import json_response
from triptych.api.seam import RouterLike
from triptych.observe.metrics import CONTENT_TYPE, Metrics
from triptych.types import Load, Stage, WorkerInfo


class HealthBody(msgspec.Struct, frozen=True):
    status: Literal["ok", "unhealthy"]
    workers: dict[str, str]  # by name: "ok", or what is wrong


class PingBody(msgspec.Struct, frozen=True):
    status: Literal["ok"] = "ok"


class ReadyBody(msgspec.Struct, frozen=True):
    ready: bool


class VersionBody(msgspec.Struct, frozen=True):
    version: str = __version__


class LoadBody(msgspec.Struct, frozen=True):
    server_load: int  # requests in flight


class WorkerBody(msgspec.Struct, frozen=True):
    name: str
    state: str
    stages: list[Stage]
    info: WorkerInfo
    load: Load
    counters: dict[str, float]  # the worker's own, from its last heartbeat


class TopologyBody(msgspec.Struct, frozen=True):
    """Every worker as the router knows it."""

    model: str
    max_model_len: int
    ready: bool
    num_running: int
    workers: list[WorkerBody]


def routes(router: RouterLike, metrics: Metrics) -> list[Route]:
    probing: asyncio.Task[dict[str, str]] | None = None

    async def health(request: Request) -> Response:
        nonlocal probing
        if probing is None or probing.done():  # who asks meanwhile waits for the same probes: anybody may ask
            probing = asyncio.create_task(router.health())
        wrong = await asyncio.shield(probing)
        well = router.ready() and not any(wrong.values())
        body = HealthBody("ok" if well else "unhealthy", {name: text or "ok" for name, text in wrong.items()})
        return json_response(body, 200 if well else 503)

    async def ping(request: Request) -> Response:
        return json_response(PingBody())

    async def ready(request: Request) -> Response:
        well = router.ready()
        return json_response(ReadyBody(well), 200 if well else 503, {} if well else {"Retry-After": "1"})

    async def version(request: Request) -> Response:
        return json_response(VersionBody())

    async def load(request: Request) -> Response:
        return json_response(LoadBody(router.num_running))

    async def topology(request: Request) -> Response:
        return json_response(_topology(router))

    async def metrics_text(request: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    endpoints: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/health": health,
        "/ready": ready,
        "/version": version,
        "/load": load,
        "/topology": topology,
        "/metrics": metrics_text,
    }
    return [Route("/ping", ping, methods=["GET", "POST"]), *(Route(path, end) for path, end in endpoints.items())]


def _topology(router: RouterLike) -> TopologyBody:
    workers = [
        WorkerBody(
            worker.info.address.name, worker.state, worker.info.stages, worker.info, worker.load, worker.counters
        )
        for worker in router.registry.workers()
    ]
    return TopologyBody(router.model_name, router.max_model_len, router.ready(), router.num_running, workers)
