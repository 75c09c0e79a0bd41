"""kill -9 of each role under load, drain, and what a deployment leaves behind: nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.deployment.conftest import chat, image_part
from triptych.config import Config
from triptych.launch import Deployment
from triptych.placement import Placement

NUM_REQUESTS = 8


async def _ask(client: httpx.AsyncClient, seed: int, max_tokens: int) -> str:
    response = await client.post(
        "/v1/chat/completions", json=chat(image_part(seed), "what is it", max_tokens=max_tokens)
    )
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def _leases_and_blocks(client: httpx.AsyncClient) -> tuple[int, int]:
    """Leases that are out, and KV blocks that are not free, over all workers."""
    loads = [worker["load"] for worker in (await client.get("/topology")).json()["workers"]]
    return (
        sum(load["num_leases"] for load in loads),
        sum(load["num_total_blocks"] - load["num_free_blocks"] for load in loads),
    )


async def _until(condition, timeout_s: float = 30.0) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.1)


@pytest.mark.parametrize("victim", ["encode-0", "prefill-0", "decode-0"])
async def test_kill_9_in_flight_and_every_request_is_answered_right(config: Config, victim: str) -> None:
    async with (
        Deployment(config, Placement.parse("1E/1P/1D")) as deployment,
        httpx.AsyncClient(base_url=deployment.url, timeout=120, trust_env=False) as client,
    ):
        expected = [await _ask(client, seed, 60) for seed in range(NUM_REQUESTS)]
        first_pid = deployment.pid(victim)
        answers = [asyncio.create_task(_ask(client, seed, 60)) for seed in range(NUM_REQUESTS)]
        await asyncio.sleep(0.15)  # some wait, some encode, some decode
        deployment.kill(victim)
        assert await asyncio.gather(*answers) == expected

        async def is_back() -> bool:
            return (await client.get("/ready")).status_code == 200 and deployment.pid(victim) not in (None, first_pid)

        async def is_idle() -> bool:
            return await _leases_and_blocks(client) == (0, 0)

        await _until(is_back)
        await _until(is_idle)
        assert await _ask(client, 0, 60) == expected[0]


async def test_a_stream_goes_on_on_another_decode_worker_from_the_tokens_already_sent(config: Config) -> None:
    async with (
        Deployment(config, Placement.parse("1E/1P/2D")) as deployment,
        httpx.AsyncClient(base_url=deployment.url, timeout=120, trust_env=False) as client,
    ):
        expected = await _ask(client, 3, 200)
        body = chat(image_part(3), "what is it", max_tokens=200, stream=True)
        text, killed = "", False
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += httpx.Response(200, text=line[6:]).json()["choices"][0]["delta"].get("content") or ""
                if len(text) > 20 and not killed:
                    killed = True
                    topology = (await client.get("/topology")).json()
                    busy = [
                        w["name"] for w in topology["workers"] if "decode" in w["stages"] and w["load"]["num_running"]
                    ]
                    for name in busy or ["decode-0"]:
                        deployment.kill(name)
        assert killed
        assert text == expected


async def test_a_client_that_goes_away_frees_every_stage(config: Config) -> None:
    async with (
        Deployment(config, Placement.parse("1E/1P/1D")) as deployment,
        httpx.AsyncClient(base_url=deployment.url, timeout=120, trust_env=False) as client,
    ):
        for seed in range(NUM_REQUESTS):
            body = chat(image_part(seed), "what is it", max_tokens=1000, stream=True)
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    break  # the first chunk is here: leave

        async def is_idle() -> bool:
            running = (await client.get("/topology")).json()["num_running"]
            return running == 0 and await _leases_and_blocks(client) == (0, 0)

        await _until(is_idle)
        assert await _ask(client, 0, 8)


async def test_stopping_lets_running_requests_end_and_leaves_nothing_behind(config: Config) -> None:
    deployment = Deployment(config, Placement.parse("1E/1P/1D"))
    await deployment.start()
    runtime_dir, pids = Path(deployment.runtime_dir), [deployment.pid(n) for n in ("encode-0", "prefill-0", "decode-0")]
    async with httpx.AsyncClient(base_url=deployment.url, timeout=120, trust_env=False) as client:
        answer = asyncio.create_task(_ask(client, 1, 150))
        await asyncio.sleep(0.2)
        await deployment.stop()
        assert await answer
    assert not runtime_dir.exists()
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_drained_worker_finishes_leaves_and_is_replaced_while_others_take_its_work(config: Config) -> None:
    async with (
        Deployment(config, Placement.parse("1E/1P/2D")) as deployment,
        httpx.AsyncClient(base_url=deployment.url, timeout=120, trust_env=False) as client,
    ):
        expected = [await _ask(client, seed, 60) for seed in range(NUM_REQUESTS)]
        first_pid = deployment.pid("decode-0")
        before = [asyncio.create_task(_ask(client, seed, 60)) for seed in range(NUM_REQUESTS)]
        await asyncio.sleep(0.1)
        assert (await client.post("/workers/drain", json={"name": "decode-0"})).status_code == 200
        after = [asyncio.create_task(_ask(client, seed, 60)) for seed in range(NUM_REQUESTS)]
        assert await asyncio.gather(*before, *after) == expected * 2

        async def is_replaced() -> bool:
            states = {w["name"]: w["state"] for w in (await client.get("/topology")).json()["workers"]}
            return states.get("decode-0") == "live" and deployment.pid("decode-0") not in (None, first_pid)

        await _until(is_replaced)


async def test_a_worker_that_was_frozen_and_counted_as_lost_starts_anew(config: Config) -> None:
    """Its leases ended and its requests went elsewhere: the frozen life must not serve again."""
    quick = msgspec.structs.replace(config.router, heartbeat_s=0.2, heartbeat_ttl_s=1.0)
    config = msgspec.structs.replace(config, router=quick)
    async with (
        Deployment(config, Placement.parse("1E/1P/2D")) as deployment,
        httpx.AsyncClient(base_url=deployment.url, timeout=120, trust_env=False) as client,
    ):
        expected = [await _ask(client, seed, 60) for seed in range(NUM_REQUESTS)]
        pid = deployment.pid("decode-0")
        assert pid is not None
        answers = [asyncio.create_task(_ask(client, seed, 60)) for seed in range(NUM_REQUESTS)]
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGSTOP)
        assert await asyncio.gather(*answers) == expected

        async def names() -> list[str]:
            return [worker["name"] for worker in (await client.get("/topology")).json()["workers"]]

        async def is_lost() -> bool:
            return "decode-0" not in await names()

        async def is_replaced() -> bool:
            return "decode-0" in await names() and deployment.pid("decode-0") not in (None, pid)

        await _until(is_lost)
        os.kill(pid, signal.SIGCONT)

        await _until(is_replaced)
        again = [asyncio.create_task(_ask(client, seed, 60)) for seed in range(NUM_REQUESTS)]
        assert await asyncio.gather(*again) == expected
