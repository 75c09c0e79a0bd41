"""`python -m tests.chaos.cancels`: clients that go away at random moments, by the thousand; nothing may grow.

Exit code 0 when memory, descriptors, sockets, leases, KV blocks and shared memory are back to where they were.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.chaos.asking import ask
from tests.chaos.questions import Asked, make_questions
from tests.chaos.resources import grown, settled
from tests.chaos.run import FLAGS
from tests.chaos.server import Server

NUM_QUESTIONS = 24
WARM_UP = 300  # cancels, before the first look
MAX_TOKENS = 200  # longer than most clients wait
LONGEST_WAIT_S = 2.0
SETTLE_S = 60.0


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.cancels", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="cancels (default: 10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--placement", default="2E/2P/2D")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--json", type=Path, help="where the result goes")
    return parser.parse_args(argv)


async def cancel_many(
    server: Server, questions: Sequence[Asked], count: int, concurrency: int, seed: int
) -> Counter[str]:
    """Ask until `count` clients have gone away; how the requests ended, and how many had a token by then."""
    ends: Counter[str] = Counter()
    numbers = itertools.count()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)

    async def one_after_the_other(client: httpx.AsyncClient) -> None:
        while ends["cancelled"] < count:
            rng = random.Random(f"cancels {seed} {next(numbers)}")
            question = rng.choice(questions)._replace(max_tokens=MAX_TOKENS)
            body = question.body(rng, stream=rng.random() < 0.5)
            end = await ask(client, body, LONGEST_WAIT_S * 10.0 ** rng.uniform(-3, 0))
            ends["answered" if end.answer else "failed" if end.error else "cancelled"] += 1

    async with httpx.AsyncClient(base_url=server.url, timeout=600, trust_env=False, limits=limits) as client:
        await asyncio.gather(*(one_after_the_other(client) for _ in range(concurrency)))
    return ends


async def stages_reached(server: Server) -> dict[str, float]:
    """Work that was begun at each stage, from the workers' own counters."""
    names = {"encode": "encode_items_total", "prefill": "prompt_tokens_computed_total", "decode": "engine_steps_total"}
    workers = await server.workers()
    return {
        stage: sum(w.counters.get(counter, 0.0) for w in workers if stage in w.stages)
        for stage, counter in names.items()
    }


async def cancels(args: argparse.Namespace, log: Path) -> dict[str, Any]:
    questions = make_questions(NUM_QUESTIONS, args.seed)
    async with Server(args.placement, FLAGS, log) as server:
        await cancel_many(server, questions, min(WARM_UP, args.count), args.concurrency, args.seed + 1)
        before = await settled(server, SETTLE_S)
        ends = await cancel_many(server, questions, args.count, args.concurrency, args.seed)
        after = await settled(server, SETTLE_S)
        return {
            "count": args.count,
            "seed": args.seed,
            "placement": args.placement,
            "concurrency": args.concurrency,
            "ends": dict(ends),
            "work_done": await stages_reached(server),
            "grown": grown(before, after),
            "before": before._asdict() | {"processes": {n: p._asdict() for n, p in before.processes.items()}},
            "after": after._asdict() | {"processes": {n: p._asdict() for n, p in after.processes.items()}},
        }


def report(found: dict[str, Any]) -> str:
    lines = [f"{'process':<12} {'private MiB':>16} {'descriptors':>16} {'sockets':>12}"]
    for name, was in found["before"]["processes"].items():
        now = found["after"]["processes"].get(name, was)
        memory = f"{was['private_bytes'] >> 20} -> {now['private_bytes'] >> 20}"
        fds, sockets = (f"{was[k]} -> {now[k]}" for k in ("num_fds", "num_sockets"))
        lines.append(f"{name:<12} {memory:>16} {fds:>16} {sockets:>12}")
    for what in ("num_leases", "num_used_blocks", "segments", "shm_files"):
        lines.append(f"{what}: {found['before'][what]} -> {found['after'][what]}")
    lines.append(f"ends: {found['ends']}; work done: {found['work_done']}")
    return "\n".join([*lines, *(f"GROWN: {what}" for what in found["grown"])])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(cancels(args, Path(directory, "server.log")))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    print(report(found))
    return 1 if found["grown"] or found["ends"].get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
