"""Sampling against a plain reference that sorts everything, and that a draw depends on its own request alone."""

from collections.abc import Collection

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from triptych.engine import sampler
from triptych.engine.batch import SampleRow
from triptych.engine.sampler import uniforms
from triptych.types import SamplingParams

FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.7},
    {"top_k": 12, "top_p": 0.5},
    {"min_p": 0.1},
    {"min_p": 0.05, "top_p": 0.8, "top_k": 20, "temperature": 1.3},
]


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    num_output_tokens: list[int],
    eos_token_ids: Collection[int] = (),
) -> list[int]:
    """Token ids alone, of rows whose output is as long as is said."""
    rows = [SampleRow(p, [0] * n, 0) for p, n in zip(params, num_output_tokens, strict=True)]
    return [drawn.token_id for drawn in sampler.sample(logits, rows, eos_token_ids)]


def _params(**filters: float) -> SamplingParams:
    return SamplingParams(max_tokens=10, **filters)  # type: ignore[arg-type]


def _reference(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Probabilities of one row, in float64 and in so many words."""
    scaled = logits.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    if params.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0
    normalised: NDArray[np.float64] = p / p.sum()
    return normalised


def _chi_square(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> tuple[float, int]:
    """Statistic and degrees of freedom, rare tokens as one class."""
    expected = probabilities * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    used = expected > 0
    return float(((observed - expected)[used] ** 2 / expected[used]).sum()), int(used.sum()) - 1


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("vocab", [64, 1500])
def test_distribution(filters: dict[str, float], vocab: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2.5, vocab).astype(np.float32))
    params, draws = _params(**filters), 8000
    probabilities = _reference(logits.numpy(), params)
    counts = np.zeros(vocab, dtype=int)
    for start in range(0, draws, 1000):
        rows = [msgspec.structs.replace(params, seed=start + i) for i in range(1000)]
        np.add.at(counts, sample(logits.expand(1000, -1), rows, [3] * 1000), 1)
    assert not counts[probabilities == 0].any()
    statistic, freedom = _chi_square(counts, probabilities)
    assert statistic < freedom + 4 * (2 * max(freedom, 1)) ** 0.5, (statistic, freedom)


def test_tokens_of_one_seed_are_distributed_too() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    params = _params(seed=77)
    drawn = sample(logits.expand(4000, -1), [params] * 4000, list(range(4000)))
    statistic, freedom = _chi_square(np.bincount(drawn, minlength=4), _reference(logits[0].numpy(), params))
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_greedy() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    assert sample(logits, [_params(temperature=0.0)] * 5, [0] * 5) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_filters_that_leave_the_likeliest(filters: dict[str, float]) -> None:
    logits = torch.randn(6, 2000, generator=torch.Generator().manual_seed(0))
    drawn = sample(logits, [_params(seed=i, **filters) for i in range(6)], [0] * 6)
    assert drawn == logits.argmax(-1).tolist()


def test_a_draw_depends_on_its_own_request_alone() -> None:
    """Alone, in any batch, in any order: the same tokens, and other ones at another index or seed."""
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(24, 5000, generator=generator) * 2).bfloat16().float()  # many equal values
    filters: list[dict[str, float]] = [*FILTERS, {"temperature": 0.0}, {"top_k": 100}, {"top_k": 2000}]
    params = [_params(**filters[i % len(filters)], seed=100 + i) for i in range(24)]
    indices = [i % 5 for i in range(24)]
    together = sample(logits, params, indices)
    assert together == [sample(logits[i : i + 1], [params[i]], [indices[i]])[0] for i in range(24)]
    order = np.random.default_rng(1).permutation(24).tolist()
    shuffled = sample(logits[order], [params[i] for i in order], [indices[i] for i in order])
    assert shuffled == [together[i] for i in order]
    assert together != sample(logits, params, [i + 1 for i in indices])


def test_a_flat_distribution_falls_back_to_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the candidates hold less than top_p, the whole vocabulary is sorted: the same as if it always were."""
    logits = torch.randn(4, 6000, generator=torch.Generator().manual_seed(5)) * 0.01
    params = [_params(top_p=0.9, seed=i) for i in range(4)]
    drawn = [sample(logits, params, [n] * 4) for n in range(50)]
    assert len({token for row in drawn for token in row}) > 150
    likely = logits[0].argsort(descending=True)[:1024].tolist()
    assert sum(row[0] in likely for row in drawn) < 25
    monkeypatch.setattr(sampler, "MAX_CANDIDATES", 6000)
    assert drawn == [sample(logits, params, [n] * 4) for n in range(50)]


def test_top_p_at_its_boundary() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    for top_p, possible in ((0.35, {0}), (0.65, {0, 1}), (0.85, {0, 1, 2}), (0.95, {0, 1, 2, 3})):
        params = [_params(top_p=top_p, seed=i) for i in range(300)]
        assert set(sample(logits.expand(300, -1), params, [0] * 300)) == possible


def test_min_tokens_holds_back_every_end() -> None:
    logits = torch.tensor([[9.0, 8.0, 7.0, 1.0]])
    params = SamplingParams(max_tokens=9, temperature=0.0, min_tokens=2, stop_token_ids=[1, 99])
    assert [sample(logits, [params], [n], {0})[0] for n in range(4)] == [2, 2, 0, 0]
    assert logits.tolist() == [[9.0, 8.0, 7.0, 1.0]]
    drawing = [SamplingParams(min_tokens=1, stop_token_ids=[1], seed=seed) for seed in range(50)]
    assert set(sample(logits.expand(50, -1), drawing, [0] * 50, {0})) <= {2, 3}
    assert 0 in sample(logits.expand(50, -1), drawing, [1] * 50, {0})


def test_uniforms() -> None:
    numbers = uniforms([5] * 4096, list(range(4096)))
    assert 0 <= numbers.min() < numbers.max() < 1
    assert abs(np.histogram(numbers, 16, (0, 1))[0] - 256).max() < 80
    across = uniforms(list(range(4096)), [0] * 4096)
    assert abs(np.corrcoef(across[:-1], across[1:])[0, 1]) < 0.06
    assert uniforms([-1, 2**70 + 3], [0, 0]).tolist() == uniforms([2**64 - 1, 3], [0, 0]).tolist()
    assert uniforms([1], [2])[0] != uniforms([2], [1])[0]


def test_a_large_vocabulary_is_not_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The common path looks at 1,024 candidates at most."""
    widths: list[int] = []
    topk = torch.Tensor.topk

    def recording(self: torch.Tensor, k: int, dim: int = -1) -> object:
        widths.append(k)
        return topk(self, k, dim)

    monkeypatch.setattr(torch.Tensor, "topk", recording)
    logits = torch.randn(4, 150_000, generator=torch.Generator().manual_seed(0)) * 4
    params = [_params(top_p=0.9), _params(top_k=50), _params(top_k=200, top_p=0.5), _params()]
    sample(logits, params, [0] * 4)
    assert sorted(widths) == [64, 256, 1024]


def test_parameters_at_the_edge_of_float_still_draw_a_token() -> None:
    """One request's odd numbers must not fail the step that others share."""
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(0))
    for temperature in (1e-320, 1e-38, 1e30):
        for top_p in (1e-300, 1e-9, 1.0):
            params = SamplingParams(temperature=temperature, top_p=top_p, min_p=0.0, seed=3)
            (token,) = sample(logits, [params], [0])
            assert 0 <= token < 3000
