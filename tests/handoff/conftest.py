"""A producer and a consumer over each transport, both ends real, in one process."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from triptych.clock import ManualClock
from triptych.handoff.leases import Leases
from triptych.transport.base import Transport
from triptych.transport.inproc import InProcTransport
from triptych.transport.shm import ShmTransport
from triptych.types import WorkerAddress

TTL_S = 60.0
POOL_BYTES = 1 << 20


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
    else:
        transport = ShmTransport(name, epoch, POOL_BYTES, runtime_dir, prefault=False)
    return End(transport, WorkerAddress(name, epoch, "", transport.pool_path))


@pytest.fixture(params=["inproc", "shm"])
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
