"""Router, encode, prefill and decode workers on hosts of their own: right answers, and links that are cut."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deployment.conftest import chat, image_part
from tests.deployment.namespaces import Hosts, why_not
from triptych.config import Config
from triptych.launch import Deployment
from triptych.placement import Placement

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(why_not()), reason=why_not())]

WORKERS = {
    "encode-0": "encode",
    "encode-1": "encode",
    "prefill-0": "prefill",
    "decode-0": "decode",
    "decode-1": "decode",
}
NUM_REQUESTS = 6
MAX_TOKENS = 24
SETTINGS = ["--num-kv-blocks", "400", "--transfer-timeout-s", "3", "--log-level", "info"]


class Net:
    """A deployment of one worker a host, and a client on the router's host."""

    def __init__(self, hosts: Hosts, model: str, directory: Path) -> None:
        self.hosts = hosts
        runtime_dir = directory / "r"
        address = hosts.add("router")
        self.url = f"http://{address}:8000"
        router = ["router", model, "--host", address, "--control-host", address, "--runtime-dir", str(runtime_dir)]
        hosts.start("router", [*router, *SETTINGS], private=False)
        self.until((runtime_dir / "join.json").exists, 60)
        for name, stage in WORKERS.items():
            where = hosts.add(name)
            worker = ["worker", model, "--name", name, "--stages", stage, "--join-file", str(runtime_dir / "join.json")]
            hosts.start(name, [*worker, "--host", where, "--runtime-dir", str(hosts.sockets(name)), *SETTINGS])
        self.until(lambda: set(self.workers()) == set(WORKERS), 180)

    def until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        give_up_s = time.monotonic() + timeout_s
        while not condition():
            dead = {name: self.hosts.log(name) for name, p in self.hosts.processes.items() if p.poll() is not None}
            assert not dead, dead
            assert time.monotonic() < give_up_s, {name: self.hosts.log(name) for name in self.hosts.processes}
            time.sleep(0.2)

    def request(self, method: str, path: str, body: object = None) -> httpx.Response:
        def ask() -> httpx.Response:
            with httpx.Client(base_url=self.url, timeout=120, trust_env=False) as client:
                return client.request(method, path, json=body)

        return self.hosts.on("router", ask)

    def workers(self) -> dict[str, Any]:
        try:
            return {worker["name"]: worker for worker in self.request("GET", "/topology").json()["workers"]}
        except httpx.ConnectError:
            return {}

    def counter(self, name: str) -> float:
        return float(sum(worker["counters"].get(name, 0.0) for worker in self.workers().values()))

    def ask(self, seed: int, max_tokens: int = MAX_TOKENS) -> str:
        response = self.request(
            "POST", "/v1/chat/completions", chat(image_part(seed), "what is it", max_tokens=max_tokens)
        )
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["message"]["content"])

    def ask_all(self, seeds: range) -> list[str]:
        with ThreadPoolExecutor(len(seeds)) as pool:
            return list(pool.map(self.ask, seeds))

    def until_idle(self) -> None:
        def idle() -> bool:
            loads = [worker["load"] for worker in self.workers().values()]
            return all(
                load["num_leases"] == 0 and load["num_free_blocks"] == load["num_total_blocks"] for load in loads
            )

        self.until(idle, 90)


@pytest.fixture(scope="module")
def net(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    directory = tmp_path_factory.mktemp("n")
    hosts = Hosts(directory)
    try:
        yield Net(hosts, str(tiny_model), directory)
    finally:
        hosts.close()


@pytest.fixture
async def expected(config: Config) -> list[str]:
    """What one worker that hosts every stage answers, for pictures 0 to 99 on demand."""
    async with (
        Deployment(config, Placement.parse("EPD")) as deployment,
        httpx.AsyncClient(base_url=deployment.url, timeout=120, trust_env=False) as client,
    ):
        answers = []
        for seed in range(4 * NUM_REQUESTS):
            body = chat(image_part(seed), "what is it", max_tokens=MAX_TOKENS)
            response = await client.post("/v1/chat/completions", json=body)
            answers.append(response.json()["choices"][0]["message"]["content"])
        return answers


def test_hosts_answer_as_one_worker_does_and_over_their_links_cut(net: Net, expected: list[str]) -> None:
    """One test, because its deployment takes long to start: undisturbed, then one fault after another."""
    first, second, third, fourth = (range(k * NUM_REQUESTS, (k + 1) * NUM_REQUESTS) for k in range(4))

    assert net.ask_all(first) == [expected[k] for k in first]
    net.until_idle()
    time.sleep(2.5)  # a heartbeat, and a tick before it
    moved = net.counter("embed_transfer_bytes_total") + net.counter("kv_transfer_bytes_total")
    assert net.counter("tcp_fetched_bytes_total") == net.counter("tcp_sent_bytes_total") == moved > 0

    net.hosts.block("prefill-0", "decode-0")  # both reach the router, but not each other
    assert net.ask_all(second) == [expected[k] for k in second]
    assert "cannot reach each other" in net.hosts.log("router")
    net.hosts.unblock("prefill-0", "decode-0")

    net.hosts.block("prefill-0", "encode-0")
    assert net.ask_all(third) == [expected[k] for k in third]
    # Each end tells the router; the request ends once the first has, so the other may not have said it yet.
    said = [("prefill-0", "worker=encode-0 cannot be reached"), ("encode-0", "worker=prefill-0 cannot be reached")]
    assert any(words in net.hosts.log(host) for host, words in said)
    net.hosts.unblock("prefill-0", "encode-0")

    # Nobody reaches it, and it has all the work: over the other's link to the prefill worker nothing is planned yet.
    net.hosts.set_link("encode-1", "down")
    assert net.ask_all(fourth) == [expected[k] for k in fourth]
    net.until(lambda: "encode-1" not in net.workers(), 60)
    net.hosts.set_link("encode-1", "up")
    net.until_idle()
    # It was counted as lost; this life of it is refused, and it says so and ends.
    assert net.hosts.processes["encode-1"].wait(60) is not None
    assert "declared lost" in net.hosts.log("encode-1")
    del net.hosts.processes["encode-1"]
    assert net.ask(0) == expected[0]


def test_a_prefill_worker_that_reaches_no_decode_worker_is_an_error_in_time(net: Net) -> None:
    blocked = [name for name in WORKERS if name.startswith("decode")]
    for name in blocked:
        net.hosts.block("prefill-0", name)
    started_s = time.monotonic()
    response = net.request("POST", "/v1/chat/completions", chat("hello there", max_tokens=4))
    assert response.status_code == 503, response.text
    assert "cannot reach each other" in json.dumps(response.json())
    assert time.monotonic() - started_s < 60
    for name in blocked:
        net.hosts.unblock("prefill-0", name)
    net.until_idle()
