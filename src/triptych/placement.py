"""Which stages share a worker process, and how many workers of each kind there are.

Read by `launch.py` in the router process, from `--placement` or from the counts of `triptych serve`. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from triptych.config import WorkerConfig
from triptych.errors import ConfigError
from triptych.types import Stage

Pins = Mapping[str, Sequence[int]]  # cores by worker name, by group name for all its workers, or of the router
ROUTER = "router"

_LETTERS = {"E": Stage.ENCODE, "P": Stage.PREFILL, "D": Stage.DECODE}


@dataclass(frozen=True)
class Group:
    """Workers that host the same stages."""

    letters: str  # of E, P, D, in this order
    count: int

    @property
    def name(self) -> str:
        return "epd" if self.letters == "EPD" else "-".join(_LETTERS[letter] for letter in self.letters)


@dataclass(frozen=True)
class Placement:
    """Which stages share a worker, and how many workers of each kind there are: `2E/1P/2D`, `1E/1PD`, `EPD`."""

    groups: tuple[Group, ...]

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Raises ConfigError for a form that it cannot read and for a stage that nobody hosts."""
        counts: dict[str, int] = {}
        for part in text.strip().upper().split("/"):
            match = re.fullmatch(r"(\d*)(E?P?D?)", part)
            if match is None or not match[2] or match[1] == "0":
                raise ConfigError(f"placement {text!r}: {part!r} is not a count and letters of EPD, as in 2E/1P/2D")
            counts[match[2]] = counts.get(match[2], 0) + int(match[1] or 1)
        return cls._checked(counts)

    @classmethod
    def from_counts(cls, **counts: int) -> Placement:
        """By group name: `encode=2, prefill_decode=1`. Nothing at all is `EPD`."""
        letters = {"encode": "E", "prefill": "P", "decode": "D", "prefill_decode": "PD", "encode_prefill": "EP"}
        letters["epd"] = "EPD"
        return cls._checked({letters[name]: count for name, count in counts.items() if count} or {"EPD": 1})

    @classmethod
    def _checked(cls, counts: Mapping[str, int]) -> Placement:
        placement = cls(tuple(Group(letters, count) for letters, count in counts.items()))
        hosted = "".join(counts)
        missing = [stage.value for letter, stage in _LETTERS.items() if letter not in hosted]
        if missing:
            raise ConfigError(f"placement {placement}: no worker hosts {' and '.join(missing)}")
        return placement

    def __str__(self) -> str:
        if self.groups == (Group("EPD", 1),):
            return "EPD"
        return "/".join(f"{group.count}{group.letters}" for group in self.groups)

    def workers(self, router_url: str, runtime_dir: str, pins: Pins) -> list[WorkerConfig]:
        """Raises ConfigError for a pin that fits no worker."""
        named = [(group, f"{group.name}-{k}") for group in self.groups for k in range(group.count)]
        unknown = set(pins) - {name for _, name in named} - {group.name for group in self.groups} - {ROUTER}
        if unknown:
            names = ", ".join(name for _, name in named)
            raise ConfigError(f"--pin {min(unknown)}: there is no such worker; there are {names}, and the {ROUTER}")
        workers = []
        for group, name in named:
            cores = list(pins.get(name, pins.get(group.name, ())))
            stages = [_LETTERS[letter] for letter in group.letters]
            threads = max(1, len(cores))
            workers.append(
                WorkerConfig(
                    name=name,
                    stages=stages,
                    router_url=router_url,
                    runtime_dir=runtime_dir,
                    cores=cores,
                    num_threads=threads,
                )
            )
        return workers


def lend_cores(workers: Sequence[WorkerConfig]) -> list[WorkerConfig]:
    """Each may compute on the others' cores. Raises ConfigError unless each is pinned to cores of its own."""
    owners: dict[int, str] = {}
    for worker in workers:
        if not worker.cores:
            raise ConfigError(f"--lend-cores: {worker.name} is not pinned to a core")
        for core in worker.cores:
            if owners.setdefault(core, worker.name) != worker.name:
                raise ConfigError(f"--lend-cores: core {core} is of {owners[core]} and of {worker.name}")
    return [
        msgspec.structs.replace(worker, lent_cores=[core for core in owners if core not in worker.cores])
        for worker in workers
    ]


def parse_pins(texts: Sequence[str]) -> dict[str, list[int]]:
    """`encode=0` or `prefill-0=1,3-5` by name. Raises ConfigError."""
    pins: dict[str, list[int]] = {}
    for text in texts:
        name, _, cores = text.partition("=")
        try:
            given = parse_cores(cores)
        except ValueError:
            raise ConfigError(f"--pin {text}: not of the form NAME=CORES, as in encode=0 or prefill-0=1,3-5") from None
        if name in pins:
            raise ConfigError(f"--pin {text}: {name} is pinned twice")
        pins[name] = given
    return pins


def check_cores(where: str, cores: Sequence[int], allowed: Collection[int]) -> None:
    """Raises ConfigError for a core that this process may not run on."""
    for core in cores:
        if core not in allowed:
            raise ConfigError(f"{where}: core {core} does not exist; there are {_ranges(allowed)}")


def _ranges(numbers: Collection[int]) -> str:
    """0, 2, 3, 4 is `0,2-4`."""
    firsts = sorted(number for number in numbers if number - 1 not in numbers)
    lasts = sorted(number for number in numbers if number + 1 not in numbers)
    pairs = zip(firsts, lasts, strict=True)
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in pairs)


def parse_cores(text: str) -> list[int]:
    """`0,2-4` is 0, 2, 3, 4. Raises ValueError."""
    cores: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    if not cores:
        raise ValueError(text)
    return cores
