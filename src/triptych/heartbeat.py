"""A worker's word to the registry: registers with the router, heartbeats, registers again when forgotten, leaves.

Runs in a thread of the worker, so that the router hears from it while a long forward runs. On the router's host it
speaks HTTP over loopback; from other hosts the encrypted way of the mailboxes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import httpx
import msgspec
import zmq

from triptych import messages
from triptych.curve import Join, connect_with
from triptych.errors import ConfigError
from triptych.messages import Answer, Beat, Leave, Register
from triptych.types import Heartbeat, WorkerInfo

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 5.0


class NoAnswerError(Exception):
    """The router is not there, or not reached."""


class Line(Protocol):
    """One question at a time, each with its answer. Raises NoAnswerError."""

    def ask(self, question: Register | Beat | Leave) -> Answer: ...

    def close(self) -> None: ...


class HttpLine:
    """To a router of the same host."""

    def __init__(self, router_url: str) -> None:
        self._client = httpx.Client(base_url=router_url, timeout=ANSWER_TIMEOUT_S, trust_env=False)

    def ask(self, question: Register | Beat | Leave) -> Answer:
        match question:
            case Register(info):
                return self._post("/workers/register", info)
            case Beat(heartbeat):
                return self._post("/workers/heartbeat", heartbeat)
            case Leave(name, epoch):
                return self._post("/workers/leave", {"name": name, "epoch": epoch})

    def _post(self, path: str, body: object) -> Answer:
        try:
            headers = {"content-type": "application/json"}
            response = self._client.post(path, content=msgspec.json.encode(body), headers=headers)
        except httpx.HTTPError as error:
            raise NoAnswerError(str(error)) from error
        return Answer(response.status_code, response.text)

    def close(self) -> None:
        self._client.close()


class CurveLine:
    """To a router of another host, over its mailbox; used by one thread at a time."""

    def __init__(self, join: Join, name: str, epoch: str) -> None:
        self._sender = name, epoch
        self._router = join.router
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A question that was not answered does not block the next, and its late answer is not taken for another's.
        self._socket.setsockopt(zmq.REQ_RELAXED, 1)
        self._socket.setsockopt(zmq.REQ_CORRELATE, 1)
        self._socket.setsockopt(zmq.RCVTIMEO, int(1000 * ANSWER_TIMEOUT_S))
        self._socket.setsockopt(zmq.SNDTIMEO, int(1000 * ANSWER_TIMEOUT_S))
        try:
            connect_with(self._socket, join.member, join.router_key, join.router)
        except ConfigError:
            self.close()
            raise

    def ask(self, question: Register | Beat | Leave) -> Answer:
        try:
            self._socket.send(messages.encode(question, *self._sender))
            body = messages.decode(self._socket.recv()).body
        except zmq.Again:
            raise NoAnswerError(f"nobody who knows the join file's keys answers at {self._router}") from None
        except msgspec.DecodeError as error:
            raise NoAnswerError(f"the router speaks another protocol: {error}") from error
        if not isinstance(body, Answer):
            raise NoAnswerError(f"the router answers with {type(body).__name__}")
        return body

    def close(self) -> None:
        self._context.destroy(linger=0)


class Heart:
    """`with Heart(...)`: registered and beating inside, gone from the router after. It owns the line.

    `on_refused` is called from the heartbeat's thread when a router that was started anew does not want this worker.
    """

    def __init__(
        self,
        line: Line,
        info: WorkerInfo,
        beat: Callable[[], Heartbeat],
        period_s: float,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._line = line
        self._info = info
        self._beat = beat
        self._period_s = period_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._on_refused = on_refused

    def __enter__(self) -> Heart:
        try:
            self._register_until_known()
        except BaseException:
            self._line.close()
            raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(NoAnswerError):  # the router went first
            self._line.ask(Leave(self._info.address.name, self._info.address.epoch))
        self._line.close()

    def _register_until_known(self) -> None:
        """Waits for a router that does not answer yet, unless told to leave. Raises ConfigError if it refuses."""
        while not (self._stop.is_set() or self._beat().draining):
            try:
                answer = self._line.ask(Register(self._info))
            except NoAnswerError as error:
                logger.info("the router does not answer yet: %s", error)
            else:
                if answer.status == 409:
                    raise ConfigError(f"the router refused this worker: {answer.message}")
                if answer.status < 300:
                    return
            self._stop.wait(self._period_s)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                if self._line.ask(Beat(self._beat())).status == 404:
                    self._register_until_known()
            except NoAnswerError as error:
                logger.warning("heartbeat failed: %s", error)
            except ConfigError as error:
                logger.error("%s", error)
                self._on_refused()
                return
