"""Embeddings of media items on their way from an encode worker to a prefill worker.

The producer's half runs on the encode worker's compute thread, called by `stages/encode.py`; `fetch_embedding` on the
prefill worker's, called by `stages/language.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from triptych.handoff.arriving import Arriving
from triptych.handoff.leases import Leases
from triptych.handoff.tensors import bytes_of, checksum, copy_checked, dtype_name, dtype_of, tensor_over
from triptych.messages import EmbeddingHandle, Range
from triptych.transport.base import Slot, Transport
from triptych.types import WorkerAddress


@dataclass(frozen=True, eq=False)
class StoredEmbedding:
    """An embedding in the producer's pool, computed once and published to any number of consumers."""

    slot: Slot
    shape: tuple[int, int]  # num_embeds, width
    dtype: str
    checksum: int

    @property
    def num_bytes(self) -> int:
        return self.slot.num_bytes


class EmbeddingPool:
    """Keeps each stored embedding until the encoder cache has discarded it and no lease on it is out."""

    def __init__(self, transport: Transport, leases: Leases, address: WorkerAddress) -> None:
        self._transport = transport
        self._leases = leases
        self._address = address
        self._references: dict[StoredEmbedding, int] = {}  # leases, and one until it is discarded
        self._discarded: set[StoredEmbedding] = set()  # those that only leases keep

    def store(self, tensor: torch.Tensor) -> StoredEmbedding:
        """Copy [num_embeds, width] of any device into the pool, once. The caller owns the result until `discard`.

        Raises PoolExhaustedError when it does not fit now, ValueError for another rank or dtype.
        """
        if tensor.dim() != 2:
            raise ValueError(f"an embedding is [num_embeds, width], not {list(tensor.shape)}")
        shape = (tensor.shape[0], tensor.shape[1])
        dtype = dtype_name(tensor.dtype)
        slot = self._transport.allocate(tensor.numel() * tensor.element_size())
        try:
            in_pool = tensor_over(self._transport.memory(slot), tensor.dtype, shape)
            in_pool.copy_(tensor.detach())
            stored = StoredEmbedding(slot, shape, dtype, checksum(bytes_of(in_pool)))
        except BaseException:
            self._transport.free(slot)
            raise
        self._references[stored] = 1
        return stored

    def publish(self, stored: StoredEmbedding, consumer: WorkerAddress, request: tuple[str, int]) -> EmbeddingHandle:
        """Lease it to the consumer for one attempt at a request. Raises ValueError when it was discarded."""
        self._require(stored)
        self._references[stored] += 1
        where = Range(stored.slot.offset, stored.slot.num_bytes)
        ticket = self._transport.offer([where])
        end = partial(self._end_lease, stored, ticket)
        lease_id = self._leases.grant(consumer.name, consumer.epoch, request, end)
        return EmbeddingHandle(lease_id, self._address, where, stored.shape, stored.dtype, stored.checksum, ticket)

    def _end_lease(self, stored: StoredEmbedding, ticket: bytes) -> None:
        self._transport.withdraw(ticket)
        self._unreference(stored)

    def discard(self, stored: StoredEmbedding) -> None:
        """The encoder cache lets go of it. Raises ValueError the second time."""
        self._require(stored)
        self._discarded.add(stored)
        self._unreference(stored)

    def _require(self, stored: StoredEmbedding) -> None:
        if stored not in self._references or stored in self._discarded:
            raise ValueError("the embedding was discarded, or is another pool's")

    def _unreference(self, stored: StoredEmbedding) -> None:
        self._references[stored] -= 1
        if not self._references[stored]:
            del self._references[stored]
            self._discarded.discard(stored)
            self._transport.free(stored.slot)

    def __len__(self) -> int:
        """Embeddings that hold memory, discarded ones with leases included."""
        return len(self._references)

    @property
    def num_leased(self) -> int:
        """Embeddings that a consumer may still be reading: their memory comes back when it is done."""
        return sum(count > (stored not in self._discarded) for stored, count in self._references.items())

    def check(self) -> None:
        """Raises AssertionError when an embedding is kept by nobody."""
        for stored, references in self._references.items():
            if references < 1:
                raise AssertionError(f"an embedding of {stored.shape} has {references} references")
        if not self._discarded <= self._references.keys():
            raise AssertionError("a discarded embedding has no lease and was not freed")


def fetch_embedding(transport: Transport, handle: EmbeddingHandle) -> Arriving[torch.Tensor]:
    """Begin to fetch the consumer's own copy on the CPU, [num_embeds, width], in the dtype that was published.

    Raises ValueError when the handle contradicts itself, and what `Transport.fetch` raises. The caller releases the
    lease after success and failure alike.
    """
    dtype = dtype_of(handle.dtype)
    num_embeds, width = handle.shape
    if min(num_embeds, width) < 0 or num_embeds * width * dtype.itemsize != handle.range.num_bytes:
        raise ValueError(f"{handle.range.num_bytes} bytes are not {handle.dtype} of shape {list(handle.shape)}")

    def take(views: list[memoryview]) -> torch.Tensor:
        tensor = torch.empty(handle.shape, dtype=dtype)  # the owner has agreed that it has so many bytes
        copy_checked(views[0], tensor, handle.checksum, f"embedding from {handle.owner.name}, lease {handle.lease_id}")
        return tensor

    return Arriving(transport.fetch(handle.owner, [handle.range], handle.ticket), take)
