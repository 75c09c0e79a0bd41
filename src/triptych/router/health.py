"""Probes: every worker does a small piece of real work in each of its stages, now and then and for `/health`.

A worker that fails a probe is suspect and gets no new work until a later probe succeeds: a circuit breaker whose trial
requests are nobody's. One that answers no probe twice in a row hangs, though it may heartbeat: it is lost.
"""

from __future__ import annotations

import asyncio
import itertools

from triptych.config import RouterConfig
from triptych.messages import Probe, Probed
from triptych.router.client import RouterMailbox
from triptych.router.registry import RegisteredWorker, Registry
from triptych.types import WorkerAddress


class Probes:
    def __init__(self, registry: Registry, mailbox: RouterMailbox, config: RouterConfig) -> None:
        self._registry = registry
        self._mailbox = mailbox
        self._config = config
        self._ids = itertools.count(1)
        self._open: dict[int, tuple[str, asyncio.Future[str]]] = {}  # by probe_id: the worker's epoch, its answer

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._config.probe_s)
            await self.probe_all()

    async def probe_all(self) -> dict[str, str]:
        """Probe all workers at once: "" or what is wrong, by name."""
        workers = self._registry.workers()
        answers = await asyncio.gather(*(self._probe(worker) for worker in workers))
        return {worker.name: answer for worker, answer in zip(workers, answers, strict=True)}

    async def _probe(self, worker: RegisteredWorker) -> str:
        probe_id = next(self._ids)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._open[probe_id] = (worker.address.epoch, answer)
        self._mailbox.send(worker.address, Probe(probe_id))
        silence = f"no answer to a probe within {self._config.probe_timeout_s} s"
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                worker.suspect = await answer
        except TimeoutError:
            if worker.suspect == silence:
                self._registry.hangs(worker.address)
            worker.suspect = silence
        finally:
            del self._open[probe_id]
        return worker.suspect

    def answered(self, sender: str, message: Probed) -> None:
        _, answer = self._open.get(message.probe_id, ("", None))
        if answer is not None and not answer.done():
            answer.set_result(message.error)

    def lost(self, address: WorkerAddress) -> None:
        """A dead worker does not answer: nobody waits for it."""
        for epoch, answer in self._open.values():
            if epoch == address.epoch and not answer.done():
                answer.set_result("the worker was lost")
