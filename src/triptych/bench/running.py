"""The processes of one system, in a session of their own, from their start to the stop by the id of their own group.

Called by `compare.py`. A system that is a URL is only looked at.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from triptych.bench.client import Target, get, send
from triptych.bench.processes import ProcessTree
from triptych.bench.requests import text_request
from triptych.bench.systems import System
from triptych.errors import ConfigError

STOP_S = 20.0  # between SIGTERM and SIGKILL
POLL_S = 0.1
READY_ANSWER_S = 5.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _filled(text: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


class RunningSystem:
    """From `start` to `stop`. For a URL, both only look."""

    def __init__(self, system: System, model_path: str, log: Path) -> None:
        self.system = system
        self.ready_s: float | None = None  # from its start to the first 200 of the ready path
        self.first_answer_s: float | None = None  # from its start to the end of its first answer
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        port = free_port() if system.command else 0
        self.url = system.url or f"http://127.0.0.1:{port}"
        cores = ",".join(map(str, system.device_cores))
        self._values = {"port": str(port), "model": model_path, "cores": cores}
        self.target = Target.parse(self.url, system.model)
        self.tree: ProcessTree | None = ProcessTree(system.pids) if system.pids else None

    @property
    def command(self) -> list[str]:
        return [_filled(word, self._values) for word in self.system.command]

    async def start(self) -> None:
        """Returns when it is ready. Raises ConfigError, with nothing left running, when it will not be."""
        start_s = time.monotonic()
        if self.system.command:
            self._spawn()
        try:
            deadline_s = start_s + self.system.start_timeout_s
            await self._until_ready(deadline_s)
            ready_s = time.monotonic() - start_s
            if not self.target.model:
                self.target = Target.parse(self.url, await self._first_model())
            await self._until_answer(deadline_s)
            if self.system.command:
                self.ready_s, self.first_answer_s = ready_s, time.monotonic() - start_s
            if self.tree is not None and not self.tree.alive():
                raise ConfigError(f"system {self.system.name}: pids: not all of {list(self.tree.roots)} run")
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """SIGTERM to its group, SIGKILL to what is left of it and of its known descendants later."""
        process, tree = self._process, self.tree
        if process is None or tree is None:
            return
        self._process = None
        tree.living()  # so that those whose parent goes first are known
        _signal_group(process.pid, signal.SIGTERM)
        if not await self._over(process, tree, STOP_S):
            if process.poll() is None:
                _signal_group(process.pid, signal.SIGKILL)
            for pid in tree.living():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await self._over(process, tree, STOP_S)

    async def _over(self, process: subprocess.Popen[bytes], tree: ProcessTree, limit_s: float) -> bool:
        """Whether nothing of it runs any more, within the limit."""
        for _ in range(round(limit_s / POLL_S)):
            if process.poll() is not None and not tree.living():
                return True
            await asyncio.sleep(POLL_S)
        return False

    def _spawn(self) -> None:
        env = {**os.environ, **{name: _filled(value, self._values) for name, value in self.system.env.items()}}
        command = self.command
        if self.system.cores:
            command = ["taskset", "-c", self._values["cores"], *command]  # it becomes the command: same pid
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    env=env,
                    cwd=self.system.cwd or None,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(f"system {self.system.name}: command: {error}") from None
        self.tree = ProcessTree([self._process.pid])

    async def _until_ready(self, deadline_s: float) -> None:
        while True:
            status, _ = await get(self.target, self.system.ready, READY_ANSWER_S)
            if status == 200:
                return
            await self._pause(deadline_s, f"{self.url}{self.system.ready} was not 200")

    async def _until_answer(self, deadline_s: float) -> None:
        """Some servers call themselves healthy before they can answer."""
        request = text_request("Hello", 1)
        while True:
            now_s = time.monotonic()
            record, _ = await send(self.target, request, [], now_s, now_s, max(1.0, deadline_s - now_s))
            if not record.failure:
                return
            if record.failure.startswith("http_4"):
                raise ConfigError(f"system {self.system.name} refuses a request: {record.failure} {record.detail}")
            await self._pause(deadline_s, f"no answer but {record.failure} {record.detail}".strip())

    async def _pause(self, deadline_s: float, seen: str) -> None:
        """Raises ConfigError when it ended, or when it is too late for another look."""
        name, limit_s = self.system.name, self.system.start_timeout_s
        if self._process is not None and self._process.poll() is not None:
            raise ConfigError(f"system {name} ended with {self._process.returncode} at its start: {self._tail()}")
        if time.monotonic() > deadline_s:
            raise ConfigError(f"system {name}: not ready within {limit_s:g} s: {seen}; {self._tail()}")
        await asyncio.sleep(POLL_S)

    def _tail(self) -> str:
        if not self.system.command:
            return "it is not ours to start"
        lines = self._log.read_text(errors="replace").splitlines()
        return f"{self._log} ends with: {' | '.join(lines[-3:])}"

    async def _first_model(self) -> str:
        status, body = await get(self.target, "/v1/models", READY_ANSWER_S)
        try:
            name = msgspec.json.decode(body)["data"][0]["id"]
        except (msgspec.DecodeError, KeyError, IndexError, TypeError):
            raise ConfigError(f"model: {self.url}/v1/models answers {status} and names none: give one") from None
        return str(name)


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def version(system: System) -> str:
    """What its version command prints; empty without one or when it fails."""
    if not system.version_command:
        return ""
    try:
        done = subprocess.run(system.version_command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    return done.stdout.strip()
