"""What `Transport` promises, held against every transport. But for inproc the producer is another process."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from triptych.errors import PeerLostError, PoolExhaustedError
from triptych.messages import Range
from triptych.transport.base import ALIGNMENT_BYTES, Transport
from triptych.types import WorkerAddress

from . import peer as peers
from .peer import POOL_BYTES, Peer, make_transport, payload, wait_for

StartPeer = Callable[[], Peer]
MAPPED = ("inproc", "shm", "auto")  # where a fetch is a view of the owner's memory


def new_epoch() -> str:
    return uuid.uuid4().hex


@pytest.fixture(params=[*MAPPED, "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


only_mapped = pytest.mark.parametrize("kind", MAPPED, indirect=True)


def fetch(transport: Transport, owner: Peer, *ranges: Range, ticket: bytes | None = None) -> list[memoryview]:
    """What has arrived, or the error that took its place; the views stay good until the transport is closed."""
    known = owner.tickets.get(ranges[0], b"")
    return wait_for(transport.fetch(owner.address, ranges, known if ticket is None else ticket))


@pytest.fixture
def start_peer(kind: str, tmp_path: Path) -> Iterator[StartPeer]:
    started: list[Peer] = []

    def start() -> Peer:
        started.append(peers.start_peer(kind, new_epoch(), tmp_path))
        return started[-1]

    yield start
    for peer in started:
        peer.close()


@pytest.fixture
def peer(start_peer: StartPeer) -> Peer:
    return start_peer()


@pytest.fixture
def epoch() -> str:
    return new_epoch()


@pytest.fixture
def transport(kind: str, epoch: str, tmp_path: Path) -> Iterator[Transport]:
    transport = make_transport(kind, "consumer", epoch, tmp_path)
    yield transport
    transport.check()
    transport.close()


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


# -- the own pool ------------------------------------------------------------------------------------------------------


def test_slots_are_aligned_and_keep_their_own_bytes(transport: Transport) -> None:
    slots = [transport.allocate(size) for size in (1, 63, 64, 65, 4097)]
    for seed, slot in enumerate(slots):
        transport.memory(slot)[:] = payload(seed, slot.num_bytes)
    for seed, slot in enumerate(slots):
        assert bytes(transport.memory(slot)) == payload(seed, slot.num_bytes)
        assert slot.offset % ALIGNMENT_BYTES == address_of(transport.memory(slot)) % ALIGNMENT_BYTES == 0


def test_used_bytes_return_to_zero(transport: Transport) -> None:
    slots = [transport.allocate(size) for size in (0, 1, 64, 1000)]
    assert transport.used_bytes == 64 + 64 + 64 + 1024
    for slot in slots:
        transport.free(slot)
    assert transport.used_bytes == 0
    transport.free(transport.allocate(POOL_BYTES))


def test_a_second_free_is_refused(transport: Transport) -> None:
    slot = transport.allocate(100)
    transport.free(slot)
    with pytest.raises(ValueError, match="not allocated"):
        transport.free(slot)
    with pytest.raises(ValueError, match="not allocated"):
        transport.memory(slot)


def test_a_late_free_does_not_free_the_next_slot_at_its_place(transport: Transport) -> None:
    slot = transport.allocate(100)
    transport.free(slot)
    successor = transport.allocate(100)
    assert successor == slot
    with pytest.raises(ValueError, match="not allocated"):
        transport.free(slot)
    transport.memory(successor)


def test_a_full_pool_says_so_and_recovers(transport: Transport) -> None:
    slot = transport.allocate(POOL_BYTES - 64)
    with pytest.raises(PoolExhaustedError, match="no 128 bytes in one piece"):
        transport.allocate(65)
    transport.allocate(64)
    with pytest.raises(PoolExhaustedError):
        transport.allocate(0)
    transport.free(slot)
    transport.allocate(65)


def test_a_negative_size_is_refused(transport: Transport) -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        transport.allocate(-1)


# -- fetch -------------------------------------------------------------------------------------------------------------


def test_bytes_arrive_bit_for_bit_in_any_order(transport: Transport, peer: Peer) -> None:
    sizes = [1, 64, 5 << 20, 65, 4096]
    ranges = [peer.store(seed, size) for seed, size in enumerate(sizes)]
    for seed in (3, 0, 4, 2, 1):
        (view,) = fetch(transport, peer, ranges[seed])
        assert view.readonly
        assert bytes(view) == payload(seed, sizes[seed])


def test_zero_bytes_arrive(transport: Transport, peer: Peer) -> None:
    where = peer.store(0, 0)
    assert where.num_bytes == 0
    assert bytes(fetch(transport, peer, where)[0]) == b""


def test_the_own_pool_is_fetched_like_any_other(transport: Transport, epoch: str) -> None:
    slot = transport.allocate(1000)
    transport.memory(slot)[:] = payload(1, 1000)
    (view,) = transport.fetch(WorkerAddress("consumer", epoch, "", transport.pool_path), [Range(*slot)]).views()
    assert view.readonly
    assert bytes(view) == payload(1, 1000)
    assert np.shares_memory(np.frombuffer(view, np.uint8), np.frombuffer(transport.memory(slot), np.uint8))


@pytest.mark.parametrize("where", [Range(-64, 64), Range(0, -1), Range(POOL_BYTES, 1), Range(64, POOL_BYTES)])
def test_a_range_outside_the_pool_is_refused(
    transport: Transport, start_peer: StartPeer, epoch: str, where: Range
) -> None:
    peer = start_peer()
    ticket = peer.tickets.get(peer.store(1, 64), b"")
    for owner in (peer.address, WorkerAddress("consumer", epoch, "", transport.pool_path)):
        with pytest.raises(ValueError, match=r"not inside a pool|not for"):
            wait_for(transport.fetch(owner, [where], ticket))
    with pytest.raises(ValueError, match="not inside a pool"):
        transport.offer([where])


def test_many_ranges_come_with_one_fetch(transport: Transport, peer: Peer) -> None:
    sizes = [64, 1, 0, 4096, 100_000, 64] * 3
    ranges = [peer.store(seed, size) for seed, size in enumerate(sizes)]
    order = [3, 17, 0, 1, 2, 5, 4, 3]
    views = fetch(transport, peer, *(ranges[k] for k in order), ticket=peer.offer(*ranges))
    assert [bytes(view) for view in views] == [payload(k, sizes[k]) for k in order]


def test_no_ranges_need_no_owner(transport: Transport, peer: Peer) -> None:
    assert wait_for(transport.fetch(peer.address, [])) == []


def test_a_fetch_is_closed_twice_without_harm(transport: Transport, peer: Peer) -> None:
    where = peer.store(1, 1000)
    running = transport.fetch(peer.address, [where], peer.tickets.get(where, b""))
    running.close()
    running.close()
    assert bytes(fetch(transport, peer, where)[0]) == payload(1, 1000)


@only_mapped
def test_a_fetch_copies_nothing(kind: str, transport: Transport, peer: Peer) -> None:
    size = 32 << 20
    where = peer.store(7, size)
    fetch(transport, peer, where)
    before = private_bytes()
    views = [fetch(transport, peer, where)[0] for _ in range(10)]
    assert sum(int(np.frombuffer(view, np.uint8).max()) for view in views) == 2550
    assert private_bytes() - before < size // 4
    assert len({address_of(view) for view in views}) == 1
    if kind != "inproc":
        assert permissions_at(address_of(views[0])) == "r--s"


def private_bytes() -> int:
    """Memory that is this process's alone; pages of a shared mapping do not count."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


