"""What only shared memory has: seals, a socket, other users, and processes that do not answer."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from triptych.errors import ConfigError, PeerLostError
from triptych.messages import Range
from triptych.transport import descriptor
from triptych.transport.descriptor import request_descriptor
from triptych.transport.shm import ShmTransport
from triptych.types import WorkerAddress

from .peer import ProcessPeer

MIB = 1 << 20


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[WorkerAddress]:
    transport = ShmTransport("w0", "one", MIB, tmp_path)
    yield WorkerAddress("w0", "one", "", transport.pool_path)
    transport.close()


@contextmanager
def impostor(path: Path, header: bytes, fd: int | None) -> Iterator[WorkerAddress]:
    """Answers one request for a pool with anything."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [] if fd is None else [fd]))
                connection.sendmsg([header], [] if fd is None else [rights])

        thread = threading.Thread(target=answer)
        thread.start()
        yield WorkerAddress("w9", "nine", "", str(path))
        thread.join()


def header(epoch: bytes = b"nine", num_bytes: int = MIB, magic: bytes = b"TPOL", version: int = 1) -> bytes:
    return descriptor._HEADER.pack(magic, version, num_bytes, b"w9", epoch)


def test_the_descriptor_can_neither_be_cut_nor_written(owner: WorkerAddress) -> None:
    offer = request_descriptor(owner)
    try:
        assert offer.num_bytes == MIB
        assert not os.get_inheritable(offer.fd)
        for size in (0, 2 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(offer.fd, size)
        with pytest.raises(PermissionError):
            mmap.mmap(offer.fd, MIB, access=mmap.ACCESS_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(offer.fd, b"x", 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(offer.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(offer.fd)


@pytest.mark.parametrize("prefault", [True, False])
def test_prefault_takes_the_memory_at_once(tmp_path: Path, prefault: bool) -> None:
    transport = ShmTransport("w0", "one", 4 * MIB, tmp_path, prefault)
    offer = request_descriptor(WorkerAddress("w0", "one", "", transport.pool_path))
    taken = os.fstat(offer.fd).st_blocks * 512
    os.close(offer.fd)
    transport.close()
    assert taken == (4 * MIB if prefault else 0)


def test_a_prefaulted_pool_takes_no_faults(tmp_path: Path) -> None:
    transport = ShmTransport("w0", "one", 32 * MIB, tmp_path)
    memory = transport.memory(transport.allocate(32 * MIB))
    page_faults_before = minor_faults()
    for offset in range(0, 32 * MIB, mmap.PAGESIZE):
        memory[offset] = 1
    assert minor_faults() - page_faults_before < 100
    del memory
    transport.close()


def minor_faults() -> int:
    return int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[7])


def test_other_users_get_nothing(owner: WorkerAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PeerLostError, match="another user"):
        request_descriptor(owner)
    monkeypatch.undo()
    os.close(request_descriptor(owner).fd)


def test_the_server_sends_nothing_to_other_users(owner: WorkerAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(2)
        connection.connect(owner.pool)
        assert connection.recv(1) == b""


def test_an_owner_that_does_not_answer_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptor, "CONNECT_TIMEOUT_S", 0.1)
    path = tmp_path / "stuck.pool"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(1)
        with pytest.raises(PeerLostError, match="timed out"):
            request_descriptor(WorkerAddress("w9", "nine", "", str(path)))


def test_a_worker_without_a_pool_is_lost(tmp_path: Path) -> None:
    with pytest.raises(PeerLostError, match="shares no pool"):
        request_descriptor(WorkerAddress("w9", "nine", "", ""))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "0 bytes"),
        (header()[:-1], "141 bytes"),
        (header() + b"x", "143 bytes"),
        (header(magic=b"HTTP"), "form b'HTTP' 1"),
        (header(version=2), "form b'TPOL' 2"),
        (header(epoch=b"ten"), "epoch nine is over"),
    ],
)
def test_a_wrong_answer_is_refused_and_its_descriptor_closed(tmp_path: Path, answer: bytes, message: str) -> None:
    fd = os.memfd_create("impostor")
    fds = len(os.listdir("/proc/self/fd"))
    with impostor(tmp_path / "x.pool", answer, fd) as address, pytest.raises(PeerLostError, match=message):
        request_descriptor(address)
    assert len(os.listdir("/proc/self/fd")) == fds
    os.close(fd)


def test_an_answer_without_a_descriptor_is_refused(tmp_path: Path) -> None:
    with (
        impostor(tmp_path / "x.pool", header(), None) as address,
        pytest.raises(PeerLostError, match="0 descriptors"),
    ):
        request_descriptor(address)


@pytest.mark.parametrize("sealed", [True, False])
def test_memory_that_could_be_cut_is_not_mapped(tmp_path: Path, sealed: bool) -> None:
    fd = os.memfd_create("impostor", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB // 2 if sealed else MIB)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    consumer = ShmTransport("w1", "two", MIB, tmp_path)
    with (
        impostor(tmp_path / "x.pool", header(), fd) as address,
        pytest.raises(PeerLostError, match="not sealed"),
    ):
        consumer.fetch(address, [Range(0, 1)])
    consumer.close()
    os.close(fd)


def test_a_restart_removes_the_socket_of_a_killed_life_only(tmp_path: Path) -> None:
    killed, neighbour = ProcessPeer("shm", "killed", tmp_path), ShmTransport("producer2", "other", MIB, tmp_path)
    killed.kill()
    alive = ProcessPeer("shm", "alive", tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"producer.alive.pool", "producer2.other.pool"}
    later = ProcessPeer("shm", "later", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names | {"producer.later.pool"}
    for peer in (alive, later, killed):
        peer.close()
    neighbour.close()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="cannot listen"):
        ShmTransport("w0", "one", MIB, tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot listen"):
        ShmTransport("w0", "one", MIB, tmp_path / ("long" * 40))
    with pytest.raises(ConfigError, match="at most 64 bytes"):
        ShmTransport("w" * 65, "one", MIB, tmp_path)
    with pytest.raises(ConfigError, match="bytes; the machine has"):
        ShmTransport("w0", "one", 1 << 62, tmp_path)
    with pytest.raises(ValueError, match="must have bytes"):
        ShmTransport("w0", "one", 0, tmp_path)
    assert len(os.listdir("/proc/self/fd")) == fds
    assert list(tmp_path.iterdir()) == []


def test_the_thread_ends_with_the_transport(tmp_path: Path) -> None:
    before = threading.active_count()
    transport = ShmTransport("w0", "one", MIB, tmp_path)
    assert threading.active_count() == before + 1
    transport.close()
    assert threading.active_count() == before
