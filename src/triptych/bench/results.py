"""The raw JSON of a run: every request's numbers and all that one needs to judge them. Written after every round."""

from __future__ import annotations

from pathlib import Path

import msgspec

from triptych.bench.ceilings import Ceiling
from triptych.bench.machine import Machine
from triptych.bench.metrics import DEFINITIONS, RequestRecord, Summary
from triptych.bench.settings import Spec
from triptych.bench.workload import Load
from triptych.errors import ConfigError

FORMAT = 1


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One round of one system under one load of one workload."""

    round: int
    position: int  # in the order of systems of this round
    system: str
    workload: str
    load: Load
    seed: int
    summary: Summary
    cpu_s: float | None  # of the system's processes, while the round ran
    own_cpu_s: dict[str, float]  # of it, by process; what died within the round is missing here
    counters: dict[str, float]  # of the system's metrics page: what changed in the round
    peak_rss_bytes: int | None  # since its processes started
    num_processes: int | None
    client_cpu_s: float  # of this process
    records: list[RequestRecord]


class SystemFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was found out about a system at one of its starts."""

    name: str
    url: str
    command: list[str]
    model: str
    cores: tuple[int, ...]
    version: str
    ready_s: float | None  # see the definitions; None for what runs already
    first_answer_s: float | None


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """A system without requests."""

    round: int
    system: str
    cores_busy: float
    num_processes: int


class Results(msgspec.Struct, kw_only=True):
    """Grows while the run goes on."""

    spec: Spec
    machine: Machine
    format: int = FORMAT
    complete: bool = False
    tokens_per_word: float = 0.0
    definitions: dict[str, str] = msgspec.field(default_factory=lambda: dict(DEFINITIONS))
    systems: list[SystemFacts] = msgspec.field(default_factory=list)
    ceilings: list[Ceiling] = msgspec.field(default_factory=list)
    idle: list[Idle] = msgspec.field(default_factory=list)
    cells: list[Cell] = msgspec.field(default_factory=list)

    def save(self, file: Path) -> None:
        """Whole or not at all."""
        part = file.with_name(file.name + ".part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
        part.replace(file)


def read(file: Path) -> Results:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Results)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{file}: {error}") from None
