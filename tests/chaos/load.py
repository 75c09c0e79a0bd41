"""The load: a fixed number of requests at any time, drawn from a fixed set of questions, each checked at its end."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from tests.chaos.asking import Answer, BrokenError, End, ask
from tests.chaos.questions import Asked
from tests.chaos.server import NO_KEEP_ALIVE

CANCEL_SHARE = 0.1
NEW_SHARE = 0.6  # of the requests: pictures and salt that no cache has
TIMEOUT_S = 600.0
SHOWN = 20  # failures kept in words


@dataclass
class Flight:
    """A request that runs, or has ended."""

    number: int
    question: int
    started_s: float
    ended_s: float = 0.0
    outcome: str = ""  # answered, failed, cancelled, wrong or broken
    error: str = ""


@dataclass
class Load:
    """`expected` is the undisturbed answer of each question. `flights` are all requests so far."""

    url: str
    questions: Sequence[Asked]
    expected: Sequence[Answer]
    concurrency: int
    seed: int
    cancel_share: float = CANCEL_SHARE
    flights: list[Flight] = field(default_factory=list)
    running: set[int] = field(default_factory=set)  # numbers
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def run(self, until_s: float) -> None:
        """Start requests until then (monotonic clock), and see all of them to their end."""
        async with self._client() as client:
            await asyncio.gather(*(self._one_after_the_other(client, until_s) for _ in range(self.concurrency)))

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=TIMEOUT_S, trust_env=False, limits=NO_KEEP_ALIVE)

    async def _one_after_the_other(self, client: httpx.AsyncClient, until_s: float) -> None:
        while time.monotonic() < until_s:
            await self._one(client, next(self._numbers))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        index = rng.randrange(len(self.questions))
        body = self.questions[index].body(rng if rng.random() < NEW_SHARE else None, stream=rng.random() < 0.5)
        cancel_s = 10.0 ** rng.uniform(-3, 0.3) if rng.random() < self.cancel_share else None
        flight = Flight(number, index, time.monotonic())
        self.flights.append(flight)
        self.running.add(number)
        try:
            end = await ask(client, body, cancel_s)
        except BrokenError as error:
            flight.outcome, flight.error = "broken", str(error)
        else:
            flight.outcome, flight.error = self._judge(index, end)
        flight.ended_s = time.monotonic()
        self.running.discard(number)
        self.counts[flight.outcome] += 1
        self.counts["streamed" if body["stream"] else "whole"] += 1
        if flight.outcome not in ("answered", "cancelled") and len(self.failures) < SHOWN:
            self.failures.append(f"request {number} {flight.outcome}: {flight.error}")

    def _judge(self, index: int, end: End) -> tuple[str, str]:
        if end.answer is not None:
            if end.answer == self.expected[index]:
                return "answered", ""
            return "wrong", f"question {index}: {end.answer} instead of {self.expected[index]}"
        return ("failed", f"{end.status} {end.error}") if end.error else ("cancelled", "")


async def undisturbed(url: str, questions: Sequence[Asked]) -> list[Answer]:
    """Each answer, asked for alone. Raises BrokenError when there is none."""
    answers = []
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        for question in questions:
            end = await ask(client, question.body())
            if end.answer is None:
                raise BrokenError(f"no answer while nothing is disturbed: {end.status} {end.error}")
            answers.append(end.answer)
    return answers