def permissions_at(address: int) -> str:
    """Of the pool's mapping that holds the address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        start, end = (int(bound, 16) for bound in span.split("-"))
        if start <= address < end:
            assert "memfd:triptych-producer" in line
            return permissions
    raise AssertionError("not mapped")


@only_mapped
def test_a_reader_sees_what_is_written_after_free(transport: Transport, peer: Peer) -> None:
    """Why the hand-off verifies a checksum on its own copy."""
    where = peer.store(1, 4096)
    (view,) = fetch(transport, peer, where)
    peer.free(where)
    assert peer.store(2, 4096) == where
    assert bytes(view) == payload(2, 4096)


# -- peers come and go -------------------------------------------------------------------------------------------------


def test_a_peer_that_dies_unmapped_is_lost(transport: Transport, peer: Peer) -> None:
    where = peer.store(1, 100)
    peer.kill()
    with pytest.raises(PeerLostError):
        fetch(transport, peer, where)


@only_mapped
def test_a_mapped_peer_stays_readable_after_its_death(transport: Transport, peer: Peer) -> None:
    first, second = peer.store(1, 100), peer.store(2, 5000)
    (view,) = fetch(transport, peer, first)
    peer.kill()
    assert bytes(view) == payload(1, 100)
    assert bytes(fetch(transport, peer, second)[0]) == payload(2, 5000)


def test_a_forgotten_peer_is_lost_and_its_views_are_not(transport: Transport, peer: Peer) -> None:
    where = peer.store(1, 100)
    (view,) = fetch(transport, peer, where)
    peer.kill()
    transport.forget(peer.address.epoch)
    transport.forget(peer.address.epoch)
    assert bytes(view) == payload(1, 100)
    with pytest.raises(PeerLostError):
        fetch(transport, peer, where)


def test_a_live_peer_is_mapped_again_after_forget(transport: Transport, peer: Peer) -> None:
    where = peer.store(1, 100)
    fetch(transport, peer, where)
    transport.forget(peer.address.epoch)
    assert bytes(fetch(transport, peer, where)[0]) == payload(1, 100)


def test_forget_of_an_unknown_epoch_does_nothing(transport: Transport) -> None:
    transport.forget("never heard of")


def test_a_restarted_peer_is_not_its_earlier_life(transport: Transport, start_peer: StartPeer) -> None:
    old = start_peer()
    where = old.store(1, 100)
    old.kill()
    new = start_peer()
    assert new.store(2, 100) == where
    with pytest.raises(PeerLostError):
        fetch(transport, old, where)
    assert bytes(fetch(transport, new, where)[0]) == payload(2, 100)


@only_mapped
def test_the_first_fetch_from_a_later_life_lets_go_of_the_earlier(transport: Transport, start_peer: StartPeer) -> None:
    old = start_peer()
    where = old.store(1, 100)
    (view,) = fetch(transport, old, where)
    old.kill()
    new = start_peer()
    assert bytes(fetch(transport, old, where)[0]) == payload(1, 100)
    assert bytes(fetch(transport, new, new.store(2, 100))[0]) == payload(2, 100)
    transport.check()
    with pytest.raises(PeerLostError):
        fetch(transport, old, where)
    assert bytes(view) == payload(1, 100)
    assert bytes(fetch(transport, new, where)[0]) == payload(2, 100)


def test_another_epoch_at_the_same_socket_is_refused(transport: Transport, peer: Peer) -> None:
    stale = WorkerAddress(peer.address.name, new_epoch(), "", peer.address.pool, peer.address.data)
    where = peer.store(1, 100)
    with pytest.raises(PeerLostError):
        wait_for(transport.fetch(stale, [where], peer.tickets.get(where, b"")))


def test_close_leaves_nothing_behind(kind: str, epoch: str, start_peer: StartPeer, tmp_path: Path) -> None:
    peer = start_peer()
    where = peer.store(1, 100)
    gc.collect()
    files, fds = set(tmp_path.iterdir()), num_fds()
    transport = make_transport(kind, "consumer", epoch, tmp_path)
    transport.memory(transport.allocate(100))[:] = payload(0, 100)
    assert len(fetch(transport, peer, where)[0]) == 100
    transport.close()
    transport.close()
    gc.collect()
    assert set(tmp_path.iterdir()) == files
    assert num_fds() == fds
    peer.close()
    assert list(tmp_path.iterdir()) == []


def test_views_outlive_close(kind: str, epoch: str, peer: Peer, tmp_path: Path) -> None:
    where = peer.store(1, 100)
    gc.collect()
    fds = num_fds()
    transport = make_transport(kind, "consumer", epoch, tmp_path)
    own = transport.memory(transport.allocate(100))
    own[:] = payload(2, 100)
    (view,) = fetch(transport, peer, where)
    transport.close()
    assert (bytes(view), bytes(own)) == (payload(1, 100), payload(2, 100))
    del view, own
    gc.collect()
    assert num_fds() == fds
