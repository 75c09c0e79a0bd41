"""Real processes: a deployment of a tiny random checkpoint, what a client needs to ask it, and what it then holds."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.equivalence.reference import picture
from triptych.config import ApiConfig, Config, EngineConfig, ModelConfig, RouterConfig
from triptych.launch import Deployment
from triptych.placement import Placement
from triptych.testing_checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny"
    make_checkpoint("qwen3_vl", path)
    return path


@pytest.fixture
def config(tiny_model: Path) -> Config:
    return Config(
        model=ModelConfig(path=str(tiny_model)),
        engine=EngineConfig(num_kv_blocks=400),
        router=RouterConfig(drain_s=20.0),
        api=ApiConfig(port=0),
    )


def image_part(seed: int, width: int = 90, height: int = 60) -> dict[str, object]:
    content = base64.b64encode(picture(seed, width, height)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}


def chat(*parts: dict[str, object] | str, max_tokens: int = 8, **fields: object) -> dict[str, object]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": max_tokens,
        **fields,
    }


@asynccontextmanager
async def serving(
    config: Config, placement: str, **options: Any
) -> AsyncIterator[tuple[Deployment, httpx.AsyncClient]]:
    """A deployment that is ready, and a client of it."""
    limits = httpx.Limits(max_connections=None)
    async with (
        Deployment(config, Placement.parse(placement), **options) as deployment,
        httpx.AsyncClient(base_url=deployment.url, timeout=120, trust_env=False, limits=limits) as client,
    ):
        yield deployment, client


async def post(client: httpx.AsyncClient, body: dict[str, object]) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=body)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def ask(client: httpx.AsyncClient, seed: int, max_tokens: int) -> str:
    return text_of(await post(client, chat(image_part(seed), "what is it", max_tokens=max_tokens)))


async def workers(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    """As the router shows them, by name."""
    return {worker["name"]: worker for worker in (await client.get("/topology")).json()["workers"]}


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await condition():
            await asyncio.sleep(0.05)


async def until_idle(client: httpx.AsyncClient) -> None:
    """No request, no lease and no used KV block is left."""

    async def is_idle() -> bool:
        topology = (await client.get("/topology")).json()
        loads = [worker["load"] for worker in topology["workers"]]
        held = [load["num_leases"] + load["num_total_blocks"] - load["num_free_blocks"] for load in loads]
        return topology["num_running"] == 0 and not any(held)

    await until(is_idle)


async def until_live(client: httpx.AsyncClient, names: list[str], not_pids: list[int | None] | None = None) -> None:
    """Workers of these names are live, none of them with a pid of `not_pids`."""

    async def are_live() -> bool:
        known = await workers(client)
        live = [known[name] for name in names if name in known and known[name]["state"] == "live"]
        return len(live) == len(names) and not {w["info"]["pid"] for w in live} & set(not_pids or [])

    await until(are_live)
