"""Layers of transformers' models swapped for the kernels of `triptych.kernels`: a call a layer, weights packed once.

Used by `engine/runner.py` and `models/vision.py` on a CPU that has the instructions. A layer is taken over only if its
parts are those that the kernels compute; anything else is left to torch. Called once, after loading.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from triptych.kernels import library
from triptych.kernels.library import Activation, Kernels
from triptych.models.language import LanguageModel
from triptych.models.swaps import FusedRMSNorm, LinearPatchEmbed, swap

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_ACTIVATIONS = {"SiLUActivation": Activation.SILU, "SiLU": Activation.SILU, "GELUTanh": Activation.GELU_TANH}
_GATED_BLOCK = 32  # outputs of gates, then as many of ups: half a panel each
_STEP = 2  # inputs that one product takes; a row is a whole number of them


def kernels_for(dtype: torch.dtype) -> Kernels:
    return library.kernels(_DTYPES[dtype])


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in panels; the result of a row does not depend on the rows beside it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, order: NDArray[np.int64] | None = None) -> None:
        """`order` names for each output the row of `weight` and `bias` that it comes from.

        Raises ValueError for an odd number of inputs, which bf16 products cannot read.
        """
        super().__init__()
        if weight.shape[1] % _STEP:
            raise ValueError(f"a weight of {weight.shape[1]} inputs cannot be packed: the number is odd")
        self._kernels = kernels_for(weight.dtype)
        self.dtype = weight.dtype
        self.num_inputs = weight.shape[1]
        self.num_outputs = weight.shape[0] if order is None else len(order)
        weight = weight.detach().contiguous()
        self.panels = weight.new_empty(self._kernels.packed_elements(self.num_outputs, self.num_inputs))
        places = None if order is None else order.ctypes.data
        self._kernels.pack(weight.data_ptr(), places, self.num_outputs, self.num_inputs, self.panels.data_ptr())
        self.bias = bias
        if bias is not None and order is not None:
            self.bias = bias.detach()[torch.from_numpy(order)].contiguous()
        self.struct = library.Linear(self.panels.data_ptr(), _pointer(self.bias), self.num_outputs, self.num_inputs)
        self._reference = ctypes.byref(self.struct)

    @classmethod
    def of(cls, linear: nn.Linear | LinearPatchEmbed) -> PackedLinear:
        return cls(linear.weight, linear.bias)

    @classmethod
    def gated(cls, gate: nn.Linear, up: nn.Linear) -> PackedLinear:
        """Both in one, in the order in which `gated` of csrc/layers.h reads them."""
        size = gate.out_features
        places = np.arange(-(-size // _GATED_BLOCK) * _GATED_BLOCK).reshape(-1, 1, _GATED_BLOCK)
        order = np.where(places < size, places + np.array([0, size]).reshape(1, 2, 1), 2 * size)
        weight = torch.cat((gate.weight, up.weight, gate.weight.new_zeros(1, gate.in_features)))
        bias = None
        if gate.bias is not None and up.bias is not None:
            bias = torch.cat((gate.bias, up.bias, gate.bias.new_zeros(1)))
        return cls(weight, bias, np.ascontiguousarray(order.reshape(-1), dtype=np.int64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., num_inputs] to [..., num_outputs]."""
        rows = rows.to(self.dtype).contiguous()
        output = rows.new_empty((*rows.shape[:-1], self.num_outputs))
        num_rows = rows.numel() // self.num_inputs
        self._kernels.linear(self._reference, rows.data_ptr(), num_rows, Activation.NONE, output.data_ptr())
        return output

    def to_float32(self, rows: torch.Tensor) -> torch.Tensor:
        """As `forward`, with results that were not rounded to the dtype of the weight."""
        rows = rows.contiguous()
        output = torch.empty((*rows.shape[:-1], self.num_outputs), dtype=torch.float32)
        num_rows = rows.numel() // self.num_inputs
        self._kernels.linear_float(self._reference, rows.data_ptr(), num_rows, output.data_ptr())
        return output


class PackedPatchEmbed(PackedLinear):
    """`LinearPatchEmbed` on a packed weight."""

    @property
    def weight(self) -> torch.Tensor:
        """Transformers asks for its dtype."""
        return self.panels

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return super().forward(patches.flatten(1))


