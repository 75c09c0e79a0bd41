"""Placements, and the life of a deployment: start, restart, give up, clean stop, port taken, orphans.

The workers here are `play_worker`, which does what a worker does on the way in and out and nothing between.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import msgspec
import pytest

import triptych
from tests.api.conftest import FakeVocabulary
from triptych.api.admission import Admission
from triptych.api.app import create_app
from triptych.cli.foreground import serve
from triptych.config import ApiConfig, Config, RouterConfig, WorkerConfig
from triptych.errors import ConfigError, EngineError
from triptych.launch import Deployment, Serving
from triptych.observe.metrics import Metrics
from triptych.placement import Placement, lend_cores, parse_pins
from triptych.supervisor import RestartPolicy
from triptych.types import (
    ChoiceFinished,
    Event,
    Finished,
    FinishReason,
    Heartbeat,
    Load,
    Prompt,
    Request,
    Stage,
    TextDelta,
    Timing,
    Usage,
    WeightsReport,
    WorkerAddress,
    WorkerInfo,
)

CONFIG = Config(api=ApiConfig(port=0), router=RouterConfig(drain_s=5))
QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02)


def play_worker(config: Config, worker: WorkerConfig) -> None:
    """Registers, touches a file, waits for SIGTERM, leaves."""
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    address = WorkerAddress(worker.name, f"{os.getpid()}", "", "")
    info = WorkerInfo(
        address, worker.stages, "v1", "fake", 10, WeightsReport(1, 2, 3, 4, 0.5), os.getpid(),
        cores=sorted(os.sched_getaffinity(0)), supervised=worker.supervised,
    )  # fmt: skip
    with Path(worker.runtime_dir, f"{worker.name}.lives").open("a") as lives:
        lives.write(f"{os.getpid()}\n")
    _post(worker.router_url, "register", info)
    while not stop:
        time.sleep(0.01)
    if config.model.served_name == "stubborn":
        time.sleep(60)
    with contextlib.suppress(OSError):
        _post(worker.router_url, "leave", Heartbeat(worker.name, address.epoch, Load()))


def play_broken_worker(config: Config, worker: WorkerConfig) -> None:
    raise EngineError("broken")


def play_mistaken_worker(config: Config, worker: WorkerConfig) -> None:
    raise ConfigError("no such checkpoint")


def play_hindered_worker(config: Config, worker: WorkerConfig) -> None:
    """Its second life has no memory."""
    lives = Path(worker.runtime_dir, f"{worker.name}.lives")
    if lives.exists() and lives.read_text().count("\n") == 1:
        with lives.open("a") as file:
            file.write("0\n")
        raise ConfigError("no memory")
    play_worker(config, worker)


def _post(url: str, path: str, value: object) -> None:
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(f"{url}/workers/{path}", msgspec.json.encode(value), headers)
    urllib.request.urlopen(asked, timeout=5).close()


class Worker:
    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.load = Load()
        self.counters: dict[str, float] = {}
        self.state = "live"


class PlayRegistry:
    def __init__(self) -> None:
        self.known: dict[str, Worker] = {}
        self.log: list[str] = []

    def register(self, info: WorkerInfo) -> None:
        self.known[info.address.name] = Worker(info)

    def heartbeat(self, beat: Heartbeat) -> bool:
        return beat.name in self.known

    def leave(self, name: str, epoch: str) -> None:
        self.log.append(f"left {name}")
        self.known.pop(name, None)

    def lost(self, name: str) -> None:
        self.log.append(f"lost {name}")
        self.known.pop(name, None)

    def workers(self) -> list[Worker]:
        return list(self.known.values())


class PlayRouter:
    """Answers after `delay_s`."""

    model_name = "fake"
    max_model_len = 10
    num_running = 0
    closing = False

    def __init__(self) -> None:
        self.registry = PlayRegistry()
        self.vocabulary = FakeVocabulary()
        self.log: list[str] = []
        self.delay_s = 0.0

    async def start(self) -> None:
        self.log.append("start")

    async def close(self) -> None:
        self.log.append("close")

    def admit(self) -> None:
        return None

    async def lay_out(self, request: Request) -> Prompt:
        return Prompt([1])

    async def handle(self, request: Request) -> AsyncIterator[Event]:
        yield TextDelta("yes", 1)
        await asyncio.sleep(self.delay_s)
        yield ChoiceFinished(0, FinishReason.STOP, None)
        yield Finished(Usage(1, 1), Timing(0, 0, [], [], []))

    def drain(self, name: str) -> bool:
        return False

    def ready(self) -> bool:
        return {stage for worker in self.registry.workers() for stage in worker.info.stages} == set(Stage)

    async def health(self) -> dict[str, str]:
        return {}


def play_compose(config: Config, runtime_dir: str) -> Serving:
    router, admission = PlayRouter(), Admission(16)
    return Serving(router, create_app(router, config, Metrics(), admission), admission)


def deployment(placement: str = "1E/1PD", **options: object) -> Deployment:
    defaults: dict[str, object] = {
        "compose": play_compose, "target": play_worker, "preload": (), "policy": QUICK, "say": LINES.append,
    }  # fmt: skip
    config = options.pop("config", CONFIG)
    return Deployment(config, Placement.parse(placement), **(defaults | options))  # type: ignore[arg-type]


LINES: list[str] = []


@pytest.fixture(autouse=True)
def no_lines() -> None:
    LINES.clear()


def num_lives(running: Deployment, name: str) -> int:
    return Path(running.runtime_dir, f"{name}.lives").read_text().count("\n")


def is_there(path: str) -> bool:
    return Path(path).exists()


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


async def until(condition: Callable[[], bool], what: str) -> None:
    """Waits at most 10 s for the condition."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within 10 s: {what}")


