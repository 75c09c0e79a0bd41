"""A language model whose decoder layers are run by `triptych.kernels`: one call a layer, weights packed once.

Made by `engine/runner.py` from the loaded model, on a CPU that has the instructions, if every layer is made of the
parts that the kernels compute.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from triptych.kernels import library
from triptych.kernels.library import Activation
from triptych.models.language import LanguageModel
from triptych.models.likeliest import Likeliest
from triptych.models.packed_linear import ACTIVATIONS, DTYPES, STEP, PackedLinear, kernels_for, pointer
from triptych.models.swaps import FusedRMSNorm

logger = logging.getLogger(__name__)


class QueryRows(NamedTuple):
    """What the last layer, or every layer, attends with; see `Step` in kernels/library.py."""

    queries: NDArray[np.int64]  # [num_queries, 4]
    selected: NDArray[np.int64] | None  # rows that go on; None: all


class StepRows(NamedTuple):
    """Where the packed rows of a step come from and where their KV goes."""

    positions: NDArray[np.int64]  # [3, T]
    slots: NDArray[np.int64]  # [T]
    block_table: NDArray[np.int64]  # of all sequences, one after the other
    every: QueryRows
    last: QueryRows  # of the last layer: the rows whose logits are wanted, or all


class _Decoder:
    """One decoder layer: its packed weights and the structure that describes them to the kernels."""

    def __init__(self, layer: nn.Module) -> None:
        attention, mlp = cast(Any, layer.self_attn), cast(Any, layer.mlp)
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        key, value = attention.k_proj, attention.v_proj
        bias = None if key.bias is None else torch.cat((key.bias, value.bias))
        self.linears = {
            "query": PackedLinear.of(attention.q_proj),
            "key_value": PackedLinear(torch.cat((key.weight, value.weight)), bias),
            "output": PackedLinear.of(attention.o_proj),
            "gate_up": PackedLinear.gated(mlp.gate_proj, mlp.up_proj),
            "down": PackedLinear.of(mlp.down_proj),
        }
        norms = (layer.input_layernorm, layer.post_attention_layernorm, query_norm, key_norm)
        self.norms = [None if norm is None else cast(Any, norm).weight for norm in norms]
        head_dim: int = attention.head_dim
        self.struct = library.DecoderLayer(
            *(linear.struct for linear in self.linears.values()),
            *(pointer(norm) for norm in self.norms),
            attention.q_proj.in_features,
            attention.q_proj.out_features // head_dim,
            key.out_features // head_dim,
            head_dim,
            mlp.down_proj.in_features,
            cast(Any, layer.input_layernorm).eps,
            attention.scaling,
        )
        self.reference = ctypes.byref(self.struct)


class NativeLanguage:
    """A `LanguageModel` whose decoder layers are the kernels'. Takes its weights over; it must not be used after."""

    def __init__(self, language: LanguageModel, kv: torch.Tensor) -> None:
        """`kv` [num_blocks, layers, 2, KV heads, block_size, head_dim]; its blocks will hold tiles, not rows."""
        model = cast(Any, language.model)
        dtype = language.embedding.weight.dtype
        self._kernels = kernels_for(dtype)
        self._rotary = model.rotary_emb
        self._norm_weight, self._norm_eps = model.norm.weight, model.norm.eps
        self._layers: list[_Decoder] = []
        for index in range(len(model.layers)):
            self._layers.append(_Decoder(model.layers[index]))
            model.layers[index] = nn.Identity()  # the weights that were packed go
        head = language.embedding if language.head is None else language.head
        self._head = PackedLinear(head.weight, None)
        self._likeliest = Likeliest(head.weight, self._head) if Likeliest.can_round(head.weight) else None
        self._kv = kv
        self._float = torch.empty(0, dtype=torch.float32)  # the angles' dtype, for the rotary module

    def forward(
        self, embeds: torch.Tensor, rows: StepRows, deepstack: Sequence[tuple[int, torch.Tensor]]
    ) -> torch.Tensor:
        """Writes the KV of all rows [T, hidden], which are overwritten; the rows that `last` selects, before the norm.

        `deepstack` is a first row and [n, layers * hidden] each: what is added to n rows after the first layers.
        """
        positions = torch.from_numpy(rows.positions)
        cos, sin = (angles[0].contiguous() for angles in self._rotary(self._float, positions[:, None]))
        every = self._step(rows, rows.every, cos, sin)
        hidden_size = embeds.shape[1]
        num_deepstack = deepstack[0][1].shape[1] // hidden_size if deepstack else 0
        hidden, last, selected = embeds, len(self._layers) - 1, rows.last.selected
        selects = selected is not None and num_deepstack <= last  # else deepstack adds to rows that were left out
        for index, layer in enumerate(self._layers):
            step = every
            if index == last and selects:
                step = self._step(rows, rows.last, cos, sin)
            kv = self._kv.data_ptr() + index * self._kv.stride(1) * self._kv.element_size()
            self._kernels.decoder_layer(layer.reference, ctypes.byref(step), kv, hidden.data_ptr())
            if index < num_deepstack:
                for row, columns in deepstack:
                    added = columns[:, index * hidden_size : (index + 1) * hidden_size]
                    hidden[row : row + len(columns)] += added
        if selected is None:
            return hidden
        return hidden[: len(selected)] if selects else hidden[torch.from_numpy(selected)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary] of what `forward` returned."""
        return self._head.to_float32(self._normed(hidden))

    def likeliest(self, hidden: torch.Tensor) -> list[int | None]:
        """The first of the largest logits of each row, where it is known without all of them."""
        if self._likeliest is not None and not self._likeliest.helps:
            logger.info("the bounds of this head leave too many logits open: greedy tokens are taken from all of them")
            self._likeliest = None
        return [None] * len(hidden) if self._likeliest is None else self._likeliest.tokens(self._normed(hidden))

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(hidden)
        weight, eps = self._norm_weight.data_ptr(), self._norm_eps
        self._kernels.norm(hidden.data_ptr(), len(hidden), weight, None, hidden.shape[1], eps, normed.data_ptr())
        return normed

    def _step(self, rows: StepRows, asking: QueryRows, cos: torch.Tensor, sin: torch.Tensor) -> library.Step:
        selected = asking.selected
        return library.Step(
            cos.data_ptr(),
            sin.data_ptr(),
            rows.slots.ctypes.data,
            asking.queries.ctypes.data,
            rows.block_table.ctypes.data,
            None if selected is None else selected.ctypes.data,
            len(rows.slots),
            len(asking.queries),
            0 if selected is None else len(selected),
            self._kv.shape[4],
            self._kv.stride(0),
        )


def why_not_native(language: LanguageModel, block_size: int) -> str:
    """Empty if `NativeLanguage` can take it over, else the reason why torch has to run it."""
    weight = language.embedding.weight
    if not library.available():
        return "the kernels were not built, or this processor cannot run them"
    if weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return f"the kernels do not run {weight.dtype} on {weight.device.type}"
    if block_size % library.TILE:
        return f"block_size {block_size} is not a multiple of {library.TILE}"
    for layer in cast(nn.ModuleList, language.model.layers):
        reason = _why_not_decoder(cast(Any, layer))
        if reason:
            return reason
    return "" if isinstance(language.model.norm, FusedRMSNorm) else "the last norm is not an RMS norm"


def _why_not_decoder(layer: Any) -> str:
    attention: Any = getattr(layer, "self_attn", None)
    mlp: Any = getattr(layer, "mlp", None)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    if attention is None or not all(isinstance(getattr(attention, name, None), nn.Linear) for name in names):
        return f"{type(layer).__name__} has no plain attention"
    if not all(isinstance(getattr(mlp, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")):
        return f"{type(layer).__name__} has no gated MLP"
    if ACTIVATIONS.get(type(mlp.act_fn).__name__) != Activation.SILU:
        return f"{type(mlp.act_fn).__name__} is not SiLU"
    if not isinstance(layer.input_layernorm, FusedRMSNorm):
        return "the norms are not RMS norms"
    if any(linear.in_features % STEP for linear in (attention.q_proj, attention.o_proj, mlp.down_proj)):
        return "a layer has an odd number of inputs"
    head_dim = attention.head_dim
    if head_dim % library.TILE or head_dim > library.MAX_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of {library.TILE}"
    return ""
