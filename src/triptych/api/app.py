"""The Starlette application of the router process: OpenAI's routes, health, metrics, topology and the workers' own.

Built by `launch.py`, which hands the router in. A request's order here: admission, body limit, checks, the router.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from triptych import __version__
from triptych.api import admin
from triptych.api.admission import Admission
from triptych.api.answer import AnswerForm
from triptych.api.body import json_response, read_body, require_json
from triptych.api.openai import ChatCall, error_body, parse_chat
from triptych.api.seam import RouterLike
from triptych.api.stream import ClientGoneError, EventStream, closing, complete, first_event, while_connected
from triptych.config import Config
from triptych.errors import NotFoundError, OverloadedError, TriptychError
from triptych.observe.logging import canonical_line
from triptych.observe.metrics import CONTENT_TYPE, Metrics

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's word for an answer that nobody reads


def create_app(router: RouterLike, config: Config, metrics: Metrics, admission: Admission | None = None) -> Starlette:
    """`admission` is kept by the launcher, which closes it when the process is told to stop."""
    return Starlette(
        routes=[
            Route("/v1/chat/completions", ChatEndpoint(router, config, metrics, admission or Admission())),
            *_model_routes(router),
            *_state_routes(router, metrics),
            *admin.routes(router),
        ],
        exception_handlers={TriptychError: _on_error, HTTPException: _on_http_error, Exception: _on_error},
    )


class ChatEndpoint:
    """POST /v1/chat/completions, as an ASGI app of its own: it must see the client go at any moment."""

    def __init__(self, router: RouterLike, config: Config, metrics: Metrics, admission: Admission) -> None:
        self._router = router
        self._config = config
        self._metrics = metrics
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            raise HTTPException(405, headers={"Allow": "POST"})
        with self._admission.enter():
            response = await self._respond(Request(scope, receive))
            await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        call = await self._read(request)
        form = AnswerForm(call.response_id, self._router.model_name, call.include_usage, call.timing)
        events = self._router.handle(call.request)
        try:
            if call.stream:
                # A failure before the first event is an HTTP error; after it the status has been sent.
                first = await while_connected(request.receive, first_event(events))
                return EventStream(first, events, form)
            async with closing(events):
                return json_response(await while_connected(request.receive, complete(events, form)))
        except ClientGoneError:
            async with closing(events):
                return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def _read(self, request: Request) -> ChatCall:
        """The checked request. One that fails here is counted and logged here: the router never hears of it."""
        started_s = time.monotonic()
        try:
            require_json(request)
            body = await read_body(request, self._config.api.max_body_bytes)
            return parse_chat(body, model_name=self._router.model_name, max_model_len=self._router.max_model_len)
        except TriptychError as error:
            self._metrics.failed(error)
            canonical_line(request_id="", status=error.status, e2e_s=time.monotonic() - started_s, error=error)
            raise


def _model_routes(router: RouterLike) -> list[Route]:
    created = int(time.time())

    def card() -> dict[str, object]:
        return {
            "id": router.model_name,
            "object": "model",
            "created": created,
            "owned_by": "triptych",
            "root": router.model_name,
            "parent": None,
            "max_model_len": router.max_model_len,
        }

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [card()]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != router.model_name:
            raise NotFoundError(f"The model `{name[:200]}` does not exist.", param="model")
        return json_response(card())

    return [Route("/v1/models", models), Route("/v1/models/{name:path}", model)]


def _state_routes(router: RouterLike, metrics: Metrics) -> list[Route]:
    async def health(request: Request) -> Response:
        workers = await router.health()
        well = router.ready() and not any(workers.values())
        return json_response({"status": "ok" if well else "unhealthy", "workers": workers}, 200 if well else 503)

    async def ping(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        well = router.ready()
        return json_response({"ready": well}, 200 if well else 503, {} if well else {"Retry-After": "1"})

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    async def load(request: Request) -> Response:
        return json_response({"server_load": router.num_running})

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


def _topology(router: RouterLike) -> dict[str, object]:
    """Every worker as the router knows it; `counters` are the worker's own, from its last heartbeat."""
    workers = [
        {
            "name": worker.info.address.name,
            "state": worker.state,
            "stages": worker.info.stages,
            "info": worker.info,
            "load": worker.load,
            "counters": worker.counters,
        }
        for worker in router.registry.workers()
    ]
    return {
        "model": router.model_name,
        "max_model_len": router.max_model_len,
        "ready": router.ready(),
        "num_running": router.num_running,
        "workers": workers,
    }


async def _on_error(request: Request, error: Exception) -> Response:
    body = error_body(error)
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, OverloadedError) else {}
    return json_response(body, body.error.code, headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # Starlette calls it with nothing else
    return json_response({"detail": error.detail}, error.status_code, error.headers)
