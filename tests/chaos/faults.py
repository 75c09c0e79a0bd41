"""Faults at random: which worker, when, what; and how long it took until the deployment was whole again.

Every stage keeps a survivor: a stage gets its next fault only when all its workers are live again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from tests.chaos.links import Link, SocketFiles
from tests.chaos.load import Flight, Load
from tests.chaos.server import Server, WorkerView, send_signal

LIVES_WINDOW_S = 65.0
LIVES_IN_WINDOW = 3  # deaths of one worker; the supervisor gives a worker up after five a minute
RECOVERY_TIMEOUT_S = 90.0
POLL_S = 0.2


@dataclass
class Injection:
    kind: str
    victim: str
    at_s: float
    in_flight: frozenset[int]
    recovered_s: float = 0.0  # until every worker of its stage was live again; 0: not in time


@dataclass
class Faults:
    """`ttl_s` is the deployment's heartbeat TTL; `mean_s` the mean time between two faults."""

    server: Server
    load: Load
    seed: int
    ttl_s: float
    mean_s: float
    make_link: Callable[[Server, WorkerView], Link] = SocketFiles
    injections: list[Injection] = field(default_factory=list)
    unjust: list[str] = field(default_factory=list)  # what happened to workers that were well
    _busy: set[str] = field(default_factory=set)  # stages under a fault
    _deaths: list[tuple[str, float]] = field(default_factory=list)  # worker, when
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def kinds(self) -> Mapping[str, tuple[int, Callable[[WorkerView, random.Random], Awaitable[None]]]]:
        """By name: its weight, and what it does."""
        return {
            "kill -9": (4, self._kill),
            "kill -9, and again at once": (1, self._kill_twice),
            "stop, shorter than the TTL": (3, self._stop_short),
            "stop, longer than the TTL": (2, self._stop_long),
            "drain": (3, self._drain),
            "SIGTERM to the worker": (1, self._terminate),
            "link cut": (2, self._cut),
            "stop of the router": (2, self._stop_router),
        }

    async def run(self, until_s: float) -> None:
        """Inject until then (monotonic clock); returns when the deployment is whole again."""
        rng = random.Random(f"faults {self.seed}")
        num_workers = len(await self.server.workers())
        while True:
            await asyncio.sleep(rng.expovariate(1 / self.mean_s))
            if time.monotonic() >= until_s:
                break
            kinds = self.kinds
            kind = rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
            victim = await self._victim(rng, num_workers)
            if victim is not None:
                self._busy |= set(victim.stages)
                task = asyncio.create_task(self._inject(kind, victim, random.Random(rng.random())))
                self._tasks.append(task)
        await asyncio.gather(*self._tasks)

    async def _victim(self, rng: random.Random, num_workers: int) -> WorkerView | None:
        """A worker whose stages all have another live one, and that has not died too often of late."""
        workers = await self.server.workers()
        now = time.monotonic()
        recent = [name for name, at_s in self._deaths if now - at_s < LIVES_WINDOW_S]
        live = [worker for worker in workers if worker.state == "live"]
        eligible = [
            worker
            for worker in live
            if not self._busy & set(worker.stages)
            and recent.count(worker.name) < LIVES_IN_WINDOW
            and all(any(stage in other.stages for other in live if other is not worker) for stage in worker.stages)
        ]
        return rng.choice(sorted(eligible)) if eligible and len(workers) <= num_workers else None

    async def _inject(self, kind: str, victim: WorkerView, rng: random.Random) -> None:
        injection = Injection(kind, victim.name, time.monotonic(), frozenset(self.load.running))
        self.injections.append(injection)
        try:
            await self.kinds[kind][1](victim, rng)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECOVERY_TIMEOUT_S):
                    await self._until(lambda workers: any(w.name == victim.name and w.state == "live" for w in workers))
                    injection.recovered_s = time.monotonic() - injection.at_s
        finally:
            self._busy -= set(victim.stages)

    async def _until(self, condition: Callable[[list[WorkerView]], bool]) -> None:
        while not condition(await self.server.workers()):
            await asyncio.sleep(POLL_S)

    async def _until_another_life(self, victim: WorkerView) -> None:
        self._deaths.append((victim.name, time.monotonic()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECOVERY_TIMEOUT_S):
                await self._until(
                    lambda workers: any(w.name == victim.name and w.epoch != victim.epoch for w in workers)
                )

    # -- kinds ---------------------------------------------------------------------------------------------------------

    async def _kill(self, victim: WorkerView, rng: random.Random) -> None:
        send_signal(victim.pid, signal.SIGKILL)
        await self._until_another_life(victim)

    async def _kill_twice(self, victim: WorkerView, rng: random.Random) -> None:
        """The second life dies as soon as it is there."""
        await self._kill(victim, rng)
        for worker in await self.server.workers():
            if worker.name == victim.name and worker.epoch != victim.epoch:
                await self._kill(worker, rng)

    async def _stop_short(self, victim: WorkerView, rng: random.Random) -> None:
        await self._stop(victim, rng.uniform(0.1, 0.6) * self.ttl_s)

    async def _stop_long(self, victim: WorkerView, rng: random.Random) -> None:
        """It is counted as lost, and a new life takes its place; unless the router was stopped meanwhile too."""
        self._deaths.append((victim.name, time.monotonic()))
        await self._stop(victim, rng.uniform(1.2, 1.8) * self.ttl_s)

    async def _stop(self, victim: WorkerView, for_s: float) -> None:
        send_signal(victim.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(for_s)
        finally:
            send_signal(victim.pid, signal.SIGCONT)

    async def _stop_router(self, victim: WorkerView, rng: random.Random) -> None:
        """Longer than the TTL of every worker: none of them is at fault."""
        send_signal(self.server.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.uniform(1.1, 1.4) * self.ttl_s)
        finally:
            send_signal(self.server.pid, signal.SIGCONT)
        await asyncio.sleep(1.0)
        if victim.epoch not in {worker.epoch for worker in await self.server.workers()}:
            self.unjust.append(f"{victim.name} was lost because the router was stopped")

    async def _drain(self, victim: WorkerView, rng: random.Random) -> None:
        await self.server.drain(victim.name)
        await self._until_another_life(victim)

    async def _terminate(self, victim: WorkerView, rng: random.Random) -> None:
        send_signal(victim.pid, signal.SIGTERM)
        await self._until_another_life(victim)

    async def _cut(self, victim: WorkerView, rng: random.Random) -> None:
        link = self.make_link(self.server, victim)
        link.cut()
        try:
            await asyncio.sleep(rng.uniform(0.1, 0.5) * self.ttl_s)
        finally:
            link.mend()


def table(injections: list[Injection], flights: list[Flight]) -> list[dict[str, object]]:
    """A row a kind: how often, how many requests were in flight, how many of them failed, the slowest recovery.

    `slowest_request_s` is from the fault to the end of the last request that was in flight.
    """
    by_number = {flight.number: flight for flight in flights}
    rows: list[dict[str, object]] = []
    for kind in sorted({injection.kind for injection in injections}):
        of_kind = [injection for injection in injections if injection.kind == kind]
        ended = [(i, by_number[number]) for i in of_kind for number in i.in_flight]
        rows.append(
            {
                "fault": kind,
                "injected": len(of_kind),
                "in_flight": len(ended),
                "failed": sum(flight.outcome not in ("answered", "cancelled") for _, flight in ended),
                "slowest_recovery_s": round(max(i.recovered_s for i in of_kind), 2),
                "slowest_request_s": round(max((f.ended_s - i.at_s for i, f in ended), default=0.0), 2),
            }
        )
    return rows


def cancelled(flights: list[Flight]) -> dict[str, object]:
    """The row of the clients that went away."""
    gone = [flight for flight in flights if flight.outcome == "cancelled"]
    row: dict[str, object] = {"fault": "client gone", "injected": len(gone), "in_flight": len(gone), "failed": 0}
    return row | {"slowest_recovery_s": 0.0, "slowest_request_s": 0.0}
