"""A producer and a consumer over each transport, both ends real, in one process."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

from triptych.clock import ManualClock
from triptych.handoff.arriving import Arriving
from triptych.handoff.leases import Leases
from triptych.transport.base import Transport
from triptych.transport.inproc import InProcTransport
from triptych.transport.shm import ShmTransport
from triptych.transport.tcp import TcpTransport
from triptych.types import WorkerAddress

TTL_S = 60.0
POOL_BYTES = 1 << 20

Landed = TypeVar("Landed")


def landed(arriving: Arriving[Landed]) -> Landed:
    """Wait for it and land it."""
    give_up_s = time.monotonic() + 60
    while not arriving.done:
        assert time.monotonic() < give_up_s, "it neither came nor failed"
        time.sleep(0.0005)
    return arriving.land()


class End(NamedTuple):
    transport: Transport
    address: WorkerAddress


class Ends(NamedTuple):
    producer: End
    consumer: End


def make_end(kind: str, name: str, runtime_dir: Path) -> End:
    epoch = uuid.uuid4().hex
    transport: Transport
    if kind == "inproc":
        transport = InProcTransport(epoch, POOL_BYTES)
    elif kind == "tcp":
        transport = TcpTransport(InProcTransport(epoch, POOL_BYTES), epoch, "127.0.0.1", always=True)
    else:
        transport = ShmTransport(name, epoch, POOL_BYTES, runtime_dir, prefault=False)
    return End(transport, WorkerAddress(name, epoch, "", transport.pool_path, transport.data_endpoint))


@pytest.fixture(params=["inproc", "shm", "tcp"])
def ends(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ends]:
    ends = Ends(make_end(request.param, "e0", tmp_path), make_end(request.param, "p0", tmp_path))
    yield ends
    for end in ends:
        end.transport.check()
        end.transport.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def leases(clock: ManualClock) -> Leases:
    return Leases(clock, TTL_S)
