"""Paged attention against plain attention over each sequence's own keys and values."""

from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch.nn import functional

from triptych.engine import varlen_attention
from triptych.engine.attention import StepAttention
from triptych.engine.batch import SequenceChunk, StepBatch
from triptych.engine.varlen_attention import VarlenAttention

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
    keys, values = (t.float().repeat_interleave(len(query) // len(t), 0) for t in (keys, values))
    return functional.scaled_dot_product_attention(query.float(), keys, values, attn_mask=mask, scale=scale).transpose(
        0, 1
    )


def documented_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """What torch says of its `varlen_attn` with a table of pages, which no CPU has."""
    assert (cu_seq_k, window_size, enable_gqa, num_splits) == (None, (-1, 0), True, 1)
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert query.is_contiguous()
    assert key.stride(-1) == 1
    bounds = cu_seq_q.tolist()
    assert (bounds[0], bounds[-1]) == (0, len(query))
    assert max_k >= int(seqused_k.max())
    assert max_q == max(end - first for first, end in pairwise(bounds))
    output = torch.empty_like(query)
    for i, (first, end) in enumerate(pairwise(bounds)):
        pages = block_table[i, : -(-int(seqused_k[i]) // key.shape[1])]
        keys, values = (t[pages].flatten(0, 1)[: seqused_k[i]].transpose(0, 1) for t in (key, value))
        output[first:end] = _plain(query[first:end].transpose(0, 1), keys, values, scale).to(query.dtype)
    return output


@pytest.mark.parametrize("way", ["cpu", "masked", "varlen"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_equals_plain_attention(
    dtype: torch.dtype, tolerance: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`masked` and `varlen` are the ways of other devices than the CPU, here run on the CPU."""
    monkeypatch.setattr(varlen_attention, "varlen_attn", documented_varlen_attn)
    _check_steps(dtype, tolerance, way, torch.device("cpu"), BLOCK_SIZE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: whether torch's kernel takes our pages")
@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_varlen_equals_plain_attention_on_a_gpu(block_size: int) -> None:
    _check_steps(torch.bfloat16, 2e-2, "varlen", torch.device("cuda"), block_size)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "expected"),
    [
        ("cuda", torch.bfloat16, 128, True),
        ("cuda", torch.float16, 256, True),
        ("cuda", torch.float32, 128, False),
        ("cuda", torch.bfloat16, 512, False),
        ("cpu", torch.bfloat16, 128, False),
    ],
)
def test_where_varlen_attention_runs(device: str, dtype: torch.dtype, head_dim: int, expected: bool) -> None:
    kv = SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 1, 2, 1, 16, head_dim))
    assert varlen_attention.can_run(cast(torch.Tensor, kv)) is expected


def _check_steps(dtype: torch.dtype, tolerance: float, way: str, device: torch.device, block_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    kv = torch.full((NUM_BLOCKS, LAYERS, 2, KV_HEADS, block_size, HEAD_DIM), torch.nan, dtype=dtype, device=device)
    order = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    tables = [order[i * 12 : (i + 1) * 12] for i in range(4)]
    history: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for step in STEPS:
        chunks = [
            SequenceChunk([0] * n, context, np.zeros((3, n), dtype=np.int64), tables[i], [], False)
            for i, (context, n) in enumerate(step)
        ]
        batch = StepBatch.pack(chunks, block_size)
        owner = {rows.first_row: i for rows in batch.sequences for i in range(4) if rows.blocks[0] == tables[i][0]}
        attention: StepAttention | VarlenAttention
        if way == "varlen":
            attention = VarlenAttention.of(kv, batch)
        else:
            attention = StepAttention(kv, batch)
            attention._is_cpu = way == "cpu"
        for layer in range(LAYERS):
            total = len(batch.token_ids)
            query = torch.randn(HEADS, total, HEAD_DIM, generator=generator).to(dtype)
            key, value = torch.randn(2, KV_HEADS, total, HEAD_DIM, generator=generator).to(dtype).unbind()
            output = attention(layer, query.to(device), key.to(device), value.to(device), 0.3).cpu()
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
