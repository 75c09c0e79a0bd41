"""Draws the next token of each row: greedy rows by argmax, the others by one uniform number and their own filters.

Pure function of a row's logits, parameters and tokens, so a request draws the same tokens in any batch, on any worker,
at any attempt. Called by `engine/engine.py` after each step. Never sorts the vocabulary in the common path.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.engine.batch import Drawn, SampleRow
from triptych.engine.logits import MOST, changed_logits
from triptych.engine.logprobs import ranked, score
from triptych.messages import Logprobs
from triptych.types import SamplingParams

MAX_CANDIDATES = 1024  # most tokens that are sorted, unless a row's top_k or top_p asks for more

_CANDIDATE_SIZES = (64, 256, MAX_CANDIDATES)  # a row's own parameters choose one: the batch must not
_BLOCK = 256  # tokens of one block of the inverse CDF
_BELOW_ONE = 1.0 - 2.0**-52
_MASK64 = (1 << 64) - 1


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) for each seed and token index: two rounds of splitmix64 (Steele, Lea and Flood, 2014)."""
    state = np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64)
    state = _splitmix64(state) ^ np.array(indices, dtype=np.uint64)
    numbers: NDArray[np.float64] = (_splitmix64(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = state + np.uint64(0x9E3779B97F4A7C15)  # wraps
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SampleRow], eos_token_ids: Collection[int] = ()) -> list[Drawn]:
    """One token a row of `logits` [rows, vocabulary] float32, which is left as it is.

    As in vLLM: log-probabilities are those of `logits`; what `logits.py` changes comes next, and decides greedy rows
    too; then temperature, min_p, top_k and top_p filter what is drawn from.
    """
    changed = {i: changed_logits(logits[i], row, eos_token_ids) for i, row in enumerate(rows) if row.changes_logits}
    tokens: dict[int, int] = {}
    groups: dict[int | None, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(_num_candidates(row.sampling, logits.shape[1]), []).append(i)
    for num_candidates, places in groups.items():
        picked = _picked(logits, changed, places)
        if num_candidates is None:
            drawn = picked.argmax(-1).tolist()
        else:
            params = [rows[i].sampling for i in places]
            numbers = uniforms([p.seed for p in params], [rows[i].num_output_tokens for i in places])
            drawn = _draw(picked, params, numbers, num_candidates)
        tokens.update(zip(places, drawn, strict=True))
    return [Drawn(tokens[i], _logprobs(logits[i : i + 1], tokens[i], row)) for i, row in enumerate(rows)]


def _picked(logits: torch.Tensor, changed: dict[int, torch.Tensor], places: list[int]) -> torch.Tensor:
    """The rows at `places`, as they are to be drawn from; not a copy where that is all of `logits`."""
    if not changed:
        return logits if len(places) == len(logits) else logits[places]
    return torch.stack([changed[i] if i in changed else logits[i] for i in places])


def _logprobs(logits: torch.Tensor, token: int, row: SampleRow) -> Logprobs | None:
    num_top = row.sampling.num_logprobs
    return None if num_top is None else score(logits, [token], num_top)[0]


def _num_candidates(params: SamplingParams, vocab: int) -> int | None:
    """How many of the likeliest tokens a row looks at; 0: all, unsorted; `vocab`: all, sorted; None: it is greedy."""
    if params.temperature <= 0:
        return None
    if params.top_k <= 0 and params.top_p >= 1:
        return 0
    if params.top_k <= 0:
        return min(MAX_CANDIDATES, vocab)
    return min(next((size for size in _CANDIDATE_SIZES if size >= params.top_k), vocab), vocab)


def _draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], numbers: NDArray[np.float64], num_candidates: int
) -> list[int]:
    """Rows that all look at `num_candidates` tokens."""
    temperatures = torch.tensor([min(p.temperature, MOST) for p in params], device=logits.device)
    weights = _weights(logits, temperatures, params)
    uniform = torch.from_numpy(numbers).to(logits.device)
    if num_candidates == 0:
        return _draw_of_all(weights, uniform)
    values, tokens = ranked(weights, num_candidates)
    kept, enough = _filtered(values, weights, params, num_candidates)
    drawn = tokens.gather(1, _inverse_cdf(kept, uniform)[:, None])[:, 0].tolist()
    for i in (~enough).nonzero()[:, 0].tolist():  # a flat distribution: its top_p is not within the candidates
        drawn[i] = _draw(logits[i : i + 1], params[i : i + 1], numbers[i : i + 1], logits.shape[1])[0]
    return drawn


def _weights(logits: torch.Tensor, temperatures: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """exp(logit / temperature), 1 for the likeliest token, 0 below min_p of it."""
    top = logits.amax(-1, keepdim=True)
    weights = (logits - top).div_(temperatures[:, None]).exp_()
    if any(p.min_p > 0 for p in params):
        least = torch.tensor([p.min_p for p in params], device=logits.device)
        weights.masked_fill_(weights < least[:, None], 0.0)
    return weights


def _filtered(
    values: torch.Tensor, weights: torch.Tensor, params: Sequence[SamplingParams], num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Descending `values` in float64 with what top_k and top_p rule out set to 0, and whether that is all there is.

    A row without top_k measures top_p against the whole vocabulary; if the candidates hold less, it is not enough.
    """
    vocab = weights.shape[1]
    device = values.device
    top_k = torch.tensor([p.top_k if p.top_k > 0 else vocab for p in params], device=device)[:, None]
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device)[:, None]
    kept = values.double()
    kept.masked_fill_(torch.arange(num_candidates, device=device) >= top_k, 0.0)
    cumulative = kept.cumsum(-1)
    of_all = weights.sum(-1, dtype=torch.float64)[:, None]
    total = torch.where(top_k < vocab, cumulative[:, -1:], of_all)
    wanted = top_p * total
    enough = (cumulative[:, -1:] >= wanted)[:, 0] | (top_k < vocab)[:, 0] | (num_candidates >= vocab)
    beyond = cumulative - kept >= wanted  # the tokens before it hold the mass already
    beyond[:, 0] = False
    return kept.masked_fill_(beyond & (top_p < 1), 0.0), enough


def _draw_of_all(weights: torch.Tensor, uniform: torch.Tensor) -> list[int]:
    """By the whole vocabulary in the order of its ids: first a block, then a token in it."""
    blocks = torch.nn.functional.pad(weights, (0, -weights.shape[1] % _BLOCK)).view(len(weights), -1, _BLOCK)
    sums = blocks.sum(-1).double()
    cumulative = sums.cumsum(-1)
    target = uniform * cumulative[:, -1]
    block = _search(cumulative, target)
    before = (cumulative - sums).gather(1, block[:, None])[:, 0]
    chosen = blocks[torch.arange(len(blocks), device=blocks.device), block].double()
    inner = _search(chosen.cumsum(-1), (target - before).clamp_min(0))
    tokens: list[int] = (block * _BLOCK + inner).clamp_max(weights.shape[1] - 1).tolist()
    return tokens


def _inverse_cdf(values: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    cumulative = values.cumsum(-1)
    return _search(cumulative, uniform * cumulative[:, -1])


def _search(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First place of each row whose sum is above the target: its own value is above 0."""
    target = torch.minimum(target, cumulative[:, -1] * _BELOW_ONE)
    found = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return found.clamp_max(cumulative.shape[1] - 1)  # sums that are subnormal or zero have nothing above the target
