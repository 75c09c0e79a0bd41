"""The server's own counters around a round, from its Prometheus page: how many encodes it ran, what its caches hit.

Only for systems that name the page; nothing of the client's measures comes from here. Called by `compare.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from triptych.bench.client import Target, get

SETTLE_S = 1.5  # workers may tell their counts later than the answer is over
ANSWER_S = 10.0
ENDINGS = ("_total", "_count", "_sum")

Counters = dict[str, float]  # by name, summed over labels


def parse(page: str) -> Counters:
    """Counters of a page in Prometheus' text format; lines of another form are skipped."""
    found: Counters = {}
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if line.startswith("#") or not name.endswith(ENDINGS):
            continue
        try:
            amount = float(line.rpartition("}")[2].split()[0] if "{" in line else line.split()[1])
        except (ValueError, IndexError):
            continue
        found[name] = found.get(name, 0.0) + amount
    return found


async def read(target: Target, path: str) -> Counters | None:
    """None without a page, or when it does not answer."""
    if not path:
        return None
    await asyncio.sleep(SETTLE_S)
    status, body = await get(target, path, ANSWER_S)
    return parse(body.decode(errors="replace")) if status == 200 else None


def difference(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> Counters:
    """What changed."""
    if before is None or after is None:
        return {}
    return {name: amount - before.get(name, 0.0) for name, amount in after.items() if amount != before.get(name, 0.0)}
