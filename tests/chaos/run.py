"""Faults under load against a real deployment of the demo checkpoint: `python -m tests.chaos`, or `make chaos`.

Exit code 0 when every promise was kept: see `verdict`. The same seed gives the same requests and the same faults, at
moments that depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.chaos.faults import Faults, cancelled, table
from tests.chaos.load import Load, undisturbed
from tests.chaos.questions import make_questions
from tests.chaos.reference import reference_answers
from tests.chaos.resources import Snapshot, grown, settled
from tests.chaos.server import Server

NUM_QUESTIONS = 24
MIN_SUCCESS = 0.99
WARM_UP_S = 15.0
SETTLE_S = 60.0
HEARTBEAT_TTL_S = 8.0  # longer than the default: a machine that is busy with other work must not kill a healthy worker
FLAGS = (
    "--model-dtype", "float32", "--max-num-requests", "1000", "--deadline-s", "300",
    "--num-kv-blocks", "1500", "--cache-bytes", str(8 << 20), "--embedding-cache-bytes", str(8 << 20),
    "--log-level", "warning",
)  # fmt: skip


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="time with faults (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="of requests and faults (default: 0)")
    parser.add_argument("--placement", default="2E/2P/2D", help="two workers of every stage, at least")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight (default: 8)")
    parser.add_argument("--mean-fault-s", type=float, default=2.5, help="mean time between faults (default: 2.5)")
    parser.add_argument("--heartbeat-ttl-s", type=float, default=HEARTBEAT_TTL_S)
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--log", type=Path, help="where the deployment's log goes (default: a temporary file)")
    return parser.parse_args(argv)


async def chaos(args: argparse.Namespace, log: Path) -> dict[str, Any]:
    questions = make_questions(NUM_QUESTIONS, args.seed)
    flags = [*FLAGS, "--heartbeat-ttl-s", str(args.heartbeat_ttl_s)]
    async with Server(args.placement, flags, log) as server:
        expected = await undisturbed(server.url, questions)
        warm = Load(server.url, questions, expected, args.concurrency, args.seed + 1)
        await warm.run(time.monotonic() + WARM_UP_S)
        before = await settled(server, SETTLE_S)
        load = Load(server.url, questions, expected, args.concurrency, args.seed)
        faults = Faults(server, load, args.seed, args.heartbeat_ttl_s, args.mean_fault_s)
        until_s = time.monotonic() + args.seconds
        await asyncio.gather(load.run(until_s), faults.run(until_s))
        after = await settled(server, SETTLE_S)
        is_alive = server.alive
    differing = [k for k, answer in reference_answers(questions).items() if answer != expected[k]]
    return result(args, warm, load, faults, before, after, differing, is_alive)


def result(
    args: argparse.Namespace,
    warm: Load,
    load: Load,
    faults: Faults,
    before: Snapshot,
    after: Snapshot,
    differing: list[int],
    is_alive: bool,
) -> dict[str, Any]:
    ended = sum(load.counts[kind] for kind in ("answered", "failed", "wrong", "broken"))
    return {
        "seconds": args.seconds,
        "seed": args.seed,
        "placement": args.placement,
        "concurrency": args.concurrency,
        "heartbeat_ttl_s": args.heartbeat_ttl_s,
        "requests": {"started": len(load.flights), **load.counts},
        "success": load.counts["answered"] / max(ended, 1),
        "faults": [*table(faults.injections, load.flights), cancelled(load.flights)],
        "unrecovered": [f"{i.kind} of {i.victim}" for i in faults.injections if not i.recovered_s],
        "unjust": faults.unjust,
        "failures": load.failures,
        "failures_while_undisturbed": warm.failures,
        "unlike_the_reference": differing,
        "grown": grown(before, after),
        "before": {name: process._asdict() for name, process in before.processes.items()},
        "after": {name: process._asdict() for name, process in after.processes.items()},
        "ended_alone": not is_alive,
    }


def verdict(found: dict[str, Any]) -> list[str]:
    """The promises that were broken."""
    requests = found["requests"]
    ends = sum(requests.get(kind, 0) for kind in ("answered", "failed", "wrong", "broken", "cancelled"))
    checks = {
        f"{requests['started'] - ends} requests did not end": requests["started"] == ends,
        "a request ended in another way than once": not requests.get("broken", 0),
        "an answer differs from the undisturbed one": not requests.get("wrong", 0),
        "a greedy answer differs from the reference": not found["unlike_the_reference"],
        "a request failed before the first fault": not found["failures_while_undisturbed"],
        f"success {found['success']:.4f} is below {MIN_SUCCESS}": found["success"] >= MIN_SUCCESS,
        f"not recovered: {found['unrecovered']}": not found["unrecovered"],
        f"unjust: {found['unjust']}": not found["unjust"],
        f"grown: {found['grown']}": not found["grown"],
        "the deployment ended": not found["ended_alone"],
        "no fault was injected": len(found["faults"]) > 1,
    }
    return [promise for promise, kept in checks.items() if not kept]


def report(found: dict[str, Any]) -> str:
    header = ("fault", "injected", "in_flight", "failed", "slowest_recovery_s", "slowest_request_s")
    rows = [header, *([str(row[name]) for name in header] for row in found["faults"])]
    widths = [max(len(row[k]) for row in rows) for k in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    counts = ", ".join(f"{name} {count}" for name, count in found["requests"].items())
    memory = ", ".join(
        f"{name} {found['before'][name]['private_bytes'] >> 20} -> {process['private_bytes'] >> 20}"
        for name, process in sorted(found["after"].items())
        if name in found["before"]
    )
    lines += ["", f"requests: {counts}; success {100 * found['success']:.2f} %", f"private memory, MiB: {memory}"]
    return "\n".join([*lines, *found["failures"][:10], *found["failures_while_undisturbed"][:10]])


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(chaos(args, args.log or Path(directory, "server.log")))
    broken = found["broken_promises"] = verdict(found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    print(report(found))
    print("\n".join(f"BROKEN: {promise}" for promise in broken) if broken else "every promise was kept")
    return 1 if broken else 0
