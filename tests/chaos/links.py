"""Ways to cut a worker off from the others. Within one host a link is a unix socket, between hosts it would be TCP."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Protocol

from tests.chaos.server import Server, WorkerView

HIDDEN = ".cut"


class Link(Protocol):
    """Made for one life of a worker. A cut that is mended leaves the link as it was."""

    def cut(self) -> None: ...

    def mend(self) -> None: ...


class SocketFiles:
    """Nobody reaches the worker's mailbox or its memory pool who is not connected already: the files are away.

    A worker that was started meanwhile cannot connect; what others send to it waits.
    """

    def __init__(self, server: Server, victim: WorkerView) -> None:
        self._directory = server.runtime_dir
        self._patterns = (f"{victim.name}-{victim.epoch[:8]}.sock", f"{victim.name}.{victim.epoch[:16]}.pool")
        self._hidden: list[Path] = []

    def cut(self) -> None:
        for name in self._patterns:
            path = self._directory / name
            with contextlib.suppress(FileNotFoundError):
                self._hidden.append(path.rename(path.with_name(path.name + HIDDEN)))

    def mend(self) -> None:
        for path in self._hidden:
            with contextlib.suppress(FileNotFoundError):
                path.rename(path.with_name(path.name.removesuffix(HIDDEN)))
        self._hidden.clear()
