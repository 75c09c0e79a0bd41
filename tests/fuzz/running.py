"""The deployment that is fuzzed, and the loop that asks it: shared by every kind of fuzzing."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from triptych.config import ApiConfig, Config
from triptych.launch import Deployment
from triptych.placement import Placement

TIMEOUT_S = 60.0  # for one answer; what takes longer hangs
CONCURRENCY = 4
MAX_GROWTH_BYTES = 96 << 20  # of all processes, from the first third of a run to its end

Ask = Callable[[httpx.AsyncClient, random.Random], Coroutine[Any, Any, httpx.Response]]


@dataclass
class Outcome:
    """What a run saw. `failures` have the status, or what went wrong, and how to see it again."""

    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    growth_bytes: int = 0

    def __str__(self) -> str:
        counts = " ".join(f"{status}:{count}" for status, count in sorted(self.statuses.items()))
        grown = f"grown by {self.growth_bytes / (1 << 20):.1f} MiB"
        return "\n".join([f"{sum(self.statuses.values())} requests, {counts}, {grown}", *self.failures[:20]])


@asynccontextmanager
async def serving(config: Config | None = None) -> AsyncIterator[Deployment]:
    config = config or Config(api=ApiConfig(port=0))
    async with Deployment(config, Placement.parse("1E/1PD")) as deployment:
        yield deployment


async def fuzz(deployment: Deployment, ask: Ask, seconds: float, seed: int) -> Outcome:
    """Asks for so long, several at once, each request from a seed of its own; then checks that all is idle again."""
    outcome = Outcome()
    started_s = time.monotonic()
    before: list[int] = []
    async with httpx.AsyncClient(base_url=deployment.url, timeout=TIMEOUT_S, trust_env=False) as client:

        async def keep_asking(first: int) -> None:
            number = first
            while (now_s := time.monotonic() - started_s) < seconds:
                if not before and now_s > seconds / 3:
                    before.append(_memory())
                await _ask_once(client, ask, f"{seed}/{number}", outcome)
                number += CONCURRENCY

        await asyncio.gather(*map(keep_asking, range(CONCURRENCY)))
        outcome.growth_bytes = _memory() - (before[0] if before else _memory())
        if outcome.growth_bytes > MAX_GROWTH_BYTES:
            outcome.failures.append(f"memory has grown by {outcome.growth_bytes} bytes")
        outcome.failures += await _left_behind(client)
    return outcome


async def _ask_once(client: httpx.AsyncClient, ask: Ask, seed: str, outcome: Outcome) -> None:
    try:
        response = await ask(client, random.Random(seed))
    except httpx.HTTPError as error:
        outcome.failures.append(f"seed {seed}: {type(error).__name__} {error}")
        return
    outcome.statuses[response.status_code] += 1
    if response.status_code >= 500:
        outcome.failures.append(f"seed {seed}: {response.status_code} {response.text[:200]}")
    elif '"error":{"message"' in response.text and response.status_code == 200:  # inside a stream
        outcome.failures.append(f"seed {seed}: {response.text[-300:]}")


async def _left_behind(client: httpx.AsyncClient) -> list[str]:
    """Nothing runs, nothing is leased, and a plain question is answered."""
    topology: dict[str, Any] = {}
    for _ in range(50):
        topology = (await client.get("/topology")).json()
        leases = sum(worker["load"]["num_leases"] for worker in topology["workers"])
        if topology["num_running"] == 0 and leases == 0:
            break
        await asyncio.sleep(0.2)
    else:
        return [f"still busy: {topology}"]
    body = {"messages": [{"role": "user", "content": "What is 2 plus 3?"}], "max_tokens": 4, "temperature": 0}
    answer = await client.post("/v1/chat/completions", json=body)
    return [] if answer.status_code == 200 else [f"the next request: {answer.status_code} {answer.text[:200]}"]


def _memory() -> int:
    """Resident bytes of this process, which is the router's, and of its workers."""
    router = psutil.Process(os.getpid())
    total = int(router.memory_info().rss)
    for worker in router.children(recursive=True):
        try:
            total += int(worker.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
    return total


def main(ask: Ask, description: str, config: Config | None = None) -> None:
    """The command line of one kind of fuzzing. Exits with 1 where something failed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    async def run() -> Outcome:
        async with serving(config) as deployment:
            return await fuzz(deployment, ask, args.seconds, args.seed)

    outcome = asyncio.run(run())
    print(outcome)
    raise SystemExit(1 if outcome.failures else 0)
