"""Sixteen clients ask at once about one new image: one forward, whatever happens to the worker that runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.deployment.conftest import chat, image_part, post, serving, text_of, until, until_idle, workers
from triptych.config import Config, WorkerConfig
from triptych.launch import Deployment

pytestmark = pytest.mark.slow  # `tests/router/test_field_cases.py` has the same in one process

NUM_CLIENTS = 16
FORWARD_S = 2.0
TTL_S = 3.0
PATIENCE_S = 60.0  # for a machine that is busy with other work; the request's own deadline is ten times that


def run_with_slow_tower(config: Config, worker: WorkerConfig) -> None:
    """A worker whose forwards take `FORWARD_S`, each with a line in the file `NAME.forwards` when it begins."""
    from triptych.models.vision import VisionRunner
    from triptych.worker import run

    encode = VisionRunner.encode

    def slow(self: VisionRunner, items: object) -> object:
        with Path(worker.runtime_dir, f"{worker.name}.forwards").open("a") as begun:
            begun.write(f"{os.getpid()}\n")
        time.sleep(FORWARD_S)
        return encode(self, items)  # type: ignore[arg-type]

    VisionRunner.encode = slow  # type: ignore[assignment,method-assign]
    run(config, worker)


def begun(deployment: Deployment) -> dict[str, int]:
    """Forwards that were begun, by worker, over all its lives."""
    files = Path(deployment.runtime_dir).glob("*.forwards")
    return {file.stem: file.read_text().count("\n") for file in files}


async def leader_of(deployment: Deployment) -> str:
    """The one encode worker that has begun a forward."""

    async def has_begun() -> bool:
        return bool(begun(deployment))

    await until(has_begun)
    (name,) = begun(deployment)
    return name


@pytest.fixture
def slow(config: Config) -> Config:
    router = msgspec.structs.replace(config.router, heartbeat_s=0.2, heartbeat_ttl_s=TTL_S, probe_s=600.0)
    return msgspec.structs.replace(config, router=router)


def ask_all(client: httpx.AsyncClient) -> list[asyncio.Task[httpx.Response]]:
    bodies = [chat(image_part(99), f"{k} what is it") for k in range(NUM_CLIENTS)]
    return [asyncio.create_task(post(client, body)) for body in bodies]


async def counted(client: httpx.AsyncClient, forwards: int) -> None:
    """The encode workers themselves have counted so many forwards, each of one item."""

    async def have() -> bool:
        known = [w["counters"] for name, w in (await workers(client)).items() if name.startswith("encode")]
        counts = [sum(c.get(f"encode_{what}_total", 0) for c in known) for what in ("forwards", "items")]
        return counts == [forwards, forwards]

    await until(have)


@pytest.mark.parametrize("num_encoders", [2, 4])
async def test_sixteen_clients_and_one_new_image_are_one_forward(slow: Config, num_encoders: int) -> None:
    async with serving(slow, f"{num_encoders}E/1P/1D", target=run_with_slow_tower) as (deployment, client):
        for response in await asyncio.gather(*ask_all(client)):
            assert text_of(response)
        assert sum(begun(deployment).values()) == 1
        await counted(client, 1)
        await until_idle(client)


@pytest.mark.parametrize("num_encoders", [2, 4])
async def test_the_leader_is_killed_in_the_forward_and_there_is_exactly_one_more(
    slow: Config, num_encoders: int
) -> None:
    async with serving(slow, f"{num_encoders}E/1P/1D", target=run_with_slow_tower) as (deployment, client):
        tasks = ask_all(client)
        leader = await leader_of(deployment)
        deployment.kill(leader)
        for response in await asyncio.gather(*tasks):
            assert text_of(response)
        assert sum(begun(deployment).values()) == 2
        await counted(client, 1)  # the other died with its counter
        await until_idle(client)


@pytest.mark.parametrize("num_encoders", [2, 4])
async def test_the_leading_request_is_cancelled_in_the_forward_and_the_others_get_it(
    slow: Config, num_encoders: int
) -> None:
    async with serving(slow, f"{num_encoders}E/1P/1D", target=run_with_slow_tower) as (deployment, client):
        first = asyncio.create_task(post(client, chat(image_part(99), "what is it")))
        await leader_of(deployment)
        tasks = ask_all(client)
        await asyncio.sleep(0.2)
        first.cancel()
        for response in await asyncio.gather(*tasks):
            assert text_of(response)
        assert sum(begun(deployment).values()) == 1
        await counted(client, 1)
        await until_idle(client)


@pytest.mark.parametrize("num_encoders", [2, 4])
async def test_the_leader_hangs_in_the_forward_and_nobody_waits_longer_than_its_ttl_and_an_encode(
    slow: Config, num_encoders: int
) -> None:
    async with serving(slow, f"{num_encoders}E/1P/1D", target=run_with_slow_tower) as (deployment, client):
        tasks = ask_all(client)
        leader = await leader_of(deployment)
        pid, stopped_s = deployment.pid(leader), time.monotonic()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        for response in await asyncio.gather(*tasks):
            assert text_of(response)
        assert time.monotonic() - stopped_s < TTL_S + FORWARD_S + PATIENCE_S
        assert sum(begun(deployment).values()) == 2
        os.kill(pid, signal.SIGCONT)
        await until_idle(client)
