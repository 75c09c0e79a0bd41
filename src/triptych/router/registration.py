"""What the router answers to workers of other hosts that register, beat and leave, over its encrypted mailbox.

`api/admin.py` does the same over HTTP for workers of the router's own host.
"""

from __future__ import annotations

from triptych.curve import check_endpoint
from triptych.errors import ConfigError
from triptych.messages import Answer, Beat, Body, Leave, Register
from triptych.router.registry import Registry

OK, UNKNOWN, REFUSED = 200, 404, 409


class Registration:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def answer(self, body: Body) -> Answer:
        match body:
            case Register(info):
                try:
                    check_endpoint(info.address.endpoint, has_keys=True)
                    self._registry.register(info)
                except ConfigError as error:
                    return Answer(REFUSED, error.message)
                return Answer(OK)
            case Beat(heartbeat):
                return Answer(OK if self._registry.heartbeat(heartbeat) else UNKNOWN)
            case Leave(name, epoch):
                self._registry.leave(name, epoch)
                return Answer(OK)
            case _:
                return Answer(REFUSED, f"a worker does not register with {type(body).__name__}")
