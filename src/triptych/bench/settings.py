"""Every setting of a run: defaults, then the `[bench]` table of the file, then flags. Read by `cli/bench.py`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from triptych.bench.metrics import check_limits
from triptych.bench.systems import System, check_names
from triptych.bench.workload import Load, Workload, custom, named
from triptych.errors import ConfigError

PositiveInt = Annotated[int, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]
NonNegative = Annotated[float, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]

MIN_REQUESTS = 12  # a multiple of W1's mix of counts and sizes
REQUESTS_PER_SLOT = 3
OPEN_LOOP_S = 30.0  # of arrivals in a round


def doc(text: str) -> Meta:
    return Meta(description=text)


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One flag a field, but for those that only a comparison has."""

    workload: Annotated[tuple[str, ...], doc("names of workloads")] = ("W1",)
    concurrency: Annotated[tuple[PositiveInt, ...], doc("closed loop: sessions at once; each value is one load")] = ()
    rate: Annotated[
        tuple[Annotated[float, Meta(gt=0)], ...], doc("open loop: sessions that arrive a second, Poisson")
    ] = ()
    requests: Annotated[
        Count, doc("requests a round; 0: three a slot, or half a minute of arrivals; twelve at least")
    ] = 0
    rounds: Annotated[PositiveInt, doc("rounds; tables show the median over them")] = 5
    warmup: Annotated[Count, doc("unmeasured requests before a system's first round of each load")] = 2
    seed: Annotated[int, doc("other pages and texts")] = 0
    slo: Annotated[dict[str, float], doc("limits in seconds by name: ttft, tpot, e2e, itl; all must be met")] = {}
    timeout_s: Annotated[Seconds, doc("a request that takes longer has failed")] = 600.0
    idle_s: Annotated[NonNegative, doc("time before each round in which idle CPU is measured; 0: not")] = 5.0
    ceilings: Annotated[bool, doc("measure GEMM rate and read bandwidth before each round and at the end")] = True
    ceilings_python: Annotated[str, doc("a Python that has torch, for the ceilings; empty: this one")] = ""
    tokens_per_word: Annotated[NonNegative, doc("of the model's tokenizer; 0: asked of the first system")] = 0.0
    baseline: Annotated[str, doc("system that ratios are against; empty: the first")] = ""
    restart: Annotated[bool, doc("start a system for its own cell only, instead of all for the whole run")] = False

    def __post_init__(self) -> None:
        if not self.workload:
            raise ValueError("workload: none is named")

    def loads(self) -> list[Load]:
        found = [Load(concurrency=value) for value in self.concurrency]
        found += [Load(rate_per_s=value) for value in self.rate]
        return found or [Load(concurrency=1)]

    def num_requests(self, load: Load) -> int:
        in_time = round(OPEN_LOOP_S * load.rate_per_s) if load.rate_per_s else 0
        return self.requests or max(MIN_REQUESTS, REQUESTS_PER_SLOT * (load.concurrency or 0), in_time)


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run is made of."""

    settings: BenchSettings
    systems: tuple[System, ...]
    workloads: tuple[Workload, ...]
    model_path: str = ""

    @property
    def baseline(self) -> str:
        return self.settings.baseline or self.systems[0].name


def read_file(file: Path) -> dict[str, Any]:
    """The tables of a comparison's file. Raises ConfigError."""
    try:
        tables = tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from None
    unknown = sorted(set(tables) - {"bench", "system", "workload", "model_path"})
    if unknown:
        raise ConfigError(f"{file}: unknown table or key {unknown[0]!r}")
    return tables


def make_spec(tables: dict[str, Any], flags: dict[str, Any]) -> Spec:
    """Raises ConfigError that names the field."""
    given = tables.get("bench", {})
    if not isinstance(given, dict):
        raise ConfigError("bench: not a table")
    settings = _convert(given | flags, BenchSettings, "bench")
    check_limits(settings.slo)
    systems = tuple(
        _convert(table, System, f"system {table.get('name', number)}")
        for number, table in enumerate(_tables(tables, "system"), 1)
    )
    check_names(systems)
    own = {workload.name: workload for workload in map(custom, _tables(tables, "workload"))}
    workloads = tuple(named(name, own) for name in settings.workload)
    names = {system.name for system in systems}
    if settings.baseline and settings.baseline not in names:
        raise ConfigError(f"baseline: no system is called {settings.baseline!r}")
    return Spec(settings=settings, systems=systems, workloads=workloads, model_path=str(tables.get("model_path", "")))


def _tables(tables: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = tables.get(key, [])
    if not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
        raise ConfigError(f"{key}: write [[{key}]]")
    return found


def _convert(table: dict[str, Any], kind: type[Any], where: str) -> Any:
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
