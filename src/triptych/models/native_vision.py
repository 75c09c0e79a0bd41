"""Blocks of a vision tower run by `triptych.kernels`: one call a block, weights packed once.

`models/vision.py` swaps them in after loading, on a CPU that has the instructions. Modules that are made of other parts
than the kernels compute stay with torch.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
from torch import nn

from triptych.kernels import library
from triptych.kernels.library import Activation
from triptych.models.packed_linear import (
    ACTIVATIONS,
    DTYPES,
    STEP,
    PackedLinear,
    PackedPatchEmbed,
    kernels_for,
    pointer,
)
from triptych.models.swaps import FusedRMSNorm, LinearPatchEmbed, swap


class NativeVisionBlock(nn.Module):
    """A block of a Qwen tower: norm, attention inside each window, norm, MLP."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        attention, mlp = cast(Any, block.attn), cast(Any, block.mlp)
        norms = [cast(Any, block.norm1), cast(Any, block.norm2)]
        is_gated = hasattr(mlp, "gate_proj")
        up = PackedLinear.gated(mlp.gate_proj, mlp.up_proj) if is_gated else PackedLinear.of(mlp.linear_fc1)
        down = mlp.down_proj if is_gated else mlp.linear_fc2
        self.linears = nn.ModuleList(
            [PackedLinear.of(attention.qkv), PackedLinear.of(attention.proj), up, PackedLinear.of(down)]
        )
        self.norms = [tensor for norm in norms for tensor in (norm.weight, getattr(norm, "bias", None))]
        head_dim = attention.qkv.in_features // attention.num_heads
        self._struct = library.VisionBlock(
            *(cast(PackedLinear, linear).struct for linear in self.linears),
            *(pointer(tensor) for tensor in self.norms),
            attention.qkv.in_features,
            attention.num_heads,
            head_dim,
            down.in_features,
            int(is_gated),
            ACTIVATIONS[type(mlp.act_fn).__name__],
            norms[0].eps,
            head_dim**-0.5,
        )
        self._kernels = kernels_for(attention.qkv.weight.dtype)

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: Any,
    ) -> torch.Tensor:
        """[patches, hidden], in place: the tower does not read what a block was given."""
        cos, sin = (angles.float().contiguous() for angles in position_embeddings)
        bounds = cu_seqlens.to(torch.int64).contiguous()
        hidden = hidden_states.contiguous()
        self._kernels.vision_block(
            ctypes.byref(self._struct),
            cos.data_ptr(),
            sin.data_ptr(),
            bounds.data_ptr(),
            len(bounds) - 1,
            hidden.data_ptr(),
        )
        return hidden


def _is_vision_block(module: Any) -> bool:
    attention: Any = getattr(module, "attn", None)
    mlp: Any = getattr(module, "mlp", None)
    if not isinstance(getattr(attention, "qkv", None), nn.Linear) or not hasattr(attention, "num_heads"):
        return False
    activation = ACTIVATIONS.get(type(getattr(mlp, "act_fn", None)).__name__)
    gated = all(isinstance(getattr(mlp, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj"))
    plain = all(isinstance(getattr(mlp, name, None), nn.Linear) for name in ("linear_fc1", "linear_fc2"))
    norms = all(isinstance(getattr(module, name, None), (nn.LayerNorm, FusedRMSNorm)) for name in ("norm1", "norm2"))
    head_dim = attention.qkv.in_features // attention.num_heads
    is_known = (gated and activation == Activation.SILU) or (plain and activation is not None)
    widths = (attention.qkv, mlp.down_proj if gated else mlp.linear_fc2) if is_known else ()
    return norms and is_known and head_dim % library.TILE == 0 and all(w.in_features % STEP == 0 for w in widths)


def swap_vision(tower: nn.Module, dtype: torch.dtype) -> int:
    """Swap the blocks, the patch embedding and the linear layers of a tower on a CPU; returns how many."""
    if not library.available() or dtype not in DTYPES:
        return 0

    def native(child: nn.Module) -> nn.Module | None:
        if _is_vision_block(child):
            return NativeVisionBlock(child)
        if isinstance(child, LinearPatchEmbed):
            return PackedPatchEmbed.of(child)
        return None

    def packed(child: nn.Module) -> nn.Module | None:
        is_packable = type(child) is nn.Linear and child.in_features % STEP == 0
        return PackedLinear.of(cast(nn.Linear, child)) if is_packable else None

    return swap(tower, native) + swap(tower, packed)
