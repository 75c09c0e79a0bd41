"""Situations that have broken real servers, against real processes. A test's number is that of its situation.

What one process can show as well is in `tests/router/test_field_cases.py`; workers that die are in `test_faults.py`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
import zmq
from safetensors import safe_open
from safetensors.torch import save_file

from tests.chaos.questions import with_comment
from tests.chaos.resources import SLACK_BYTES, settled
from tests.chaos.server import Server
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
from tests.equivalence.reference import picture
from triptych import messages
from triptych.config import ApiConfig, Config, ModelConfig, RouterConfig
from triptych.launch import Deployment
from triptych.supervisor import RestartPolicy
from triptych.testing_checkpoints import make_checkpoint
from triptych.types import SamplingParams, WorkerAddress

NUM_DEATHS = 20
NUM_IMAGES = 5000


def limited(config: Config, max_num_requests: int) -> Config:
    router = msgspec.structs.replace(config.router, max_num_requests=max_num_requests)
    return msgspec.structs.replace(config, router=router)


async def test_s3_two_hundred_image_requests_at_once_are_answered_or_refused(config: Config) -> None:
    async with serving(limited(config, 150), "1E/1PD") as (_, client):
        bodies = [chat(image_part(seed), "what is it", max_tokens=4) for seed in range(200)]
        responses = await asyncio.gather(*(post(client, body) for body in bodies))
        statuses = Counter(response.status_code for response in responses)
        assert set(statuses) == {200, 503}
        assert statuses[200] >= 150
        for response in responses:
            if response.status_code == 200:
                assert text_of(response)
            else:
                assert response.headers["retry-after"]
                assert "in flight" in response.json()["error"]["message"]
        await until_idle(client)


async def test_s5_one_broken_image_among_eight_fails_only_its_own_request(config: Config) -> None:
    async with serving(config, "1E/1P/1D") as (_, client):
        expected = [await ask(client, seed, 8) for seed in range(7)]
        png = picture(100, 90, 60)
        half = base64.b64encode(png[: len(png) // 2]).decode()  # its header is whole
        broken: dict[str, object] = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{half}"}}
        new = [chat(image_part(seed), "and this", image_part(50 + seed), "what is it") for seed in range(7)]
        *good, bad = await asyncio.gather(*(post(client, body) for body in [*new, chat(broken, "what is it")]))
        assert all(text_of(response) for response in good)
        assert bad.status_code == 400
        assert bad.json()["error"]["param"].startswith("messages")
        assert [await ask(client, seed, 8) for seed in range(7)] == expected
        await until_idle(client)


async def test_s6_work_for_a_stage_that_a_worker_does_not_host_leaves_it_alive(config: Config) -> None:
    async with serving(config, "1E/1P/1D") as (deployment, client):
        addresses = {worker.info.address.name: worker.info.address for worker in deployment.router.registry.workers()}
        pids = {name: deployment.pid(name) for name in addresses}
        consumer = WorkerAddress("nobody", "0", f"ipc://{deployment.runtime_dir}/nobody.sock", "")
        text = messages.Prefill("x", 0, [1, 2, 3], 0, [], SamplingParams(), "", 0, decode_elsewhere=False)
        image = messages.EncodeItems("x", 0, ["item"], consumer)
        with zmq.Context() as context:
            wrong: dict[str, messages.Body] = {"encode-0": text, "prefill-0": image, "decode-0": text}
            for name, body in wrong.items():
                with context.socket(zmq.PUSH) as socket:
                    socket.setsockopt(zmq.LINGER, 2000)
                    socket.connect(addresses[name].endpoint)
                    socket.send(messages.encode(body, "router", ""))
                    socket.send(b"no message at all")
        assert await ask(client, 1, 8)
        assert {name: deployment.pid(name) for name in addresses} == pids
        assert (await client.get("/health")).status_code == 200


async def test_s7_an_image_that_comes_again_goes_to_the_encode_worker_that_has_it(config: Config) -> None:
    """The encode worker's own counters prove that the encode was remote, and that its cache was hit."""
    engine = msgspec.structs.replace(config.engine, embedding_cache_bytes=0, prefix_caching=False)
    router = msgspec.structs.replace(config.router, heartbeat_s=0.2)
    async with serving(msgspec.structs.replace(config, engine=engine, router=router), "2E/1P/1D") as (_, client):
        first = await ask(client, 1, 8)
        assert await ask(client, 1, 8) == first

        async def counted() -> bool:
            encoders = [worker["counters"] for name, worker in (await workers(client)).items() if "encode" in name]
            names = ("encode_items_total", "encoder_cache_misses_total", "encoder_cache_hits_total")
            return sorted([c.get(name, 0) for name in names] for c in encoders) == [[0, 0, 0], [1, 1, 1]]

        await until(counted)


