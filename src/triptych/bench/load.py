"""How requests are offered: a closed loop of so many at once, or an open loop of Poisson arrivals.

Called by `compare.py`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence

from triptych.bench.client import Target, send
from triptych.bench.metrics import RequestRecord
from triptych.bench.requests import Request, Session
from triptych.bench.workload import Load


class Driver:
    """Sends sessions to one target and keeps what was seen. One use a round."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._start_s = time.monotonic()
        self._records: list[RequestRecord] = []

    async def run(self, sessions: Sequence[Session], load: Load, seed: int) -> list[RequestRecord]:
        """A record for every request, in the order of their indices."""
        if load.concurrency is not None:
            waiting = iter(sessions)
            slots = min(load.concurrency, len(sessions))
            await asyncio.gather(*(self._slot(waiting) for _ in range(slots)))
        else:
            assert load.rate_per_s is not None
            await self._arrivals(sessions, load.rate_per_s, random.Random(f"{seed}-arrivals"))
        return sorted(self._records, key=lambda record: record.index)

    async def _slot(self, waiting: Iterator[Session]) -> None:
        for session in waiting:
            await self._session(session, time.monotonic())

    async def _arrivals(self, sessions: Sequence[Session], rate_per_s: float, rng: random.Random) -> None:
        due_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                group.create_task(self._session(session, due_s))
                due_s += rng.expovariate(rate_per_s)

    async def _session(self, session: Session, due_s: float) -> None:
        answers: list[str] = []
        failed = False
        for request in session:
            if failed:  # its history never came to be
                self._records.append(self._unsent(request))
                continue
            record, text = await send(self._target, request, answers, self._start_s, due_s, self._timeout_s)
            self._records.append(record)
            answers.append(text)
            failed = bool(record.failure)
            due_s = time.monotonic()

    def _unsent(self, request: Request) -> RequestRecord:
        now_s = time.monotonic() - self._start_s
        return RequestRecord(
            index=request.index,
            kind=request.kind,
            num_images=request.num_images,
            asked_output_tokens=request.output_tokens,
            due_s=now_s,
            sent_s=now_s,
            chunk_s=[],
            end_s=now_s,
            failure="earlier_turn",
        )
