"""Comparisons of mock servers: what is interleaved, what is kept, what the table says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from triptych.bench import compare, counters
from triptych.bench.ceilings import PROBE, Ceiling, measure, summarize
from triptych.bench.compare import Comparison, turned
from triptych.bench.plot import plot
from triptych.bench.report import report, rows
from triptych.bench.results import Results, read
from triptych.bench.settings import Spec, make_spec, read_file
from triptych.errors import ConfigError

from .mock_server import MockServer, serving

SCRIPT = str(Path(__file__).with_name("mock_server.py"))
NAMES = ("a", "b", "c")
QUIET: dict[str, Any] = {"idle_s": 0.0, "ceilings": False, "tokens_per_word": 1.0, "requests": 3, "warmup": 1}


@pytest.fixture
def servers() -> Iterator[dict[str, MockServer]]:
    with ExitStack() as stack:
        yield {name: stack.enter_context(serving()) for name in NAMES}


def spec_of(servers: dict[str, MockServer], **settings: Any) -> Spec:
    systems = [{"name": name, "url": server.url, "cores": [0]} for name, server in servers.items()]
    return make_spec({"system": systems}, {"workload": ["W2"], "rounds": 3, **QUIET, **settings})


async def compared(spec: Spec, output: Path) -> Results:
    said: list[str] = []
    results = await Comparison(spec, output, said.append).run()
    assert len([line for line in said if line.startswith("round")]) == len(results.cells)
    return results


def test_another_system_is_first_in_each_round() -> None:
    assert [turned("abc", number) for number in range(4)] == [list(order) for order in ("abc", "bca", "cab", "abc")]


async def test_rounds_are_interleaved(servers: dict[str, MockServer], tmp_path: Path) -> None:
    results = await compared(spec_of(servers, concurrency=[1, 2]), tmp_path / "r.json")
    assert results.complete
    order = [(cell.round, cell.load.label, cell.system) for cell in results.cells]
    assert order == [
        (number, load, name)
        for number, names in enumerate(("abc", "bca", "cab"))
        for load in ("c=1", "c=2")
        for name in names
    ]


async def test_a_round_is_the_same_for_every_system_and_new_each_time(
    servers: dict[str, MockServer], tmp_path: Path
) -> None:
    await compared(spec_of(servers), tmp_path / "r.json")
    seen = [[json.dumps(body) for body in server.bodies if body["max_tokens"] > 1] for server in servers.values()]
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0])) == len(seen[0]) == 1 + 3 * 3  # one for warm-up, three rounds of three


async def test_primed_images_come_before_every_round(servers: dict[str, MockServer], tmp_path: Path) -> None:
    workload = {"name": "again", "base": "W4", "sizes": [[64, 64]], "image_counts": [2, 2], "primed_images": 4}
    systems = [{"name": "a", "url": servers["a"].url}]
    settings = QUIET | {"workload": ["again"], "rounds": 2, "warmup": 0}
    results = await compared(make_spec({"system": systems, "workload": [workload]}, settings), tmp_path / "r.json")
    assert len(servers["a"].bodies) == 1 + 2 * (2 + 3)  # the first answer, then primers and requests
    assert [cell.summary.num_completed for cell in results.cells] == [3, 3]


async def test_json_round_trip(servers: dict[str, MockServer], tmp_path: Path) -> None:
    results = await compared(spec_of(servers, slo={"ttft": 100.0}), tmp_path / "r.json")
    again = read(tmp_path / "r.json")
    assert msgspec.to_builtins(again) == msgspec.to_builtins(results)
    assert report(again) == report(results)
    raw = json.loads((tmp_path / "r.json").read_text())
    assert len(raw["cells"][0]["records"]) == 3
    assert raw["definitions"]["tpot_s"]
    assert raw["machine"]["cpu"]
    assert raw["machine"]["packages"]["msgspec"]
    assert raw["spec"]["settings"]["slo"] == {"ttft": 100.0}
    assert raw["cells"][0]["summary"]["goodput_per_s"] > 0
    with pytest.raises(ConfigError, match="nothing"):
        read(tmp_path / "nothing.json")


async def test_a_run_that_is_cut_keeps_what_it_has(
    servers: dict[str, MockServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(servers)
    normal = compare.turned

    def power_fails(systems: Any, number: int) -> Any:
        if number == 2:
            raise RuntimeError("power")
        return normal(systems, number)

    monkeypatch.setattr(compare, "turned", power_fails)
    with pytest.raises(RuntimeError, match="power"):
        await Comparison(spec, tmp_path / "r.json", lambda _: None).run()
    kept = read(tmp_path / "r.json")
    assert not kept.complete
    assert [cell.round for cell in kept.cells] == [0, 0, 0, 1, 1, 1]
    assert "CUT SHORT" in report(kept)


async def test_failures_are_counted_and_shown(
    servers: dict[str, MockServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "SETTLE_S", 0.0)
    systems = [{"name": "a", "url": servers["a"].url, "model": "flaky", "metrics": "/metrics"}]
    settings = QUIET | {"workload": ["W2"], "rounds": 1, "requests": 9, "warmup": 0}
    results = await compared(make_spec({"system": systems}, settings), tmp_path / "r.json")
    [cell] = results.cells
    assert (cell.summary.num_completed, cell.summary.failures) == (6, {"http_503": 3})
    assert "6/3" in report(results)
    assert cell.counters == {"mock_requests_total": 9.0}


def test_counters_of_a_page() -> None:
    page = '# HELP a_total x\na_total{b="c d"} 2\na_total{b="e"} 3.5 17\nb_sum 4\nc 5\nd_total\ne_total{x="} y"} nan?\n'
    assert counters.parse(page) == {"a_total": 5.5, "b_sum": 4.0}
    assert counters.difference({"a_total": 1.0, "b_sum": 4.0}, {"a_total": 3.0, "b_sum": 4.0, "n_total": 1.0}) == {
        "a_total": 2.0,
        "n_total": 1.0,
    }
    assert counters.difference(None, {"a_total": 3.0}) == {}


async def test_a_system_that_refuses_all_ends_the_run(servers: dict[str, MockServer], tmp_path: Path) -> None:
    systems = [{"name": "a", "url": servers["a"].url, "model": "short", "start_timeout_s": 0.3}]
    with pytest.raises(ConfigError, match=r"system a.*wrong_count"):
        await compared(make_spec({"system": systems}, QUIET), tmp_path / "r.json")


async def test_cpu_of_started_systems_and_ratios(tmp_path: Path) -> None:
    """One system burns CPU in a child for each request, the other does not; each is up for its own cells only."""
    systems = [
        {"name": "lean", "command": [sys.executable, SCRIPT, "{port}"], "cores": [0]},
        {"name": "hot", "command": [sys.executable, SCRIPT, "{port}", "burns"], "cores": [0]},
    ]
    settings = QUIET | {"workload": ["W2"], "rounds": 1, "restart": True, "idle_s": 0.1, "baseline": "lean"}
    results = await compared(make_spec({"system": systems}, settings), tmp_path / "r.json")
    lean, hot = (cell.summary.cpu_s_per_request for cell in results.cells)
    assert lean is not None
    assert hot is not None
    assert hot > 2 * lean
    assert all(len(cell.own_cpu_s) == 1 for cell in results.cells)
    assert "mock_server.py" in next(iter(results.cells[0].own_cpu_s))
    assert [facts.name for facts in results.systems] == ["lean", "hot"]
    assert all(facts.ready_s is not None for facts in results.systems)
    assert {idle.system for idle in results.idle} == {"lean", "hot"}
    header, first, second = rows(results)
    speed = header.index("tok/s/dev")
    assert second[speed].endswith("x)")
    assert "x)" not in first[speed]


async def test_tokens_of_a_word_are_asked_of_the_first_system(servers: dict[str, MockServer], tmp_path: Path) -> None:
    results = await compared(spec_of(servers, rounds=1, tokens_per_word=0.0), tmp_path / "r.json")
    assert results.tokens_per_word == 0.1  # the mock counts ten whatever the length: the least
    assert len(servers["a"].bodies) == len(servers["b"].bodies) + 2


async def test_a_plot_is_a_picture(servers: dict[str, MockServer], tmp_path: Path) -> None:
    results = await compared(spec_of(servers, concurrency=[1, 2], rounds=1), tmp_path / "r.json")
    plot(results, tmp_path / "r.png")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    results.cells.clear()
    with pytest.raises(ConfigError, match="no rounds"):
        plot(results, tmp_path / "r.png")


def test_ceilings_are_medians_and_bests() -> None:
    found = summarize([Ceiling(0, 200.0, 90.0, 10.0), Ceiling(0, 100.0, 80.0, 20.0), Ceiling(1, 300.0, 70.0, 12.0)])
    assert found is not None
    assert (found.bf16_gflops, found.fp32_gflops, found.read_gb_per_s) == ((200, 300), (80, 90), (12, 20))
    assert summarize([]) is None


async def test_the_probe_is_a_script_for_any_python_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "import torch" in PROBE.read_text()
    assert "triptych" not in PROBE.read_text().replace("`ceilings.py`", "")
    with pytest.raises(ConfigError, match="ceilings"):
        await measure(0, "/no/such/python")


@pytest.mark.slow
async def test_ceilings_of_a_core() -> None:
    found = await measure(0)
    assert found.bf16_gflops > 0
    assert found.fp32_gflops > 0
    assert found.read_gb_per_s > 0
    assert found.torch


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[systems]]\nname = 'a'", "systems"),
        ("system = 3", "system: write"),
        ("bench = 3\n[[system]]\nname='a'\nurl='http://a'", "bench: not a table"),
        ("[bench]\nround = 3\n[[system]]\nname='a'\nurl='http://a'", "round"),
        ("[bench]\nrounds = 0\n[[system]]\nname='a'\nurl='http://a'", "rounds"),
        ("[bench]\nconcurrency = [0]\n[[system]]\nname='a'\nurl='http://a'", "concurrency"),
        ("[bench]\nbaseline = 'b'\n[[system]]\nname='a'\nurl='http://a'", "baseline"),
        ("[bench]\nworkload = ['W77']\n[[system]]\nname='a'\nurl='http://a'", "W77"),
        ("[bench]\nslo = {speed = 1.0}\n[[system]]\nname='a'\nurl='http://a'", "speed"),
        ("[[system]]\nname='a'", "system a: .*command and url"),
        ("[[workload]]\nname='w'\nturns=0\n[[system]]\nname='a'\nurl='http://a'", "workload w: .*turns"),
        ("", "describes none"),
        ("= 3", "spec.toml"),
    ],
)
def test_bad_files_are_refused_by_field(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        make_spec(read_file(tmp_path / "spec.toml"), {})


def test_flags_go_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text("[bench]\nrounds = 7\nseed = 3\n[[system]]\nname='a'\nurl='http://a'")
    spec = make_spec(read_file(tmp_path / "spec.toml"), {"rounds": 2})
    assert (spec.settings.rounds, spec.settings.seed, spec.baseline) == (2, 3, "a")
    assert spec.settings.num_requests(spec.settings.loads()[0]) == 12
