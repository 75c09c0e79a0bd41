"""The KV memory of an engine, and KV blocks on their way from a prefill worker to a decode worker.

One block is one contiguous range, so that it moves in one piece. Runs on the compute thread of prefill and decode
workers; called by `stages/prefill.py` and `stages/decode.py`; the engine reads and writes `KVMemory.tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import msgspec
import torch

from triptych.handoff.arriving import Arriving
from triptych.handoff.leases import Leases
from triptych.handoff.tensors import bytes_of, checksum, copy_checked, tensor_over
from triptych.messages import KVHandle, Range
from triptych.transport.base import Slot, Transport
from triptych.types import WorkerAddress


@dataclass(frozen=True)
class KVLayout:
    """[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; the 2 is keys, then values."""

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int  # tokens
    head_dim: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        return (self.num_blocks, *self.block_shape)

    @property
    def block_bytes(self) -> int:
        return prod(self.block_shape) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """What the transport's pool must have room for where the device is the CPU."""
        return self.num_blocks * self.block_bytes


class KVMemory:
    """`tensor` holds all blocks: on the CPU it lies in the transport's pool, so that publishing copies nothing.

    Raises PoolExhaustedError when the pool is too small.
    """

    def __init__(self, transport: Transport, layout: KVLayout, device: torch.device | str) -> None:
        self.transport = transport
        self.layout = layout
        self.in_pool = torch.device(device).type == "cpu"
        if self.in_pool:
            self._slot = transport.allocate(layout.num_bytes)
            self.tensor = tensor_over(transport.memory(self._slot), layout.dtype, layout.shape)
            # Attention masks what was never written by a weight of zero, and zero times NaN is NaN.
            self.tensor.zero_()
        else:
            self.tensor = torch.zeros(layout.shape, dtype=layout.dtype, device=device)

    def range_of(self, block_id: int) -> Range:
        """Where a block lies in the pool, on the CPU."""
        return Range(self._slot.offset + block_id * self.layout.block_bytes, self.layout.block_bytes)

    def stage(self, block_ids: Sequence[int]) -> tuple[Slot, torch.Tensor]:
        """Copy blocks of any device into one slot of the pool, which the caller frees; returns them as a tensor too.

        Raises PoolExhaustedError.
        """
        slot = self.transport.allocate(len(block_ids) * self.layout.block_bytes)
        try:
            staged = tensor_over(
                self.transport.memory(slot), self.layout.dtype, (len(block_ids), *self.layout.block_shape)
            )
            staged.copy_(self.tensor[torch.tensor(block_ids, dtype=torch.long, device=self.tensor.device)])
        except BaseException:
            self.transport.free(slot)
            raise
        return slot, staged

    def require(self, block_ids: Sequence[int]) -> None:
        """Raises ValueError when one is not a block of this memory."""
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.layout.num_blocks):
            raise ValueError(f"blocks {list(block_ids)} are not all among {self.layout.num_blocks}")


class KVProducer:
    """Publishes blocks of one `KVMemory` under leases."""

    def __init__(self, memory: KVMemory, leases: Leases, address: WorkerAddress) -> None:
        self._memory = memory
        self._leases = leases
        self._address = address

    def publish(
        self,
        block_ids: Sequence[int],
        first_block: int,
        consumer: WorkerAddress,
        request: tuple[str, int],
        free: Callable[[], None],
    ) -> KVHandle:
        """Lease blocks, the first of which is block `first_block` of the request.

        The caller keeps the blocks as they are until `free` is called, once, at the end of the lease. Where this
        raises (PoolExhaustedError when there is no room to stage, ValueError) there is no lease and no call.
        """
        memory = self._memory
        memory.require(block_ids)
        slot: Slot | None
        if memory.in_pool:
            ranges = [memory.range_of(block_id) for block_id in block_ids]
            checksums = [checksum(bytes_of(memory.tensor[block_id])) for block_id in block_ids]
            slot = None
        else:
            slot, staged = memory.stage(block_ids)
            size = memory.layout.block_bytes
            ranges = [Range(slot.offset + index * size, size) for index in range(len(block_ids))]
            checksums = [checksum(bytes_of(block)) for block in staged]
        ticket = memory.transport.offer(ranges)

        def end() -> None:
            memory.transport.withdraw(ticket)
            if slot is not None:
                memory.transport.free(slot)
            free()

        lease_id = self._leases.grant(consumer.name, consumer.epoch, request, end)
        return KVHandle(lease_id, self._address, first_block, ranges, checksums, ticket)


def skip_blocks(handle: KVHandle, num_blocks: int) -> KVHandle:
    """The handle without those of its blocks that are among the request's first `num_blocks`."""
    skipped = min(max(num_blocks - handle.first_block, 0), len(handle.blocks))
    return msgspec.structs.replace(
        handle,
        first_block=handle.first_block + skipped,
        blocks=handle.blocks[skipped:],
        checksums=handle.checksums[skipped:],
    )


def fetch_blocks(memory: KVMemory, handle: KVHandle, into_block_ids: Sequence[int]) -> Arriving[None]:
    """Begin to fetch the handle's blocks; `land` copies them from the owner's pool, or from where they landed, to
    their place.

    Raises ValueError when the blocks are not of the own layout, and what `Transport.fetch` raises. When `land` raises,
    the own blocks hold nothing of use; the caller frees them, and releases the lease after success and failure alike.
    """
    layout = memory.layout
    if not len(into_block_ids) == len(handle.blocks) == len(handle.checksums):
        raise ValueError(
            f"{len(handle.blocks)} blocks with {len(handle.checksums)} checksums for {len(into_block_ids)} own blocks"
        )
    memory.require(into_block_ids)
    for block in handle.blocks:
        if block.num_bytes != layout.block_bytes:
            raise ValueError(f"a block of {block.num_bytes} bytes; the own layout has {layout.block_bytes}")
    fetch = memory.transport.fetch(handle.owner, handle.blocks, handle.ticket)
    return Arriving(fetch, lambda sources: _put_blocks(memory, handle, sources, into_block_ids))


def _put_blocks(
    memory: KVMemory, handle: KVHandle, sources: Sequence[memoryview], into_block_ids: Sequence[int]
) -> None:
    layout = memory.layout
    if memory.in_pool:
        targets = [memory.tensor[block_id] for block_id in into_block_ids]
    else:
        landed = torch.empty((len(sources), *layout.block_shape), dtype=layout.dtype)
        targets = list(landed)
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        what = f"KV block {handle.first_block + index} from {handle.owner.name}, lease {handle.lease_id}"
        copy_checked(source, target, handle.checksums[index], what)
    if not memory.in_pool:
        ids = torch.tensor(into_block_ids, dtype=torch.long, device=memory.tensor.device)
        memory.tensor[ids] = landed.to(memory.tensor.device)
