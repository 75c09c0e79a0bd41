"""The worker processes as children of the router process: started, watched, started again, stopped.

Used by `launch.Deployment` inside the event loop. `worker_main` is what runs in each child. Children are forked by
multiprocessing's fork server, which has imported torch already, so that a worker (again) starts in a moment.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple

import msgspec

from triptych.config import Config, WorkerConfig
from triptych.errors import ConfigError, TriptychError
from triptych.observe import logging as log_lines
from triptych.runtime_dir import remove_if_orphaned

logger = logging.getLogger(__name__)

RunWorker = Callable[[Config, WorkerConfig], None]

PRELOAD = ("torch", "transformers", "triptych.worker")
UNGUARDED = 79  # exit code of a child whose script starts a deployment while it is imported
ORPHAN_DRAIN_S = 2.0  # for an orphan to free what it shares, before it is forced
ORPHAN_FORCE_S = 3.0


@dataclass(frozen=True)
class RestartPolicy:
    max_deaths: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.1
    max_delay_s: float = 5.0

    def delay_s(self, num_deaths: int) -> float:
        """Before the start that follows the `num_deaths`-th death within the window."""
        return min(self.first_delay_s * 2.0 ** (num_deaths - 1), self.max_delay_s)


class End(NamedTuple):
    """How one life ended."""

    code: int | None  # None: it could not be started
    reason: str = ""  # of a ConfigError


@dataclass
class Child:
    """One worker over all its lives."""

    config: WorkerConfig
    process: ForkServerProcess | None = None  # of the life that runs
    num_lives: int = 0  # begun
    deaths_s: list[float] = field(default_factory=list)  # within the policy's window, on the monotonic clock


class Supervisor:
    """`on_death` hears of every life that ended unasked; `failed` is set with a message when a worker is given up."""

    def __init__(
        self,
        config: Config,
        target: RunWorker | None,
        *,
        policy: RestartPolicy,
        preload: Sequence[str],
        on_death: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        self._config = config
        self._target = target
        self._policy = policy
        self._on_death = on_death
        self._say = say
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._children: dict[str, Child] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def start(self, workers: Sequence[WorkerConfig]) -> None:
        _start_fork_server()
        for worker in workers:
            child = self._children[worker.name] = Child(msgspec.structs.replace(worker, supervised=True))
            self._tasks.append(asyncio.create_task(self._keep(child), name=f"keep-{worker.name}"))

    def pid(self, name: str) -> int | None:
        process = self._children[name].process
        return process.pid if process is not None and process.is_alive() else None

    def pids(self) -> set[int]:
        """Of the lives that run."""
        return {pid for name in self._children if (pid := self.pid(name)) is not None}

    def kill(self, name: str) -> None:
        """kill -9 of the life that runs."""
        process = self._children[name].process
        if process is not None:
            process.kill()

    def kill_all(self) -> None:
        self._stopping.set()
        for name in self._children:
            self.kill(name)

    async def stop(self, grace_s: float) -> None:
        """SIGTERM to all, and SIGKILL to those that still live after `grace_s`. Returns when all are gone."""
        self._stopping.set()
        for child in self._children.values():
            if child.process is not None:
                child.process.terminate()
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=grace_s)
        if late:
            self._say("workers that did not leave in time are killed")
            self.kill_all()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, BaseException):
                logger.error("a worker was not watched to its end", exc_info=ended)

    async def _keep(self, child: Child) -> None:
        """One life after the other, until stopping or given up."""
        while not self._stopping.is_set():
            end = await self._live(child)
            if self._stopping.is_set():
                return
            self._on_death(child.config.name)
            delay_s = self._next_delay_s(child, end)
            if delay_s is None:
                return
            try:
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    async def _live(self, child: Child) -> End:
        """Start the process and wait for its end."""
        child.num_lives += 1
        reasons, told = self._context.Pipe(duplex=False)
        with reasons:
            with told:  # the child has its own end
                process = self._context.Process(
                    target=worker_main, args=(self._target, self._config, child.config, told), name=child.config.name
                )
                try:
                    await asyncio.to_thread(process.start)  # the first one waits for the fork server's imports
                except (EOFError, OSError) as error:
                    logger.error("the fork server did not start %s: %s", child.config.name, error)
                    return End(None)
            code = await self._until_end(child, process)
            return End(code, _received(reasons))

    async def _until_end(self, child: Child, process: ForkServerProcess) -> int | None:
        """The exit code."""
        child.process = process
        if self._stopping.is_set():
            process.terminate()
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(process.sentinel)
        process.join()
        code = process.exitcode
        child.process = None
        process.close()
        return code

    def _next_delay_s(self, child: Child, end: End) -> float | None:
        """Seconds until the next start; None when the worker died too often, or cannot start as it is configured.

        One that left as it was told did not die. What keeps a later life from starting may pass: lack of memory, say.
        """
        if end.code == 0:
            self._say(f"{child.config.name} left, starting it again in {self._policy.first_delay_s:.1f} s")
            return self._policy.first_delay_s
        if end.code == UNGUARDED:
            self._give_up(
                "a worker process imports the script that started it, and this one makes a deployment while it is "
                'imported: put that, `LLM(..., placement=...)` say, below `if __name__ == "__main__":`'
            )
            return None
        if end.reason:
            if child.num_lives == 1:
                self._give_up(f"worker {child.config.name}: {end.reason}")
                return None
            logger.error("worker %s: %s", child.config.name, end.reason)
        now = time.monotonic()
        child.deaths_s = [at for at in child.deaths_s if now - at < self._policy.window_s] + [now]
        count = len(child.deaths_s)
        how = f"{child.config.name} ended with {_describe(end.code)}"
        if count >= self._policy.max_deaths:
            often = f"{count} times within {self._policy.window_s:.0f} s"
            self._give_up(f"{how}, {often}: given up; its reason is logged above")
            return None
        delay_s = self._policy.delay_s(count)
        self._say(f"{how} (death {count}), starting it again in {delay_s:.1f} s")
        return delay_s

    def _give_up(self, message: str) -> None:
        if not self.failed.done():
            self.failed.set_result(message)


def _received(reasons: Connection[Any, str]) -> str:
    """What an ended worker said of its mistake; "" where it said nothing."""
    try:
        return reasons.recv() if reasons.poll() else ""
    except EOFError:
        return ""


def _describe(code: int | None) -> str:
    if code is None:
        return "no process"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def leave_if_imported() -> None:
    """Ends a child that would start children while it still imports its parent's script: it never gets to its work.

    An exception would be a traceback for each child, or be caught by the script.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(UNGUARDED)


