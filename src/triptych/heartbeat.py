"""A worker's HTTP side: registers with the router, heartbeats, registers again when the router forgot it, leaves.

Runs in a thread of the worker, so that the router hears from it while a long forward runs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from types import TracebackType

import httpx
import msgspec

from triptych.errors import ConfigError
from triptych.types import Heartbeat, WorkerInfo

logger = logging.getLogger(__name__)


class Heart:
    """`with Heart(...)`: registered and beating inside, gone from the router after.

    `on_refused` is called from the heartbeat's thread when a router that was started anew does not want this worker.
    """

    def __init__(
        self,
        router_url: str,
        info: WorkerInfo,
        beat: Callable[[], Heartbeat],
        period_s: float,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._info = info
        self._beat = beat
        self._period_s = period_s
        self._stop = threading.Event()
        self._client = httpx.Client(base_url=router_url, timeout=5.0, trust_env=False)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._on_refused = on_refused

    def __enter__(self) -> Heart:
        self._register_until_known()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(httpx.HTTPError):  # the router went first
            self._post("/workers/leave", self._beat())
        self._client.close()

    def _register_until_known(self) -> None:
        """Waits for a router that does not answer yet, unless told to leave. Raises ConfigError if it refuses."""
        while not (self._stop.is_set() or self._beat().draining):
            try:
                response = self._post("/workers/register", self._info)
            except httpx.HTTPError as error:
                logger.info("the router does not answer yet: %s", error)
            else:
                if response.status_code == 409:
                    raise ConfigError(f"the router refused this worker: {response.text}")
                if response.is_success:
                    return
            self._stop.wait(self._period_s)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            try:
                if self._post("/workers/heartbeat", self._beat()).status_code == 404:
                    self._register_until_known()
            except httpx.HTTPError as error:
                logger.warning("heartbeat failed: %s", error)
            except ConfigError as error:
                logger.error("%s", error)
                self._on_refused()
                return

    def _post(self, path: str, body: Heartbeat | WorkerInfo) -> httpx.Response:
        return self._client.post(path, content=msgspec.json.encode(body))
