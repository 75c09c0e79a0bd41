"""A producer in a process of its own: stores one embedding and three KV blocks, prints their handles, then waits.

Its values follow from the seed, so that the test can make them again.
"""

from __future__ import annotations

import sys

import msgspec
import torch

from triptych.clock import MonotonicClock
from triptych.handoff.embedding import EmbeddingPool
from triptych.handoff.kv import KVLayout, KVMemory, KVProducer
from triptych.handoff.leases import Leases
from triptych.messages import EmbeddingHandle, KVHandle
from triptych.transport.shm import ShmTransport
from triptych.types import WorkerAddress

LAYOUT = KVLayout(num_blocks=4, num_layers=2, num_kv_heads=2, block_size=16, head_dim=32, dtype=torch.bfloat16)
CONSUMER = WorkerAddress("p0", "consumer", "", "")


class Published(msgspec.Struct, frozen=True):
    embedding: EmbeddingHandle
    kv: KVHandle


def values() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(300, 256, generator=generator).to(torch.bfloat16)
    return embedding, torch.randn(LAYOUT.shape, generator=generator).to(torch.bfloat16)


def main() -> None:
    epoch, runtime_dir = sys.argv[1:]
    transport = ShmTransport("producer", epoch, 8 << 20, runtime_dir)
    address = WorkerAddress("producer", epoch, "", transport.pool_path)
    leases = Leases(MonotonicClock(), 60)
    memory = KVMemory(transport, LAYOUT, "cpu")
    embedding, kv = values()
    memory.tensor.copy_(kv)
    pool = EmbeddingPool(transport, leases, address)
    published = Published(
        pool.publish(pool.store(embedding), CONSUMER, ("r", 0)),
        KVProducer(memory, leases, address).publish([2, 0, 3], 0, CONSUMER, ("r", 0), lambda: None),
    )
    print(msgspec.json.encode(published).decode(), flush=True)
    sys.stdin.read()
    transport.close()


if __name__ == "__main__":
    main()
