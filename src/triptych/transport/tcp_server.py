"""The owner's half of the TCP transport: serves ranges of the pool, straight from its memory, to whoever has a ticket.

Runs in the I/O thread of a worker; the compute thread only writes the table of what is offered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from triptych.errors import ConfigError
from triptych.messages import Range
from triptych.transport.io_thread import IoThread, readable, receive_exactly
from triptych.transport.wire import (
    ID_BYTES,
    NONCE_BYTES,
    RANGE_BYTES,
    REQUEST_BYTES,
    Request,
    Status,
    Ticket,
    WireError,
    is_signed,
    pack_answer,
    pack_greeting,
    read_ranges,
    read_request,
)

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256  # what is over is closed at once
GREETED_S = 5.0  # for the first request that is signed; strangers get no longer
IDLE_S = 120.0  # between two requests
SLOWEST_BYTES_A_S = 4 << 20  # a consumer, or an owner, that is slower counts as cut off
PATIENCE_S = 10.0  # beside the time that the bytes may take


def transfer_timeout_s(num_bytes: int, patience_s: float) -> float:
    return patience_s + num_bytes / SLOWEST_BYTES_A_S


class Offer(NamedTuple):
    ticket: Ticket
    ranges: frozenset[Range]


class PoolServer:
    """Listens until the I/O thread ends. `offer` and `withdraw` are the compute thread's: single steps on a dict."""

    def __init__(self, io: IoThread, pool: memoryview, epoch: str, host: str, port: int) -> None:
        self._pool = pool
        self._epoch = epoch
        self._offers: dict[bytes, Offer] = {}
        self._connections: dict[asyncio.Task[None], socket.socket] = {}
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        self.num_bytes = 0  # sent since the start
        io.start(self._accept())

    def offer(self, ranges: Sequence[Range]) -> bytes:
        ticket = Ticket.new()
        self._offers[ticket.id] = Offer(ticket, frozenset(Range(*each) for each in ranges))
        return ticket.pack()

    def withdraw(self, ticket: bytes) -> None:
        self._offers.pop(ticket[:ID_BYTES], None)

    @property
    def num_offers(self) -> int:
        return len(self._offers)

    # -- in the I/O thread ---------------------------------------------------------------------------------------------

    async def _accept(self) -> None:
        with self._listener:
            while True:
                await readable(self._listener)
                try:  # not `loop.sock_accept`: a cancel after the connection, before this task, would leave it open
                    sock, _ = self._listener.accept()
                except OSError as error:  # out of descriptors, or a peer that hung up
                    logger.warning("a data connection was not accepted: %s", error)
                    await asyncio.sleep(0.05)
                    continue
                if len(self._connections) >= MAX_CONNECTIONS:
                    logger.warning("a data connection was refused: there are %d", MAX_CONNECTIONS)
                    sock.close()
                    continue
                task = asyncio.create_task(self._serve(sock))
                self._connections[task] = sock
                task.add_done_callback(self._end)  # also of a task that was cancelled before it began

    def _end(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task).close()

    async def _serve(self, sock: socket.socket) -> None:
        """One connection, request after request, until the consumer leaves, errs or is too slow."""
        try:
            await self._converse(sock)
        except (OSError, TimeoutError) as error:
            logger.debug("a data connection ended: %s", error or "too slow")
        except WireError as error:
            logger.warning("a data connection was closed: the other end %s", error)

    async def _converse(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        prepare(sock)
        nonce, patience_s, number = secrets.token_bytes(NONCE_BYTES), GREETED_S, 0
        async with asyncio.timeout(GREETED_S):
            await loop.sock_sendall(sock, pack_greeting(self._epoch, nonce))
        while True:
            async with asyncio.timeout(patience_s):
                request = read_request(await receive_exactly(sock, REQUEST_BYTES))
                body = await receive_exactly(sock, request.num_ranges * RANGE_BYTES)
            status, ranges = self._judge(request, body, nonce, number)
            if status is Status.NO_LEASE and number == 0:
                with contextlib.suppress(OSError):  # to a stranger: one short word, and good-bye
                    sock.send(pack_answer(status))
                return
            num_bytes = sum(each.num_bytes for each in ranges)
            async with asyncio.timeout(transfer_timeout_s(num_bytes, PATIENCE_S)):
                await loop.sock_sendall(sock, pack_answer(status, num_bytes))
                for start, end in joined(ranges):
                    await loop.sock_sendall(sock, self._pool[start:end])
            self.num_bytes += num_bytes
            number, patience_s = number + 1, IDLE_S

    def _judge(self, request: Request, body: bytes, nonce: bytes, number: int) -> tuple[Status, list[Range]]:
        offer = self._offers.get(request.ticket_id)
        if offer is None or not is_signed(request.mac, offer.ticket, nonce, number, body):
            return Status.NO_LEASE, []
        ranges = read_ranges(body)
        if not offer.ranges.issuperset(ranges):
            return Status.NOT_OFFERED, []
        return Status.OK, ranges


def joined(ranges: Sequence[Range]) -> Iterator[tuple[int, int]]:
    """Start and end of the bytes to send, neighbours as one: KV blocks often are, and each piece is a system call."""
    start = end = 0
    for each in ranges:
        if each.offset != end:
            if end > start:
                yield start, end
            start = each.offset
        end = each.offset + each.num_bytes
    if end > start:
        yield start, end


def listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot serve memory on {host} port {port}: {error}") from error
    listener.setblocking(False)
    return listener


def prepare(sock: socket.socket) -> None:
    """A silent network is noticed by the kernel too, in about the time that we give it ourselves."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * PATIENCE_S))
