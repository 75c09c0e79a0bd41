"""Modules of transformers swapped, after loading, for ones that compute the same in less time.

Each swap looks for what it can prove equal and leaves the rest as it is. Called by the runners of both parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.nn import functional

Replacement = Callable[[nn.Module], nn.Module | None]  # None: leave it


class FusedRMSNorm(nn.Module):
    """torch's own RMS norm, on the weight of another module."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class LinearPatchEmbed(nn.Module):
    """A convolution whose kernels tile its input is a linear map of each tile."""

    def __init__(self, convolution: nn.Conv3d) -> None:
        super().__init__()
        self.weight = nn.Parameter(convolution.weight.flatten(1), requires_grad=False)
        self.bias = convolution.bias

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """[n, channels, t, h, w], one kernel's reach each, to [n, out]."""
        return functional.linear(patches.flatten(1), self.weight, self.bias)


class OneDNNLinear(nn.Module):
    """A linear layer whose weight lies in the layout that oneDNN multiplies fastest by few rows, on a CPU."""

    def __init__(self, linear: nn.Linear, num_rows: int) -> None:
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), num_rows)
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], ""))


@torch.inference_mode()
def swap_rms_norms(module: nn.Module) -> int:
    """Swap every `*RMSNorm` that computes what torch's does; returns how many."""

    def fused(child: nn.Module) -> nn.Module | None:
        eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
        if not type(child).__name__.endswith("RMSNorm") or eps is None or not _is_plain_weight(child):
            return None
        swapped = FusedRMSNorm(cast(nn.Parameter, child.weight), float(eps))
        return swapped if _equal_on_a_row(child, swapped) else None

    return swap(module, fused)


def swap_patch_embed(module: nn.Module) -> int:
    """Swap every Conv3d whose kernels tile the input; returns how many."""

    def linear(child: nn.Module) -> nn.Module | None:
        if not isinstance(child, nn.Conv3d) or child.stride != child.kernel_size:
            return None
        plain = child.groups == 1 and child.padding == (0, 0, 0) and child.dilation == (1, 1, 1)
        return LinearPatchEmbed(child) if plain else None

    return swap(module, linear)


@torch.inference_mode()
def swap_linears(module: nn.Module, num_rows: int = 8) -> int:
    """Pack every Linear of a CPU module for forwards of about `num_rows` rows; returns how many.

    The packed weight is a copy, so pack where few rows are multiplied often: in decode workers.
    """
    if not torch._C._has_mkldnn:
        return 0

    def packed(child: nn.Module) -> nn.Module | None:
        if type(child) is not nn.Linear or child.weight.device.type != "cpu":
            return None
        return OneDNNLinear(child, num_rows)

    return swap(module, packed)


def swap(module: nn.Module, replacement: Replacement) -> int:
    """Register what `replacement` makes of each child in its place; returns how many it made."""
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            swapped = replacement(child)
            if swapped is not None:
                parent.register_module(name, swapped.eval())
                count += 1
    return count


def _is_plain_weight(module: nn.Module) -> bool:
    names = [name for name, _ in module.named_parameters()]
    return names == ["weight"] and cast(nn.Parameter, module.weight).ndim == 1


def _equal_on_a_row(module: nn.Module, swapped: nn.Module) -> bool:
    """Whether the two agree on one row, up to rounding: a norm may scale by weight + 1, or subtract a mean."""
    weight = cast(nn.Parameter, module.weight)
    row = torch.linspace(-1.5, 2.5, weight.numel(), dtype=torch.float32).to(weight)[None]
    tolerance = 1e-5 if weight.dtype is torch.float32 else 2e-2
    expected, got = module(row).float(), swapped(row).float()
    return torch.allclose(got, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
