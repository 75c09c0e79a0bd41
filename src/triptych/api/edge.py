"""What every HTTP request meets first: an id for its answer, API keys, and how often its client may ask.

ASGI apps around the routes, put together in `app.py`. What they find out stands in the scope, for `caller_of`.
"""

from __future__ import annotations

import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.api.errors import count_refused, error_response
from triptych.api.fields import Caller
from triptych.api.keys import Keys
from triptych.api.rates import Rates
from triptych.api.sampling import REQUEST_ID
from triptych.errors import TriptychError
from triptych.observe.metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/version", "/metrics", "/openapi.json"})
OPEN_TREES = ("/workers/",)  # for loopback peers only, see `admin.py`

_ID = "triptych.request_id"
_CLIENT = "triptych.client"


def caller_of(scope: Scope) -> Caller:
    return Caller(scope.get(_ID, ""), scope.get(_CLIENT, ""))


def answer_with_id(scope: Scope, request_id: str) -> None:
    """Let the answer's `x-request-id` be another: a request's own field goes before its header."""
    scope[_ID] = request_id


class RequestIds:
    """`x-request-id` comes in and goes out; where none that is usable comes in, one is made."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        scope[_ID] = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = scope[_ID]
            await send(message)

        await self._app(scope, receive, send_with_id)


class Guard:
    """Keys and rates. Paths that probes and load balancers ask need neither."""

    def __init__(self, app: ASGIApp, keys: Keys, rates: Rates, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._rates = rates
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or scope["path"].startswith(OPEN_TREES):
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        try:
            if self._keys:
                scope[_CLIENT] = self._keys.client_of(Headers(scope=scope).get("authorization", ""))
            if scope["method"] == "POST":
                self._rates.take(scope.get(_CLIENT) or _address(scope))
        except TriptychError as error:
            count_refused(error, self._metrics, scope[_ID], started_s)
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""
