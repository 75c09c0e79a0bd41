"""uvicorn inside the router process: its socket is bound by us and its signals are left to `launch.py`.

Used by `launch.Deployment`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from triptych.errors import ConfigError

log = logging.getLogger(__name__)

LAST_CONNECTIONS_S = 2  # for what is still open when all requests have been drained


def bind(host: str, port: int) -> socket.socket:
    """A socket on the address; port 0 takes any free one. Raises ConfigError when that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is taken; choose another with --port, or 0 for any") from None
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return sock


def url_of(sock: socket.socket) -> str:
    """Where a client on this host reaches the socket."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiServer:
    """Serves `app` on a bound socket until stopped; owns the socket."""

    def __init__(self, app: ASGIApp, sock: socket.socket) -> None:
        self._sock = sock
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=LAST_CONNECTIONS_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve([self._sock]), name="http")
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise ConfigError("the HTTP server stopped before it had started")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._sock.close()
