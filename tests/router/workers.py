"""Registrations for tests of the registry and of what is planned with it."""

from __future__ import annotations

from triptych.clock import ManualClock
from triptych.router.prefix_index import PrefixIndex
from triptych.router.registry import RegisteredWorker, Registry
from triptych.types import Stage, WeightsReport, WorkerAddress, WorkerInfo

VERSION = "v1"
TTL_S = 2.0
E, P, D = Stage.ENCODE, Stage.PREFILL, Stage.DECODE


def info(name: str, stages: list[Stage], epoch: str = "1", version: str = VERSION) -> WorkerInfo:
    address = WorkerAddress(name, f"{name}-{epoch}", f"ipc://{name}-{epoch}", "")
    return WorkerInfo(address, stages, version, "m", 100, WeightsReport(), pid=1)


class Told:
    """A registry and what it told of losses and arrivals."""

    def __init__(self, *workers: WorkerInfo) -> None:
        self.clock = ManualClock()
        self.lost: list[str] = []
        self.num_joined = 0
        self.prefixes = PrefixIndex(4)
        self.registry = Registry(VERSION, TTL_S, self.clock, lambda a: self.lost.append(a.epoch), self._joined)
        for worker in workers:
            self.registry.register(worker)

    def _joined(self, worker: RegisteredWorker) -> None:
        self.num_joined += 1

    def pass_time(self, seconds: float) -> None:
        """As the router does: with a sweep every moment."""
        end_s = self.clock.now() + seconds
        while self.clock.now() < end_s:
            self.clock.advance(min(0.25, end_s - self.clock.now()))
            self.registry.sweep()

    def live(self, stage: Stage) -> list[str]:
        return [worker.name for worker in self.registry.live(stage)]
