"""What only TCP has: links that are cut, owners that are slow, late or others, and strangers who ask for memory."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from triptych.errors import ConfigError, LinkError, PeerLostError, TransferError
from triptych.messages import Range
from triptych.transport import tcp_client, tcp_server, wire
from triptych.transport.inproc import InProcTransport
from triptych.transport.io_thread import IoThread
from triptych.transport.shm import ShmTransport
from triptych.transport.tcp import TcpTransport
from triptych.transport.tcp_server import PoolServer
from triptych.transport.wire import Status, Ticket
from triptych.types import WorkerAddress

from .peer import payload, wait_for

MIB = 1 << 20
HOST = "127.0.0.1"
Talk = Callable[[socket.socket], None]


@contextmanager
def end(name: str = "owner", patience_s: float = 20.0, **settings: int) -> Iterator[tuple[TcpTransport, WorkerAddress]]:
    local = InProcTransport(name, 4 * MIB)
    transport = TcpTransport(local, name, HOST, always=True, patience_s=patience_s, **settings)
    try:
        yield transport, WorkerAddress(name, name, "", "", transport.data_endpoint)
    finally:
        transport.check()
        transport.close()


def store(transport: TcpTransport, seed: int, num_bytes: int) -> tuple[Range, bytes]:
    slot = transport.allocate(num_bytes)
    transport.memory(slot)[:] = payload(seed, num_bytes)
    return Range(*slot), transport.offer([Range(*slot)])


@contextmanager
def impostor(*talks: Talk, epoch: str = "nine") -> Iterator[WorkerAddress]:
    """An owner that behaves as told on each connection, one after the other, after it has greeted and been asked."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(8)

        def serve() -> None:
            for talk in talks:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(20)
                    connection.sendall(wire.pack_greeting(epoch, bytes(wire.NONCE_BYTES)))
                    talk(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield WorkerAddress("w9", "nine", "", "", f"{HOST}:{listener.getsockname()[1]}")
        thread.join(20)
        assert not thread.is_alive()


def hear(connection: socket.socket) -> list[Range]:
    request = wire.read_request(connection.recv(wire.REQUEST_BYTES, socket.MSG_WAITALL))
    return wire.read_ranges(connection.recv(request.num_ranges * wire.RANGE_BYTES, socket.MSG_WAITALL))


def until_closed(connection: socket.socket) -> None:
    with suppress(ConnectionError):
        assert connection.recv(1) == b""


def hear_only(connection: socket.socket) -> None:
    hear(connection)
    until_closed(connection)


ANY = Ticket.new().pack()
WHERE = Range(0, 100_000)


# -- owners that fail --------------------------------------------------------------------------------------------------


def test_a_connection_that_is_cut_in_the_middle_is_an_error_and_the_next_fetch_works() -> None:
    def cut(connection: socket.socket) -> None:
        (where,) = hear(connection)
        connection.sendall(wire.pack_answer(Status.OK, where.num_bytes) + bytes(where.num_bytes // 2))

    def whole(connection: socket.socket) -> None:
        (where,) = hear(connection)
        connection.sendall(wire.pack_answer(Status.OK, where.num_bytes) + payload(5, where.num_bytes))
        until_closed(connection)

    with end() as (consumer, _), impostor(cut, whole) as owner:
        with pytest.raises(LinkError, match="after 50000 of 100000 bytes"):
            wait_for(consumer.fetch(owner, [WHERE], ANY))
        assert consumer.landed_bytes == 0
        fetched = consumer.fetch(owner, [WHERE], ANY)
        assert bytes(wait_for(fetched)[0]) == payload(5, WHERE.num_bytes)
        fetched.close()
        consumer.close()


def test_bytes_that_come_too_late_find_the_connection_closed_and_nobody_elses_memory() -> None:
    """The memory of a fetch that timed out is used again, and the late bytes do not land in it."""
    go_on = threading.Event()

    def late(connection: socket.socket) -> None:
        (where,) = hear(connection)
        connection.sendall(wire.pack_answer(Status.OK, where.num_bytes) + b"\xee" * 10_000)
        assert go_on.wait(20)
        with suppress(ConnectionError):
            connection.sendall(b"\xee" * (where.num_bytes - 10_000))
        until_closed(connection)

    size = 2 * MIB
    with end(patience_s=0.5, landing_bytes=size) as (consumer, _), impostor(late) as owner:
        running = consumer.fetch(owner, [Range(0, size)], ANY)
        with pytest.raises(LinkError, match="did not send"):
            wait_for(running)
        with end("honest") as (honest, address):
            where, ticket = store(honest, 3, size)
            fetched = consumer.fetch(address, [where], ticket)  # takes all of the landing: the same memory
            (view,) = wait_for(fetched)
            go_on.set()
            time.sleep(0.1)
            assert bytes(view) == payload(3, size)
            fetched.close()
        running.close()
        consumer.close()


def test_memory_is_not_given_on_while_a_connection_may_write_to_it() -> None:
    stop = threading.Event()

    def stall(connection: socket.socket) -> None:
        (where,) = hear(connection)
        connection.sendall(wire.pack_answer(Status.OK, where.num_bytes) + bytes(1000))
        assert stop.wait(20)
        until_closed(connection)

    size = 2 * MIB
    with end(landing_bytes=size) as (consumer, _), end("honest") as (honest, address), impostor(stall) as owner:
        stalled = consumer.fetch(owner, [Range(0, size)], ANY)
        while not consumer.landed_bytes:
            time.sleep(0.001)
        where, ticket = store(honest, 3, size)
        waiting = consumer.fetch(address, [where], ticket)
        time.sleep(0.1)
        assert not waiting.done, "two fetches in one place"
        stalled.close()
        assert bytes(wait_for(waiting)[0]) == payload(3, size)
        waiting.close()
        stop.set()
        consumer.close()


@pytest.mark.parametrize("silent", ["before the greeting", "before the answer", "in the bytes"])
def test_a_fetch_has_a_deadline(silent: str) -> None:
    stop = threading.Event()

    def wait(connection: socket.socket) -> None:
        if silent == "in the bytes":
            (where,) = hear(connection)
            connection.sendall(wire.pack_answer(Status.OK, where.num_bytes) + b"x")
        assert stop.wait(20)

    with end(patience_s=0.3) as (consumer, _), socket.socket() as mute, impostor(wait) as owner:
        if silent == "before the greeting":
            mute.bind((HOST, 0))
            mute.listen(1)
            socket.create_connection(tcp_client.split_endpoint(owner.data)).close()
            owner = WorkerAddress("w9", "nine", "", "", f"{HOST}:{mute.getsockname()[1]}")
        with pytest.raises(LinkError, match=r"did not send 100000 bytes within 0\.3"):
            wait_for(consumer.fetch(owner, [WHERE], ANY))
        assert consumer.landed_bytes == 0
        assert consumer.counters["tcp_fetch_failures_total"] == 1
        stop.set()


def test_a_trickle_is_too_slow_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "SLOWEST_BYTES_A_S", 1e9)

    def trickle(connection: socket.socket) -> None:
        (where,) = hear(connection)
        connection.sendall(wire.pack_answer(Status.OK, where.num_bytes))
        with suppress(ConnectionError):
            while True:
                connection.sendall(b"x")
                time.sleep(0.02)

    with end(patience_s=0.5) as (consumer, _), impostor(trickle) as owner, pytest.raises(LinkError):
        wait_for(consumer.fetch(owner, [WHERE], ANY))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        wire.pack_answer(Status.OK, WHERE.num_bytes + 1),
        wire.pack_answer(Status.OK, 2**63),
        bytes(wire.ANSWER_BYTES),
    ],
)
def test_an_owner_that_answers_nonsense_is_an_error(answer: bytes) -> None:
    def nonsense(connection: socket.socket) -> None:
        hear(connection)
        connection.sendall(answer)
        until_closed(connection)

    with end() as (consumer, _), impostor(nonsense) as owner:
        with pytest.raises(TransferError, match=r"answers in form|for other ranges"):
            wait_for(consumer.fetch(owner, [WHERE], ANY))
        assert consumer.landed_bytes == 0


