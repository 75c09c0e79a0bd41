"""Embeddings arrive bit for bit, or as an error; the producer keeps each as long as someone may need it."""

from __future__ import annotations

import msgspec
import pytest
import torch

from triptych.clock import ManualClock
from triptych.errors import ChecksumError, PeerLostError, PoolExhaustedError, TransferError
from triptych.handoff.embedding import EmbeddingPool, fetch_embedding
from triptych.handoff.leases import Leases
from triptych.messages import EmbeddingHandle, Range

from .conftest import POOL_BYTES, TTL_S, Ends, landed

REQUEST = ("r", 0)


@pytest.fixture
def pool(ends: Ends, leases: Leases) -> EmbeddingPool:
    return EmbeddingPool(ends.producer.transport, leases, ends.producer.address)


def random_bits(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Any bits, NaN payloads among them."""
    flat = torch.randint(0, 256, (shape[0] * shape[1] * dtype.itemsize,), dtype=torch.uint8)
    return flat.view(dtype).view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(37, 48), (1, 1), (0, 48)])
def test_an_embedding_arrives_bit_for_bit(
    ends: Ends, pool: EmbeddingPool, leases: Leases, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    tensor = random_bits(shape, dtype)
    stored = pool.store(tensor)
    handle = pool.publish(stored, ends.consumer.address, REQUEST)
    handle = msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=EmbeddingHandle)
    fetched = landed(fetch_embedding(ends.consumer.transport, handle))
    assert same_bits(fetched, tensor)
    assert handle.range.num_bytes == stored.num_bytes == tensor.numel() * tensor.element_size()
    assert leases.release(handle.lease_id)
    pool.discard(stored)
    assert ends.producer.transport.used_bytes == 0
    assert same_bits(fetched, tensor)  # an own copy


def test_rows_of_a_larger_tensor_are_stored_contiguous(ends: Ends, pool: EmbeddingPool) -> None:
    tensor = torch.randn(20, 64, requires_grad=True)[3:11, ::2]
    handle = pool.publish(pool.store(tensor), ends.consumer.address, REQUEST)
    fetched = landed(fetch_embedding(ends.consumer.transport, handle))
    assert torch.equal(fetched, tensor)
    assert not fetched.requires_grad


def test_a_discarded_embedding_stays_until_its_last_lease(ends: Ends, pool: EmbeddingPool, leases: Leases) -> None:
    tensor = torch.randn(5, 8)
    stored = pool.store(tensor)
    handles = [pool.publish(stored, ends.consumer.address, ("r", attempt)) for attempt in range(2)]
    pool.discard(stored)
    with pytest.raises(ValueError, match="discarded"):
        pool.publish(stored, ends.consumer.address, REQUEST)
    with pytest.raises(ValueError, match="discarded"):
        pool.discard(stored)
    leases.release(handles[0].lease_id)
    leases.release(handles[0].lease_id)
    pool.check()
    assert (len(pool), pool.num_leased) == (1, 1)
    assert torch.equal(landed(fetch_embedding(ends.consumer.transport, handles[1])), tensor)
    leases.release(handles[1].lease_id)
    assert (len(pool), ends.producer.transport.used_bytes) == (0, 0)
    with pytest.raises(ValueError, match="discarded"):
        pool.discard(stored)


def test_a_released_embedding_stays_until_it_is_discarded(ends: Ends, pool: EmbeddingPool, leases: Leases) -> None:
    stored = pool.store(torch.randn(5, 8))
    for attempt in range(3):
        handle = pool.publish(stored, ends.consumer.address, ("r", attempt))
        assert pool.num_leased == 1
        leases.release(handle.lease_id)
    assert (len(pool), pool.num_leased) == (1, 0)
    pool.discard(stored)
    assert (len(pool), ends.producer.transport.used_bytes) == (0, 0)


def test_expiry_frees(ends: Ends, pool: EmbeddingPool, leases: Leases, clock: ManualClock) -> None:
    stored = pool.store(torch.randn(5, 8))
    pool.publish(stored, ends.consumer.address, REQUEST)
    pool.discard(stored)
    clock.advance(TTL_S)
    assert leases.expire() == 1
    assert (len(pool), ends.producer.transport.used_bytes) == (0, 0)


def test_bytes_overwritten_after_the_lease_are_noticed(ends: Ends, pool: EmbeddingPool, leases: Leases) -> None:
    stored = pool.store(torch.randn(5, 8))
    handle = pool.publish(stored, ends.consumer.address, REQUEST)
    leases.release(handle.lease_id)
    pool.discard(stored)
    assert pool.store(torch.randn(5, 8)).slot == stored.slot
    with pytest.raises(TransferError, match=f"lease {handle.lease_id}|lease is over"):  # over TCP, the owner says no
        landed(fetch_embedding(ends.consumer.transport, handle))


def test_one_flipped_bit_is_noticed(ends: Ends, pool: EmbeddingPool) -> None:
    stored = pool.store(torch.randn(100, 8))
    handle = pool.publish(stored, ends.consumer.address, REQUEST)
    ends.producer.transport.memory(stored.slot)[1234] ^= 1
    with pytest.raises(ChecksumError):
        landed(fetch_embedding(ends.consumer.transport, handle))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((5, 9), "float32"), ((5, 8), "bfloat16"), ((-5, -8), "float32"), ((5, 8), "int8"), ((5, 8), "float64")],
)
def test_a_handle_that_contradicts_itself_is_refused(
    ends: Ends, pool: EmbeddingPool, shape: tuple[int, int], dtype: str
) -> None:
    handle = pool.publish(pool.store(torch.randn(5, 8)), ends.consumer.address, REQUEST)
    with pytest.raises(ValueError, match=r"bytes are not|is not one of"):
        landed(fetch_embedding(ends.consumer.transport, msgspec.structs.replace(handle, shape=shape, dtype=dtype)))


def test_a_handle_of_more_than_the_pool_takes_no_memory(ends: Ends, pool: EmbeddingPool) -> None:
    handle = pool.publish(pool.store(torch.randn(5, 8)), ends.consumer.address, REQUEST)
    huge = msgspec.structs.replace(handle, shape=(1 << 40, 8), range=Range(0, 32 << 40))
    with pytest.raises(ValueError, match=r"not inside a pool|not for"):
        landed(fetch_embedding(ends.consumer.transport, huge))


def test_a_lost_producer_is_an_error(ends: Ends, pool: EmbeddingPool) -> None:
    handle = pool.publish(pool.store(torch.randn(5, 8)), ends.consumer.address, REQUEST)
    ends.producer.transport.close()
    with pytest.raises(PeerLostError):
        landed(fetch_embedding(ends.consumer.transport, handle))


def test_what_cannot_be_stored_takes_no_memory(ends: Ends, pool: EmbeddingPool) -> None:
    with pytest.raises(ValueError, match="num_embeds, width"):
        pool.store(torch.zeros(8))
    with pytest.raises(ValueError, match="int64"):
        pool.store(torch.zeros(8, 8, dtype=torch.int64))
    with pytest.raises(PoolExhaustedError):
        pool.store(torch.zeros(2, POOL_BYTES))
    with pytest.raises(NotImplementedError):
        pool.store(torch.zeros(2, 2, device="meta"))
    assert (len(pool), ends.producer.transport.used_bytes) == (0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_embedding_of_a_gpu_arrives_bit_for_bit(ends: Ends, pool: EmbeddingPool) -> None:
    """Would show that a CUDA tensor reaches the pool whole before its checksum is taken."""
    tensor = random_bits((64, 128), torch.bfloat16)
    handle = pool.publish(pool.store(tensor.cuda()), ends.consumer.address, REQUEST)
    assert same_bits(landed(fetch_embedding(ends.consumer.transport, handle)), tensor)
