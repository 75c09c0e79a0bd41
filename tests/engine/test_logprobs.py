"""Log-probabilities against torch's own, their ranks, and that neither batch nor parameters change them."""

from __future__ import annotations

import pytest
import torch

from triptych.engine.batch import SampleRow
from triptych.engine.logprobs import score
from triptych.engine.sampler import sample
from triptych.types import SamplingParams


def _logits(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 4


@pytest.mark.parametrize("vocab", [7, 1536, 150_000])
@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_scores(vocab: int, num_top: int) -> None:
    logits = _logits(6, vocab)
    tokens = [0, 1, vocab - 1, *logits[3:].argmax(-1).tolist()]
    expected = torch.log_softmax(logits.double(), -1)
    order = logits.argsort(-1, descending=True)
    for k, scored in enumerate(score(logits, tokens, num_top)):
        assert scored.token_ids == [tokens[k], *order[k, :num_top].tolist()]
        assert scored.rank == order[k].tolist().index(tokens[k]) + 1
        torch.testing.assert_close(
            torch.tensor(scored.logprobs).double(), expected[k, scored.token_ids], rtol=0, atol=1e-4
        )
        assert scored.logprobs[1:] == sorted(scored.logprobs[1:], reverse=True)


def test_a_row_is_the_same_bit_for_bit_in_any_batch() -> None:
    logits = _logits(40, 5000)
    tokens = [17 * k for k in range(40)]
    together = score(logits, tokens, 4)
    assert together == [score(logits[k : k + 1], tokens[k : k + 1], 4)[0] for k in range(40)]
    assert together[9:25] == score(logits[9:25].clone(), tokens[9:25], 4)


def test_equal_logits_are_in_the_order_of_their_tokens_and_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0, 2.0]])
    (scored,) = score(logits, [5], 5)
    assert (scored.token_ids, scored.rank) == ([5, 1, 3, 4, 2, 5], 4)
    assert score(logits, [4], 0)[0].rank == 1


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    (scored,) = score(_logits(1, 7), [2], 1000)
    assert sorted(scored.token_ids[1:]) == list(range(7))
    assert sum(torch.tensor(scored.logprobs[1:]).exp()) == pytest.approx(1.0, abs=1e-6)


def test_the_sampler_scores_raw_logits_and_only_where_it_is_asked_to() -> None:
    logits = _logits(4, 300)
    changing = {"temperature": 3.0, "presence_penalty": 2.0, "allowed_token_ids": [4, 5], "top_k": 2}
    params = [
        SamplingParams(),
        SamplingParams(num_logprobs=0),
        SamplingParams(num_logprobs=3, seed=9, **changing),  # type: ignore[arg-type]
        SamplingParams(num_logprobs=20, temperature=0.0),
    ]
    drawn = sample(logits, [SampleRow(p, [1, 4, 4], 1) for p in params])
    assert drawn[0].logprobs is None
    assert drawn[2].token_id in (4, 5)
    for k, num_top in ((1, 0), (2, 3), (3, 20)):
        assert drawn[k].logprobs == score(logits[k : k + 1], [drawn[k].token_id], num_top)[0]
