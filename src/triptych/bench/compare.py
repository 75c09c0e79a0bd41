"""Runs systems side by side: rounds interleaved, the order of systems turned from round to round, all kept.

The process of `triptych bench`. Each round has new pages and texts, the same for every system, so that no cache helps
but where the workload repeats on purpose.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar
from zlib import crc32

from triptych.bench import counters
from triptych.bench.ceilings import measure
from triptych.bench.load import Driver
from triptych.bench.machine import describe
from triptych.bench.metrics import summarize
from triptych.bench.processes import Usage
from triptych.bench.requests import RequestFactory, Session, text_request
from triptych.bench.results import Cell, Idle, Results, SystemFacts
from triptych.bench.running import RunningSystem, version
from triptych.bench.settings import Spec
from triptych.bench.systems import System
from triptych.bench.workload import Load, Workload
from triptych.errors import ConfigError

Say = Callable[[str], None]
T = TypeVar("T")

PROBE_WORDS = (64, 320)  # lengths of the two texts whose difference gives the tokens of a word


class Prepared(NamedTuple):
    """Requests of one round, made before it, for every system alike."""

    primers: list[Session]
    warmup: list[Session]
    sessions: list[Session]
    seed: int


def turned(systems: Sequence[T], round_number: int) -> list[T]:
    """Another system first in each round."""
    start = round_number % len(systems)
    return [*systems[start:], *systems[:start]]


def round_seed(seed: int, round_number: int, workload: str, load: str) -> int:
    """Unlike for every cell of the table, alike for every system."""
    return crc32(f"{seed}/{round_number}/{workload}/{load}".encode())


class Comparison:
    """One run, from the first start to the last stop."""

    def __init__(self, spec: Spec, output: Path, say: Say) -> None:
        self.results = Results(spec=spec, machine=describe())
        self._spec = spec
        self._settings = spec.settings
        self._output = output
        self._say = say
        self._running: dict[str, RunningSystem] = {}
        self._versions = {system.name: version(system) for system in spec.systems}

    async def run(self) -> Results:
        """Saves after every round; whatever ends it, no system that it started is left."""
        async with AsyncExitStack() as stack:
            if not self._settings.restart:
                for system in self._spec.systems:
                    await stack.enter_async_context(self._started(system))
            for number in range(self._settings.rounds):
                await self._ceilings()
                await self._idle(number)
                for workload in self._spec.workloads:
                    for load in self._settings.loads():
                        await self._row(number, workload, load)
                self.results.save(self._output)
            await self._ceilings()
            self.results.complete = True
            self.results.save(self._output)
        return self.results

    async def _row(self, number: int, workload: Workload, load: Load) -> None:
        """One round of each system with the same requests."""
        prepared: Prepared | None = None
        for position, system in enumerate(turned(self._spec.systems, number)):
            async with self._up(system) as running:
                if not self.results.tokens_per_word:
                    self.results.tokens_per_word = await self._tokens_per_word(running)
                prepared = prepared or self._prepare(number, workload, load)
                cell = await self._cell(running, prepared, number, position, workload, load)
                self.results.cells.append(cell)
                self._say(progress(cell, self._settings.rounds))
                if self._settings.restart:
                    await self._idle(number)
            self.results.save(self._output)

    def _prepare(self, number: int, workload: Workload, load: Load) -> Prepared:
        seed = round_seed(self._settings.seed, number, workload.name, load.label)
        factory = RequestFactory(workload, seed, self.results.tokens_per_word)
        sessions = factory.sessions(self._settings.num_requests(load))
        first = number == 0 or self._settings.restart
        warmup = RequestFactory(workload, seed + 1, self.results.tokens_per_word)
        num_warmup = self._settings.warmup if first else 0
        return Prepared(factory.primers(), warmup.sessions(num_warmup), sessions, seed)

    async def _cell(
        self, running: RunningSystem, prepared: Prepared, number: int, position: int, workload: Workload, load: Load
    ) -> Cell:
        gentle = Load(concurrency=load.concurrency or 1)
        await self._unmeasured(running, [*prepared.warmup, *prepared.primers], gentle)
        told = await counters.read(running.target, running.system.metrics)
        gc.collect()
        gc.freeze()  # the requests are garbage only after the round
        before, client_before_s = _usage(running), time.process_time()
        records = await Driver(running.target, self._settings.timeout_s).run(prepared.sessions, load, prepared.seed)
        client_cpu_s = time.process_time() - client_before_s
        after = _usage(running)
        gc.unfreeze()
        changed = counters.difference(told, await counters.read(running.target, running.system.metrics))
        cpu_s = after.cpu_s - before.cpu_s if before and after else None
        return Cell(
            round=number,
            position=position,
            system=running.system.name,
            workload=workload.name,
            load=load,
            seed=prepared.seed,
            summary=summarize(records, len(running.system.device_cores), self._settings.slo, cpu_s),
            cpu_s=cpu_s,
            own_cpu_s=_own_cpu_s(before, after),
            counters=changed,
            peak_rss_bytes=after.peak_rss_bytes if after else None,
            num_processes=after.num_processes if after else None,
            client_cpu_s=client_cpu_s,
            records=records,
        )

    async def _unmeasured(self, running: RunningSystem, sessions: Sequence[Session], load: Load) -> None:
        """Says when one fails, and goes on: the round will count it."""
        if not sessions:
            return
        records = await Driver(running.target, self._settings.timeout_s).run(sessions, load, 0)
        failed = [record for record in records if record.failure]
        if failed:
            reason = f"{failed[0].failure} {failed[0].detail}".strip()
            self._say(f"{running.system.name}: {len(failed)} of {len(records)} unmeasured requests failed: {reason}")

    async def _tokens_per_word(self, running: RunningSystem) -> float:
        """Tokens of one more word of the texts, by the usage of two requests. Raises ConfigError if one fails."""
        if self._settings.tokens_per_word:
            return self._settings.tokens_per_word
        tokens = []
        for num_words in PROBE_WORDS:
            text = RequestFactory(Workload(name="probe", prompt_tokens=num_words), 0).text()
            driver = Driver(running.target, self._settings.timeout_s)
            [record] = await driver.run([(text_request(text, 1),)], Load(concurrency=1), 0)
            if record.failure:
                raise ConfigError(f"system {running.system.name}: {record.failure} {record.detail}".strip())
            tokens.append(record.num_prompt_tokens)
        return max(0.1, (tokens[1] - tokens[0]) / (PROBE_WORDS[1] - PROBE_WORDS[0]))

    # -- systems, while nothing is asked of them -----------------------------------------------------------------------

    @asynccontextmanager
    async def _started(self, system: System) -> AsyncIterator[RunningSystem]:
        log = self._output.with_name(f"{self._output.stem}-logs") / f"{system.name.replace('/', '-')}.log"
        running = RunningSystem(system, self._spec.model_path, log)
        if system.command:
            self._say(f"{system.name}: starting")
        await running.start()
        try:
            self._running[system.name] = running
            self.results.systems.append(
                SystemFacts(
                    name=system.name,
                    url=running.url,
                    command=running.command,
                    model=running.target.model,
                    cores=system.device_cores,
                    version=self._versions[system.name],
                    ready_s=running.ready_s,
                    first_answer_s=running.first_answer_s,
                )
            )
            after = f" after {running.ready_s:.1f} s" if running.ready_s is not None else ""
            self._say(f"{system.name}: ready{after} at {running.url}, model {running.target.model}")
            yield running
        finally:
            del self._running[system.name]
            await running.stop()

    @asynccontextmanager
    async def _up(self, system: System) -> AsyncIterator[RunningSystem]:
        if system.name in self._running:
            yield self._running[system.name]
        else:
            async with self._started(system) as running:
                yield running

    async def _ceilings(self) -> None:
        if not self._settings.ceilings:
            return
        for core in sorted({core for system in self._spec.systems for core in system.device_cores}):
            found = await measure(core, self._settings.ceilings_python or sys.executable)
            self.results.ceilings.append(found)
            self._say(
                f"core {core}: bf16 {found.bf16_gflops:.0f} GFLOP/s, fp32 {found.fp32_gflops:.0f} GFLOP/s, "
                f"read {found.read_gb_per_s:.1f} GB/s"
            )

    async def _idle(self, number: int) -> None:
        if not self._settings.idle_s or not self._running:
            return
        before = {name: _usage(running) for name, running in self._running.items()}
        start_s = time.monotonic()
        await asyncio.sleep(self._settings.idle_s)
        for name, running in self._running.items():
            first, last, length_s = before[name], _usage(running), time.monotonic() - start_s
            if first and last:
                busy = (last.cpu_s - first.cpu_s) / length_s
                self.results.idle.append(
                    Idle(round=number, system=name, cores_busy=busy, num_processes=last.num_processes)
                )


def _usage(running: RunningSystem) -> Usage | None:
    return running.tree.usage() if running.tree is not None else None


def _own_cpu_s(before: Usage | None, after: Usage | None) -> dict[str, float]:
    if before is None or after is None:
        return {}
    return {label: total_s - before.own_cpu_s.get(label, 0.0) for label, total_s in after.own_cpu_s.items()}


def progress(cell: Cell, rounds: int) -> str:
    """One line for one round of one system."""
    found = cell.summary
    parts = [f"round {cell.round + 1}/{rounds} {cell.workload} {cell.load.label} {cell.system}:"]
    parts.append(f"{found.num_completed} requests in {found.duration_s:.1f} s")
    if found.num_failed:
        parts.append(f"FAILED {found.num_failed} ({', '.join(f'{n} {why}' for why, n in found.failures.items())})")
    if found.ttft_s is not None:
        parts.append(f"TTFT p50 {found.ttft_s.p50:.3f} p90 {found.ttft_s.p90:.3f} s")
    parts.append(f"{found.output_tokens_per_s_per_device:.2f} output tok/s/device")
    if found.cpu_s_per_request is not None:
        parts.append(f"{found.cpu_s_per_request:.3f} CPU-s/request")
    return "  ".join(parts)
