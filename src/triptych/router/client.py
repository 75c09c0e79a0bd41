"""The router's mailbox: what it sends to workers and hears from them. Runs in the router's event loop."""

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
    """PUSH to each worker, one PULL for all of them, over unix sockets in the deployment's private directory."""

    def __init__(self, runtime_dir: str) -> None:
        self._path = Path(runtime_dir) / "router.sock"
        # Made by `start`: a context that is never used would have to be closed too.
        self._context: zmq.asyncio.Context | None = None
        self._senders: dict[str, zmq.Socket[bytes]] = {}  # by epoch; synchronous: a send only queues
        self._task: asyncio.Task[None] | None = None

    def start(self, on_envelope: OnEnvelope) -> None:
        self._context = zmq.asyncio.Context()
        inbox = self._context.socket(zmq.PULL)
        inbox.setsockopt(zmq.LINGER, 0)
        inbox.setsockopt(zmq.RCVHWM, 0)
        inbox.bind(f"ipc://{self._path}")
        self._task = asyncio.create_task(self._receive(inbox, on_envelope), name="router-mailbox")

    async def _receive(self, inbox: zmq.asyncio.Socket, on_envelope: OnEnvelope) -> None:
        while True:
            frame = await inbox.recv()
            try:
                envelope = messages.decode(frame)
            except msgspec.DecodeError as error:
                logger.warning("a message was dropped: %s", error)
                continue
            if envelope.version != messages.PROTOCOL_VERSION:
                logger.warning("message of protocol %d from %s dropped", envelope.version, envelope.sender)
                continue
            on_envelope(envelope)

    def send(self, address: WorkerAddress, body: messages.Body) -> None:
        sender = self._senders.get(address.epoch)
        if sender is None:
            assert self._context is not None, "the mailbox was not started"
            sender = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
            sender.setsockopt(zmq.LINGER, 200)
            sender.setsockopt(zmq.SNDHWM, 0)
            self._senders[address.epoch] = sender
            try:
                sender.connect(address.endpoint)
            except zmq.ZMQError as error:
                logger.error("worker=%s cannot be reached: %s", address.name, error)
        with contextlib.suppress(zmq.Again):  # nobody reads there: the registry will hear of it
            sender.send(messages.encode(body, "router", ""), zmq.DONTWAIT)

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
