"""A producer for the contract suite: a real second process over shm, an object over inproc.

Run as a script it is that process: it obeys one JSON line after another on stdin. Payloads are named by a seed, so that
both sides know the bytes and none of them cross by another way.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from triptych.messages import Range
from triptych.transport.base import Slot, Transport
from triptych.transport.inproc import InProcTransport
from triptych.transport.shm import ShmTransport
from triptych.types import WorkerAddress

POOL_BYTES = 64 << 20
NAME = "producer"


def payload(seed: int, num_bytes: int) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


class Store:
    """What a producer does with its transport when told to."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._slots: dict[int, Slot] = {}

    def store(self, seed: int, num_bytes: int) -> Range:
        slot = self.transport.allocate(num_bytes)
        self.transport.memory(slot)[:] = payload(seed, num_bytes)
        self._slots[slot.offset] = slot
        return Range(*slot)

    def free(self, offset: int) -> None:
        self.transport.free(self._slots.pop(offset))


class Peer(Protocol):
    """One life of a producer, as the tests drive it."""

    address: WorkerAddress

    def store(self, seed: int, num_bytes: int) -> Range: ...
    def free(self, range: Range) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class InProcPeer:
    def __init__(self, epoch: str, runtime_dir: Path) -> None:
        self._store = Store(InProcTransport(epoch, POOL_BYTES))
        self.address = WorkerAddress(NAME, epoch, "", "")

    def store(self, seed: int, num_bytes: int) -> Range:
        return self._store.store(seed, num_bytes)

    def free(self, range: Range) -> None:
        self._store.free(range.offset)

    def kill(self) -> None:
        self._store.transport.close()

    def close(self) -> None:
        self._store.transport.close()


class ProcessPeer:
    """The shm producer, in a process of its own."""

    def __init__(self, epoch: str, runtime_dir: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, epoch, str(runtime_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid
        self.address = WorkerAddress(NAME, epoch, "", self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the producer died"
        return json.loads(line)

    def _ask(self, op: str, *args: int) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([op, *args]) + "\n")
        return self._answer()

    def store(self, seed: int, num_bytes: int) -> Range:
        return Range(*self._ask("store", seed, num_bytes))

    def free(self, range: Range) -> None:
        self._ask("free", range.offset)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """The end of input is its order to leave."""
        self._process.communicate()


PEERS: dict[str, Callable[[str, Path], Peer]] = {"inproc": InProcPeer, "shm": ProcessPeer}


def make_transport(kind: str, name: str, epoch: str, runtime_dir: Path, pool_bytes: int = POOL_BYTES) -> Transport:
    if kind == "inproc":
        return InProcTransport(epoch, pool_bytes)
    return ShmTransport(name, epoch, pool_bytes, runtime_dir, prefault=False)


def main() -> None:
    epoch, runtime_dir = sys.argv[1:]
    store = Store(ShmTransport(NAME, epoch, POOL_BYTES, runtime_dir, prefault=False))
    print(json.dumps(store.transport.pool_path), flush=True)
    ops: dict[str, Callable[..., object]] = {"store": store.store, "free": store.free}
    for line in sys.stdin:
        op, *args = json.loads(line)
        print(json.dumps(ops[op](*args)), flush=True)
    store.transport.close()


if __name__ == "__main__":
    main()
