"""Attention over paged KV: the one function that every decoder layer of transformers calls in a step.

KV is one tensor [num_blocks, layers, 2, KV heads, block_size, head_dim]. A layer's new keys and values are written to
their slots, then each sequence attends to its own blocks. Runs in prefill and decode workers, under `engine/runner.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface

from triptych.engine import varlen_attention
from triptych.engine.batch import SequenceRows, StepBatch
from triptych.engine.varlen_attention import VarlenAttention

NAME = "triptych"  # of the attention implementation, as transformers knows it

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class _Sequence(NamedTuple):
    """One sequence of the step, with the rows of KV to gather for layer 0: keys and values of each head, by block."""

    rows: SequenceRows
    gather: torch.Tensor  # int64 [2 * KV heads * blocks]


def step_attention(kv: torch.Tensor, batch: StepBatch) -> StepAttention | VarlenAttention:
    """What the layers of one step call."""
    return VarlenAttention.of(kv, batch) if varlen_attention.can_run(kv) else StepAttention(kv, batch)


class StepAttention:
    """Reads and writes `kv` for one step. Made once a step, called by every layer."""

    def __init__(self, kv: torch.Tensor, batch: StepBatch) -> None:
        num_blocks, num_layers, _, self._num_kv_heads, self._block_size, self._head_dim = kv.shape
        planes = 2 * self._num_kv_heads  # of one layer in one block, [block_size, head_dim] each
        self._planes = kv.view(num_blocks * num_layers * planes, self._block_size * self._head_dim)
        self._lines = kv.view(-1, self._head_dim)
        self._planes_a_layer = planes
        self._is_cpu = kv.device.type == "cpu"
        plane = np.arange(planes)[:, None]
        block_planes = num_layers * planes
        blocks, offsets = np.divmod(batch.slots, self._block_size)
        lines = (blocks * block_planes + plane) * self._block_size + offsets
        self._write_lines = torch.from_numpy(lines.reshape(-1)).to(kv.device)
        self._sequences = [
            _Sequence(rows, torch.from_numpy((rows.blocks * block_planes + plane).reshape(-1)).to(kv.device))
            for rows in batch.sequences
        ]

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """`query` [heads, T, head_dim], `key` and `value` [KV heads, T, head_dim]; returns [T, heads, head_dim]."""
        self._write(layer, key, value)
        output = query.new_empty((query.shape[1], query.shape[0], self._head_dim))
        for sequence in self._sequences:
            first, end = sequence.rows.first_row, sequence.rows.end_row
            span = slice(first, end)
            if not self._is_cpu:
                attended = self._attend_masked(layer, query[:, span], sequence, scale)
            elif sequence.rows.num_rows == 1:
                attended = self._attend_row(layer, query[:, span], sequence, scale)
            else:
                attended = self._attend_chunk(layer, query[:, span], key[:, span], value[:, span], sequence, scale)
            output[span] = attended.transpose(0, 1)
        return output

    def _write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        lines = self._write_lines + layer * self._planes_a_layer * self._block_size
        self._lines.index_copy_(0, lines, torch.stack((key, value)).view(-1, self._head_dim))

    def _gather(self, layer: int, sequence: _Sequence, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, KV heads, num_tokens, head_dim] of the sequence's first tokens."""
        planes = self._planes.index_select(0, sequence.gather + layer * self._planes_a_layer)
        keys, values = planes.view(2, 1, self._num_kv_heads, -1, self._head_dim)[..., :num_tokens, :].unbind()
        return keys, values

    def _packed(self, query: torch.Tensor) -> torch.Tensor:
        """The query heads that share a KV head, as rows of it: [1, KV heads, heads / KV heads * n, head_dim]."""
        return query.reshape(1, self._num_kv_heads, -1, self._head_dim)

    def _attend_row(self, layer: int, query: torch.Tensor, sequence: _Sequence, scale: float) -> torch.Tensor:
        keys, values = self._gather(layer, sequence, sequence.rows.num_context + 1)
        attended = functional.scaled_dot_product_attention(self._packed(query), keys, values, scale=scale)
        return attended.reshape(query.shape)

    def _attend_chunk(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sequence: _Sequence,
        scale: float,
    ) -> torch.Tensor:
        """Causally inside the chunk, without a mask over the context, joined by the log of each one's sum."""
        packed = self._packed(query)
        heads = packed.view(self._num_kv_heads, -1, *query.shape[1:])
        own_keys, own_values = (t[:, None].expand(heads.shape) for t in (key, value))
        own, own_lse = _flash(heads, own_keys, own_values, 0.0, True, scale=scale)
        num_context = sequence.rows.num_context
        if num_context == 0:
            return cast(torch.Tensor, own).reshape(query.shape)
        keys, values = self._gather(layer, sequence, num_context)
        context, context_lse = _flash(packed, keys, values, 0.0, False, scale=scale)
        weight = torch.sigmoid(own_lse - context_lse.view(own_lse.shape))[..., None]
        joined = torch.lerp(context.reshape(own.shape).float(), own.float(), weight)
        return joined.to(query.dtype).view(query.shape)

    def _attend_masked(self, layer: int, query: torch.Tensor, sequence: _Sequence, scale: float) -> torch.Tensor:
        """The plain way, on any device: gather everything, mask what lies ahead."""
        num_context, num_rows = sequence.rows.num_context, sequence.rows.num_rows
        keys, values = self._gather(layer, sequence, num_context + num_rows)
        mask = None
        if num_rows > 1:
            shape = (num_rows, num_context + num_rows)
            mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(num_context)
        repeats = query.shape[0] // self._num_kv_heads
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        return functional.scaled_dot_product_attention(query[None], keys, values, attn_mask=mask, scale=scale)[0]


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    step: StepAttention | VarlenAttention,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [1, heads, T, head_dim] in, [1, T, heads, head_dim] and no weights out."""
    return step(module.layer_idx, query[0], key[0], value[0], scaling)[None], None


def register_attention() -> None:
    """Make NAME known to transformers. No mask function goes with it, so that no mask is built."""
    AttentionInterface.register(NAME, paged_attention)
