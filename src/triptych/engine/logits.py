"""What a request's parameters change in its logits before a token is drawn: what is ruled out, bias, penalties.

In vLLM's order: grammar, allowed_token_ids, bad_words, min_tokens, logit_bias, then the repetition, frequency and
presence penalties. What would rule out every token that is left is left out itself. Called by `sampler.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.engine.batch import SampleRow

MOST = 1e30
LEAST_PENALTY = 1e-6  # one that float32 has as 0 would make numbers of what is ruled out


def changed_logits(logits: torch.Tensor, row: SampleRow, eos_token_ids: Collection[int]) -> torch.Tensor:
    """A copy of `logits` [vocabulary] float32, changed. Token ids beyond the vocabulary are passed over."""
    params, vocab, output_ids = row.sampling, len(logits), row.token_ids[row.num_prompt_tokens :]
    logits = logits.clone()
    if row.grammar_mask is not None:
        bits = np.unpackbits(row.grammar_mask.view(np.uint8), count=vocab, bitorder="little")
        logits = _only(logits, torch.from_numpy(bits.view(np.bool_)))
    if params.allowed_token_ids:
        is_allowed = np.zeros(vocab, dtype=np.bool_)
        is_allowed[_known(params.allowed_token_ids, vocab)] = True
        logits = _only(logits, torch.from_numpy(is_allowed))
    _rule_out(logits, _ends_of_bad_words(params.bad_words, output_ids))
    if len(output_ids) < params.min_tokens:
        _rule_out(logits, {*eos_token_ids, *params.stop_token_ids})
    if params.logit_bias:
        biased = _known(params.logit_bias, vocab)
        bias = np.array([_bounded(params.logit_bias[token_id]) for token_id in biased.tolist()], dtype=np.float32)
        logits[_on(logits, biased)] += _on(logits, bias)
    if params.repetition_penalty != 1:
        seen = _on(logits, np.asarray(row.token_ids))
        values = logits[seen]  # of a token that is there twice, twice: equal values replace it
        penalty = max(LEAST_PENALTY, _bounded(params.repetition_penalty))
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if output_ids and (params.frequency_penalty or params.presence_penalty):
        token_ids, counts = np.unique(output_ids, return_counts=True)
        penalties = counts * _bounded(params.frequency_penalty) + _bounded(params.presence_penalty)
        logits[_on(logits, token_ids)] -= _on(logits, penalties.astype(np.float32))
    return logits


def _only(logits: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    kept = logits.masked_fill(~keep.to(logits.device), -torch.inf)
    return kept if kept.max() > -torch.inf else logits


def _rule_out(logits: torch.Tensor, token_ids: Collection[int]) -> None:
    known = _on(logits, _known(token_ids, len(logits)))
    if len(known):
        before = logits[known]
        logits[known] = -torch.inf
        if logits.max() == -torch.inf:
            logits[known] = before


def _known(token_ids: Collection[int], vocab: int) -> NDArray[np.int64]:
    return np.array([token_id for token_id in token_ids if 0 <= token_id < vocab], dtype=np.int64)


def _ends_of_bad_words(bad_words: Sequence[Sequence[int]], output_ids: Sequence[int]) -> list[int]:
    """The last token of each sequence whose tokens before it are the output's last ones."""
    ends = []
    for *before, last in filter(None, bad_words):
        if len(before) <= len(output_ids) and before == list(output_ids[len(output_ids) - len(before) :]):
            ends.append(last)
    return ends


def _bounded(value: float) -> float:
    """What float32 can hold: an overflow would raise, and fail the step that other requests share."""
    return max(-MOST, min(MOST, value))


def _on(logits: torch.Tensor, array: NDArray[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array).to(logits.device)
