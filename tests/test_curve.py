"""Keys, join files, and messages between hosts: only members are heard, and only they hear."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from triptych import messages
from triptych.clock import ManualClock
from triptych.curve import (
    JOIN_FILE,
    KEY_FILE,
    Join,
    KeyPair,
    RouterKeys,
    check_endpoint,
    connect_with,
    load_join,
    tcp_endpoint,
    write_secret,
)
from triptych.errors import ConfigError
from triptych.heartbeat import CurveLine, NoAnswerError
from triptych.messages import Answer, Beat, Drain, Envelope, Leave, Probe, Probed, Register
from triptych.router.client import ZmqMailbox
from triptych.router.registration import Registration
from triptych.router.registry import Registry
from triptych.transport import links
from triptych.transport.mailbox import Mailbox
from triptych.types import Heartbeat, Load, Stage, WeightsReport, WorkerAddress, WorkerInfo

LONG_S = 20.0
ANY = tcp_endpoint("127.0.0.1", 0)


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tri") as path:
        yield Path(path)


@pytest.fixture
def join() -> Join:
    """Of a router that is not there."""
    return Join("tcp://127.0.0.1:9", KeyPair.new().public, KeyPair.new())


def address_of(mailbox: Mailbox, name: str, epoch: str) -> WorkerAddress:
    return WorkerAddress(name, epoch, mailbox.endpoint, "", "", mailbox.key)


def receive(mailbox: Mailbox, timeout_s: float = LONG_S) -> list[Envelope]:
    for _ in range(int(timeout_s / 0.1)):
        if received := mailbox.receive(0.1):
            return received
    return []


# -- files and addresses -----------------------------------------------------------------------------------------------


def test_a_secret_is_kept_from_others(tmp_path: Path, join: Join) -> None:
    path = tmp_path / JOIN_FILE
    write_secret(path, join)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_join(str(path)) == join
    assert list(tmp_path.iterdir()) == [path]
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read it"):
        load_join(str(path))


@pytest.mark.parametrize("content", [b"", b"{}", b'{"router": 3}', b"\xff", b'{"version": 2}'])
def test_what_is_no_join_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / JOIN_FILE
    with pytest.raises(ConfigError, match=JOIN_FILE):
        load_join(str(path))
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="not a file of keys"):
        load_join(str(path))


def test_a_routers_keys_outlive_it(tmp_path: Path) -> None:
    keys = RouterKeys.load_or_make(str(tmp_path))
    assert RouterKeys.load_or_make(str(tmp_path)) == keys
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", "", "224.0.0.1"])
def test_a_host_must_be_an_address_that_others_can_name(host: str) -> None:
    with pytest.raises(ConfigError):
        tcp_endpoint(host, 0)


def test_tcp_needs_keys_and_unix_sockets_have_none() -> None:
    assert tcp_endpoint("10.0.0.1", 7000) == "tcp://10.0.0.1:7000"
    assert tcp_endpoint("fd00::1", 0) == "tcp://[fd00::1]:*"
    check_endpoint("tcp://10.0.0.1:7000", has_keys=True)
    check_endpoint("ipc:///run/x.sock", has_keys=False)
    for endpoint, has_keys in [
        ("tcp://127.0.0.1:7000", False),
        ("ipc:///run/x.sock", True),
        ("udp://10.0.0.1:1", True),
    ]:
        with pytest.raises(ConfigError):
            check_endpoint(endpoint, has_keys)


# -- between workers ---------------------------------------------------------------------------------------------------


def test_members_hear_each_other(join: Join) -> None:
    a, b = Mailbox("a", "1", ANY, join.router, join), Mailbox("b", "2", ANY, join.router, join)
    for k in range(50):
        a.to_worker(address_of(b, "b", "2"), Probe(k))
    received: list[Envelope] = []
    while len(received) < 50:
        got = receive(b)
        assert got, "nothing came"
        received += got
    assert [envelope.body for envelope in received] == [Probe(k) for k in range(50)]
    assert {(envelope.sender, envelope.epoch) for envelope in received} == {("a", "1")}
    a.close()
    b.close()


@pytest.mark.parametrize("stranger", ["no keys", "keys of its own"])
def test_a_stranger_is_not_heard(join: Join, stranger: str, caplog: pytest.LogCaptureFixture) -> None:
    mailbox = Mailbox("b", "2", ANY, join.router, join)
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    if stranger == "no keys":
        socket.connect(mailbox.endpoint)
    else:
        connect_with(socket, KeyPair.new(), mailbox.key, mailbox.endpoint)
    socket.send(messages.encode(Drain(), "router", ""))
    assert receive(mailbox, 0.7) == []
    member = Mailbox("a", "1", ANY, join.router, join)
    member.to_worker(address_of(mailbox, "b", "2"), Probe(1))
    assert [envelope.body for envelope in receive(mailbox)] == [Probe(1)]
    context.destroy(linger=0)
    member.close()
    mailbox.close()


def test_nothing_is_told_to_whoever_took_the_port(join: Join) -> None:
    """A listener without the secret key of the address gets no message, whatever it listens with."""
    sender, impostor = Mailbox("a", "1", ANY, join.router, join), Mailbox("b", "2", ANY, join.router, join)
    right = msgspec.structs.replace(address_of(impostor, "b", "2"), key=KeyPair.new().public)
    sender.to_worker(right, Probe(1))
    assert receive(impostor, 0.7) == []
    sender.close()
    impostor.close()


@pytest.mark.parametrize("key", ["", "short", "ä" * 40])
def test_an_address_without_a_key_is_not_written_to(join: Join, key: str, caplog: pytest.LogCaptureFixture) -> None:
    mailbox = Mailbox("a", "1", ANY, join.router, join)
    mailbox.to_worker(WorkerAddress("b", "2", "tcp://127.0.0.1:9", "", "", key), Drain())
    mailbox.to_worker(WorkerAddress("c", "3", "ipc:///run/c.sock", "", "", ""), Drain())
    assert "Drain for b" in caplog.text
    assert "Drain for c" in caplog.text
    mailbox.close()


def test_an_address_that_is_taken_is_said(join: Join) -> None:
    mailbox = Mailbox("a", "1", ANY, join.router, join)
    with pytest.raises(ConfigError, match="cannot listen"):
        Mailbox("b", "2", mailbox.endpoint, join.router, join)
    mailbox.close()


async def test_a_link_that_is_down_is_reported_and_one_that_is_up_is_not(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "LINK_PATIENCE_S", 0.3)
    heard: asyncio.Queue[Envelope] = asyncio.Queue()
    router = ZmqMailbox(str(directory), ANY)
    router.start(heard.put_nowait)
    join = load_join(str(directory / JOIN_FILE))
    a, b = Mailbox("a", "1", ANY, join.router, join), Mailbox("b", "2", ANY, join.router, join)
    b_address = address_of(b, "b", "2")
    a.to_worker(b_address, Probe(1))
    a.to_worker(WorkerAddress("never", "3", "tcp://127.0.0.1:9", "", "", b.key), Probe(2))
    assert await asyncio.to_thread(receive, b)

    async def report() -> messages.Body:
        for _ in range(int(LONG_S / 0.05)):
            await asyncio.to_thread(a.receive, 0.05)
            if not heard.empty():
                return heard.get_nowait().body
        raise AssertionError("nothing was reported")

    assert await report() == messages.LinkLost("never", "3")
    b.close()
    assert await report() == messages.LinkLost("b", "2")
    a.forget("2")
    a.to_worker(b_address, Probe(3))
    await asyncio.to_thread(a.receive, 0.5)
    assert heard.empty()
    a.close()
    await router.close()


# -- with the router ---------------------------------------------------------------------------------------------------


def info(version: str = "v1", endpoint: str = "tcp://10.0.0.1:7000") -> WorkerInfo:
    address = WorkerAddress("encode-0", "e1", endpoint, "", "10.0.0.1:7001", KeyPair.new().public)
    return WorkerInfo(address, [Stage.ENCODE], version, "m", 100, WeightsReport(), pid=1)


async def test_router_and_worker_hear_each_other(directory: Path) -> None:
    heard: asyncio.Queue[Envelope] = asyncio.Queue()
    router = ZmqMailbox(str(directory), ANY)
    router.start(heard.put_nowait)
    join = load_join(str(directory / JOIN_FILE))
    worker = Mailbox("a", "1", ANY, join.router, join)
    router.send(address_of(worker, "a", "1"), Probe(1))
    assert [e.body for e in await asyncio.to_thread(receive, worker)] == [Probe(1)]
    worker.to_router(Probed(1))
    envelope = await asyncio.wait_for(heard.get(), LONG_S)
    assert (envelope.sender, envelope.epoch, envelope.body) == ("a", "1", Probed(1))
    worker.close()
    await router.close()


async def test_a_worker_registers_beats_and_leaves(directory: Path) -> None:
    registry = Registry("v1", 5.0, ManualClock(), lambda _: None)
    router = ZmqMailbox(str(directory), ANY)
    router.registration = Registration(registry)
    router.start(lambda _: None)
    line = CurveLine(load_join(str(directory / JOIN_FILE)), "encode-0", "e1")
    beat = Beat(Heartbeat("encode-0", "e1", Load(num_waiting=3)))
    assert (await asyncio.to_thread(line.ask, beat)).status == 404
    refused = await asyncio.to_thread(line.ask, Register(info("v2")))
    assert (refused.status, "version hash v2" in refused.message) == (409, True)
    unsafe = await asyncio.to_thread(line.ask, Register(info(endpoint="ipc:///run/x.sock")))
    assert (unsafe.status, registry.workers()) == (409, [])
    assert await asyncio.to_thread(line.ask, Register(info())) == Answer(200)
    assert await asyncio.to_thread(line.ask, beat) == Answer(200)
    (worker,) = registry.workers()
    assert worker.load.num_waiting == 3
    assert await asyncio.to_thread(line.ask, Leave("encode-0", "e1")) == Answer(200)
    assert registry.workers() == []
    line.close()
    await router.close()


@pytest.mark.parametrize("wrong", ["member", "router"])
async def test_without_the_right_keys_nobody_registers(
    directory: Path, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.heartbeat.ANSWER_TIMEOUT_S", 0.7)
    registry = Registry("v1", 5.0, ManualClock(), lambda _: None)
    router = ZmqMailbox(str(directory), ANY)
    router.registration = Registration(registry)
    router.start(lambda _: None)
    join = load_join(str(directory / JOIN_FILE))
    if wrong == "member":
        join = msgspec.structs.replace(join, member=KeyPair.new())
    else:
        join = msgspec.structs.replace(join, router_key=KeyPair.new().public)
    line = CurveLine(join, "encode-0", "e1")
    with pytest.raises(NoAnswerError, match="join file"):
        await asyncio.to_thread(line.ask, Register(info()))
    assert registry.workers() == []
    line.close()
    await router.close()


async def test_a_router_that_starts_again_is_the_same_to_its_workers(directory: Path) -> None:
    heard: asyncio.Queue[Envelope] = asyncio.Queue()
    router = ZmqMailbox(str(directory), ANY)
    router.start(heard.put_nowait)
    join = load_join(str(directory / JOIN_FILE))
    worker = Mailbox("a", "1", ANY, join.router, join)
    await router.close()
    again = ZmqMailbox(str(directory), join.router)
    again.start(heard.put_nowait)
    assert load_join(str(directory / JOIN_FILE)) == join
    worker.to_router(Probed(2))
    assert (await asyncio.wait_for(heard.get(), LONG_S)).body == Probed(2)
    worker.close()
    await again.close()


def test_no_thread_is_left(join: Join) -> None:
    before = threading.active_count()
    for _ in range(3):
        Mailbox("a", "1", ANY, join.router, join).close()
    assert threading.active_count() <= before