# -- placements --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("EPD", ["epd-0"]),
        ("2epd", ["epd-0", "epd-1"]),
        ("2E/1P/2D", ["encode-0", "encode-1", "prefill-0", "decode-0", "decode-1"]),
        ("E/PD", ["encode-0", "prefill-decode-0"]),
        ("1EP/1D", ["encode-prefill-0", "decode-0"]),
        ("1E/1E/1PD", ["encode-0", "encode-1", "prefill-decode-0"]),
    ],
)
def test_placement(text: str, names: list[str]) -> None:
    placement = Placement.parse(text)
    assert [worker.name for worker in placement.workers("http://r", "/r", {})] == names
    assert Placement.parse(str(placement)) == placement


@pytest.mark.parametrize("text", ["", "2", "0E/1PD", "E//PD", "PE/D", "1X", "-1E/1PD", "EE/PD"])
def test_placement_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="placement"):
        Placement.parse(text)


@pytest.mark.parametrize(("text", "missing"), [("2E/1P", "decode"), ("1PD", "encode"), ("E", "prefill and decode")])
def test_placement_with_a_stage_that_nobody_hosts(text: str, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"no worker hosts {missing}$"):
        Placement.parse(text)


def test_counts() -> None:
    assert Placement.from_counts() == Placement.parse("EPD")
    assert str(Placement.from_counts(encode=2, prefill=1, decode=2, epd=0)) == "2E/1P/2D"
    assert str(Placement.from_counts(epd=1)) == "EPD"


def test_pins() -> None:
    pins = parse_pins(["encode=0,2-3", "encode-1=5"])
    workers = Placement.parse("2E/1PD").workers("http://r", "/r", pins)
    assert [worker.cores for worker in workers] == [[0, 2, 3], [5], []]
    assert [worker.num_threads for worker in workers] == [3, 1, 1]
    assert Placement.parse("EPD").workers("http://r", "/r", {"router": [1]})[0].cores == []
    with pytest.raises(ConfigError, match="decode-7"):
        Placement.parse("EPD").workers("http://r", "/r", {"decode-7": [0]})
    with pytest.raises(ConfigError, match="NAME=CORES"):
        parse_pins(["encode"])
    with pytest.raises(ConfigError, match="encode is pinned twice"):
        parse_pins(["encode=0", "encode=1"])


def test_cores_are_lent_by_workers_that_have_their_own() -> None:
    placement = Placement.parse("2E/1PD")

    def lent(*pins: str) -> list[list[int]]:
        workers = placement.workers("http://r", "/r", parse_pins(pins))
        return [worker.lent_cores for worker in lend_cores(workers)]

    assert lent("encode-0=0", "encode-1=1,2", "prefill-decode=3") == [[1, 2, 3], [0, 3], [0, 1, 2]]
    with pytest.raises(ConfigError, match="core 0 is of encode-0 and of encode-1"):
        lent("encode=0", "prefill-decode=1")
    with pytest.raises(ConfigError, match="prefill-decode-0 is not pinned"):
        lent("encode-0=0", "encode-1=1")


def test_delays_grow_to_a_limit() -> None:
    policy = RestartPolicy(first_delay_s=0.1, max_delay_s=1.0)
    assert [policy.delay_s(count) for count in (1, 2, 3, 9)] == [0.1, 0.2, 0.4, 1.0]


# -- the life of a deployment ------------------------------------------------------------------------------------------