@pytest.mark.slow
async def test_s9_the_encode_worker_is_killed_and_restarted_twenty_times_under_load(config: Config) -> None:
    policy = RestartPolicy(max_deaths=2 * NUM_DEATHS, max_delay_s=0.1)
    router = msgspec.structs.replace(config.router, capacity_wait_s=60.0, max_attempts=10)
    config = msgspec.structs.replace(config, router=router)
    async with serving(config, "1E/1P/1D", policy=policy) as (deployment, client):
        over = asyncio.Event()
        salts = iter(range(1_000_000))

        async def answered(body: dict[str, object]) -> str:
            """While no encode worker lives a new request is told to come again, and it does."""
            while (response := await post(client, body)).status_code == 503:
                assert response.headers["retry-after"]
                assert "No live worker hosts the encode stage" in response.text
                await asyncio.sleep(0.1)
            return text_of(response)

        async def keep_asking() -> int:
            """New pictures all the time: each needs the encode worker."""
            count = 0
            while not over.is_set():
                seed = 1000 + next(salts)
                body = chat(image_part(seed), "what is it")
                assert await answered(body | {"cache_salt": str(seed)}) == await answered(body)
                count += 1
            return count

        asking = [asyncio.create_task(keep_asking()) for _ in range(4)]
        pids: list[int | None] = []
        for _ in range(NUM_DEATHS):
            pids.append(deployment.pid("encode-0"))
            deployment.kill("encode-0")
            await until_live(client, ["encode-0"], pids)
            await asyncio.sleep(random.random() * 0.2)
        over.set()
        assert min(await asyncio.gather(*asking)) > 0
        await until_idle(client)
        assert await ask(client, 1, 8)