def test_another_life_at_the_port_is_not_asked() -> None:
    with end() as (consumer, _), impostor(until_closed, epoch="ten") as owner:
        running = consumer.fetch(owner, [WHERE], ANY)
        with pytest.raises(PeerLostError, match="restarted"):
            wait_for(running)


def test_nobody_at_the_port_is_a_lost_owner() -> None:
    with end() as (consumer, _), end("gone") as (gone, address):
        where, ticket = store(gone, 1, 100)
        gone.close()
        with pytest.raises(PeerLostError, match="cannot be reached"):
            wait_for(consumer.fetch(address, [where], ticket))


def test_forget_ends_the_fetches_that_run() -> None:
    with end() as (consumer, _), impostor(hear_only) as owner:
        running = consumer.fetch(owner, [WHERE], ANY)
        time.sleep(0.05)
        consumer.forget("nine")
        with pytest.raises(PeerLostError, match="is lost"):
            wait_for(running)


@pytest.mark.parametrize("data", ["", "no port", "example.org:80", "127.0.0.1:0", "127.0.0.1:70000", ":80"])
def test_an_endpoint_that_is_no_address_is_refused(data: str) -> None:
    with end() as (consumer, _), pytest.raises((ValueError, PeerLostError)):
        wait_for(consumer.fetch(WorkerAddress("w9", "nine", "", "", data), [WHERE], ANY))


