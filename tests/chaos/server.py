"""A deployment in processes of its own, as an operator starts it, and what can be asked of it from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import httpx

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
# A server may close a connection that idles just when the next request is sent on it, as one that was stopped does.
NO_KEEP_ALIVE = httpx.Limits(max_keepalive_connections=0)


class WorkerView(NamedTuple):
    """One worker as the router shows it."""

    name: str
    epoch: str
    state: str
    stages: tuple[str, ...]
    pid: int
    load: dict[str, Any]
    counters: dict[str, float]


class Server:
    """`async with Server(placement, flags, log)`: `triptych serve`, ready. Its log goes to the file `log`."""

    def __init__(self, placement: str, flags: Sequence[str], log: Path) -> None:
        self.url = ""
        self.runtime_dir = Path()
        self.pid = 0
        self.client = httpx.AsyncClient(timeout=60.0, trust_env=False, limits=NO_KEEP_ALIVE)
        self._command = [sys.executable, "-m", "triptych.cli.main", "serve", "--placement", placement, "--port", "0"]
        self._command += flags
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Server:
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=asyncio.subprocess.PIPE, stderr=log
            )
        self.pid = self._process.pid
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._until_ready(self._process)
        except BaseException:
            await self._end()
            raise
        self._reader = asyncio.create_task(self._read_on(self._process), name="server-output")
        return self

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := (await process.stdout.readline()).decode():
            if line.startswith("runtime files in "):
                self.runtime_dir = Path(line.split()[-1])
            if line.startswith("ready after "):
                self.url = line.split()[-1]
                self.client.base_url = httpx.URL(self.url)
                return
        raise RuntimeError(f"the server did not start:\n{self._log.read_text()[-4000:]}")

    async def _read_on(self, process: asyncio.subprocess.Process) -> None:
        """Its output goes on: a pipe that nobody reads would stop it one day."""
        assert process.stdout is not None
        with self._log.open("ab") as log:
            while line := await process.stdout.readline():
                log.write(line)
                log.flush()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        await self.client.aclose()
        process = self._process
        if process is not None:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._reader is not None:
            await self._reader

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def topology(self) -> dict[str, Any]:
        body: dict[str, Any] = (await self.client.get("/topology")).json()
        return body

    async def workers(self) -> list[WorkerView]:
        return [
            WorkerView(
                name=worker["name"],
                epoch=worker["info"]["address"]["epoch"],
                state=worker["state"],
                stages=tuple(worker["stages"]),
                pid=worker["info"]["pid"],
                load=worker["load"],
                counters=worker["counters"],
            )
            for worker in (await self.topology())["workers"]
        ]

    async def total(self, counter: str) -> float:
        """Of the lives that run; it lags by a heartbeat."""
        return sum(worker.counters.get(counter, 0.0) for worker in await self.workers())

    async def drain(self, name: str) -> bool:
        return (await self.client.post("/workers/drain", json={"name": name})).status_code == 200


def send_signal(pid: int, number: signal.Signals) -> bool:
    """False when the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
