"""What parameters change in logits: against transformers' own processors, and numpy in so many words."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from triptych.engine.batch import SampleRow
from triptych.engine.logits import changed_logits
from triptych.engine.sampler import sample
from triptych.types import SamplingParams

VOCAB, EOS = 97, 5
PROMPT = [11, 12, 13, 14, 11, 12]
OUTPUT = [20, 21, 20, 22, 20, 13]

FIELDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 0.4},
    {"presence_penalty": -0.9},
    {"logit_bias": {3: 4.5, 20: -100.0, 60: 0.25}},
    {"allowed_token_ids": [1, 5, 20, 21, 22, 90]},
    {"bad_words": [[33], [20, 13, 40], [21, 13, 41], [13, 42], [1] * 9]},
    {"min_tokens": 7, "stop_token_ids": [8, 9]},
]
EVERYTHING = {name: value for fields in [*FIELDS[:1], *FIELDS[2:]] for name, value in fields.items()}


def _logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def _row(output: list[int] = OUTPUT, mask: NDArray[np.int32] | None = None, **fields: Any) -> SampleRow:
    return SampleRow(SamplingParams(max_tokens=99, **fields), [*PROMPT, *output], len(PROMPT), mask)


def _mask(allowed: list[int]) -> NDArray[np.int32]:
    words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << (token % 32))
    return words.view(np.int32)


def _reference(logits: NDArray[np.float64], row: SampleRow, grammar: list[int] | None = None) -> NDArray[np.float64]:
    """One token after the other, in vLLM's order."""
    p, output = row.sampling, list(row.token_ids[row.num_prompt_tokens :])
    changed = logits.copy()
    for token in range(len(changed)):
        if grammar is not None and token not in grammar:
            changed[token] = -np.inf
        if p.allowed_token_ids and token not in p.allowed_token_ids:
            changed[token] = -np.inf
        for word in p.bad_words:
            if word[-1] == token and [*output, token][-len(word) :] == word:
                changed[token] = -np.inf
        if len(output) < p.min_tokens and (token == EOS or token in p.stop_token_ids):
            changed[token] = -np.inf
        changed[token] += p.logit_bias.get(token, 0.0)
        if token in row.token_ids:
            changed[token] *= p.repetition_penalty if changed[token] < 0 else 1 / p.repetition_penalty
        changed[token] -= p.frequency_penalty * output.count(token)
        changed[token] -= p.presence_penalty * (token in output)
    return changed


@pytest.mark.parametrize("fields", [*FIELDS, EVERYTHING], ids=lambda fields: "+".join(fields))
@pytest.mark.parametrize("output", [[], [20], OUTPUT])
def test_each_field_and_all_together(fields: dict[str, Any], output: list[int]) -> None:
    logits, row = _logits(), _row(output, **fields)
    before = logits.clone()
    changed = changed_logits(logits, row, [EOS])
    assert row.changes_logits
    np.testing.assert_allclose(changed.numpy(), _reference(logits.double().numpy(), row), rtol=2e-6, atol=2e-6)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("seed", range(30))
def test_random_fields(seed: int) -> None:
    rng = random.Random(seed)
    fields = {name: value for part in FIELDS if rng.random() < 0.5 for name, value in part.items()}
    allowed = rng.sample(range(VOCAB), 60) if rng.random() < 0.5 else None
    output = [rng.choice([13, 20, 21, 33, rng.randrange(VOCAB)]) for _ in range(rng.randrange(12))]
    row = _row(output, None if allowed is None else _mask(allowed), **fields)
    logits = _logits(seed)
    changed = changed_logits(logits, row, [EOS]) if row.changes_logits else logits
    np.testing.assert_allclose(changed.numpy(), _reference(logits.double().numpy(), row, allowed), rtol=2e-6, atol=2e-6)


def test_nothing_is_changed_unless_it_is_asked_for() -> None:
    ordinary = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.1, seed=3, stop_token_ids=[7], max_tokens=9)
    assert not SampleRow(ordinary, [1, 2, 3], 2).changes_logits
    assert not _row(min_tokens=len(OUTPUT)).changes_logits


# -- transformers ------------------------------------------------------------------------------------------------------


def _transformed(processor: Any, token_ids: list[int]) -> torch.Tensor:
    scores: torch.Tensor = processor(torch.tensor([token_ids]), _logits()[None].clone())
    return scores[0]


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.2, 3.0])
def test_the_repetition_penalty_is_transformers(penalty: float) -> None:
    row = _row(repetition_penalty=penalty)
    expected = _transformed(RepetitionPenaltyLogitsProcessor(penalty), [*PROMPT, *OUTPUT])
    assert torch.equal(changed_logits(_logits(), row, [EOS]), expected)


def test_bad_words_are_transformers_but_for_the_prompt() -> None:
    words = [[33], [20, 13, 40], [21, 13, 41], [13, 42]]
    expected = _transformed(NoBadWordsLogitsProcessor(words), OUTPUT)
    assert torch.equal(changed_logits(_logits(), _row(bad_words=words), [EOS]), expected)
    at_start = changed_logits(_logits(), _row([], bad_words=[[11, 12, 44], [45]]), [EOS])
    assert at_start.isneginf().nonzero()[:, 0].tolist() == [45]  # the prompt ends with 11, 12


def test_the_bias_is_transformers() -> None:
    bias = {3: 4.5, 20: -7.0}
    processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    changed = changed_logits(_logits(), _row(logit_bias=bias), [EOS])
    torch.testing.assert_close(changed, _transformed(processor, [*PROMPT, *OUTPUT]))


