"""The router's mailbox: what it sends to workers and hears from them. Runs in the router's event loop.

On one host over unix sockets; with keys over TCP, encrypted and authenticated, and workers register here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from triptych import messages
from triptych.curve import JOIN_FILE, Guard, Join, RouterKeys, bind_with, check_endpoint, connect_with, write_secret
from triptych.errors import ConfigError
from triptych.router.registration import Registration
from triptych.types import WorkerAddress

logger = logging.getLogger(__name__)

OnEnvelope = Callable[[messages.Envelope], None]

MOST_AT_ONCE = 100  # messages that are read before the event loop goes on with others


class RouterMailbox(Protocol):
    """`ZmqMailbox` between processes; `testing.LocalMailbox` within one."""

    def start(self, on_envelope: OnEnvelope) -> None:
        """Begin to deliver; called once, inside the event loop."""
        ...

    def send(self, address: WorkerAddress, body: messages.Body) -> None:
        """Never blocks and never raises for a dead worker: its loss is the registry's news."""
        ...

    def forget(self, address: WorkerAddress) -> None:
        """This life of the worker is over; what it did not read is void."""
        ...

    async def close(self) -> None: ...


class ZmqMailbox:
    """A socket to each worker, and one for all that they say.

    `endpoint` is a TCP address to listen on, "" for the unix socket in `runtime_dir`. With it `start` writes the join
    file there, and `registration` answers workers.
    """

    def __init__(self, runtime_dir: str, endpoint: str = "") -> None:
        self._directory = Path(runtime_dir)
        self._path = self._directory / "router.sock"
        self._endpoint = endpoint or f"ipc://{self._path}"
        self._keys = RouterKeys.load_or_make(runtime_dir) if endpoint else None
        self.registration: Registration | None = None
        # Made by `start`: a context that is never used would have to be closed too.
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._inbox: _Inbox | None = None
        self._senders: dict[str, zmq.Socket[bytes]] = {}  # by epoch

    def start(self, on_envelope: OnEnvelope) -> None:
        """Raises ConfigError when the address cannot be had."""
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER if self._keys else zmq.PULL)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if self._keys is None:
            socket.bind(self._endpoint)
        else:
            Guard(self._context, self._keys.member.public)
            self._endpoint = bind_with(socket, self._keys.router, self._endpoint)
            join = Join(self._endpoint, self._keys.router.public, self._keys.member)
            write_secret(self._directory / JOIN_FILE, join)
        self._inbox = _Inbox(socket, lambda frames: self._received(frames, on_envelope))

    def _received(self, frames: list[bytes], on_envelope: OnEnvelope) -> None:
        *way_back, frame = frames
        try:
            envelope = messages.decode(frame)
        except msgspec.DecodeError as error:
            logger.warning("a message was dropped: %s", error)
            return
        if envelope.version != messages.PROTOCOL_VERSION:
            logger.warning("message of protocol %d from %s dropped", envelope.version, envelope.sender)
        elif len(way_back) > 1 and self.registration is not None:  # a REQ socket waits for an answer
            assert self._inbox is not None, "a frame came from it"
            answer = self.registration.answer(envelope.body)
            self._inbox.answer([*way_back, messages.encode(answer, "router", "")])
        else:
            on_envelope(envelope)

    def send(self, address: WorkerAddress, body: messages.Body) -> None:
        sender = self._senders.get(address.epoch)
        if sender is None:
            sender = self._senders[address.epoch] = self._open(address)
        with contextlib.suppress(zmq.Again):  # nobody reads there: the registry will hear of it
            sender.send(messages.encode(body, "router", ""), zmq.DONTWAIT)

    def _open(self, address: WorkerAddress) -> zmq.Socket[bytes]:
        assert self._context is not None, "the mailbox was not started"
        sender = self._context.socket(zmq.PUSH)
        sender.setsockopt(zmq.LINGER, 200)
        sender.setsockopt(zmq.SNDHWM, 0)
        try:
            check_endpoint(address.endpoint, self._keys is not None)
            if self._keys is not None:
                connect_with(sender, self._keys.member, address.key, address.endpoint)
            else:
                sender.connect(address.endpoint)
        except (ConfigError, zmq.ZMQError) as error:
            logger.error("worker=%s cannot be reached: %s", address.name, error)
        return sender

    def forget(self, address: WorkerAddress) -> None:
        sender = self._senders.pop(address.epoch, None)
        if sender is not None:
            sender.close(linger=0)

    async def close(self) -> None:
        if self._inbox is not None:
            self._inbox.close()
        for sender in self._senders.values():
            sender.close(linger=200)
        self._senders.clear()
        if self._context is not None:
            self._context.destroy(linger=200)
        self._path.unlink(missing_ok=True)


class _Inbox:
    """Reads a socket in the running event loop, without a task: each token of each answer comes this way."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._fd = socket.fileno()
        self._loop.add_reader(self._fd, self._read)
        self._next: asyncio.Handle | None = self._loop.call_soon(self._read)

    def _read(self) -> None:
        """ZeroMQ's file descriptor tells only of what is new: nothing may be left unread without a next turn."""
        self._next = None
        for _ in range(MOST_AT_ONCE):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            try:
                self._on_frames(self._socket.recv_multipart(zmq.DONTWAIT))
            except Exception:
                logger.exception("a message was dropped")
        self._next = self._loop.call_soon(self._read)

    def answer(self, frames: list[bytes]) -> None:
        """To one who asked, and may be gone. Only while a message is read, which is then followed by another look."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.DONTWAIT)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        if self._next is not None:
            self._next.cancel()
        self._socket.close(linger=0)
