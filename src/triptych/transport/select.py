"""Chooses a worker's transport from its configuration. Runs once in each worker, at its start; called by it."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from triptych.config import HandoffConfig
from triptych.transport.base import Transport
from triptych.transport.inproc import InProcTransport
from triptych.transport.shm import ShmTransport
from triptych.types import Stage


def select_transport(
    config: HandoffConfig,
    stages: Collection[Stage],
    pool_bytes: int,
    name: str,
    epoch: str,
    runtime_dir: str | Path,
) -> Transport:
    """'auto' is inproc in a worker that hosts every stage, else shm. Raises ConfigError as `ShmTransport` does."""
    kind = config.transport
    if kind == "auto":
        kind = "inproc" if set(stages) == set(Stage) else "shm"
    if kind == "inproc":
        return InProcTransport(epoch, pool_bytes)
    return ShmTransport(name, epoch, pool_bytes, runtime_dir)
