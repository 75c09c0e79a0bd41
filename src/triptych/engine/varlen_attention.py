"""Attention over paged KV in one call of torch's flash attention for all sequences of a step: for CUDA, in 16 bits.

The interface of `StepAttention` in `attention.py`, which makes one of these on such a device. **Not measured, and never
run on a device**: tests run it against what torch documents of `varlen_attn`; the one that needs a GPU is marked so.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from triptych.engine.batch import StepBatch

DTYPES = (torch.float16, torch.bfloat16)  # flash attention has no other
MAX_HEAD_DIM = 256


def can_run(kv: torch.Tensor) -> bool:
    return kv.device.type == "cuda" and kv.dtype in DTYPES and kv.shape[-1] <= MAX_HEAD_DIM


class VarlenRows(NamedTuple):
    """Where the packed rows of a step come from and where their KV goes, on the device."""

    blocks: torch.Tensor  # int64 [T], that each row's keys and values are written to
    offsets: torch.Tensor  # int64 [T], in that block
    first_rows: torch.Tensor  # int32 [sequences + 1], of each sequence, then T
    used: torch.Tensor  # int32 [sequences], tokens of each, the new ones included
    table: torch.Tensor  # int32 [sequences, most blocks of one]
    max_rows: int  # of one sequence
    max_used: int

    @classmethod
    def of(cls, batch: StepBatch, block_size: int, device: torch.device) -> VarlenRows:
        def tensor(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        sequences = batch.sequences  # in the order of their rows
        blocks, offsets = np.divmod(batch.slots, block_size)
        used = [rows.num_context + rows.num_rows for rows in sequences]
        table = np.zeros((len(sequences), max(len(rows.blocks) for rows in sequences)), dtype=np.int32)
        for line, rows in zip(table, sequences, strict=True):
            line[: len(rows.blocks)] = rows.blocks
        return cls(
            tensor(blocks),
            tensor(offsets),
            tensor(np.array([0, *(rows.end_row for rows in sequences)], dtype=np.int32)),
            tensor(np.array(used, dtype=np.int32)),
            tensor(table),
            max(rows.num_rows for rows in sequences),
            max(used),
        )


class VarlenAttention:
    """Reads and writes `kv` where `rows` say. Made once a step or once a graph, called by every layer."""

    def __init__(self, kv: torch.Tensor, rows: VarlenRows) -> None:
        self._kv = kv
        self._rows = rows

    @classmethod
    def of(cls, kv: torch.Tensor, batch: StepBatch) -> VarlenAttention:
        return cls(kv, VarlenRows.of(batch, kv.shape[4], kv.device))

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """`query` [heads, T, head_dim], `key` and `value` [KV heads, T, head_dim]; returns [T, heads, head_dim]."""
        rows = self._rows
        self._kv[rows.blocks, layer, :, :, rows.offsets] = torch.stack((key, value)).permute(2, 0, 1, 3)
        keys, values = self._kv[:, layer].transpose(2, 3).unbind(1)  # [blocks, block_size, KV heads, head_dim]
        output = varlen_attn(
            query.transpose(0, 1).contiguous(),
            keys,
            values,
            rows.first_rows,
            None,
            rows.max_rows,
            rows.max_used,
            scale=scale,
            window_size=(-1, 0),  # causal: a sequence's last row sees all of its tokens
            enable_gqa=True,
            seqused_k=rows.used,
            block_table=rows.table,
            num_splits=1,  # a row's result does not depend on what else the step computes
        )
        assert isinstance(output, torch.Tensor)
        return output
