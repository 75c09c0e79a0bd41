"""Attention over paged KV in one call of torch's flash attention for all sequences of a step: for CUDA, in 16 bits.

The interface of `StepAttention` in `attention.py`, which makes one of these on such a device. **Not measured, and never
run on a device**: tests run it against what torch documents of `varlen_attn`; the one that needs a GPU is marked so.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from triptych.engine.batch import StepBatch

DTYPES = (torch.float16, torch.bfloat16)  # flash attention has no other
MAX_HEAD_DIM = 256


def can_run(kv: torch.Tensor) -> bool:
    return kv.device.type == "cuda" and kv.dtype in DTYPES and kv.shape[-1] <= MAX_HEAD_DIM


class VarlenAttention:
    """Reads and writes `kv` for one step. Made once a step, called by every layer."""

    def __init__(self, kv: torch.Tensor, batch: StepBatch) -> None:
        self._kv = kv
        blocks, offsets = np.divmod(batch.slots, kv.shape[4])
        self._blocks, self._offsets = self._tensor(blocks), self._tensor(offsets)
        sequences = batch.sequences  # in the order of their rows
        used = [rows.num_context + rows.num_rows for rows in sequences]
        table = np.zeros((len(sequences), max(len(rows.blocks) for rows in sequences)), dtype=np.int32)
        for line, rows in zip(table, sequences, strict=True):
            line[: len(rows.blocks)] = rows.blocks
        self._first_rows = self._tensor(np.array([0, *(rows.end_row for rows in sequences)], dtype=np.int32))
        self._used, self._table = self._tensor(np.array(used, dtype=np.int32)), self._tensor(table)
        self._max_rows, self._max_used = max(rows.num_rows for rows in sequences), max(used)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._kv.device)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """`query` [heads, T, head_dim], `key` and `value` [KV heads, T, head_dim]; returns [T, heads, head_dim]."""
        self._kv[self._blocks, layer, :, :, self._offsets] = torch.stack((key, value)).permute(2, 0, 1, 3)
        keys, values = self._kv[:, layer].transpose(2, 3).unbind(1)  # [blocks, block_size, KV heads, head_dim]
        output = varlen_attn(
            query.transpose(0, 1).contiguous(),
            keys,
            values,
            self._first_rows,
            None,
            self._max_rows,
            self._max_used,
            scale=scale,
            window_size=(-1, 0),  # causal: a sequence's last row sees all of its tokens
            enable_gqa=True,
            seqused_k=self._used,
            block_table=self._table,
            num_splits=1,  # a row's result does not depend on what else the step computes
        )
        assert isinstance(output, torch.Tensor)
        return output
