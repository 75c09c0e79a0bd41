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
import zmq.asyncio

from triptych import messages
from triptych.curve import JOIN_FILE, Guard, Join, RouterKeys, bind_with, check_endpoint, connect_with, write_secret
from triptych.errors import ConfigError
from triptych.router.registration import Registration
from triptych.types import WorkerAddress

logger = logging.getLogger(__name__)

OnEnvelope = Callable[[messages.Envelope], None]


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
        self._context: zmq.asyncio.Context | None = None
        self._senders: dict[str, zmq.Socket[bytes]] = {}  # by epoch; synchronous: a send only queues
        self._task: asyncio.Task[None] | None = None

    def start(self, on_envelope: OnEnvelope) -> None:
        """Raises ConfigError when the address cannot be had."""
        self._context = zmq.asyncio.Context()
        inbox = self._context.socket(zmq.ROUTER if self._keys else zmq.PULL)
        inbox.setsockopt(zmq.LINGER, 0)
        inbox.setsockopt(zmq.RCVHWM, 0)
        if self._keys is None:
            inbox.bind(self._endpoint)
        else:
            Guard(self._context, self._keys.member.public)
            self._endpoint = bind_with(inbox, self._keys.router, self._endpoint)
            join = Join(self._endpoint, self._keys.router.public, self._keys.member)
            write_secret(self._directory / JOIN_FILE, join)
        self._task = asyncio.create_task(self._receive(inbox, on_envelope), name="router-mailbox")

    async def _receive(self, inbox: zmq.asyncio.Socket, on_envelope: OnEnvelope) -> None:
        while True:
            *way_back, frame = await inbox.recv_multipart()
            try:
                envelope = messages.decode(frame)
            except msgspec.DecodeError as error:
                logger.warning("a message was dropped: %s", error)
                continue
            if envelope.version != messages.PROTOCOL_VERSION:
                logger.warning("message of protocol %d from %s dropped", envelope.version, envelope.sender)
            elif len(way_back) > 1 and self.registration is not None:  # a REQ socket waits for an answer
                answer = self.registration.answer(envelope.body)
                await inbox.send_multipart([*way_back, messages.encode(answer, "router", "")])
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
        sender: zmq.Socket[bytes] = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
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
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for sender in self._senders.values():
            sender.close(linger=200)
        self._senders.clear()
        if self._context is not None:
            self._context.destroy(linger=200)
        self._path.unlink(missing_ok=True)
