"""Messages between the router's event loop and the compute thread of one process: twins of the ZeroMQ mailboxes.

They cross as bytes, as between processes, so that neither side holds an object that the other changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from queue import Empty, SimpleQueue

from triptych import messages
from triptych.router.client import OnEnvelope
from triptych.types import WorkerAddress

_WAKE = b""


class ComputeMailbox:
    """The worker's end: the twin of `transport.mailbox.Mailbox`. `receive` is the compute thread's alone."""

    def __init__(self, address: WorkerAddress, router: LoopMailbox) -> None:
        self._address = address
        self._router = router
        self._frames: SimpleQueue[bytes] = SimpleQueue()
        router.connect(self)

    def to_router(self, body: messages.Body) -> None:
        self._router.deliver(messages.encode(body, self._address.name, self._address.epoch))

    def to_worker(self, address: WorkerAddress, body: messages.Body) -> None:
        """There is one worker, so it writes to itself: a stage to another one."""
        self.put(messages.encode(body, self._address.name, self._address.epoch))

    def forget(self, epoch: str) -> None:
        """There is no other worker."""

    def put(self, frame: bytes) -> None:
        self._frames.put(frame)

    def wake(self) -> None:
        self._frames.put(_WAKE)

    def receive(self, timeout_s: float) -> list[messages.Envelope]:
        frames = []
        with contextlib.suppress(Empty):
            frames.append(self._frames.get(block=timeout_s > 0, timeout=timeout_s or None))
            while True:
                frames.append(self._frames.get_nowait())
        return [messages.decode(frame) for frame in frames if frame != _WAKE]


class LoopMailbox:
    """The router's end: the twin of `router.client.ZmqMailbox`, for the one worker that connects."""

    def __init__(self) -> None:
        self._worker: ComputeMailbox | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_envelope: OnEnvelope | None = None

    def connect(self, worker: ComputeMailbox) -> None:
        self._worker = worker

    def start(self, on_envelope: OnEnvelope) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_envelope = on_envelope

    def send(self, address: WorkerAddress, body: messages.Body) -> None:
        if self._worker is not None:
            self._worker.put(messages.encode(body, "router", ""))

    def forget(self, address: WorkerAddress) -> None:
        self._worker = None

    async def close(self) -> None:
        self._worker = self._on_envelope = None

    def deliver(self, frame: bytes) -> None:
        """Called by the compute thread."""
        assert self._loop is not None, "the mailbox was not started"
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear of it
            self._loop.call_soon_threadsafe(self._receive, frame)

    def _receive(self, frame: bytes) -> None:
        if self._on_envelope is not None:
            self._on_envelope(messages.decode(frame))
