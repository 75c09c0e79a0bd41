"""Each swap against the module that it replaces, and what must not be swapped."""

from pathlib import Path

import pytest
import torch
from torch import nn

from triptych.config import ModelConfig
from triptych.models.family import Part
from triptych.models.registry import open_model
from triptych.models.swaps import LinearPatchEmbed, OneDNNLinear, swap_linears, swap_patch_embed, swap_rms_norms
from triptych.models.weights import load_part

CPU = torch.device("cpu")
DTYPES = [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)]


class PlainRMSNorm(nn.Module):
    """As transformers writes it."""

    def __init__(self, size: int, shift: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = 1e-6
        self.shift = shift

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        as_float = hidden.float()
        normed = as_float * torch.rsqrt(as_float.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.shift) * normed.to(hidden.dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_rms_norm(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    norm = PlainRMSNorm(96).to(dtype)
    module = nn.Sequential(norm)
    assert swap_rms_norms(module) == 1
    hidden = torch.randn(5, 96, dtype=dtype) * 3
    torch.testing.assert_close(module(hidden), norm(hidden), rtol=tolerance, atol=tolerance)


def test_a_norm_that_adds_one_to_its_weight_stays() -> None:
    module = nn.Sequential(PlainRMSNorm(16, shift=1.0))
    assert swap_rms_norms(module) == 0


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_patch_embed(dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv3d(3, 8, kernel_size=(2, 4, 4), stride=(2, 4, 4), bias=bias).to(dtype)
    module = nn.Sequential(convolution)
    assert swap_patch_embed(module) == 1
    assert isinstance(module[0], LinearPatchEmbed)
    patches = torch.randn(7, 3, 2, 4, 4, dtype=dtype)
    torch.testing.assert_close(module(patches), convolution(patches).view(7, 8), rtol=tolerance, atol=tolerance)


def test_overlapping_kernels_stay() -> None:
    assert swap_patch_embed(nn.Sequential(nn.Conv3d(3, 8, kernel_size=2, stride=1))) == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear(dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias).to(dtype)
    module = nn.Sequential(linear)
    assert swap_linears(module) == 1
    assert isinstance(module[0], OneDNNLinear)
    for shape in ((1, 64), (3, 64), (1, 40, 64)):
        rows = torch.randn(shape, dtype=dtype)
        with torch.inference_mode():
            torch.testing.assert_close(module(rows), linear(rows), rtol=tolerance, atol=tolerance)


def test_every_norm_and_linear_of_a_model_is_swapped(folder: Path) -> None:
    spec = open_model(str(folder), ModelConfig())
    language = load_part(spec, Part.LANGUAGE, CPU).module
    num_norms = sum(type(m).__name__.endswith("RMSNorm") for m in language.modules())
    num_linears = sum(isinstance(m, nn.Linear) for m in language.modules())
    assert swap_rms_norms(language) == num_norms > 0
    assert swap_linears(language) == num_linears > 0
    assert swap_patch_embed(load_part(spec, Part.VISION, CPU).module) == 1
