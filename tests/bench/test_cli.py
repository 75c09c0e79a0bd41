"""The command, as documented, against a mock server."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.bench.results import read
from triptych.bench.settings import make_spec, read_file
from triptych.bench.workload import PRESETS
from triptych.cli.main import main

from .mock_server import MockServer

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
PAGE = (DOCS / "README.md").read_text()
QUICK = ["--requests", "3", "--warmup", "1", "--idle-s", "0", "--tokens-per-word", "1", "--no-ceilings"]
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^triptych bench run .*$", PAGE, re.MULTILINE)]


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_documented_runs(
    command: list[str],
    server: MockServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word.replace("http://127.0.0.1:8000", server.url).replace("4242", str(os.getpid())) for word in command]
    if "--rate" in words:
        words[words.index("--rate") + 1] = "50"
    assert main([*words, *QUICK]) == 0
    [file] = tmp_path.glob("*.json")
    results = read(file)
    assert results.complete
    assert not any(cell.summary.num_failed for cell in results.cells)
    printed = capsys.readouterr().out
    assert "round 1/" in printed
    assert "TTFT p90" in printed
    assert file.name in printed
    if "--pid" in words:
        assert all(cell.summary.cpu_s_per_request is not None for cell in results.cells)
        assert {cell.summary.num_devices for cell in results.cells} == {2}
    if "--slo" in words:
        assert results.cells[0].summary.goodput_per_s is not None


def test_documented_comparison_and_report(
    server: MockServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "systems.toml"
    spec.write_text(f"[[system]]\nname = 'a'\nurl = '{server.url}'\n[[system]]\nname = 'b'\nurl = '{server.url}'\n")
    words = ["bench", "compare", str(spec), "--output", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    assert main([*words, *QUICK, "--workload", "W2", "--rounds", "2", "--baseline", "b"]) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["bench", "report", str(tmp_path / "r.json"), "--markdown", "--plot", str(tmp_path / "again.png")]) == 0
    printed = capsys.readouterr().out
    assert "| W2 | c=1 | a | 6/0 |" in printed
    assert (tmp_path / "again.png").exists()
    assert main([*words, *QUICK, "--only", "a", "--workload", "W2", "--rounds", "1"]) == 0
    assert [system.name for system in read(tmp_path / "r.json").spec.systems] == ["a"]


def test_the_documented_file_is_whole() -> None:
    tables = read_file(DOCS / "systems.toml")
    spec = make_spec(tables, {})
    assert [system.name for system in spec.systems] == ["EPD", "1E/1PD"]
    assert [workload.image_format for workload in make_spec(tables, {"workload": ["W1-jpeg"]}).workloads] == ["JPEG"]


def test_every_preset_is_documented() -> None:
    assert [name for name in PRESETS if f"`{name}`" not in PAGE] == []


def test_failed_requests_give_exit_code_1(
    server: MockServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "run", "--url", server.url, "--model", "flaky", "--workload", "W2", *QUICK]
    assert main([*words, "--requests", "6", "--warmup", "0", "--output", str(tmp_path / "r.json")]) == 1
    assert "FAILED 2 (2 http_503)" in capsys.readouterr().out


def test_a_run_that_is_told_to_stop_stops_its_systems(tmp_path: Path) -> None:
    script = Path(__file__).with_name("mock_server.py")
    command = f"['{sys.executable}', '{script}', '{{port}}']"
    (tmp_path / "spec.toml").write_text(f"[[system]]\nname = 'a'\nmodel = 'slow'\ncommand = {command}\ncores = [0]\n")
    words = [sys.executable, "-m", "triptych.cli.main", "bench", "compare", "spec.toml", *QUICK]
    words += ["--workload", "W6", "--output", "r.json"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "ready" in line:
                process.terminate()
        assert process.wait() == 1
    pid = (tmp_path / "r-logs" / "a.log").read_text().split()[1]
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--url", "127.0.0.1:8000"], "url"),
        (["--url", "http://a", "--workload", "W0"], "workload: unknown 'W0'"),
        (["--url", "http://a", "--concurrency", "many"], "--concurrency"),
        (["--url", "http://a", "--rounds", "0"], "--rounds"),
        (["--url", "http://a", "--slo", "speed=3"], "speed"),
        (["--url", "http://a", "--cores", "x"], "--cores"),
        (["--url", "http://a", "--rate", "-1"], "--rate"),
    ],
)
def test_bad_input_is_told_by_field(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "run", *words, *QUICK[:-1], "--no-ceilings"]) == 1
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", sorted((DOCS / "raw").glob("*.json")), ids=lambda file: file.stem)
def test_numbers_that_were_kept_are_still_read(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "report", str(file)])
    table = capsys.readouterr().out
    assert all(system.name in table for system in read(file).spec.systems)
