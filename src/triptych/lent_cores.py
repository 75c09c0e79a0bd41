"""Cores that the workers of a host lend to each other while they have nothing to do (`serve --lend-cores`).

A file in the runtime directory has one byte a core, which says who computes there. Its owner writes it around each turn
of its loop (`worker.Worker.turn`); the kernels of the others look at it when a layer begins and borrow what is free
(`kernels/csrc/parallel.h`), so an owner that gets work shares its core for the rest of a layer at most.
"""

from __future__ import annotations

import mmap
from ctypes import c_uint8
from pathlib import Path

from triptych.config import WorkerConfig
from triptych.kernels import library

FILE = "cores"
FREE, OWNER = 0, 1  # or the number of who has borrowed it, written by the kernels


def create(runtime_dir: str, num_cores: int) -> None:
    """Called before the workers start: until they have nothing to do, all cores are taken."""
    (Path(runtime_dir) / FILE).write_bytes(bytes([OWNER] * num_cores))


class LentCores:
    """One worker's side, made before it loads its weights. One that may use no other cores lends none either."""

    def __init__(self, worker: WorkerConfig | None = None) -> None:
        self._own: list[int] = []
        if worker is None or not worker.lent_cores:
            return
        with (Path(worker.runtime_dir) / FILE).open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        self._own, self._uses = worker.cores, (c_uint8 * len(memory)).from_buffer(memory)
        self.take()
        library.borrow(self._uses, 2 + min(self._own) % 254, worker.lent_cores)

    def take(self) -> None:
        """Before this worker computes. Who has borrowed one of its cores is gone from it after the layer."""
        for core in self._own:
            self._uses[core] = OWNER

    def lend(self) -> None:
        for core in self._own:
            self._uses[core] = FREE
