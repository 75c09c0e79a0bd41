"""Each kernel against torch, for sizes that fill no panel and no tile; no row depends on its neighbours."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.kernels import why_no_kernels
from triptych.kernels import library
from triptych.kernels.library import Activation
from triptych.models.native_vision import NativeVisionBlock
from triptych.models.packed_linear import PackedLinear, kernels_for
from triptych.models.swaps import swap_rms_norms

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
SIZES = [(64, 32), (65, 34), (1, 2), (320, 96), (31, 1700), (130, 6)]
ROWS = [1, 2, 5, 6, 7, 13, 50, 61]


@pytest.fixture(autouse=True, params=["vectors", "tiles"])
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    if not library.available():
        pytest.skip(why_no_kernels())
    wants_tiles = request.param == "tiles"
    if library.use_tiles(wants_tiles) != wants_tiles:
        pytest.skip("this processor has no AMX: would show the same of products in its tile registers")
    yield
    library.use_tiles(True)
    library.set_num_threads(1)


def test_a_machine_that_can_build_and_run_the_kernels_has_them() -> None:
    assert library.available(), "not built: python -m triptych.kernels.build"


def _close(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    scale = max(1.0, float(expected.float().abs().max()))
    torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_linear(dtype: torch.dtype, tolerance: float, size: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(size[1], size[0], bias=bias).to(dtype)
    packed = PackedLinear.of(linear)
    for rows in ROWS:
        x = torch.randn(rows, size[1], dtype=dtype)
        _close(packed(x), linear(x), tolerance)
        if not bias:
            _close(packed.to_float32(x), x.float() @ linear.weight.float().T, 1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(
    ("activation", "reference"),
    [
        (Activation.SILU, functional.silu),
        (Activation.GELU_TANH, lambda x: functional.gelu(x, approximate="tanh")),
    ],
)
def test_activations(dtype: torch.dtype, tolerance: float, activation: int, reference: Any) -> None:
    """Over the whole range, far outside of which a power would overflow."""
    values = torch.cat([torch.linspace(-12, 12, 990), torch.tensor([-1e30, -500.0, -89.0, 0.0, 89.0, 500.0])])
    identity = PackedLinear(torch.tensor([[1, 0]], dtype=dtype), None)
    x = torch.stack([values, torch.zeros_like(values)], dim=1).to(dtype)
    out = torch.empty(len(x), dtype=dtype)
    kernels_for(dtype).linear(identity._reference, x.data_ptr(), len(x), activation, out.data_ptr())
    torch.testing.assert_close(out.float(), reference(x[:, 0].float()), rtol=tolerance, atol=tolerance)


def test_an_odd_number_of_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match="odd"):
        PackedLinear(torch.ones(4, 3), None)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1, 16, 96, 1000])
def test_norms(dtype: torch.dtype, tolerance: float, bias: bool, size: int) -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(9, size, dtype=dtype) * 3 + 1, torch.randn(size, dtype=dtype)
    shift = torch.randn(size, dtype=dtype) if bias else None
    out = torch.empty_like(x)
    pointer = None if shift is None else shift.data_ptr()
    kernels_for(dtype).norm(x.data_ptr(), 9, weight.data_ptr(), pointer, size, 1e-6, out.data_ptr())
    if shift is None:
        expected = functional.rms_norm(x.float(), (size,), weight.float(), 1e-6)
    else:
        expected = functional.layer_norm(x.float(), (size,), weight.float(), shift.float(), 1e-6)
    _close(out, expected, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    packed = PackedLinear(torch.randn(200, 1666, dtype=dtype), None)  # more than one slice of the inputs
    x = torch.randn(100, 1666, dtype=dtype)
    whole = packed(x)
    for rows in (1, 2, 3, 6, 11, 49):
        assert torch.equal(packed(x[:rows]), whole[:rows])


def _tower(module: str, config_class: str, block_class: str, dtype: torch.dtype, **config: Any) -> tuple[Any, Any]:
    module = f"transformers.models.{module}"
    settings = getattr(import_module(module + ".configuration_" + module.rpartition(".")[2]), config_class)(**config)
    settings._attn_implementation = "sdpa"
    block = getattr(import_module(module + ".modeling_" + module.rpartition(".")[2]), block_class)(settings)
    block = block.to(dtype).eval()
    for parameter in block.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return settings, block


TOWERS = [
    ("qwen3_vl", "Qwen3VLVisionConfig", "Qwen3VLVisionBlock", {"hidden_act": "gelu_pytorch_tanh"}),
    ("qwen2_5_vl", "Qwen2_5_VLVisionConfig", "Qwen2_5_VLVisionBlock", {"hidden_act": "silu"}),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("module", "config_class", "block_class", "extra"), TOWERS)
@pytest.mark.parametrize("windows", [[1], [16, 3, 64], [300], [25, 600]])
@pytest.mark.parametrize("head_dim", [80, 64])  # five vectors, which no block of four covers; two tiles
@torch.inference_mode()
def test_vision_block(
    dtype: torch.dtype,
    tolerance: float,
    module: str,
    config_class: str,
    block_class: str,
    extra: dict[str, str],
    windows: list[int],
    head_dim: int,
) -> None:
    torch.manual_seed(4)
    hidden, heads = 2 * head_dim, 2
    _, block = _tower(
        module, config_class, block_class, dtype, hidden_size=hidden, num_heads=heads, intermediate_size=200, **extra
    )
    swap_rms_norms(block)
    bounds = torch.tensor([0, *windows]).cumsum(0)
    rows = int(bounds[-1])
    x = torch.randn(rows, hidden, dtype=dtype)
    angles = torch.randn(rows, hidden // heads // 2).repeat(1, 2)
    position = (angles.cos(), angles.sin())
    expected = block(x, cu_seqlens=bounds.int(), position_embeddings=position)
    native = NativeVisionBlock(cast(nn.Module, block))
    one_thread = native(x.clone(), bounds.int(), position)
    _close(one_thread, expected, tolerance)
    library.set_num_threads(2)
    assert torch.equal(native(x.clone(), bounds.int(), position), one_thread)


@torch.inference_mode()
def test_a_call_borrows_the_cores_that_are_free_and_gives_them_back() -> None:
    core = max(os.sched_getaffinity(0))
    packed, x = PackedLinear(torch.randn(640, 96), None), torch.randn(20, 96)
    alone = packed(x)
    uses = (ctypes.c_uint8 * (core + 1))()
    library.borrow(uses, 7, [core])

    def threads_there() -> set[int]:
        return {task for task in map(int, os.listdir("/proc/self/task")) if os.sched_getaffinity(task) == {core}}

    try:
        before = threads_there()
        for use in (1, 8):  # the owner's, another borrower's
            uses[core] = use
            assert torch.equal(packed(x), alone)
            assert (uses[core], threads_there()) == (use, before)
        uses[core] = 0
        assert torch.equal(packed(x), alone)
        assert uses[core] == 0
        assert threads_there()
    finally:
        library.borrow(None, 0, [])


HEADS, KV_HEADS, HIDDEN, INNER = 4, 2, 96, 160


class _Layer:
    """A decoder layer of random weights, and one sequence's KV in blocks that held something else before."""

    def __init__(self, dtype: torch.dtype, head_dim: int, block_size: int, num_tokens: int) -> None:
        torch.manual_seed(5)
        self.dtype, self.block_size, self.head_dim = dtype, block_size, head_dim
        shapes = [(HEADS * head_dim, HIDDEN), (2 * KV_HEADS * head_dim, HIDDEN), (HIDDEN, HEADS * head_dim)]
        weights = [torch.randn(n, k) * k**-0.5 for n, k in [*shapes, (2 * INNER, HIDDEN), (HIDDEN, INNER)]]
        self.linears = [PackedLinear(weight.to(torch.bfloat16).to(dtype), None) for weight in weights]
        self.norms = [torch.ones(size, dtype=dtype) for size in (HIDDEN, HIDDEN, head_dim, head_dim)]
        structs, norms = [linear.struct for linear in self.linears], [norm.data_ptr() for norm in self.norms]
        sizes = (HIDDEN, HEADS, KV_HEADS, head_dim, INNER)
        self.struct = library.DecoderLayer(*structs, *norms, *sizes, 1e-6, head_dim**-0.5)
        angles = torch.randn(num_tokens, head_dim // 2).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        num_blocks = -(-num_tokens // block_size)
        self.table = np.random.default_rng(6).permutation(num_blocks).astype(np.int64)
        self.kv = torch.full((num_blocks, 2, KV_HEADS, block_size, head_dim), float("nan"), dtype=dtype)

    def run(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        count, hidden = len(rows), rows.to(self.dtype)
        tokens = np.arange(start, start + count)
        slots = self.table[tokens // self.block_size] * self.block_size + tokens % self.block_size
        queries = np.array([[0, count, start, 0]], dtype=np.int64)
        cos, sin = self.cos[start : start + count].contiguous(), self.sin[start : start + count].contiguous()
        step = library.Step(
            *(cos.data_ptr(), sin.data_ptr(), slots.ctypes.data, queries.ctypes.data, self.table.ctypes.data, None),
            *(count, 1, 0, self.block_size, self.kv.stride(0)),
        )
        kernels = kernels_for(self.dtype)
        kernels.decoder_layer(ctypes.byref(self.struct), ctypes.byref(step), self.kv.data_ptr(), hidden.data_ptr())
        return hidden


@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_decoder_layer_in_chunks(block_size: int, head_dim: int) -> None:
    """No bit depends on the chunks, nor on what the KV blocks held; bfloat16 is float32 up to rounding."""
    num_tokens = 611  # more than two spans of keys, and an odd number of tiles
    rows = torch.randn(num_tokens, HIDDEN)
    whole = _Layer(torch.bfloat16, head_dim, block_size, num_tokens).run(rows, 0)
    _close(whole, _Layer(torch.float32, head_dim, block_size, num_tokens).run(rows.bfloat16(), 0), 2e-2)
    for chunks in ([0, 17, 18, 50, 300, 610, 611], [0, 256, 257, 259, 263, 290, 575, 576, 611]):
        layer = _Layer(torch.bfloat16, head_dim, block_size, num_tokens)
        for start, end in pairwise(chunks):
            assert torch.equal(layer.run(rows[start:end], start), whole[start:end])
