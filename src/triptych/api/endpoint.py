"""A POST route that generates: chat, completions, responses. A request's order: the door, the body, checks, the router.

An ASGI app of its own, because it must see the client go at any moment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, aclosing
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych.api.admission import Admission
from triptych.api.body import BodyReader, json_response
from triptych.api.call import Call
from triptych.api.edge import answer_with_id, caller_of
from triptych.api.errors import count_refused
from triptych.api.fields import Caller, Served
from triptych.api.gather import gather, numbered
from triptych.api.seam import RouterLike
from triptych.api.stream import ClientGoneError, EventStream, first_event, while_connected
from triptych.config import ApiConfig
from triptych.errors import TriptychError
from triptych.observe.metrics import Metrics

CLIENT_CLOSED_REQUEST = 499  # nginx's word for an answer that nobody reads

Parse = Callable[[dict[str, Any], Served, Caller], Call]


class ApiParts(NamedTuple):
    """What every route is made from."""

    router: RouterLike
    config: ApiConfig
    metrics: Metrics
    admission: Admission
    bodies: BodyReader

    def served(self) -> Served:
        router = self.router
        return Served(
            router.model_name, router.max_model_len, router.vocabulary, self.config.trust_request_chat_template
        )


class GenerationEndpoint:
    """`parse` makes the call of a body; see `call.py`."""

    def __init__(self, parts: ApiParts, parse: Parse) -> None:
        self._parts = parts
        self._parse = parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            raise HTTPException(405, headers={"Allow": "POST"})
        with ExitStack() as inside:
            response = await self._respond(Request(scope, receive), inside)
            await response(scope, receive, send)

    async def _respond(self, request: Request, inside: ExitStack) -> Response:
        call = await self._read(request, inside)
        events = numbered([self._parts.router.handle(each) for each in call.requests])
        try:
            if call.stream:
                # A failure before the first event is an HTTP error; after it the status has been sent.
                first = await while_connected(request.receive, first_event(events))
                return EventStream(first, events, call.form.stream(), len(call.requests), call.request_id)
            async with aclosing(events):
                answers = await while_connected(request.receive, gather(events, len(call.requests)))
                return json_response(call.form.whole(answers))
        except ClientGoneError:
            async with aclosing(events):
                return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def _read(self, request: Request, inside: ExitStack) -> Call:
        """The checked call, after the doors. One that fails here is counted here: the router never hears of it."""
        parts, started_s, caller = self._parts, time.monotonic(), caller_of(request.scope)
        try:
            with parts.admission.arrive():
                parts.router.admit()
                body = await parts.bodies.read_json(request)
                inside.enter_context(parts.admission.enter())
            call = self._parse(body, parts.served(), caller)
        except TriptychError as error:
            count_refused(error, parts.metrics, caller.request_id, started_s)
            raise
        answer_with_id(request.scope, call.request_id)
        return call
