"""A producer for the contract suite: a real second process over shm and tcp, an object over inproc.

Run as a script it is that process: it obeys one JSON line after another on stdin. Payloads are named by a seed, so that
both sides know the bytes and none of them cross by another way.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from triptych.messages import Range
from triptych.transport.base import Fetch, Slot, Transport
from triptych.transport.inproc import InProcTransport
from triptych.transport.shm import ShmTransport
from triptych.transport.tcp import TcpTransport
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

    def store(self, seed: int, num_bytes: int) -> tuple[int, int, str]:
        """The range and, as hex, its ticket."""
        slot = self.transport.allocate(num_bytes)
        self.transport.memory(slot)[:] = payload(seed, num_bytes)
        self._slots[slot.offset] = slot
        return slot.offset, slot.num_bytes, self.transport.offer([Range(*slot)]).hex()

    def offer(self, *offsets: int) -> str:
        """One ticket for several slots, as hex."""
        return self.transport.offer([Range(*self._slots[offset]) for offset in offsets]).hex()

    def withdraw(self, ticket: str) -> None:
        self.transport.withdraw(bytes.fromhex(ticket))

    def free(self, offset: int) -> None:
        self.transport.free(self._slots.pop(offset))


class Peer(Protocol):
    """One life of a producer, as the tests drive it."""

    address: WorkerAddress
    tickets: dict[Range, bytes]  # of what was stored last at each range

    def store(self, seed: int, num_bytes: int) -> Range: ...
    def offer(self, *ranges: Range) -> bytes: ...
    def withdraw(self, ticket: bytes) -> None: ...
    def free(self, range: Range) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class InProcPeer:
    def __init__(self, epoch: str, runtime_dir: Path) -> None:
        self._store = Store(InProcTransport(epoch, POOL_BYTES))
        self.address = WorkerAddress(NAME, epoch, "", "")
        self.tickets: dict[Range, bytes] = {}

    def store(self, seed: int, num_bytes: int) -> Range:
        offset, num_bytes, _ = self._store.store(seed, num_bytes)
        return Range(offset, num_bytes)

    def offer(self, *ranges: Range) -> bytes:
        return b""

    def withdraw(self, ticket: bytes) -> None:
        return None

    def free(self, range: Range) -> None:
        self._store.free(range.offset)

    def kill(self) -> None:
        self._store.transport.close()

    def close(self) -> None:
        self._store.transport.close()


class ProcessPeer:
    """A producer in a process of its own."""

    def __init__(self, kind: str, epoch: str, runtime_dir: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, kind, epoch, str(runtime_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid
        self.tickets: dict[Range, bytes] = {}
        pool_path, data = self._answer()
        self.address = WorkerAddress(NAME, epoch, "", pool_path, data)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the producer died"
        return json.loads(line)

    def _ask(self, op: str, *args: int | str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([op, *args]) + "\n")
        return self._answer()

    def store(self, seed: int, num_bytes: int) -> Range:
        offset, size, ticket = self._ask("store", seed, num_bytes)
        self.tickets[Range(offset, size)] = bytes.fromhex(ticket)
        return Range(offset, size)

    def offer(self, *ranges: Range) -> bytes:
        return bytes.fromhex(self._ask("offer", *(each.offset for each in ranges)))

    def withdraw(self, ticket: bytes) -> None:
        self._ask("withdraw", ticket.hex())

    def free(self, range: Range) -> None:
        self._ask("free", range.offset)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """The end of input is its order to leave."""
        self._process.communicate()


def start_peer(kind: str, epoch: str, runtime_dir: Path) -> Peer:
    return InProcPeer(epoch, runtime_dir) if kind == "inproc" else ProcessPeer(kind, epoch, runtime_dir)


def make_transport(kind: str, name: str, epoch: str, runtime_dir: Path, pool_bytes: int = POOL_BYTES) -> Transport:
    """`auto` is what a worker has that other hosts can reach: shared memory here, TCP to the others."""
    if kind == "inproc":
        return InProcTransport(epoch, pool_bytes)
    if kind == "tcp":
        return TcpTransport(InProcTransport(epoch, pool_bytes), epoch, "127.0.0.1", always=True)
    shared = ShmTransport(name, epoch, pool_bytes, runtime_dir, prefault=False)
    return shared if kind == "shm" else TcpTransport(shared, epoch, "127.0.0.1")


def wait_for(fetch: Fetch, timeout_s: float = 60.0) -> list[memoryview]:
    give_up_s = time.monotonic() + timeout_s
    while not fetch.done:
        assert time.monotonic() < give_up_s, "the fetch neither came nor failed"
        time.sleep(0.0005)
    return fetch.views()


def main() -> None:
    kind, epoch, runtime_dir = sys.argv[1:]
    store = Store(make_transport(kind, NAME, epoch, Path(runtime_dir)))
    print(json.dumps([store.transport.pool_path, store.transport.data_endpoint]), flush=True)
    ops: dict[str, Callable[..., object]] = {
        "store": store.store, "offer": store.offer, "withdraw": store.withdraw, "free": store.free
    }  # fmt: skip
    for line in sys.stdin:
        op, *args = json.loads(line)
        print(json.dumps(ops[op](*args)), flush=True)
    store.transport.close()


if __name__ == "__main__":
    main()