@pytest.mark.parametrize("ticket", [b"", b"x", bytes(wire.TICKET_BYTES + 1)])
def test_what_cannot_be_a_ticket_is_refused(ticket: bytes) -> None:
    with end() as (consumer, _), end("owner2") as (_, address), pytest.raises(ValueError, match="a ticket has"):
        consumer.fetch(address, [WHERE], ticket)


# -- consumers that may not, or fail -----------------------------------------------------------------------------------


def ask(address: WorkerAddress, request: Callable[[bytes], bytes]) -> bytes:
    """All that an owner says to a stranger, after its greeting."""
    host, port = tcp_client.split_endpoint(address.data)
    with socket.create_connection((host, port), timeout=20) as connection:
        epoch, nonce = wire.read_greeting(connection.recv(wire.GREETING_BYTES, socket.MSG_WAITALL))
        assert epoch == address.epoch
        heard = b""
        with suppress(OSError):  # it may have hung up before we were done
            connection.sendall(request(nonce))
            connection.shutdown(socket.SHUT_WR)
            while more := connection.recv(65536):
                heard += more
        return heard


def test_a_stranger_gets_nothing() -> None:
    """Without a ticket's secret: made up, of another ticket, replayed, or with ranges that were not signed."""
    with end() as (owner, address):
        where, data = store(owner, 1, 1000)
        ticket, other = Ticket.parse(data), Ticket.new()
        refused = wire.pack_answer(Status.NO_LEASE)
        heard: list[bytes] = []

        def listen_in(nonce: bytes) -> bytes:
            heard.append(wire.pack_request(ticket, nonce, 0, [where]))
            return heard[0]

        assert ask(address, lambda nonce: wire.pack_request(other, nonce, 0, [where])) == refused
        assert (
            ask(address, lambda nonce: wire.pack_request(Ticket(ticket.id, other.secret), nonce, 0, [where])) == refused
        )
        assert ask(address, listen_in) == wire.pack_answer(Status.OK, 1000) + payload(1, 1000)
        assert ask(address, lambda _: heard[0]) == refused
        assert ask(address, lambda nonce: wire.pack_request(ticket, nonce, 1, [where])) == refused
        signed = wire.REQUEST_BYTES
        assert ask(
            address,
            lambda nonce: wire.pack_request(ticket, nonce, 0, [where])[:signed]
            + wire.pack_request(ticket, nonce, 0, [Range(0, 4 * MIB)])[signed:],
        ) == refused  # fmt: skip


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n" * 9, b"\0" * 500, b"TPKV" + b"\xff" * 100, b""])
def test_noise_ends_its_connection_and_nothing_else(noise: bytes) -> None:
    with end() as (consumer, _), end("owner2") as (owner, address):
        assert ask(address, lambda _: noise) in (b"", wire.pack_answer(Status.NO_LEASE))
        where, ticket = store(owner, 1, 1000)
        assert bytes(wait_for(consumer.fetch(address, [where], ticket))[0]) == payload(1, 1000)


