"""Two workers pinned to a core each that compute on the other's core while it has nothing to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.deployment.conftest import ask, serving, until
from triptych.config import Config
from triptych.kernels import library
from triptych.lent_cores import FILE, FREE
from triptych.placement import parse_pins

NUM_REQUESTS = 4


def cores_of_threads(pid: int) -> set[frozenset[int]]:
    return {frozenset(os.sched_getaffinity(int(task))) for task in os.listdir(f"/proc/{pid}/task")}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores, to show that one worker uses both")
async def test_workers_lend_their_cores(config: Config) -> None:
    async with serving(config, "EPD") as (_, client):
        expected = [await ask(client, seed, 8) for seed in range(NUM_REQUESTS)]
    first, second = sorted(os.sched_getaffinity(0))[:2]
    pins = parse_pins([f"encode={first}", f"prefill-decode={second}"])
    async with serving(config, "1E/1PD", pins=pins, lend_cores=True) as (deployment, client):
        assert [await ask(client, seed, 8) for seed in range(NUM_REQUESTS)] == expected
        uses = Path(deployment.runtime_dir, FILE)

        async def are_free() -> bool:
            return [uses.read_bytes()[core] for core in (first, second)] == [FREE, FREE]

        await until(are_free)
        if library.available():  # both had work while the other had none: layers in torch stay on their own core
            for name, own, lent in (("encode-0", first, second), ("prefill-decode-0", second, first)):
                pid = deployment.pid(name)
                assert pid is not None
                assert cores_of_threads(pid) >= {frozenset({own}), frozenset({lent})}
