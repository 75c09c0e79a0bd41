"""Chooses a worker's transport from its configuration. Runs once in each worker, at its start; called by it."""

from __future__ import annotations

from pathlib import Path

from triptych.config import HandoffConfig
from triptych.transport.base import Transport
from triptych.transport.inproc import InProcTransport
from triptych.transport.shm import ShmTransport
from triptych.transport.tcp import TcpTransport

LOOPBACK = "127.0.0.1"


def select_transport(
    config: HandoffConfig,
    pool_bytes: int,
    name: str,
    epoch: str,
    runtime_dir: str | Path,
    host: str = "",
    port: int = 0,
) -> Transport:
    """`host` is the address at which workers of other hosts reach this one; "" when there are none.

    Shared memory is for one host, also in a worker that hosts every stage: its own bytes it reads in place either way,
    and another worker may encode for it. Raises ConfigError when memory, socket or address cannot be had.
    """
    kind = config.transport
    if kind == "inproc":
        return InProcTransport(epoch, pool_bytes)
    if kind == "tcp":
        local = InProcTransport(epoch, pool_bytes)
        return TcpTransport(local, epoch, host or LOOPBACK, port, always=True, patience_s=config.transfer_timeout_s)
    shared = ShmTransport(name, epoch, pool_bytes, runtime_dir)
    if kind == "shm" or not host:
        return shared
    return TcpTransport(shared, epoch, host, port, patience_s=config.transfer_timeout_s)