def test_a_stranger_that_says_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "GREETED_S", 0.1)
    with (
        end() as (_, address),
        socket.create_connection(tcp_client.split_endpoint(address.data), timeout=20) as connection,
    ):
        assert len(connection.recv(wire.GREETING_BYTES, socket.MSG_WAITALL)) == wire.GREETING_BYTES
        assert connection.recv(1) == b""


def test_there_are_only_so_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "MAX_CONNECTIONS", 3)
    with end() as (_, address):
        where = tcp_client.split_endpoint(address.data)
        connections = [socket.create_connection(where, timeout=20) for _ in range(4)]
        greetings = [connection.recv(wire.GREETING_BYTES, socket.MSG_WAITALL) for connection in connections]
        assert sorted(map(len, greetings)) == [0, *[wire.GREETING_BYTES] * 3]
        for connection in connections:
            connection.close()


def test_a_connection_that_comes_at_the_end_is_closed_too() -> None:
    """What came while the I/O thread was busy, with its end right behind: a socket that is left open is a warning."""
    io = IoThread("busy")
    server = PoolServer(io, memoryview(bytes(10)), "owner", HOST, 0)
    busy, closing = threading.Event(), threading.Event()

    def be_busy() -> None:
        busy.set()
        closing.wait(20)

    with socket.create_connection((HOST, server.port), timeout=20) as first:
        assert len(first.recv(wire.GREETING_BYTES, socket.MSG_WAITALL)) == wire.GREETING_BYTES
    io.post(be_busy)
    busy.wait(20)
    with socket.create_connection((HOST, server.port), timeout=20) as connection:
        threading.Timer(0.2, closing.set).start()
        io.close()
        gc.collect()
        with suppress(ConnectionError):  # it had time to greet, or it had not
            assert len(connection.recv(1000, socket.MSG_WAITALL)) in (0, wire.GREETING_BYTES)


def test_a_ticket_is_over_when_it_is_withdrawn() -> None:
    with end() as (consumer, _), end("owner2") as (owner, address):
        where, ticket = store(owner, 1, 1000)
        assert owner.num_offers == 1
        wait_for(consumer.fetch(address, [where], ticket))
        owner.withdraw(ticket)
        owner.withdraw(ticket)
        assert owner.num_offers == 0
        with pytest.raises(TransferError, match="lease is over"):
            wait_for(consumer.fetch(address, [where], ticket))


def test_a_ticket_is_for_its_ranges_only() -> None:
    with end() as (consumer, _), end("owner2") as (owner, address):
        (one, ticket), (other, _) = store(owner, 1, 1000), store(owner, 2, 1000)
        for wrong in (other, Range(one.offset, 999), Range(one.offset + 1, 999)):
            with pytest.raises(ValueError, match="not for"):
                wait_for(consumer.fetch(address, [one, wrong], ticket))
        assert bytes(wait_for(consumer.fetch(address, [one], ticket))[0]) == payload(1, 1000)


def test_more_ranges_than_one_request_takes_are_asked_for_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_client, "MAX_RANGES", 7)
    with end() as (consumer, _), end("owner2") as (owner, address):
        ranges = [store(owner, seed, 100)[0] for seed in range(30)]
        views = wait_for(consumer.fetch(address, ranges, owner.offer(ranges)))
        assert [bytes(view) for view in views] == [payload(seed, 100) for seed in range(30)]


