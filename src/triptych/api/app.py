"""The ASGI application of the router process: OpenAI's routes, tokens, health, topology and the workers' own.

Built by `launch.py`, which hands the router in. Around the routes stand request ids, CORS, keys and rates.
"""

from __future__ import annotations

import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.api import admin, models, openapi, state, tokens
from triptych.api.admission import Admission
from triptych.api.body import BodyReader
from triptych.api.chat import parse_chat
from triptych.api.completions import parse_completion
from triptych.api.edge import Guard, RequestIds
from triptych.api.endpoint import ApiParts, GenerationEndpoint
from triptych.api.errors import error_response
from triptych.api.keys import Keys
from triptych.api.rates import Rates
from triptych.api.responses import parse_response
from triptych.api.seam import RouterLike
from triptych.config import Config
from triptych.errors import MethodNotAllowedError, NotFoundError, TriptychError
from triptych.observe.metrics import Metrics


class Api:
    """The whole application. Its routes are there to be looked at."""

    def __init__(self, app: ASGIApp, routes: list[BaseRoute]) -> None:
        self._app = app
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def create_app(router: RouterLike, config: Config, metrics: Metrics, admission: Admission | None = None) -> Api:
    """`admission` is kept by the launcher, which closes it when the process is told to stop. Raises ConfigError."""
    api = config.api
    admission = admission or Admission(config.router.max_num_requests)
    bodies = BodyReader(api.max_body_bytes, api.max_reading_bytes, api.body_timeout_s)
    parts = ApiParts(router, api, metrics, admission, bodies)
    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", GenerationEndpoint(parts, parse_chat)),
        Route("/v1/completions", GenerationEndpoint(parts, parse_completion)),
        Route("/v1/responses", GenerationEndpoint(parts, parse_response)),
        *tokens.routes(parts),
        *models.routes(router),
        *state.routes(router, metrics),
        *admin.routes(router, spans_hosts=bool(config.router.control_host)),
        openapi.route(),
    ]
    starlette = Starlette(
        routes=routes,
        exception_handlers={TriptychError: _on_error, 404: _no_route, 405: _wrong_method, Exception: _on_error},
    )
    starlette.router.redirect_slashes = False  # many clients do not follow, and see an empty answer
    app: ASGIApp = Guard(
        starlette, Keys.load(api.api_keys_file), Rates(api.requests_per_minute, time.monotonic), metrics
    )
    if api.cors_origins:
        origins = [origin.strip() for origin in api.cors_origins.split(",")]
        app = CORSMiddleware(
            app, origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=["x-request-id"]
        )
    return Api(RequestIds(app), routes)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _no_route(request: Request, error: Exception) -> Response:
    hint = "" if request.url.path.startswith("/v1/") else " OpenAI's routes begin with `/v1/`."
    return error_response(NotFoundError(f"There is no `{_path(request)}` here.{hint}"))


async def _wrong_method(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # Starlette calls it with nothing else
    headers = error.headers or {}
    allowed = headers.get("Allow", "another method")
    response = error_response(MethodNotAllowedError(f"`{_path(request)}` takes {allowed}, not {request.method}."))
    response.headers.update(headers)
    return response


def _path(request: Request) -> str:
    return str(request.scope["path"])[:200]
