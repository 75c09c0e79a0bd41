"""Chooses a worker's transport from its configuration. Runs once in each worker, at its start; called by it."""

from __future__ import annotations

from pathlib import Path

from triptych.config import HandoffConfig
from triptych.transport.base import Transport
from triptych.transport.inproc import InProcTransport
from triptych.transport.shm import ShmTransport


def select_transport(
    config: HandoffConfig, pool_bytes: int, name: str, epoch: str, runtime_dir: str | Path
) -> Transport:
    """Shared memory by default, in a worker that hosts every stage too: its own bytes it reads in place either way, and
    another worker may encode for it. Raises ConfigError as `ShmTransport` does."""
    if config.transport == "inproc":
        return InProcTransport(epoch, pool_bytes)
    return ShmTransport(name, epoch, pool_bytes, runtime_dir)