def test_connections_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "MAX_CONNECTIONS", 1)
    with end() as (consumer, _), end("owner2") as (owner, address):
        where, ticket = store(owner, 1, 1000)
        for _ in range(20):
            fetched = consumer.fetch(address, [where], ticket)
            assert bytes(wait_for(fetched)[0]) == payload(1, 1000)
            fetched.close()
        assert consumer.landed_bytes in (0, 1024)  # the last close may be on its way


def test_fetches_share_the_landing_and_all_arrive() -> None:
    """Twenty fetches of a MiB through memory for two, closed as they come, in any order."""
    with end(landing_bytes=2 * MIB) as (consumer, _), end("owner2") as (owner, address):
        where, ticket = store(owner, 1, MIB)
        running = [consumer.fetch(address, [where], ticket) for _ in range(20)]
        give_up_s = time.monotonic() + 60
        while running:
            assert time.monotonic() < give_up_s
            for fetched in [each for each in running if each.done]:
                assert bytes(fetched.views()[0]) == payload(1, MIB)
                fetched.close()
                running.remove(fetched)
            time.sleep(0.001)


def test_what_is_larger_than_the_landing_gets_its_own_memory() -> None:
    with end(landing_bytes=4096) as (consumer, _), end("owner2") as (owner, address):
        where, ticket = store(owner, 1, MIB)
        fetched = consumer.fetch(address, [where], ticket)
        assert bytes(wait_for(fetched)[0]) == payload(1, MIB)
        fetched.close()


def test_the_consumer_is_woken_when_something_arrives() -> None:
    with end() as (consumer, _), end("owner2") as (owner, address):
        woken = threading.Event()
        consumer.on_arrival(woken.set)
        where, ticket = store(owner, 1, 1000)
        fetched = consumer.fetch(address, [where], ticket)
        assert woken.wait(20)
        assert fetched.done


# -- which way -----------------------------------------------------------------------------------------------------


def test_one_host_maps_and_another_host_is_asked(tmp_path: Path) -> None:
    """Two directories of sockets, one of which the other end does not have: as between hosts and between containers."""
    here = TcpTransport(ShmTransport("p0", "p", MIB, tmp_path), "p", HOST)
    owner = TcpTransport(ShmTransport("e0", "e", MIB, tmp_path), "e", HOST)
    where, ticket = store(owner, 1, 1000)
    near = WorkerAddress("e0", "e", "", owner.pool_path, owner.data_endpoint)
    far = WorkerAddress("e0", "e", "", str(tmp_path / "elsewhere" / "e0.pool"), owner.data_endpoint)
    assert bytes(wait_for(here.fetch(near, [where], ticket))[0]) == payload(1, 1000)
    assert here.counters["tcp_fetches_total"] == 0
    here.forget("e")
    assert bytes(wait_for(here.fetch(far, [where], ticket))[0]) == payload(1, 1000)
    assert here.counters["tcp_fetched_bytes_total"] == owner.counters["tcp_sent_bytes_total"] == 1000
    here.close()
    owner.close()


def test_a_port_that_is_taken_is_said() -> None:
    with end() as (_, address):
        port = int(address.data.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"port {port}"):
            TcpTransport(InProcTransport("second", MIB), "second", HOST, port, always=True)
        InProcTransport("second", MIB).close()  # nothing of it is left


def test_ipv6() -> None:
    local = InProcTransport("six", MIB)
    try:
        owner = TcpTransport(local, "six", "::1", always=True)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with end() as (consumer, _):
        where, ticket = store(owner, 1, 1000)
        address = WorkerAddress("six", "six", "", "", owner.data_endpoint)
        assert address.data.startswith("[::1]:")
        assert bytes(wait_for(consumer.fetch(address, [where], ticket))[0]) == payload(1, 1000)
    owner.close()