def _start_fork_server() -> None:
    """With SIGINT ignored, which it inherits: Ctrl-C reaches the whole group while it still imports torch."""
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def worker_main(target: RunWorker | None, config: Config, worker: WorkerConfig, reasons: Connection[str, Any]) -> None:
    """The child's entry. Without a target it is `triptych.worker.run`, imported here: the parent has no torch.

    A mistake in the configuration is told to the parent, which says it once, whichever worker finds it first.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    log_lines.set_up(config.api.log_level)
    if worker.allowed_cores:
        os.sched_setaffinity(0, worker.allowed_cores)
    threading.Thread(target=_follow_parent, args=[worker.runtime_dir], name="follow-parent", daemon=True).start()
    if target is None:
        from triptych.worker import run

        target = run
    try:
        target(config, worker)
    except ConfigError as error:
        reasons.send(error.message)
        sys.exit(1)
    except TriptychError as error:
        logger.error("worker %s: %s", worker.name, error.message)
        sys.exit(1)


def _follow_parent(runtime_dir: str) -> None:
    """Leave when the parent is gone, however it went: SIGTERM to ourselves, a second one, then the hard way."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    multiprocessing.connection.wait([parent.sentinel])
    orphaned = remove_if_orphaned(runtime_dir)
    logger.warning("the %s is gone, leaving", "parent process" if orphaned else "fork server")
    for wait_s in (ORPHAN_DRAIN_S, ORPHAN_FORCE_S):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(wait_s)
    os._exit(1)
