"""Systems are started, found ready, and stopped with all that they started."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from triptych.bench import running as running_module
from triptych.bench.running import RunningSystem, version
from triptych.bench.systems import System, check_names
from triptych.errors import ConfigError

from .mock_server import MockServer

SCRIPT = str(Path(__file__).with_name("mock_server.py"))


def system(*words: str, **fields: Any) -> System:
    base: dict[str, Any] = {"name": "mock", "command": (sys.executable, SCRIPT, "{port}", *words)}
    return msgspec.convert(base | fields, System)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_a_command_is_pinned_filled_in_and_stopped_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_module, "STOP_S", 1.0)  # its child, in another group, hears no SIGTERM
    core = min(os.sched_getaffinity(0))
    running = RunningSystem(system("child", "{model}", cores=[core]), "weights", tmp_path / "logs" / "mock.log")
    await running.start()
    try:
        assert running.tree is not None
        pids = running.tree.living()
        assert len(pids) == 2
        assert [os.sched_getaffinity(pid) for pid in pids] == [{core}, {core}]
        assert Path(f"/proc/{pids[0]}/cmdline").read_text().split("\0")[-2] == "weights"
        assert running.target.model == "plain"
        assert running.ready_s is not None
        assert running.first_answer_s is not None
        assert running.first_answer_s >= running.ready_s
        assert running.command[2] in running.url
    finally:
        await running.stop()
    assert not any(map(alive, pids))
    assert (tmp_path / "logs" / "mock.log").read_text().startswith("serving")


async def test_a_command_that_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"system mock ended with 1.*no such device"):
        await RunningSystem(system("dies"), "", tmp_path / "log").start()


async def test_a_command_that_never_gets_ready_is_stopped(tmp_path: Path) -> None:
    running = RunningSystem(system("deaf", start_timeout_s=0.5), "", tmp_path / "log")
    with pytest.raises(ConfigError, match="not ready within"):
        await running.start()
    assert running.tree is not None
    assert running.tree.living() == []


async def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="system mock: command"):
        await RunningSystem(system(command=["/no/such/thing"]), "", tmp_path / "log").start()


async def test_a_url_is_only_looked_at(server: MockServer, tmp_path: Path) -> None:
    given = msgspec.convert({"name": "there", "url": server.url, "pids": [os.getpid()]}, System)
    running = RunningSystem(given, "", tmp_path / "log")
    await running.start()
    assert (running.ready_s, running.target.model) == (None, "plain")
    assert running.tree is not None
    assert running.tree.usage() is not None
    await running.stop()
    assert running.tree.alive()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"name": "x"}, "one of command and url"),
        ({"name": "x", "url": "http://a", "command": ["b"]}, "not both"),
        ({"name": "x y", "url": "http://a"}, "name"),
        ({"name": "x", "command": ["b"], "pids": [1]}, "pids"),
        ({"name": "x", "command": ["b"], "cores": [1, 1]}, "cores"),
        ({"name": "x", "command": ["b"], "port": 1}, "port"),
    ],
)
def test_bad_systems_are_refused_by_field(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=told):
        msgspec.convert(fields, System)


def test_names_are_unlike() -> None:
    with pytest.raises(ConfigError, match="mock"):
        check_names([system(), system()])
    with pytest.raises(ConfigError, match="none"):
        check_names([])


def test_versions() -> None:
    assert version(system()) == ""
    assert version(system(version_command=[sys.executable, "-c", "print('9.9')"])) == "9.9"
    assert version(system(version_command=["/no/such/thing"])).startswith("unknown")
