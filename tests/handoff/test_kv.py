"""KV blocks arrive bit for bit at another place, or as an error; `free` is called once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
import pytest
import torch

from triptych.clock import ManualClock
from triptych.errors import ChecksumError, PeerLostError, PoolExhaustedError
from triptych.handoff.kv import KVLayout, KVMemory, KVProducer, fetch_blocks
from triptych.handoff.leases import Leases
from triptych.messages import KVHandle, Range

from .conftest import POOL_BYTES, TTL_S, Ends, landed

LAYOUT = KVLayout(num_blocks=10, num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype=torch.bfloat16)
REQUEST = ("r", 0)


def fill(memory: KVMemory) -> None:
    memory.tensor.copy_(torch.randn(memory.layout.shape))


class Pair:
    """Both ends, and what the producer's engine was told to free."""

    def __init__(self, ends: Ends, leases: Leases, layout: KVLayout = LAYOUT, device: str = "cpu") -> None:
        self.ends = ends
        self.source = KVMemory(ends.producer.transport, layout, device)
        self.target = KVMemory(ends.consumer.transport, layout, device)
        self.producer = KVProducer(self.source, leases, ends.producer.address)
        self.freed: list[list[int]] = []
        fill(self.source)

    def publish(self, block_ids: list[int]) -> KVHandle:
        free = partial(self.freed.append, block_ids)
        handle = self.producer.publish(block_ids, 5, self.ends.consumer.address, REQUEST, free)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=KVHandle)


@pytest.fixture
def pair(ends: Ends, leases: Leases) -> Pair:
    return Pair(ends, leases)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("in_pool", [True, False])
def test_blocks_arrive_bit_for_bit(ends: Ends, leases: Leases, dtype: torch.dtype, in_pool: bool) -> None:
    pair = Pair(ends, leases, replace(LAYOUT, dtype=dtype))
    # What a GPU does, with a CPU tensor: the blocks go through staging slots on one side, through a copy on the other.
    pair.source.in_pool = pair.target.in_pool = in_pool
    used = ends.producer.transport.used_bytes
    handle = pair.publish([7, 0, 3])
    assert (handle.first_block, len(handle.blocks)) == (5, 3)
    assert (ends.producer.transport.used_bytes == used) == in_pool  # publishing from the pool takes no memory
    landed(fetch_blocks(pair.target, handle, [1, 9, 4]))
    for source, target in ((7, 1), (0, 9), (3, 4)):
        assert torch.equal(pair.target.tensor[target], pair.source.tensor[source])
    untouched = [block for block in range(10) if block not in (1, 9, 4)]
    assert not pair.target.tensor[untouched].any()
    assert pair.freed == []
    assert leases.release(handle.lease_id)
    assert not leases.release(handle.lease_id)
    assert pair.freed == [[7, 0, 3]]
    assert ends.producer.transport.used_bytes == used


def test_the_tensor_lies_in_the_pool(pair: Pair) -> None:
    where = pair.source.range_of(2)
    assert where.num_bytes == LAYOUT.block_bytes == 3 * 2 * 2 * 4 * 8 * 2
    pair.source.tensor[2] = 1
    transport = pair.ends.producer.transport
    (view,) = transport.fetch(pair.ends.producer.address, [where]).views()
    assert bytes(view) == b"\x80\x3f" * (LAYOUT.block_bytes // 2)


def test_a_new_memory_is_zero_in_a_used_pool(ends: Ends) -> None:
    slot = ends.producer.transport.allocate(POOL_BYTES)
    ends.producer.transport.memory(slot)[:] = b"\xff" * POOL_BYTES
    ends.producer.transport.free(slot)
    assert not KVMemory(ends.producer.transport, LAYOUT, "cpu").tensor.any()


def test_no_blocks_are_legal(pair: Pair, leases: Leases) -> None:
    for pair.source.in_pool in (True, False):
        handle = pair.publish([])
        landed(fetch_blocks(pair.target, handle, []))
        leases.release(handle.lease_id)
    assert pair.freed == [[], []]


def test_expiry_frees_once(pair: Pair, leases: Leases, clock: ManualClock) -> None:
    handle = pair.publish([1])
    clock.advance(TTL_S)
    assert leases.expire() == 1
    assert not leases.release(handle.lease_id)
    assert pair.freed == [[1]]


def test_a_reused_block_is_noticed(pair: Pair) -> None:
    handle = pair.publish([1, 2])
    pair.source.tensor[2, 0, 0, 0, 0, 0] += 1
    with pytest.raises(ChecksumError, match="KV block 6 from e0"):
        landed(fetch_blocks(pair.target, handle, [3, 4]))


@pytest.mark.parametrize("own", [[1], [1, 2, 3], [1, 10], [-1, 2]])
def test_own_blocks_that_do_not_fit_are_refused(pair: Pair, own: list[int]) -> None:
    handle = pair.publish([1, 2])
    with pytest.raises(ValueError, match="blocks"):
        landed(fetch_blocks(pair.target, handle, own))
    assert not pair.target.tensor.any()


def test_another_layout_is_refused(ends: Ends, pair: Pair) -> None:
    handle = pair.publish([1, 2])
    other = KVMemory(ends.consumer.transport, replace(LAYOUT, block_size=8), "cpu")
    with pytest.raises(ValueError, match="the own layout has 1536"):
        landed(fetch_blocks(other, handle, [1, 2]))


def test_a_handle_that_contradicts_itself_is_refused(pair: Pair) -> None:
    handle = pair.publish([1, 2])
    with pytest.raises(ValueError, match="1 checksums"):
        landed(fetch_blocks(pair.target, msgspec.structs.replace(handle, checksums=handle.checksums[:1]), [1, 2]))
    outside = msgspec.structs.replace(handle, blocks=[handle.blocks[0], Range(POOL_BYTES, LAYOUT.block_bytes)])
    with pytest.raises(ValueError, match=r"not inside a pool|not for"):
        landed(fetch_blocks(pair.target, outside, [1, 2]))


@pytest.mark.parametrize("block_ids", [[10], [-1]])
def test_blocks_that_are_not_there_are_not_published(pair: Pair, leases: Leases, block_ids: list[int]) -> None:
    with pytest.raises(ValueError, match="not all among 10"):
        pair.publish(block_ids)
    assert (len(leases), pair.freed) == (0, [])


def test_a_lost_producer_is_an_error(pair: Pair) -> None:
    handle = pair.publish([1])
    pair.ends.producer.transport.close()
    with pytest.raises(PeerLostError):
        landed(fetch_blocks(pair.target, handle, [1]))


def test_no_room_to_stage_is_an_error_without_a_lease(ends: Ends, leases: Leases, pair: Pair) -> None:
    pair.source.in_pool = False
    used = ends.producer.transport.used_bytes
    ends.producer.transport.allocate(POOL_BYTES - used)
    with pytest.raises(PoolExhaustedError):
        pair.publish([1])
    assert (len(leases), pair.freed) == (0, [])


def test_a_pool_that_is_too_small_is_an_error(ends: Ends) -> None:
    with pytest.raises(PoolExhaustedError):
        KVMemory(ends.producer.transport, replace(LAYOUT, num_blocks=10_000), "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_blocks_of_a_gpu_arrive_bit_for_bit(ends: Ends, leases: Leases) -> None:
    """Would show that staging through host memory is ordered with the device's own work."""
    pair = Pair(ends, leases, device="cuda")
    landed(fetch_blocks(pair.target, pair.publish([7, 0]), [1, 9]))
    assert torch.equal(pair.target.tensor[[1, 9]], pair.source.tensor[[7, 0]])
