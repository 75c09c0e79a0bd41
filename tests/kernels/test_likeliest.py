"""The likeliest token from bounds: the one that all logits say, whatever rows and weights look like."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels import why_no_kernels
from triptych.kernels import library
from triptych.models.likeliest import TRIED_ROWS, Likeliest
from triptych.models.packed_linear import PackedLinear

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(4096, 128), (1000, 48), (37, 16), (64, 96), (5003, 320)]  # vocabulary, hidden


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    if not library.available():
        pytest.skip(why_no_kernels())
    library.use_tiles(False)
    yield
    library.use_tiles(True)
    library.set_num_threads(1)


def _heads(weight: torch.Tensor) -> tuple[Likeliest, PackedLinear]:
    head = PackedLinear(weight, None)
    return Likeliest(weight, head), head


def _expected(head: PackedLinear, rows: torch.Tensor) -> list[int]:
    tokens: list[int] = head.to_float32(rows).argmax(-1).tolist()
    return tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@torch.inference_mode()
def test_the_same_as_of_all_logits(dtype: torch.dtype, size: tuple[int, int]) -> None:
    torch.manual_seed(3)
    likeliest, head = _heads(torch.randn(size).to(dtype))
    num_known = num_rows = 0
    for count in (1, 2, 15, 16, 17, 40):
        rows = torch.randn(count, size[1]).to(dtype)
        tokens, expected = likeliest.tokens(rows), _expected(head, rows)
        assert [token for token in tokens if token is not None] == [
            e for e, token in zip(expected, tokens, strict=True) if token is not None
        ]
        num_known, num_rows = num_known + len(tokens) - tokens.count(None), num_rows + count
        library.set_num_threads(2)
        assert likeliest.tokens(rows) == tokens
        library.set_num_threads(1)
        assert [likeliest.tokens(row[None])[0] for row in rows] == tokens, "neighbours matter"
    if size[0] >= 4096:
        assert num_known >= 0.9 * num_rows


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_inputs_and_weights_that_are_hard_to_round(dtype: torch.dtype) -> None:
    """Large columns, large rows, rows of any length, and logits that are nearly or exactly the same."""
    torch.manual_seed(4)
    weight = torch.randn(8192, 256)
    weight[:, 7] *= 40
    weight[::5] *= torch.logspace(-12, 1, len(weight[::5]))[:, None]
    weight[4000:4100] = weight[:100] * (1 + 2**-8)
    weight[5000:5100] = weight[:100]
    weight[6000:6500] = 0
    likeliest, head = _heads(weight.to(dtype))
    rows = torch.randn(300, 256)
    rows[:, 100] *= 50
    rows[:100] = weight[:100] + 0.1 * torch.randn(100, 256)
    rows *= torch.logspace(-10, 10, 300)[torch.randperm(300), None]
    rows = rows.to(dtype)
    tokens, expected = likeliest.tokens(rows), _expected(head, rows)
    assert all(token in (e, None) for token, e in zip(tokens, expected, strict=True))
    assert tokens.count(None) < 60


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_the_first_of_equal_logits(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    weight = torch.randn(2048, 64).to(dtype)
    rows = weight[[3, 700, 2040]] * 3
    weight[1000] = weight[1500] = weight[3]
    weight[701] = weight[700]
    weight[2047] = weight[2040]
    likeliest, _ = _heads(weight)
    assert likeliest.tokens(rows) == [3, 700, 2040]


@torch.inference_mode()
def test_what_bounds_cannot_say_is_left_to_the_head() -> None:
    """Rows of zeros or of what is not finite, and a head whose logits are all about the same."""
    likeliest, _ = _heads(torch.randn(4096, 64))
    rows = torch.randn(5, 64)
    rows[0] = 0
    rows[1, 5], rows[2, 5], rows[3, 63] = float("nan"), float("inf"), -float("inf")
    assert [token is None for token in likeliest.tokens(rows)] == [True, True, True, True, False]
    alike, _ = _heads(torch.ones(4096, 64))
    rows = torch.ones(TRIED_ROWS // 2, 64)
    helped = []
    for _ in range(2):
        assert set(alike.tokens(rows)) == {None}
        helped.append(alike.helps)
    assert helped == [True, False]
    for _ in range(8):
        likeliest.tokens(torch.randn(TRIED_ROWS // 4, 64))
    assert likeliest.helps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("of_weights", "of_rows"),
    [(1e20, 0), (1e30, 1e-32), (1e35, 1e5), (1e20, 1e20), (1e-30, 1e-5), (1e-38, 1), (1, 1e-38)],
)
@torch.inference_mode()
def test_numbers_of_any_size(dtype: torch.dtype, of_weights: float, of_rows: float) -> None:
    """What overflows or vanishes in bounds, or in the head, is left to it."""
    torch.manual_seed(6)
    likeliest, head = _heads((torch.randn(4096, 64) * of_weights).to(dtype))
    rows = (torch.randn(32, 64) * of_rows).to(dtype)
    assert all(t in (e, None) for t, e in zip(likeliest.tokens(rows), _expected(head, rows), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [3e37, float("nan"), float("inf")])
@pytest.mark.parametrize("output", [5, 4095])
@torch.inference_mode()
def test_an_output_whose_weights_are_too_large(dtype: torch.dtype, value: float, output: int) -> None:
    weight = torch.randn(4096, 64)
    weight[output] = value
    likeliest, head = _heads(weight.to(dtype))
    rows = (torch.rand(32, 64) * 1e-3).to(dtype)
    assert all(t in (e, None) for t, e in zip(likeliest.tokens(rows), _expected(head, rows), strict=True))


@torch.inference_mode()
def test_a_head_with_one_direction_in_common_is_given_up() -> None:
    """Bounds are right there, and wide: asking so many outputs one by one takes longer than all logits at once."""
    torch.manual_seed(7)
    common = torch.randn(1, 256)
    likeliest, head = _heads(common + 0.1 * torch.randn(8192, 256))
    rows = 0.5 * common + torch.randn(TRIED_ROWS, 256)
    assert all(t in (e, None) for t, e in zip(likeliest.tokens(rows), _expected(head, rows), strict=True))
    assert not likeliest.helps


@torch.inference_mode()
def test_a_hidden_size_that_is_no_whole_number_of_vectors_is_left_to_the_head() -> None:
    assert not Likeliest.can_round(torch.zeros(64, 24))
    assert Likeliest.can_round(torch.zeros(64, 48))
    if library.use_tiles(True):
        assert not Likeliest.can_round(torch.zeros(64, 48, dtype=torch.bfloat16))