@pytest.mark.slow
async def test_s13_five_thousand_images_leave_memory_as_it_was_after_the_first_ones(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = ["--model-path", str(tiny_model), "--num-kv-blocks", "600", "--log-level", "warning"]
    flags += ["--cache-bytes", str(4 << 20), "--embedding-cache-bytes", str(4 << 20), "--max-images", "20"]
    png = picture(1, 60, 60)
    numbers = iter(range(NUM_IMAGES))

    async def ask_about(server: Server, count: int) -> None:
        async def one_after_the_other() -> None:
            for first in iter(lambda: next(parts, None), None):
                pictures = [base64.b64encode(with_comment(png, str(first + k))).decode() for k in range(10)]
                urls: list[dict[str, object]] = [
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{p}"}} for p in pictures
                ]
                assert text_of(await post(server.client, chat(*urls, "what is it", max_tokens=1)))

        parts = iter([next(numbers) for _ in range(count)][::10])
        await asyncio.gather(*(one_after_the_other() for _ in range(4)))

    async with Server("1E/1P/1D", flags, tmp_path / "log") as server:
        server.client.timeout = httpx.Timeout(120)
        await ask_about(server, NUM_IMAGES // 5)
        warm = await settled(server, 60)
        await ask_about(server, NUM_IMAGES - NUM_IMAGES // 5)
        after = await settled(server, 60)
        await asyncio.sleep(2 * RouterConfig().heartbeat_s)  # the counts lag by one
        assert await server.total("encode_items_total") == NUM_IMAGES
    assert (after.num_leases, after.num_used_blocks) == (0, 0)
    assert (after.segments, after.shm_files) == (warm.segments, warm.shm_files)
    for name, process in after.processes.items():
        assert process.private_bytes < warm.processes[name].private_bytes + SLACK_BYTES, name


async def test_s14_a_burst_beyond_the_limit_is_refused_before_any_work_on_media(config: Config) -> None:
    async with serving(limited(config, 16), "1E/1P/1D") as (_, client):
        ended: list[tuple[float, httpx.Response]] = []

        async def one(seed: int) -> None:
            response = await post(client, chat(image_part(seed), "what is it", max_tokens=500))
            ended.append((time.monotonic(), response))

        await asyncio.gather(*(one(seed) for seed in range(200)))
        statuses = Counter(response.status_code for _, response in ended)
        assert statuses == {200: 16, 503: 184}
        refused = [(at_s, response) for at_s, response in ended if response.status_code == 503]
        assert all(response.headers["retry-after"] for _, response in refused)
        first_answer_s = min(at_s for at_s, response in ended if response.status_code == 200)
        assert max(at_s for at_s, _ in refused) < first_answer_s, "a refusal waited for work"

        async def counted() -> bool:
            counters = (await workers(client))["encode-0"]["counters"]
            return bool(counters.get("encode_items_total") == 16 and counters.get("encoder_cache_misses_total") == 16)

        await until(counted)


# -- workers that are started by hand ----------------------------------------------------------------------------------


@pytest.fixture
def short_dir() -> Iterator[str]:
    """Paths of unix sockets have 108 bytes at most."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield path


async def start_worker(deployment: Deployment, name: str, stages: str, model: Path) -> asyncio.subprocess.Process:
    """With nothing but what it must be told."""
    command = [sys.executable, "-m", "triptych.cli.main", "worker", "--stages", stages, "--name", name]
    command += ["--router", deployment.url, "--runtime-dir", deployment.runtime_dir, "--model-path", str(model)]
    return await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=dict(os.environ))


async def refusal(process: asyncio.subprocess.Process) -> str:
    """What a worker that ends at once says."""
    async with asyncio.timeout(120):
        _, err = await process.communicate()
    assert process.returncode == 1
    assert b"Traceback" not in err
    return err.decode()


@pytest.mark.slow
async def test_s15_s16_workers_of_one_host_find_their_ports_and_an_unlike_one_is_refused(
    tiny_model: Path, tmp_path: Path, short_dir: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    shard = next(other.glob("*.safetensors"))
    with safe_open(shard, "pt") as file:
        tensors = {name: file.get_tensor(name) + 0.01 for name in file.keys()}  # noqa: SIM118
    save_file(tensors, shard, {"format": "pt"})
    config = Config(model=ModelConfig(path=str(tiny_model)), api=ApiConfig(port=0))
    deployment = Deployment(config, None, runtime_dir=short_dir)
    processes: list[asyncio.subprocess.Process] = []
    try:
        await deployment.start()
        for name, stages in (("e", "encode"), ("pd", "prefill,decode")):
            processes.append(await start_worker(deployment, name, stages, tiny_model))
        async with httpx.AsyncClient(base_url=deployment.url, timeout=120, trust_env=False) as client:
            await until_live(client, ["e", "pd"])
            assert await ask(client, 1, 8)
            said = await refusal(await start_worker(deployment, "unlike", "encode", other))
            assert "the router refused this worker" in said
            assert "model, weights, dtype, block size or protocol differ" in said
            assert set(await workers(client)) == {"e", "pd"}
    finally:
        for process in processes:
            process.terminate()
            await process.communicate()
        await deployment.stop()


async def test_s16_an_encode_worker_on_a_model_without_a_vision_tower_does_not_start(
    config: Config, tmp_path: Path, short_dir: str
) -> None:
    blind = tmp_path / "blind"
    make_checkpoint("qwen3_vl", blind)
    index = blind / "model.safetensors.index.json"
    settings = json.loads(index.read_text())
    settings["weight_map"] = {k: v for k, v in settings["weight_map"].items() if "visual" not in k}
    index.write_text(json.dumps(settings))
    deployment = Deployment(config, None, runtime_dir=short_dir)
    try:
        await deployment.start()
        said = await refusal(await start_worker(deployment, "e", "encode", blind))
        assert "has no vision weights" in said
    finally:
        await deployment.stop()