@pytest.mark.parametrize("min_tokens", [5, 6, 7, 20])
def test_min_tokens_is_transformers(min_tokens: int) -> None:
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, [EOS, 8])
    row = _row(min_tokens=min_tokens, stop_token_ids=[8])
    assert torch.equal(changed_logits(_logits(), row, [EOS]), _transformed(processor, [*PROMPT, *OUTPUT]))


# -- contradictions and values that no client may send -----------------------------------------------------------------


def test_token_ids_beyond_the_vocabulary_are_passed_over() -> None:
    wild = [-1, VOCAB, 2**40, -(2**70)]
    row = _row(
        logit_bias={**dict.fromkeys(wild, 9.0), 3: 1.0},
        allowed_token_ids=[*wild, 3, 4],
        bad_words=[[token] for token in wild],
        stop_token_ids=wild,
        min_tokens=99,
    )
    changed = changed_logits(_logits(), row, [EOS])
    assert changed.isfinite().nonzero()[:, 0].tolist() == [3, 4]
    assert changed[3] == _logits()[3] + 1
    assert torch.equal(changed_logits(_logits(), _row(allowed_token_ids=wild), [EOS]), _logits())


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [EOS], "min_tokens": 99},
        {"allowed_token_ids": [EOS], "bad_words": [[EOS]]},
        {"allowed_token_ids": [EOS, 8], "bad_words": [[EOS]], "stop_token_ids": [8], "min_tokens": 99},
    ],
)
def test_what_would_leave_no_token_is_left_out(fields: dict[str, Any]) -> None:
    """The narrower word counts: a row always has a token to draw."""
    changed = changed_logits(_logits(), _row(**fields), [EOS])
    left = set(changed.isfinite().nonzero()[:, 0].tolist())
    assert left
    assert left <= set(fields["allowed_token_ids"])


def test_a_grammar_wins_over_allowed_tokens_and_over_min_tokens() -> None:
    changed = changed_logits(_logits(), _row(mask=_mask([EOS]), allowed_token_ids=[1, 2], min_tokens=99), [EOS])
    assert changed.isfinite().nonzero()[:, 0].tolist() == [EOS]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0, 1e300])
def test_odd_numbers_of_one_request_do_not_fail_the_step_that_others_share(value: float) -> None:
    logits = torch.stack([_logits(k) for k in range(5)])
    odd: list[dict[str, Any]] = [
        {"repetition_penalty": value},
        {"frequency_penalty": value, "presence_penalty": value},
        {"logit_bias": dict.fromkeys(range(VOCAB), value)},
        {"logit_bias": {3: value}, "top_p": 0.5},
    ]
    rows = [_row(**fields) for fields in odd]
    tokens = [drawn.token_id for drawn in sample(logits, [*rows, _row(seed=4)])]
    assert all(0 <= token < VOCAB for token in tokens)
    assert tokens[-1] == sample(logits[-1:], [_row(seed=4)])[0].token_id


@pytest.mark.parametrize(
    "fields", [{"temperature": 1e300}, {"repetition_penalty": 5e-324}, {"repetition_penalty": 1e300}]
)
def test_the_greatest_and_least_numbers_draw_no_token_that_is_ruled_out(fields: dict[str, Any]) -> None:
    allowed = [1, 5, *OUTPUT]
    rows = [_row(seed=k, allowed_token_ids=allowed, **fields) for k in range(50)]
    drawn = {drawn.token_id for drawn in sample(torch.stack([_logits(k) for k in range(50)]), rows)}
    assert drawn <= set(allowed)
    assert len(drawn) > 1


# -- the sampler -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_row_is_changed_for_itself_alone(temperature: float) -> None:
    """In any batch the same token, and never one that is ruled out; what is not changed is not touched."""
    logits = torch.stack([_logits(k) for k in range(9)])
    kinds = [*FIELDS, {}]
    rows = [_row(temperature=temperature, seed=k, **fields) for k, fields in enumerate(kinds)]
    for draw in range(20):
        rows = [
            row._replace(sampling=msgspec.structs.replace(row.sampling, seed=100 * draw + k))
            for k, row in enumerate(rows)
        ]
        together = [drawn.token_id for drawn in sample(logits, rows, [EOS])]
        assert together == [sample(logits[k : k + 1], [row], [EOS])[0].token_id for k, row in enumerate(rows)]
        for k, row in enumerate(rows):
            if row.changes_logits:
                changed = changed_logits(logits[k], row, [EOS])
                assert changed[together[k]] > -torch.inf
                assert temperature or together[k] == int(changed.argmax())


def test_a_common_row_is_neither_copied_nor_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[SampleRow] = []

    def changed(logits: torch.Tensor, row: SampleRow, eos_token_ids: list[int]) -> torch.Tensor:
        looked_at.append(row)
        return logits

    monkeypatch.setattr("triptych.engine.sampler.changed_logits", changed)
    monkeypatch.setattr("triptych.engine.sampler.score", lambda *_: pytest.fail("no log-probabilities were asked for"))
    logits = torch.stack([_logits(k) for k in range(2)])
    sample(logits, [_row(temperature=0.0), _row(temperature=0.0, presence_penalty=1.0)], [EOS])
    assert [row.sampling.presence_penalty for row in looked_at] == [1.0]


@pytest.mark.parametrize("penalty", [1e-50, 1e-9, 1e30])
def test_an_extreme_penalty_makes_no_number_of_what_is_ruled_out(penalty: float) -> None:
    allowed = [40, 41]
    logits = _logits()
    logits[20], logits[11] = 3.0, -3.0  # of output and prompt: what the penalty touches
    for row in (
        _row(repetition_penalty=penalty, allowed_token_ids=allowed),
        _row(repetition_penalty=penalty, mask=_mask(allowed)),
    ):
        changed = changed_logits(logits, row, [EOS])
        assert not changed.isnan().any()
        assert changed.argmax().item() in allowed
