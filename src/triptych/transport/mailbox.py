"""A worker's mailbox: ZeroMQ sockets to whom it writes, one for what it gets.

Used by the worker's compute thread alone, but for `wake`. The router has its own asynchronous one in
`router/client.py`. On one host these are unix sockets in the deployment's private directory; between hosts TCP,
encrypted and authenticated both ways. Nothing else is bound or connected.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from triptych import messages
from triptych.curve import Guard, Join, KeyPair, bind_with, check_endpoint, connect_with
from triptych.errors import ConfigError
from triptych.transport.links import Link
from triptych.types import WorkerAddress

logger = logging.getLogger(__name__)

SEND_HIGH_WATER_MARK = 10_000  # messages queued for one receiver before they are dropped


def router_endpoint(runtime_dir: str) -> str:
    return f"ipc://{runtime_dir}/router.sock"


def worker_endpoint(runtime_dir: str, name: str, epoch: str) -> str:
    return f"ipc://{runtime_dir}/{name}-{epoch[:8]}.sock"


class _Peer(NamedTuple):
    address: WorkerAddress
    socket: zmq.Socket[bytes]
    link: Link | None  # between hosts


class Mailbox:
    """Messages of one worker. Sending never blocks: what a dead receiver does not take is dropped.

    `endpoint` is where it listens and `key` what others need to write there. Raises ConfigError when it cannot listen.
    """

    def __init__(self, name: str, epoch: str, endpoint: str, router: str, join: Join | None = None) -> None:
        self._sender = name, epoch
        self._join = join
        self._context = zmq.Context()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._peers: dict[str, _Peer] = {}  # by name
        self._lost: set[str] = set()  # epochs that are over
        try:
            self._inbox = self._bind(check_endpoint(endpoint, join is not None))
            # The router answers registrations on the same socket, so between hosts it is another kind.
            self._router = self._open(zmq.DEALER if join else zmq.PUSH)
            self._connect(self._router, router, join.router_key if join else "")
        except BaseException:
            self._context.destroy(linger=0)
            os.close(self._wake_fd)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)

    def _bind(self, endpoint: str) -> zmq.Socket[bytes]:
        inbox = self._context.socket(zmq.PULL)
        inbox.setsockopt(zmq.LINGER, 0)
        inbox.setsockopt(zmq.RCVHWM, 0)
        self.endpoint, self.key = endpoint, ""
        if self._join is not None:
            own = KeyPair.new()
            Guard(self._context, self._join.member.public)
            self.endpoint, self.key = bind_with(inbox, own, endpoint), own.public
            return inbox
        try:
            inbox.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {endpoint}: {error}") from error
        return inbox

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        return socket

    def _connect(self, socket: zmq.Socket[bytes], endpoint: str, key: str) -> None:
        """Raises ConfigError for an endpoint that is not safe, or none."""
        check_endpoint(endpoint, self._join is not None)
        if self._join is not None:
            connect_with(socket, self._join.member, key, endpoint)
            return
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot connect to {endpoint}: {error}") from error

    def _meet(self, address: WorkerAddress) -> _Peer:
        socket = self._open(zmq.PUSH)
        peer = _Peer(address, socket, Link(socket, time.monotonic()) if self._join else None)
        try:
            self._connect(socket, address.endpoint, address.key)
        except ConfigError:
            self._drop(peer)
            raise
        return peer

    def _drop(self, peer: _Peer) -> None:
        if peer.link is not None:
            peer.link.close()
        peer.socket.close(linger=0)

    def to_router(self, body: messages.Body) -> None:
        self._send(self._router, body)

    def to_worker(self, address: WorkerAddress, body: messages.Body) -> None:
        if address.epoch in self._lost:
            return
        peer = self._peers.get(address.name)
        if peer is None or peer.address.endpoint != address.endpoint:
            if peer is not None:  # an earlier life of this worker: what it did not read is void
                self._drop(peer)
            try:
                peer = self._peers[address.name] = self._meet(address)
            except ConfigError as error:
                logger.warning("a message was dropped: %s for %s: %s", type(body).__name__, address.name, error)
                return
        if peer.link is not None:
            peer.link.sent(time.monotonic())
        self._send(peer.socket, body)

    def _send(self, socket: zmq.Socket[bytes], body: messages.Body) -> None:
        try:
            socket.send(messages.encode(body, *self._sender), zmq.DONTWAIT)
        except zmq.Again:
            logger.warning("a message was dropped: %s, the receiver does not read", type(body).__name__)

    def receive(self, timeout_s: float) -> list[messages.Envelope]:
        """All messages that are here; waits up to `timeout_s` for a first one or for `wake`."""
        if timeout_s > 0:  # between two steps there is nothing to wait for, and a call of `wake` stays for later
            self._poller.poll(int(timeout_s * 1000))
            with contextlib.suppress(BlockingIOError):  # nobody called wake
                os.eventfd_read(self._wake_fd)
        self._report_lost_links()
        received = []
        while int(self._inbox.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            try:
                received.append(messages.decode(self._inbox.recv(zmq.DONTWAIT)))
            except msgspec.DecodeError as error:
                logger.warning("a message was dropped: %s", error)
        return received

    def _report_lost_links(self) -> None:
        now = time.monotonic()
        for peer in self._peers.values():
            if peer.link is not None and peer.link.lost(now):
                logger.warning("worker=%s cannot be reached at %s", peer.address.name, peer.address.endpoint)
                self.to_router(messages.LinkLost(peer.address.name, peer.address.epoch))

    def forget(self, epoch: str) -> None:
        """This life of a worker is over: nothing is sent there any more."""
        self._lost.add(epoch)
        for peer in [peer for peer in self._peers.values() if peer.address.epoch == epoch]:
            del self._peers[peer.address.name]
            self._drop(peer)

    def wake(self) -> None:
        """End a `receive` that waits; may be called from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        self._context.destroy(linger=200)
        os.close(self._wake_fd)
        if self._join is None:
            Path(self.endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
