"""Paged attention against plain attention over each sequence's own keys and values."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from triptych.engine.attention import StepAttention
from triptych.engine.batch import SequenceChunk, StepBatch

HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK_SIZE, NUM_BLOCKS = 6, 2, 16, 3, 4, 64
STEPS = [
    [(0, 1)],
    [(0, 9), (0, 5)],
    [(9, 1), (5, 7), (0, 1)],
    [(10, 6), (12, 1), (1, 1), (0, 30)],
]  # for each sequence its context and new tokens


def _plain(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """[heads, n, d] over [KV heads, total, d], the last n tokens asking; returns [n, heads, d]."""
    n, total = query.shape[1], keys.shape[1]
    mask = torch.ones(n, total, dtype=torch.bool).tril(total - n)
    keys, values = (t.float().repeat_interleave(HEADS // KV_HEADS, 0) for t in (keys, values))
    return functional.scaled_dot_product_attention(query.float(), keys, values, attn_mask=mask, scale=scale).transpose(
        0, 1
    )


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_equals_plain_attention(dtype: torch.dtype, tolerance: float, masked: bool) -> None:
    """`masked` is the way of other devices than the CPU, here run on the CPU."""
    generator = torch.Generator().manual_seed(1)
    kv = torch.full((NUM_BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM), torch.nan, dtype=dtype)
    order = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    tables = [order[i * 12 : (i + 1) * 12] for i in range(4)]
    history: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for step in STEPS:
        chunks = [
            SequenceChunk([0] * n, context, np.zeros((3, n), dtype=np.int64), tables[i], [], False)
            for i, (context, n) in enumerate(step)
        ]
        batch = StepBatch.pack(chunks, BLOCK_SIZE)
        owner = {rows.first_row: i for rows in batch.sequences for i in range(4) if rows.blocks[0] == tables[i][0]}
        attention = StepAttention(kv, batch)
        attention._is_cpu = not masked
        for layer in range(LAYERS):
            total = len(batch.token_ids)
            query = torch.randn(HEADS, total, HEAD_DIM, generator=generator).to(dtype)
            key, value = torch.randn(2, KV_HEADS, total, HEAD_DIM, generator=generator).to(dtype).unbind()
            output = attention(layer, query, key, value, 0.3)
            assert output.shape == (total, HEADS, HEAD_DIM)
            for rows in batch.sequences:
                span, name = slice(rows.first_row, rows.end_row), (owner[rows.first_row], layer)
                empty = torch.empty(KV_HEADS, 0, HEAD_DIM, dtype=dtype)
                keys, values = history.get(name, (empty, empty))
                keys = torch.cat([keys[:, : rows.num_context], key[:, span]], 1)
                values = torch.cat([values[:, : rows.num_context], value[:, span]], 1)
                history[name] = keys, values
                expected = _plain(query[:, span], keys, values, 0.3)
                torch.testing.assert_close(output[span].float(), expected, rtol=tolerance, atol=tolerance)


def test_writes_its_slots_and_nothing_else() -> None:
    kv = torch.zeros((NUM_BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM))
    chunk = SequenceChunk([0] * 3, 3, np.zeros((3, 3), dtype=np.int64), [5, 9], [], False)
    key, value = torch.randn(2, KV_HEADS, 3, HEAD_DIM).unbind()
    attention = StepAttention(kv, StepBatch.pack([chunk], BLOCK_SIZE))
    attention(1, torch.randn(HEADS, 3, HEAD_DIM), key, value, 1.0)
    for kind, new in enumerate((key, value)):
        assert torch.equal(kv[5, 1, kind, :, 3], new[:, 0])
        assert torch.equal(kv[9, 1, kind, :, :2], new[:, 1:])
        kv[5, 1, kind, :, 3] = 0
        kv[9, 1, kind, :, :2] = 0
    assert not kv.any()
