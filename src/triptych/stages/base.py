"""What the worker's loop and its stages expect of each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from triptych.messages import Body
from triptych.types import WorkerAddress


class Mail(Protocol):
    """Outgoing messages; both calls return at once and never raise for a dead receiver."""

    def to_router(self, body: Body) -> None: ...

    def to_worker(self, address: WorkerAddress, body: Body) -> None: ...


Routes = Mapping[type, Callable[[Any], None]]  # what to call for each type of message


class Stage(Protocol):
    """One stage hosted by a worker. Every call comes from the worker's one compute thread."""

    counters: dict[str, float]  # totals since start, by metric name without prefix

    def routes(self) -> Routes: ...

    def step(self) -> bool:
        """Do one bounded piece of work; False when there was none."""
        ...

    def tick(self) -> None:
        """Called a few times a second: give up what nobody came for."""
        ...

    def probe(self) -> None:
        """Do a small piece of real work; raises when the stage is broken."""
        ...

    def num_live(self) -> int:
        """Requests that still hold something here; 0 means that the stage may be left."""
        ...

    def check(self) -> None:
        """Raise AssertionError unless the stage's books agree."""
        ...
