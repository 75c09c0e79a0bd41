"""What is compared: a system is a command that `running.py` starts, or a URL that somebody else serves.

`System` is one `[[system]]` of the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from triptych.errors import ConfigError


class System(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either `command` or `url`. In `command` and `env`, {port}, {model} and {cores} are filled in."""

    name: Annotated[str, Meta(pattern=r"^[\w./+-]+$")]
    command: tuple[str, ...] = ()
    env: dict[str, str] = {}  # over this process's own
    cwd: str = ""
    url: str = ""
    pids: tuple[int, ...] = ()  # with `url`: roots of its process trees; none: its CPU is not counted
    cores: tuple[Annotated[int, Meta(ge=0)], ...] = ()  # all that it may use; each is a device; empty: all there are
    model: str = ""  # name in the API; empty: the first that /v1/models lists
    ready: str = "/health"
    metrics: str = ""  # path of its Prometheus page, as /metrics: what its counters did in a round is kept
    start_timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    version_command: tuple[str, ...] = ()  # what it prints is kept in the results

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError("one of command and url is needed, and not both")
        if self.pids and not self.url:
            raise ValueError("pids belong to a url")
        if len(set(self.cores)) != len(self.cores):
            raise ValueError("cores: one is named twice")

    @property
    def device_cores(self) -> tuple[int, ...]:
        return self.cores or tuple(sorted(os.sched_getaffinity(0)))


def check_names(systems: Sequence[System]) -> None:
    """Raises ConfigError."""
    names = [system.name for system in systems]
    if not names:
        raise ConfigError("system: the file describes none")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"system: two are called {name!r}")
