"""kill -9, SIGTERM and SIGSTOP under load, rolling restarts, and what a deployment leaves behind: nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.deployment.conftest import (
    ask,
    chat,
    image_part,
    post,
    serving,
    text_of,
    until,
    until_idle,
    until_live,
    workers,
)
from triptych.config import Config
from triptych.launch import Deployment
from triptych.placement import Placement

NUM_REQUESTS = 8


@pytest.mark.parametrize("victim", ["encode-0", "prefill-0", "decode-0"])
async def test_s4_s8_kill_9_in_flight_and_every_request_is_answered_right(config: Config, victim: str) -> None:
    async with serving(config, "1E/1P/1D") as (deployment, client):
        expected = [await ask(client, seed, 60) for seed in range(NUM_REQUESTS)]
        first_pid = deployment.pid(victim)
        answers = [asyncio.create_task(ask(client, seed, 60)) for seed in range(NUM_REQUESTS)]
        await asyncio.sleep(0.15)  # some wait, some encode, some decode
        deployment.kill(victim)
        assert await asyncio.gather(*answers) == expected
        await until_live(client, [victim], [first_pid])
        await until_idle(client)
        assert await ask(client, 0, 60) == expected[0]


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}], ids=["greedy", "seeded"]
)
async def test_s8_a_stream_goes_on_on_another_decode_worker_from_the_tokens_already_sent(
    config: Config, sampling: dict[str, object]
) -> None:
    async with serving(config, "1E/1P/2D") as (deployment, client):
        body = chat(image_part(3), "what is it", max_tokens=200) | sampling
        expected = text_of(await post(client, body))
        text, num_chunks, killed = "", 0, ""
        async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                    num_chunks += 1
                if num_chunks > 10 and not killed:
                    busy = {w.name for w in deployment.router.registry.workers() if w.num_inflight_requests}  # type: ignore[attr-defined]
                    (killed,) = busy & {"decode-0", "decode-1"}
                    deployment.kill(killed)
        assert killed
        assert text == expected
        await until_idle(client)


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_s8_three_seeded_choices_go_on_when_a_worker_of_theirs_is_killed(config: Config, stage: str) -> None:
    async with serving(config, "1E/2P/2D") as (deployment, client):
        body = chat(image_part(3), "what is it", max_tokens=100, n=3) | {"temperature": 0.9, "seed": 5}
        choices = (await post(client, body)).json()["choices"]
        expected = {choice["index"]: choice["message"]["content"] for choice in choices}
        assert len(set(expected.values())) == 3
        texts, ended, num_chunks, killed = dict.fromkeys(expected, ""), list[int](), 0, ""
        async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
                    ended += [choice["index"]] if choice["finish_reason"] else []
                num_chunks += 1
                if num_chunks > 6 and not killed:
                    busy = {w.name for w in deployment.router.registry.workers() if w.num_inflight_requests}  # type: ignore[attr-defined]
                    killed = min(name for name in busy if name.startswith(stage))
                    deployment.kill(killed)
        assert killed
        assert texts == expected
        assert sorted(ended) == [0, 1, 2]
        await until_idle(client)


async def test_s10_a_client_that_goes_away_frees_every_stage(config: Config) -> None:
    async with serving(config, "1E/1P/1D") as (_, client):
        for seed in range(NUM_REQUESTS):
            body = chat(image_part(seed), "what is it", max_tokens=1000, stream=True)
            async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    break  # the first chunk is here: leave
        await until_idle(client)
        assert await ask(client, 0, 8)


async def test_stopping_lets_running_requests_end_and_leaves_nothing_behind(config: Config) -> None:
    deployment = Deployment(config, Placement.parse("1E/1P/1D"))
    await deployment.start()
    runtime_dir, pids = Path(deployment.runtime_dir), [deployment.pid(n) for n in ("encode-0", "prefill-0", "decode-0")]
    async with httpx.AsyncClient(base_url=deployment.url, timeout=120, trust_env=False) as client:
        answer = asyncio.create_task(ask(client, 1, 150))
        await asyncio.sleep(0.2)
        await deployment.stop()
        assert await answer
    assert not runtime_dir.exists()
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# -- SIGTERM and drain -------------------------------------------------------------------------------------------------


async def test_a_drained_worker_finishes_leaves_and_is_replaced_while_others_take_its_work(config: Config) -> None:
    async with serving(config, "1E/1P/2D") as (deployment, client):
        expected = [await ask(client, seed, 60) for seed in range(NUM_REQUESTS)]
        first_pid = deployment.pid("decode-0")
        before = [asyncio.create_task(ask(client, seed, 60)) for seed in range(NUM_REQUESTS)]
        await asyncio.sleep(0.1)
        assert (await client.post("/workers/drain", json={"name": "decode-0"})).status_code == 200
        after = [asyncio.create_task(ask(client, seed, 60)) for seed in range(NUM_REQUESTS)]
        assert await asyncio.gather(*before, *after) == expected * 2
        await until_live(client, ["decode-0"], [first_pid])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["triptych restart", "SIGTERM"])
async def test_a_rolling_restart_of_all_workers_under_load_loses_no_request(config: Config, how: str) -> None:
    """One worker after the other leaves, and the next follows when its next life is live."""
    names = [f"{stage}-{k}" for stage in ("encode", "prefill", "decode") for k in (0, 1)]
    async with serving(config, "2E/2P/2D") as (deployment, client):
        expected = {seed: await ask(client, seed, 30) for seed in range(NUM_REQUESTS)}
        over = asyncio.Event()

        async def keep_asking(seed: int) -> int:
            count = 0
            while not over.is_set():
                assert await ask(client, seed, 30) == expected[seed]
                count += 1
            return count

        asking = [asyncio.create_task(keep_asking(seed)) for seed in expected]
        first_pids = [deployment.pid(name) for name in names]
        if how == "SIGTERM":
            for k, (name, pid) in enumerate(zip(names, first_pids, strict=True)):
                assert pid is not None
                os.kill(pid, signal.SIGTERM)
                await until_live(client, [name], first_pids[: k + 1])
        else:
            command = [sys.executable, "-m", "triptych.cli.main", "restart", "--url", deployment.url]
            restart = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            said, _ = await restart.communicate()
            assert restart.returncode == 0
            restarted = [line.split()[0] for line in said.decode().splitlines() if not line.startswith("waiting")]
            assert restarted == sorted(names)
        over.set()
        assert min(await asyncio.gather(*asking)) > 0
        await until_live(client, names, first_pids)
        await until_idle(client)


async def test_sigterm_lets_a_worker_finish_and_a_second_one_forces(config: Config) -> None:
    router = msgspec.structs.replace(config.router, heartbeat_s=0.1)
    async with serving(msgspec.structs.replace(config, router=router), "1E/1P/2D") as (deployment, client):
        body = chat("tell me", max_tokens=2000)
        expected = text_of(await post(client, body))
        asked = asyncio.create_task(post(client, body))

        async def busy() -> list[str]:
            known = await workers(client)
            return [name for name, worker in known.items() if "decode" in name and worker["load"]["num_running"]]

        async def is_busy() -> bool:
            return bool(await busy())

        await until(is_busy)
        (name,) = await busy()
        pid = deployment.pid(name)
        assert pid is not None
        os.kill(pid, signal.SIGTERM)

        async def is_draining() -> bool:
            return (await workers(client)).get(name, {}).get("state") == "draining"

        await until(is_draining)
        assert not asked.done(), "it ended before the second signal: ask for more tokens"
        os.kill(pid, signal.SIGTERM)
        await until_live(client, [name], [pid])
        assert text_of(await asked) == expected, "the other decode worker went on"


# -- workers that hang -------------------------------------------------------------------------------------------------


def quick_ttl(config: Config, **router: float) -> Config:
    """A heartbeat TTL that a test can wait for; a machine that is busy with other work may exceed it."""
    quick = msgspec.structs.replace(config.router, heartbeat_s=0.2, heartbeat_ttl_s=2.0, **router)
    return msgspec.structs.replace(config, router=quick)


async def test_a_worker_that_was_frozen_and_counted_as_lost_starts_anew(config: Config) -> None:
    """Its leases ended and its requests went elsewhere: the frozen life must not serve again."""
    async with serving(quick_ttl(config), "1E/1P/2D") as (deployment, client):
        expected = [await ask(client, seed, 60) for seed in range(NUM_REQUESTS)]
        pid = deployment.pid("decode-0")
        assert pid is not None
        answers = [asyncio.create_task(ask(client, seed, 60)) for seed in range(NUM_REQUESTS)]
        await asyncio.sleep(0.1)
        os.kill(pid, signal.SIGSTOP)
        assert await asyncio.gather(*answers) == expected

        async def is_lost() -> bool:
            return "decode-0" not in await workers(client)

        await until(is_lost)
        os.kill(pid, signal.SIGCONT)
        await until_live(client, ["decode-0"], [pid])
        again = [asyncio.create_task(ask(client, seed, 60)) for seed in range(NUM_REQUESTS)]
        assert await asyncio.gather(*again) == expected


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["encode-0", "prefill-0", "decode-0"])
async def test_s4_the_only_worker_of_a_stage_hangs_for_good_and_is_replaced(config: Config, victim: str) -> None:
    """Nobody wakes it: it is lost, killed, and its next life takes the request over."""
    async with serving(quick_ttl(config, capacity_wait_s=90.0), "1E/1P/1D") as (deployment, client):
        expected = await ask(client, 0, 40)
        pid = deployment.pid(victim)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        # Another picture for the encode worker, which nobody has cached.
        asked = asyncio.create_task(ask(client, 1 if victim == "encode-0" else 0, 40))
        await until_live(client, [victim], [pid])
        answered = await asked
        assert victim == "encode-0" or answered == expected
        assert await ask(client, 0, 40) == expected
        await until_idle(client)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
async def test_s4_all_workers_of_a_stage_hang_and_each_request_gets_one_clear_error(config: Config, stage: str) -> None:
    config = quick_ttl(config, capacity_wait_s=1.0)
    async with serving(config, "2E/2P/2D") as (deployment, client):
        pids = [deployment.pid(f"{stage}-{k}") for k in (0, 1)]
        for pid in pids:
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
        responses = await asyncio.gather(*(post(client, chat(image_part(seed), "what is it")) for seed in range(4)))
        for response in responses:
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert stage in response.json()["error"]["message"]
        await until_live(client, [f"{stage}-0", f"{stage}-1"], pids)
        assert await ask(client, 0, 8)
        await until_idle(client)


async def test_s11_prefills_link_to_decode_is_blocked_and_the_deadline_ends_the_request(config: Config) -> None:
    """Decode hangs for less than its TTL: nothing that prefill sends is taken."""
    router = msgspec.structs.replace(config.router, deadline_s=3.0, heartbeat_ttl_s=60.0)
    async with serving(msgspec.structs.replace(config, router=router), "1E/1P/1D") as (deployment, client):
        pid = deployment.pid("decode-0")
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        response = await post(client, chat(image_part(0), "what is it", max_tokens=20))
        os.kill(pid, signal.SIGCONT)
        assert response.status_code == 504
        assert "deadline" in response.json()["error"]["message"]
        await until_idle(client)
        assert await ask(client, 0, 20)
