"""Workers over HTTP: they register, heartbeat and leave (`heartbeat.py` calls), and an operator drains one.

Only loopback peers are heard: whoever may register a worker may read every prompt. A page in a browser of this host is
such a peer too, and is refused. Workers of a deployment that spans hosts use the router's encrypted mailbox instead
(`router/registration.py`).
"""

from __future__ import annotations

import ipaddress

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from triptych.api.body import BodyReader, convert, decode_object, json_response, require_json
from triptych.api.errors import ErrorBody, ErrorDetail
from triptych.api.seam import RouterLike
from triptych.errors import ConfigError, NotFoundError
from triptych.types import Heartbeat, WorkerInfo

MAX_ADMIN_BYTES = 1 << 20
BODY_TIMEOUT_S = 10.0
BROWSER_HEADERS = ("origin", "sec-fetch-site")  # pages cannot leave them out, and programs do not send them


class Leaving(msgspec.Struct, frozen=True):
    name: str
    epoch: str


async def _body(request: Request) -> bytes:
    if not is_loopback(request) or any(header in request.headers for header in BROWSER_HEADERS):
        raise HTTPException(404)  # a peer that may not ask sees no route
    require_json(request)  # a browser asks first before it sends this to another origin
    return await BodyReader(MAX_ADMIN_BYTES, MAX_ADMIN_BYTES, BODY_TIMEOUT_S).read(request)


def is_loopback(request: Request) -> bool:
    if request.client is None:
        return True  # a unix socket
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


class Draining(msgspec.Struct, frozen=True):
    name: str


def routes(router: RouterLike, spans_hosts: bool = False) -> list[Route]:
    registry = router.registry

    async def register(request: Request) -> Response:
        info = convert(decode_object(await _body(request)), WorkerInfo)
        try:
            if spans_hosts:
                raise ConfigError("this deployment spans hosts: start the worker with --join-file and --host")
            registry.register(info)
        except ConfigError as error:
            return json_response(ErrorBody(ErrorDetail(error.message, "ConflictError", error.param, 409)), 409)
        return json_response({"registered": info.address.name})

    async def heartbeat(request: Request) -> Response:
        beat = convert(decode_object(await _body(request)), Heartbeat)
        if not registry.heartbeat(beat):
            raise NotFoundError(f"Worker {beat.name} is not registered with this epoch.", param="name")
        return json_response({"ok": True})

    async def leave(request: Request) -> Response:
        leaving = convert(decode_object(await _body(request)), Leaving)
        registry.leave(leaving.name, leaving.epoch)
        return json_response({"ok": True})

    async def drain(request: Request) -> Response:
        draining = convert(decode_object(await _body(request)), Draining)
        if not router.drain(draining.name):
            raise NotFoundError(f"There is no worker {draining.name}.", param="name")
        return json_response({"draining": draining.name})

    return [
        Route("/workers/drain", drain, methods=["POST"]),
        Route("/workers/register", register, methods=["POST"]),
        Route("/workers/heartbeat", heartbeat, methods=["POST"]),
        Route("/workers/leave", leave, methods=["POST"]),
    ]
