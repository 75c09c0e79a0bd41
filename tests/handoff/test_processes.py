"""The hand-off between two real processes, and what is left of it when the producer is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from triptych.errors import PeerLostError
from triptych.handoff.embedding import fetch_embedding
from triptych.handoff.kv import KVMemory, fetch_blocks
from triptych.transport.shm import ShmTransport

from . import producer
from .conftest import landed


def test_embeddings_and_kv_cross_processes_and_survive_their_producer(tmp_path: Path) -> None:
    command = [sys.executable, "-P", producer.__file__, "first", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        published = msgspec.json.decode(process.stdout.readline(), type=producer.Published)
        consumer = ShmTransport("p0", "consumer", 8 << 20, tmp_path)
        memory = KVMemory(consumer, producer.LAYOUT, "cpu")
        embedding, kv = producer.values()
        assert torch.equal(landed(fetch_embedding(consumer, published.embedding)), embedding)
        process.kill()
        process.wait()
        # Mapped before the producer died: what was published can still be had.
        landed(fetch_blocks(memory, published.kv, [0, 1, 2]))
        assert torch.equal(memory.tensor[:3], kv[[2, 0, 3]])
        consumer.forget("first")
        with pytest.raises(PeerLostError):
            landed(fetch_embedding(consumer, published.embedding))
        consumer.close()
