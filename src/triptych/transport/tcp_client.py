"""The consumer's half of the TCP transport: connections to the owners of pools, and what is fetched over them.

`fetch`, `forget` and a fetch's `close` are the compute thread's and return at once; all else runs in the I/O thread. A
connection whose transfer did not come to its end is closed before the memory that it wrote to can be used again.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Callable, Sequence

from triptych.errors import LinkError, PeerLostError, TransferError
from triptych.messages import Range
from triptych.transport.io_thread import IoThread, receive_exactly, receive_into
from triptych.transport.landing import LANDING_BYTES, Landing, LandingSlot
from triptych.transport.tcp_server import prepare, transfer_timeout_s
from triptych.transport.wire import (
    ANSWER_BYTES,
    GREETING_BYTES,
    MAX_RANGES,
    Status,
    Ticket,
    WireError,
    pack_request,
    read_answer,
    read_greeting,
)
from triptych.types import WorkerAddress

CONNECTIONS_PER_OWNER = 4  # a large transfer does not hold up the small ones behind it
REUSE_S = 60.0  # younger than what the owner calls idle


class TcpFetch:
    """A `Fetch` over TCP."""

    def __init__(self, ranges: Sequence[Range], give_up: Callable[[TcpFetch], None]) -> None:
        self.ranges = ranges
        self.done = False  # written last, by the I/O thread
        self.error: Exception | None = None
        self.slot: LandingSlot | None = None
        self.task: asyncio.Task[None] | None = None
        self.given_up = False  # the I/O thread's word for closed
        self._give_up = give_up
        self._closed = False

    def views(self) -> list[memoryview]:
        if self.error is not None:
            raise self.error
        assert self.slot is not None, "a fetch is done when it has its bytes or an error"
        memory, views, at = self.slot.memory.toreadonly(), [], 0
        for each in self.ranges:
            views.append(memory[at : at + each.num_bytes])
            at += each.num_bytes
        return views

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._give_up(self)


class Connection:
    """A socket on which one request at a time is asked and answered."""

    def __init__(self, sock: socket.socket, nonce: bytes) -> None:
        self.sock = sock
        self.used_s = time.monotonic()
        self._nonce = nonce
        self._number = 0

    @classmethod
    async def open(cls, owner: WorkerAddress) -> Connection:
        """Raises OSError, WireError, and PeerLostError where another life of the owner listens."""
        host, port = split_endpoint(owner.data)
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            prepare(sock)
            await asyncio.get_running_loop().sock_connect(sock, (host, port))
            epoch, nonce = read_greeting(await receive_exactly(sock, GREETING_BYTES))
            if epoch != owner.epoch:
                raise PeerLostError(f"worker {owner.name} has been restarted: epoch {owner.epoch} is over")
        except BaseException:
            sock.close()
            raise
        return cls(sock, nonce)

    async def ask(self, ticket: Ticket, ranges: Sequence[Range]) -> int:
        """The number of bytes of the ranges, which follow. Raises what `Fetch.views` raises for a refusal."""
        request = pack_request(ticket, self._nonce, self._number, ranges)
        self._number += 1
        await asyncio.get_running_loop().sock_sendall(self.sock, request)
        status, num_bytes = read_answer(await receive_exactly(self.sock, ANSWER_BYTES))
        if status is Status.NO_LEASE:
            raise TransferError("the lease is over, or was never granted")
        if status is Status.NOT_OFFERED:
            raise ValueError("a range that the lease is not for")
        if num_bytes != sum(each.num_bytes for each in ranges):
            raise WireError(f"sends {num_bytes} bytes for other ranges")
        return num_bytes

    def close(self) -> None:
        self.sock.close()


class Owner:
    """One life of a worker that something was fetched from."""

    def __init__(self, address: WorkerAddress) -> None:
        self.address = address
        self.idle: list[Connection] = []
        self.free = asyncio.Semaphore(CONNECTIONS_PER_OWNER)
        self.fetches: set[TcpFetch] = set()
        self.lost = False

    async def connection(self) -> Connection:
        while self.idle:
            connection = self.idle.pop()
            if time.monotonic() - connection.used_s < REUSE_S:
                return connection
            connection.close()
        return await Connection.open(self.address)

    def close(self) -> None:
        self.lost = True
        for fetch in self.fetches:
            if fetch.task is not None:
                fetch.task.cancel()
        for connection in self.idle:
            connection.close()
        self.idle.clear()


class PoolClient:
    """`wake` is called, in the I/O thread, when a fetch is done."""

    def __init__(self, io: IoThread, patience_s: float, landing_bytes: int = LANDING_BYTES) -> None:
        self._io = io
        self._patience_s = patience_s
        self.landing = io.call(lambda: Landing(landing_bytes))
        self.wake: Callable[[], None] = lambda: None
        self._owners: dict[str, Owner] = {}  # by epoch
        self.num_fetches = self.num_failures = self.num_bytes = 0  # since the start

    def fetch(self, owner: WorkerAddress, ranges: Sequence[Range], ticket: bytes) -> TcpFetch:
        """Raises ValueError when the endpoint or the ticket cannot be one."""
        split_endpoint(owner.data)
        secret = Ticket.parse(ticket)
        if any(each.offset < 0 or each.num_bytes < 0 or max(each) >= 1 << 63 for each in ranges):
            raise ValueError(f"{list(ranges)} are not inside a pool")
        fetch = TcpFetch(ranges, lambda fetch: self._io.post(lambda: self._close(fetch)))
        self._io.start(self._run(fetch, owner, secret))
        return fetch

    def forget(self, epoch: str) -> None:
        self._io.post(lambda: self._forget(epoch))

    def close(self) -> None:
        """Before the I/O thread ends. Views of what has landed stay good until the last of them goes."""
        self._io.call(self._forget_all)

    # -- in the I/O thread ---------------------------------------------------------------------------------------------

    def _forget(self, epoch: str) -> None:
        owner = self._owners.pop(epoch, None)
        if owner is not None:
            owner.close()

    def _forget_all(self) -> None:
        for epoch in list(self._owners):
            self._forget(epoch)

    def _owner(self, address: WorkerAddress) -> Owner:
        owner = self._owners.get(address.epoch)
        if owner is None:
            for known in list(self._owners.values()):
                if known.address.name == address.name:  # an earlier life
                    self._forget(known.address.epoch)
            owner = self._owners[address.epoch] = Owner(address)
        return owner

    def _close(self, fetch: TcpFetch) -> None:
        fetch.given_up = True
        if not fetch.done:
            if fetch.task is not None:
                fetch.task.cancel()
        elif fetch.slot is not None:
            fetch.slot.free()
            fetch.slot = None

    async def _run(self, fetch: TcpFetch, address: WorkerAddress, ticket: Ticket) -> None:
        """Ends with `done`, whatever happens."""
        owner, num_bytes = self._owner(address), sum(each.num_bytes for each in fetch.ranges)
        timeout_s = transfer_timeout_s(num_bytes, self._patience_s)
        who = f"worker {address.name} at {address.data}"
        fetch.task = asyncio.current_task()
        owner.fetches.add(fetch)
        try:
            if not fetch.given_up:
                async with asyncio.timeout(timeout_s):
                    fetch.slot = await self._transfer(owner, fetch.ranges, ticket, num_bytes)
                self.num_bytes += num_bytes
        except asyncio.CancelledError:
            fetch.error = PeerLostError(f"{who} is lost" if owner.lost else f"the fetch from {who} was given up")
        except TimeoutError:
            fetch.error = LinkError(f"{who} did not send {num_bytes} bytes within {timeout_s:.1f} s")
        except OSError as error:
            fetch.error = LinkError(f"{who} cannot be reached: {error}")
        except WireError as error:
            fetch.error = TransferError(f"{who} {error}")
        except (TransferError, ValueError) as error:
            fetch.error = error
        finally:
            owner.fetches.discard(fetch)
            self.num_fetches += 1
            self.num_failures += fetch.error is not None
            fetch.done = True
            if fetch.given_up:
                self._close(fetch)
            self.wake()

    async def _transfer(self, owner: Owner, ranges: Sequence[Range], ticket: Ticket, num_bytes: int) -> LandingSlot:
        async with owner.free:
            connection, slot = await owner.connection(), None
            try:
                at = 0
                for first in range(0, len(ranges), MAX_RANGES):
                    batch = ranges[first : first + MAX_RANGES]
                    length = await connection.ask(ticket, batch)
                    # Only what the owner agreed to send takes memory.
                    slot = slot or await self.landing.take(num_bytes)
                    await receive_into(connection.sock, slot.memory[at : at + length])
                    at += length
            except BaseException:
                connection.close()  # before its memory is freed: after this nothing can land there
                if slot is not None:
                    slot.free()
                raise
            assert slot is not None, "there is at least one range"
            connection.used_s = time.monotonic()
            if owner.lost:
                connection.close()
            else:
                owner.idle.append(connection)
            return slot


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """`10.0.0.1:7000` or `[fd00::1]:7000`. Raises ValueError for anything else: names would have to be looked up."""
    host, _, port = endpoint.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    ipaddress.ip_address(host)
    number = int(port)
    if not 0 < number < 65536:
        raise ValueError(f"{endpoint} has no port")
    return host, number


def join_endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
