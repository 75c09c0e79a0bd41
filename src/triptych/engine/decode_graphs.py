"""Decode steps as CUDA graphs: the device is told once a step what to do, instead of a dozen times a layer.

Made by `runner.py` on a device where `varlen_attention.py` runs, for steps in which every sequence computes one token.
A graph has fixed shapes and places: a step runs in the smallest one that has room for its sequences. Rows that are left
over write to the scratch block, and nobody reads what comes of them. **Not measured, and never run on a device**: tests
replay the same steps without a graph; the one that needs a GPU is marked so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from triptych.engine.batch import StepBatch
from triptych.engine.kv_blocks import SCRATCH_BLOCK
from triptych.engine.varlen_attention import VarlenAttention, VarlenRows

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # sequences; a larger step runs without a graph
WARM_UPS = 2  # kernels that are made or chosen in their first call, outside of the graph

# Token ids [T] at rotary positions [3, T] to logits [T, vocabulary].
Decode = Callable[[torch.Tensor, torch.Tensor, VarlenAttention], torch.Tensor]


class Recorder(Protocol):
    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        """The tensor that the step's result is in after each call of what is returned beside it."""
        ...


class CudaRecorder:
    """All graphs take what they need meanwhile from one pool: one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = step()
        return result, graph.replay


class DecodeGraphs:
    """One graph a size, recorded when the first step needs it."""

    def __init__(self, kv: torch.Tensor, decode: Decode, max_model_len: int, recorder: Recorder) -> None:
        self._kv = kv
        self._decode = decode
        self._max_blocks = -(-max_model_len // kv.shape[4])
        self._recorder = recorder
        self._graphs: dict[int, _DecodeGraph] = {}
        self._failed = False

    def logits(self, batch: StepBatch) -> torch.Tensor | None:
        """[sequences, vocabulary], float32.

        None for a step that is more than one sampled token a sequence, for one that no graph has room for, and where
        a graph could not be recorded.
        """
        count = len(batch.sequences)
        is_decode = len(batch.token_ids) == len(batch.sample_rows) == count and not (batch.embeddings or batch.scored)
        size = next((size for size in SIZES if size >= count), None)
        if not is_decode or size is None or self._failed:
            return None
        if size not in self._graphs:
            try:
                self._graphs[size] = _DecodeGraph(size, self._kv, self._decode, self._max_blocks, self._recorder)
            except RuntimeError as error:
                logger.warning("decode steps run without graphs: %s", error)
                self._failed = True
                return None
        return self._graphs[size].run(batch)


class _DecodeGraph:
    def __init__(self, size: int, kv: torch.Tensor, decode: Decode, max_blocks: int, recorder: Recorder) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=kv.device)

        self._block_size = kv.shape[4]
        self._token_ids, self._positions = zeros(size), zeros(3, size)
        self._rows = VarlenRows(
            blocks=zeros(size) + SCRATCH_BLOCK,
            offsets=zeros(size),
            first_rows=torch.arange(size + 1, dtype=torch.int32, device=kv.device),
            used=zeros(size, dtype=torch.int32) + 1,
            table=zeros(size, max_blocks, dtype=torch.int32) + SCRATCH_BLOCK,
            max_rows=1,
            max_used=max_blocks * self._block_size,
        )
        attention = VarlenAttention(kv, self._rows)
        self._logits, self._replay = recorder(lambda: decode(self._token_ids, self._positions, attention))

    def run(self, batch: StepBatch) -> torch.Tensor:
        count, places = len(batch.sequences), self._rows
        rows = VarlenRows.of(batch, self._block_size, torch.device("cpu"))
        for place, values, rest in (
            (self._token_ids, torch.from_numpy(batch.token_ids), 0),
            (self._positions, torch.from_numpy(batch.positions), 0),
            (places.blocks, rows.blocks, SCRATCH_BLOCK),
            (places.offsets, rows.offsets, 0),
            (places.used, rows.used, 1),
        ):
            place[..., :count].copy_(values)
            place[..., count:].fill_(rest)
        # Of a line nobody reads more blocks than are used.
        places.table[:count, : rows.table.shape[1]].copy_(rows.table)
        places.table[count:, 0].fill_(SCRATCH_BLOCK)
        self._replay()
        return self._logits[:count].clone()  # the next step writes there again
