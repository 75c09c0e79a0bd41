"""Models, health, topology, metrics, and what workers ask of the router."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from tests.api.conftest import worker_info
from triptych.api.app import create_app
from triptych.config import Config
from triptych.observe.metrics import Metrics
from triptych.types import Heartbeat, Load


async def test_models(api: Any) -> None:
    body = (await api.http.get("/v1/models")).json()
    assert body["object"] == "list"
    (card,) = body["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("demo", "model", 100)
    assert (await api.http.get("/v1/models/demo")).json() == card


async def test_a_model_name_with_a_slash(api: Any) -> None:
    api.router.model_name = "org/model"
    assert (await api.http.get("/v1/models/org/model")).json()["id"] == "org/model"


async def test_ping_version_load(api: Any) -> None:
    assert (await api.http.get("/ping")).status_code == 200
    assert (await api.http.post("/ping")).status_code == 200
    assert (await api.http.get("/version")).json()["version"]
    assert (await api.http.get("/load")).json() == {"server_load": 0}


async def test_ready(api: Any) -> None:
    assert (await api.http.get("/ready")).status_code == 200
    api.router.is_ready = False
    response = await api.http.get("/ready")
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_health(api: Any) -> None:
    api.router.sick = {"encode-0": ""}
    assert (await api.http.get("/health")).status_code == 200
    api.router.sick = {"encode-0": "", "decode-0": "no answer"}
    response = await api.http.get("/health")
    assert (response.status_code, response.json()["workers"]["decode-0"]) == (503, "no answer")
    api.router.sick, api.router.is_ready = {}, False
    assert (await api.http.get("/health")).status_code == 503


async def test_those_who_ask_for_health_at_once_share_the_probes(api: Any) -> None:
    asked, go_on = 0, asyncio.Event()

    async def health() -> dict[str, str]:
        nonlocal asked
        asked += 1
        await go_on.wait()
        return {"encode-0": ""}

    api.router.health = health
    answers = [asyncio.create_task(api.http.get("/health")) for _ in range(5)]
    await asyncio.sleep(0.01)
    go_on.set()
    assert {(await answer).json()["workers"]["encode-0"] for answer in answers} == {"ok"}
    assert asked == 1
    await api.http.get("/health")
    assert asked == 2


JSON = {"content-type": "application/json"}


async def post(api: Any, path: str, value: object) -> Any:
    return await api.http.post(path, content=msgspec.json.encode(value), headers=JSON)


async def test_life_of_a_worker(api: Any) -> None:
    beat = Heartbeat("encode-0", "e1", Load(num_waiting=2), {"encode_forwards_total": 5.0})
    assert (await post(api, "/workers/heartbeat", beat)).status_code == 404
    assert (await post(api, "/workers/register", worker_info())).status_code == 200
    assert (await post(api, "/workers/heartbeat", beat)).status_code == 200
    (worker,) = (await api.http.get("/topology")).json()["workers"]
    assert (worker["name"], worker["state"], worker["stages"]) == ("encode-0", "live", ["encode"])
    assert worker["counters"] == {"encode_forwards_total": 5.0}
    assert worker["load"]["num_waiting"] == 2
    assert worker["info"]["weights"]["shards_read"] == 1
    assert (await post(api, "/workers/leave", beat)).status_code == 200
    assert api.router.registry.workers() == []


async def test_an_unlike_worker_is_refused_with_the_reason(api: Any) -> None:
    response = await post(api, "/workers/register", worker_info(version_hash="v2"))
    assert response.status_code == 409
    assert response.json()["error"] == {"message": "another model", "type": "ConflictError", "param": None, "code": 409}


@pytest.mark.parametrize("path", ["register", "heartbeat", "leave"])
async def test_admin_bodies_are_checked(api: Any, path: str) -> None:
    response = await post(api, f"/workers/{path}", {"name": 3})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "Bad Request")


async def test_only_loopback_peers_reach_the_admin_routes(api: Any) -> None:
    app = create_app(api.router, Config(), Metrics())
    transport = httpx.ASGITransport(app, client=("10.0.0.9", 1234))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as stranger:
        response = await stranger.post("/workers/register", content=msgspec.json.encode(worker_info()), headers=JSON)
        assert response.status_code == 404
        assert (await stranger.get("/v1/models")).status_code == 200
    assert api.router.registry.workers() == []


@pytest.mark.parametrize("path", ["register", "heartbeat", "leave", "drain"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 400),
        ({}, 400),
        (JSON | {"origin": "https://a.example"}, 404),
        (JSON | {"origin": "null"}, 404),
        (JSON | {"sec-fetch-site": "same-origin"}, 404),
    ],
)
async def test_no_page_in_a_browser_reaches_the_admin_routes(
    api: Any, path: str, headers: dict[str, str], status: int
) -> None:
    for body in (worker_info(), Heartbeat("encode-0", "e1", Load())):
        response = await api.http.post(f"/workers/{path}", content=msgspec.json.encode(body), headers=headers)
        assert response.status_code == status
    assert (api.router.registry.workers(), api.router.drained) == ([], [])


async def test_metrics(api: Any) -> None:
    response = await api.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "triptych:time_to_first_token_seconds_count 0.0" in response.text


async def test_an_operator_drains_a_worker_by_name(api: Any) -> None:
    response = await post(api, "/workers/drain", {"name": "encode-0"})
    assert response.status_code == 200
    response = await post(api, "/workers/drain", {"name": "other"})
    assert response.status_code == 404
    assert api.router.drained == ["encode-0", "other"]