def _pointer(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


# -- the language model ------------------------------------------------------------------------------------------------


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
    sampled: QueryRows  # the rows whose logits are wanted


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
            *(_pointer(norm) for norm in self.norms),
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
        self._kv = kv
        self._angles_dtype = torch.empty(0, dtype=torch.float32)

    def forward(
        self, embeds: torch.Tensor, rows: StepRows, deepstack: Sequence[tuple[int, torch.Tensor]]
    ) -> torch.Tensor:
        """Writes the KV of all rows [T, hidden], which are overwritten; logits float32 [sampled rows, vocabulary].

        `deepstack` is a first row and [n, layers * hidden] each: what is added to n rows after the first layers.
        """
        positions = torch.from_numpy(rows.positions)
        cos, sin = (angles[0].contiguous() for angles in self._rotary(self._angles_dtype, positions[:, None]))
        every = self._step(rows, rows.every, cos, sin)
        hidden_size = embeds.shape[1]
        num_deepstack = deepstack[0][1].shape[1] // hidden_size if deepstack else 0
        hidden, last = embeds, len(self._layers) - 1
        is_selected = num_deepstack <= last
        for index, layer in enumerate(self._layers):
            step = every
            if index == last and is_selected:
                step = self._step(rows, rows.sampled, cos, sin)
            kv = self._kv.data_ptr() + index * self._kv.stride(1) * self._kv.element_size()
            self._kernels.decoder_layer(layer.reference, ctypes.byref(step), kv, hidden.data_ptr())
            if index < num_deepstack:
                for row, columns in deepstack:
                    added = columns[:, index * hidden_size : (index + 1) * hidden_size]
                    hidden[row : row + len(columns)] += added
        assert rows.sampled.selected is not None
        num_sampled = len(rows.sampled.selected)
        hidden = hidden[:num_sampled] if is_selected else hidden[torch.from_numpy(rows.sampled.selected)]
        normed = torch.empty_like(hidden)
        weight, eps = self._norm_weight.data_ptr(), self._norm_eps
        self._kernels.norm(hidden.data_ptr(), num_sampled, weight, None, hidden_size, eps, normed.data_ptr())
        return self._head.to_float32(normed)

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
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES:
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
    if _ACTIVATIONS.get(type(mlp.act_fn).__name__) != Activation.SILU:
        return f"{type(mlp.act_fn).__name__} is not SiLU"
    if not isinstance(layer.input_layernorm, FusedRMSNorm):
        return "the norms are not RMS norms"
    if any(linear.in_features % _STEP for linear in (attention.q_proj, attention.o_proj, mlp.down_proj)):
        return "a layer has an odd number of inputs"
    head_dim = attention.head_dim
    if head_dim % library.TILE or head_dim > library.MAX_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of {library.TILE}"
    return ""


# -- the vision tower --------------------------------------------------------------------------------------------------


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
            *(_pointer(tensor) for tensor in self.norms),
            attention.qkv.in_features,
            attention.num_heads,
            head_dim,
            down.in_features,
            int(is_gated),
            _ACTIVATIONS[type(mlp.act_fn).__name__],
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
    activation = _ACTIVATIONS.get(type(getattr(mlp, "act_fn", None)).__name__)
    gated = all(isinstance(getattr(mlp, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj"))
    plain = all(isinstance(getattr(mlp, name, None), nn.Linear) for name in ("linear_fc1", "linear_fc2"))
    norms = all(isinstance(getattr(module, name, None), (nn.LayerNorm, FusedRMSNorm)) for name in ("norm1", "norm2"))
    head_dim = attention.qkv.in_features // attention.num_heads
    is_known = (gated and activation == Activation.SILU) or (plain and activation is not None)
    widths = (attention.qkv, mlp.down_proj if gated else mlp.linear_fc2) if is_known else ()
    return norms and is_known and head_dim % library.TILE == 0 and all(w.in_features % _STEP == 0 for w in widths)


def swap_vision(tower: nn.Module, dtype: torch.dtype) -> int:
    """Swap the blocks, the patch embedding and the linear layers of a tower on a CPU; returns how many."""
    if not library.available() or dtype not in _DTYPES:
        return 0

    def native(child: nn.Module) -> nn.Module | None:
        if _is_vision_block(child):
            return NativeVisionBlock(child)
        if isinstance(child, LinearPatchEmbed):
            return PackedPatchEmbed.of(child)
        return None

    def packed(child: nn.Module) -> nn.Module | None:
        is_packable = type(child) is nn.Linear and child.in_features % _STEP == 0
        return PackedLinear.of(cast(nn.Linear, child)) if is_packable else None

    return swap(tower, native) + swap(tower, packed)