async def test_start_serve_and_clean_stop() -> None:
    async with deployment() as running:
        assert running.url.startswith("http://127.0.0.1:")
        runtime_dir = running.runtime_dir
        assert os.stat(runtime_dir).st_mode & 0o777 == 0o700
        async with httpx.AsyncClient(base_url=running.url, trust_env=False) as client:
            assert (await client.get("/ready")).status_code == 200
            workers = (await client.get("/topology")).json()["workers"]
            names = [worker["name"] for worker in workers]
            assert sorted(names) == ["encode-0", "prefill-decode-0"]
            assert all(worker["info"]["supervised"] for worker in workers)
            body = {"messages": [{"role": "user", "content": "?"}]}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"] == "yes"
        pids = [running.pid(name) for name in names]
        router = running.router
    assert isinstance(router, PlayRouter)
    assert router.log == ["start", "close"]
    assert sorted(router.registry.log) == ["left encode-0", "left prefill-decode-0"]
    assert not is_there(runtime_dir)
    assert all(pid is not None and not lives(pid) for pid in pids)
    assert any(line.startswith("ready after") for line in LINES)
    assert any("encode-0" in line and "1 of 2 shards" in line for line in LINES)


async def test_a_pinned_router_leaves_other_cores_to_its_workers() -> None:
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    async with deployment("EPD", pins={"router": [core]}) as running:
        assert os.sched_getaffinity(0) == {core}
        (worker,) = running.router.registry.workers()
        assert worker.info.cores == sorted(allowed)
    assert os.sched_getaffinity(0) == allowed


async def test_a_worker_that_dies_is_started_again() -> None:
    async with deployment() as running:
        first = running.pid("encode-0")
        running.kill("encode-0")
        await until(lambda: running.router.ready() and running.pid("encode-0") not in (None, first), "a second life")
        assert running.router.registry.log == ["lost encode-0"]  # type: ignore[attr-defined]
        assert num_lives(running, "encode-0") == 2
    assert any("encode-0 ended with SIGKILL (death 1)" in line for line in LINES)


async def test_a_worker_that_cannot_start_is_given_up() -> None:
    with pytest.raises(ConfigError, match=r"ended with exit code 1, 5 times within 60 s: given up"):
        async with deployment(target=play_broken_worker):
            raise AssertionError("it cannot have started")


async def test_a_mistake_in_the_configuration_is_told_once_and_not_tried_again() -> None:
    with pytest.raises(ConfigError, match=r"^worker (encode-0|prefill-decode-0): no such checkpoint$"):
        async with deployment(target=play_mistaken_worker):
            raise AssertionError("it cannot have started")
    assert not any("ended with" in line for line in LINES)


async def test_what_keeps_a_later_life_from_starting_may_pass() -> None:
    async with deployment("EPD", target=play_hindered_worker) as running:
        running.kill("epd-0")
        await until(lambda: num_lives(running, "epd-0") == 3 and running.router.ready(), "a third life")
    assert any("epd-0 ended with exit code 1 (death 2)" in line for line in LINES)


async def test_a_worker_that_was_lost_and_hangs_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.launch.WORKER_GRACE_S", 0.3)
    async with deployment() as running:
        first = running.pid("encode-0")
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        running.router.registry.known.pop("encode-0")  # type: ignore[attr-defined]  # as for want of heartbeats
        await until(lambda: running.pid("encode-0") not in (None, first) and running.router.ready(), "a second life")
        assert not lives(first)
    assert f"encode-0 (pid {first}) was lost and does not end: it is killed" in LINES


async def test_a_worker_that_leaves_as_it_is_told_is_never_given_up() -> None:
    async with deployment("EPD", policy=RestartPolicy(max_deaths=2, first_delay_s=0.01)) as running:
        pids: list[int] = []
        for _ in range(4):
            pid = running.pid("epd-0")
            assert pid is not None
            pids.append(pid)
            os.kill(pid, signal.SIGTERM)
            await until(lambda: running.pid("epd-0") not in (None, *pids) and running.router.ready(), "a life more")
        assert num_lives(running, "epd-0") == 5
    assert any("epd-0 left, starting it again" in line for line in LINES)


async def test_a_worker_given_up_later_ends_the_deployment() -> None:
    running = deployment("EPD", policy=RestartPolicy(max_deaths=1))
    task = asyncio.create_task(serve(running, LINES.append))
    await until(lambda: any(line.startswith("ready") for line in LINES), "ready")
    running.kill("epd-0")
    assert await asyncio.wait_for(task, 10) == 1
    assert "given up" in LINES[-1]


async def test_running_requests_are_drained_and_new_ones_refused() -> None:
    running = deployment()
    task = asyncio.create_task(serve(running, LINES.append))
    await until(lambda: any(line.startswith("curl") for line in LINES), "ready")
    assert isinstance(running.router, PlayRouter)
    running.router.delay_s = 0.5
    body = {"messages": [{"role": "user", "content": "?"}]}
    async with httpx.AsyncClient(base_url=running.url, trust_env=False) as client:
        asked = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: any("stopping" in line for line in LINES), "stopping")
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 503
        assert (await asked).status_code == 200
    assert await asyncio.wait_for(task, 10) == 0


