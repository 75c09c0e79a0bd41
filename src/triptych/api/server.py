"""uvicorn inside the router process: its socket is bound by us and its signals are left to `launch.py`.

Used by `launch.Deployment`.
"""

from __future__ import annotations

import asyncio
import errno
import http
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from triptych.api.errors import error_response
from triptych.errors import (
    ConfigError,
    HeadersTooLargeError,
    MalformedRequestError,
    RequestTimeoutError,
    TriptychError,
)

log = logging.getLogger(__name__)

LAST_CONNECTIONS_S = 2  # for what is still open when all requests have been drained
MAX_HEADER_BYTES = 64 << 10  # and what is read at once; a header that grows and grows is copied as often
HEADERS_S = 30  # from the connection, or from the answer before, until a request's headers are complete


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


class _Connection(HttpToolsProtocol):
    """uvicorn's, which would take headers of any size and for any time; and its own errors in the API's form."""

    _waiting: asyncio.TimerHandle | None = None
    _in_headers = True  # no body is being read
    _num_heads = 0  # headers that were complete
    _num_header_bytes = 0  # of those that are not yet

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        was_in_headers, num_heads = self._in_headers, self._num_heads
        super().data_received(data)
        only_headers = was_in_headers and self._num_heads == num_heads
        self._num_header_bytes = self._num_header_bytes + len(data) if only_headers else 0
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._refuse(HeadersTooLargeError(f"The request's headers are longer than {MAX_HEADER_BYTES} bytes."))

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._num_heads += 1
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_headers = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # otherwise the next request is here already
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(MalformedRequestError("The request is not valid HTTP."))

    def _wait(self) -> None:
        self._stop_waiting()
        self._waiting = self.loop.call_later(HEADERS_S, self._headers_are_late)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _headers_are_late(self) -> None:
        self._refuse(RequestTimeoutError(f"The request's headers did not arrive within {HEADERS_S} s."))

    def _refuse(self, error: TriptychError) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # an error would stand in the middle of the answer
            return
        response = error_response(error)
        lines = [f"HTTP/1.1 {error.status} {http.HTTPStatus(error.status).phrase}".encode(), b"connection: close"]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.close()


class ApiServer:
    """Serves `app` on a bound socket until stopped; owns the socket."""

    def __init__(self, app: ASGIApp, sock: socket.socket) -> None:
        self._sock = sock
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                http=_Connection,
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
