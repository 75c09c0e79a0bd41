"""Linear layers on packed weights, run by `triptych.kernels`.

Swapped in by `native_language.py` and `native_vision.py`, after loading, on a CPU that has the instructions.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from triptych.kernels import library
from triptych.kernels.library import Activation, Kernels
from triptych.models import huge_pages
from triptych.models.swaps import LinearPatchEmbed

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
ACTIVATIONS = {"SiLUActivation": Activation.SILU, "SiLU": Activation.SILU, "GELUTanh": Activation.GELU_TANH}
STEP = 2  # inputs that one product takes; a row is a whole number of them

_GATED_BLOCK = 32  # outputs of gates, then as many of ups: half a panel each


def kernels_for(dtype: torch.dtype) -> Kernels:
    return library.kernels(DTYPES[dtype])


def pointer(tensor: torch.Tensor | None) -> int | None:
    """For a structure of the kernels; the tensor has to outlive it."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in panels; the result of a row does not depend on the rows beside it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, order: NDArray[np.int64] | None = None) -> None:
        """`order` names for each output the row of `weight` and `bias` that it comes from.

        Raises ValueError for an odd number of inputs, which bf16 products cannot read.
        """
        super().__init__()
        if weight.shape[1] % STEP:
            raise ValueError(f"a weight of {weight.shape[1]} inputs cannot be packed: the number is odd")
        self._kernels = kernels_for(weight.dtype)
        self.dtype = weight.dtype
        self.num_inputs = weight.shape[1]
        self.num_outputs = weight.shape[0] if order is None else len(order)
        weight = weight.detach().contiguous()
        self.panels = huge_pages.empty(self._kernels.packed_elements(self.num_outputs, self.num_inputs), weight.dtype)
        places = None if order is None else order.ctypes.data
        self._kernels.pack(weight.data_ptr(), places, self.num_outputs, self.num_inputs, self.panels.data_ptr())
        self.bias = bias
        if bias is not None and order is not None:
            self.bias = bias.detach()[torch.from_numpy(order)].contiguous()
        self.struct = library.Linear(self.panels.data_ptr(), pointer(self.bias), self.num_outputs, self.num_inputs)
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
