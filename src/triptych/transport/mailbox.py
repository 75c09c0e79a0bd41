"""A worker's mailbox: ZeroMQ PUSH to whom it writes, one PULL for what it gets, over unix sockets.

Used by the worker's compute thread alone, but for `wake`. The router has its own asynchronous one in
`router/client.py`. Unix sockets lie in the deployment's private directory; other endpoints are refused until messages
are authenticated.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import msgspec
import zmq

from triptych import messages
from triptych.errors import ConfigError
from triptych.types import WorkerAddress

logger = logging.getLogger(__name__)

SEND_HIGH_WATER_MARK = 10_000  # messages queued for one receiver before they are dropped


def router_endpoint(runtime_dir: str) -> str:
    return f"ipc://{runtime_dir}/router.sock"


def worker_endpoint(runtime_dir: str, name: str, epoch: str) -> str:
    return f"ipc://{runtime_dir}/{name}-{epoch[:8]}.sock"


def check_endpoint(endpoint: str) -> str:
    """Raises ConfigError for an endpoint that others could write to."""
    if not endpoint.startswith("ipc://"):
        raise ConfigError(f"endpoint {endpoint}: only unix sockets (ipc://) are authenticated")
    return endpoint


class Mailbox:
    """Messages of one worker. Sending never blocks: what a dead receiver does not take is dropped."""

    def __init__(self, address: WorkerAddress, router_endpoint: str) -> None:
        self._address = address
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.setsockopt(zmq.LINGER, 0)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.bind(check_endpoint(address.endpoint))
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._router = self._connect(router_endpoint)
        self._peers: dict[str, tuple[str, zmq.Socket[bytes]]] = {}  # by name: endpoint and socket

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        check_endpoint(endpoint)
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        socket.connect(endpoint)
        return socket

    def to_router(self, body: messages.Body) -> None:
        self._send(self._router, body)

    def to_worker(self, address: WorkerAddress, body: messages.Body) -> None:
        endpoint, socket = self._peers.get(address.name, ("", None))
        if socket is None or endpoint != address.endpoint:
            if socket is not None:  # an earlier life of this worker: what it did not read is void
                socket.close(linger=0)
            try:
                socket = self._connect(address.endpoint)
            except (ConfigError, zmq.ZMQError) as error:
                logger.warning("a message was dropped: %s for %s: %s", type(body).__name__, address.name, error)
                return
            self._peers[address.name] = (address.endpoint, socket)
        self._send(socket, body)

    def _send(self, socket: zmq.Socket[bytes], body: messages.Body) -> None:
        try:
            socket.send(messages.encode(body, self._address.name, self._address.epoch), zmq.DONTWAIT)
        except zmq.Again:
            logger.warning("a message was dropped: %s, the receiver does not read", type(body).__name__)

    def receive(self, timeout_s: float) -> list[messages.Envelope]:
        """All messages that are here; waits up to `timeout_s` for a first one or for `wake`."""
        self._poller.poll(int(timeout_s * 1000))
        with contextlib.suppress(BlockingIOError):  # nobody called wake
            os.eventfd_read(self._wake_fd)
        received = []
        while True:
            try:
                received.append(messages.decode(self._inbox.recv(zmq.DONTWAIT)))
            except zmq.Again:
                return received
            except msgspec.DecodeError as error:
                logger.warning("a message was dropped: %s", error)

    def wake(self) -> None:
        """End a `receive` that waits; may be called from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        self._context.destroy(linger=200)
        os.close(self._wake_fd)
        Path(self._address.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