@pytest.mark.parametrize("keys", ["", "secret"])
async def test_the_curl_line_has_a_place_for_the_key(keys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_API_KEYS", keys)
    task = asyncio.create_task(serve(deployment("EPD"), LINES.append))
    await until(lambda: any(line.startswith("curl") for line in LINES), "ready")
    (line,) = [line for line in LINES if line.startswith("curl")]
    assert ("-H 'Authorization: Bearer YOUR_KEY'" in line) == bool(keys)
    assert "secret" not in line
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(task, 10) == 0


async def test_a_second_signal_forces() -> None:
    stubborn = msgspec.structs.replace(CONFIG, model=msgspec.structs.replace(CONFIG.model, served_name="stubborn"))
    task = asyncio.create_task(serve(deployment("EPD", config=stubborn), LINES.append))
    await until(lambda: any(line.startswith("curl") for line in LINES), "ready")
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(0.2)
    assert not task.done()
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(task, 3) == 0
    assert "forced to stop" in LINES


async def test_what_runs_after_the_start_gives_the_exit_code() -> None:
    async def then() -> int | None:
        return 7

    assert await serve(deployment("EPD"), LINES.append, then) == 7


async def test_s15_a_taken_port_is_one_clear_line_and_nothing_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = Config(api=ApiConfig(port=port))

        def never(config: Config, runtime_dir: str) -> Serving:
            raise AssertionError("composed before the port was known")

        with pytest.raises(ConfigError, match=f"^port {port} on 127.0.0.1 is taken; choose another with --port"):
            async with deployment(config=config, compose=never):
                pass


def test_s15_a_taken_port_on_the_command_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "triptych.cli.main", "serve", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == f"triptych: port {port} on 127.0.0.1 is taken; choose another with --port, or 0 for any\n"


async def start_script(tmp_path: Path, text: str) -> asyncio.subprocess.Process:
    """A parent process and group of its own, with the package under test, its tests and `tmp_path` on its path."""
    script = tmp_path / "parent.py"
    script.write_text(text)
    package = Path(triptych.__file__).parent.parent  # which another may be installed beside
    path = os.pathsep.join([str(package), str(Path(__file__).parent.parent), str(tmp_path)])
    pipe = asyncio.subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, str(script)]
    return await asyncio.create_subprocess_exec(
        *command, stdout=pipe, stderr=pipe, env=environment, start_new_session=True
    )


ORPHANS = """
import asyncio, json, os, signal
from tests.test_launch import deployment
async def main():
    async with deployment() as running:
        print(json.dumps([running.pid("encode-0"), running.pid("prefill-decode-0"), running.runtime_dir]), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_workers_leave_when_their_parent_was_killed(tmp_path: Path) -> None:
    process = await start_script(tmp_path, ORPHANS)
    out, err = await process.communicate()
    assert out, err.decode()
    *pids, runtime_dir = json.loads(out)
    await until(lambda: not any(lives(pid) for pid in pids), "the workers are gone")
    assert not is_there(runtime_dir)


INTERRUPTED = """
import asyncio
from tests.test_launch import deployment
from triptych.cli.foreground import serve
async def main():
    say = lambda line: print(line, flush=True)
    return await serve(deployment("EPD", preload=["slow_preload"], say=say), say)
if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
"""


async def test_ctrl_c_of_the_whole_group_while_the_fork_server_still_imports(tmp_path: Path) -> None:
    (tmp_path / "slow_preload.py").write_text("import time; time.sleep(1.5)")
    process = await start_script(tmp_path, INTERRUPTED)
    assert process.stdout is not None
    while not (line := (await process.stdout.readline()).decode()).startswith("runtime files in "):
        assert line, "it ended"
    await asyncio.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 10)
    assert (process.returncode, out, err) == (0, b"stopping; once more to force\n", b"")
    assert not is_there(line.split()[-1])


async def test_workers_come_back_when_the_fork_server_was_killed() -> None:
    async with deployment("EPD") as running:
        first = running.pid("epd-0")
        assert first is not None
        fork_server = parent_of(first)
        os.kill(fork_server, signal.SIGKILL)
        await until(lambda: running.pid("epd-0") not in (None, first) and running.router.ready(), "a second life")
        await until(lambda: not lives(first), "the first life is gone")
        assert is_there(running.runtime_dir)


async def test_two_routers_cannot_share_a_runtime_directory(tmp_path: Path) -> None:
    options = {"runtime_dir": str(tmp_path / "run")}
    async with deployment("EPD", **options):
        with pytest.raises(ConfigError, match="in use by another router"):
            async with deployment("EPD", **options):
                pass
    assert is_there(options["runtime_dir"])
