"""Sampling fields in every placement: log-probabilities of transformers' whole model, and the same draws everywhere."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch

from tests.equivalence.reference import GREEDY, Case, generate, log_probabilities, make_cases
from tests.equivalence.test_placements import PLACEMENTS, config_of, media_item
from tests.router.conftest import Answer, answer
from triptych.config import Config, ModelConfig
from triptych.kernels import library
from triptych.models.registry import ModelSpec, open_model
from triptych.prompt.grammar import compile_structure
from triptych.prompt.layout import PromptBuilder
from triptych.testing import Cluster
from triptych.testing_checkpoints import FamilyName, make_checkpoint
from triptych.types import FinishReason, Prompt, SamplingParams, Started, Structure, TextDelta, TokenLogprobs

NUM_CASES = 8  # and two that share a prefix with one of them
TOLERANCE = 1e-4  # of a log-probability, in float32
SCORED = msgspec.structs.replace(GREEDY, num_logprobs=3, num_prompt_logprobs=1)
VARIED = SamplingParams(
    temperature=1.2,
    top_p=0.95,
    min_p=0.001,
    ignore_eos=True,
    repetition_penalty=1.15,
    frequency_penalty=0.3,
    presence_penalty=0.2,
    logit_bias={40: 1.5, 41: -2.0},
    bad_words=[[32], [101, 116]],
    min_tokens=4,
    stop_token_ids=[7, 10**9],
    num_logprobs=2,
)


class Model(NamedTuple):
    spec: ModelSpec
    cases: list[Case]
    prompts: list[Prompt]
    media: Path


class Scored(NamedTuple):
    """One answer with all its log-probabilities."""

    token_ids: list[int]
    output: list[TokenLogprobs]
    prompt: list[TokenLogprobs | None]


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family: FamilyName = request.param
    path = tmp_path_factory.mktemp(family)
    make_checkpoint(family, path, seed=3)
    spec = open_model(str(path), ModelConfig())
    cases = make_cases(NUM_CASES, seed=5)
    builder = PromptBuilder(path, spec.family)
    prompts = [builder.build(case.messages(), [media_item(spec, c) for c in case.images]) for case in cases]
    return Model(spec, cases, prompts, tmp_path_factory.mktemp("media"))


async def _answer(cluster: Cluster, case: Case, media: Path, request_id: str, sampling: SamplingParams) -> Scored:
    scored = Scored([], [], [])
    async for event in cluster.router.handle(case.request(media, request_id, sampling)):
        if isinstance(event, TextDelta):
            scored.token_ids.extend(event.token_ids)
            scored.output.extend(event.logprobs)
        elif isinstance(event, Started):
            scored.prompt.extend(event.prompt_logprobs)
    return scored


async def _answers(
    model: Model, placement: str, config: Config, sampling: Sequence[SamplingParams]
) -> tuple[list[Scored], float]:
    """And how many requests were preempted."""
    async with Cluster(model.spec, config, placement, seed=6) as cluster:
        answers = await asyncio.gather(
            *(_answer(cluster, c, model.media, f"r{k}", sampling[k]) for k, c in enumerate(model.cases))
        )
        await cluster.until_idle()
        cluster.check()
        return answers, _num_preemptions(cluster)


def _num_preemptions(cluster: Cluster) -> float:
    return sum(worker.counter("num_preemptions_total") for worker in cluster.workers.values())


def _assert_scores(entries: Sequence[TokenLogprobs], tokens: list[int], rows: torch.Tensor, num_top: int) -> None:
    """`rows` [entries, vocabulary] are the reference's log-probabilities at the entries' places."""
    assert [entry.chosen.token_id for entry in entries] == tokens
    for entry, row in zip(entries, rows, strict=True):
        scored = [entry.chosen, *entry.top]
        got = torch.tensor([token.logprob for token in scored])
        torch.testing.assert_close(got, row[[token.token_id for token in scored]], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(got[1:], row.topk(num_top).values, rtol=0, atol=TOLERANCE)
        likelier = int((row > row[entry.chosen.token_id] + TOLERANCE).sum())
        assert likelier < entry.rank <= 1 + int((row > row[entry.chosen.token_id] - TOLERANCE).sum())


@pytest.mark.parametrize(("kernels", "placements"), [("auto", PLACEMENTS), ("torch", ("1E/1P/1D",))])
async def test_logprobs_of_prompt_and_output_are_the_whole_models(
    model: Model, kernels: str, placements: tuple[str, ...]
) -> None:
    """Images in the prompts, chunks of any size; where the kernels run, not a bit differs between placements."""
    model = model._replace(spec=replace(model.spec, kernels=kernels))
    answers = {}
    for placement, chunk in zip(placements, (4096, 24, 64), strict=False):
        config = config_of(model.media, chunk=chunk)
        answers[placement], _ = await _answers(model, placement, config, [SCORED] * len(model.cases))
    outputs = [scored.token_ids for scored in answers[placements[0]]]
    expected = log_probabilities(model.spec, model.cases, model.prompts, outputs)
    for placement in placements:
        for scored, prompt, output, rows in zip(answers[placement], model.prompts, outputs, expected, strict=True):
            num_prompt_tokens = len(prompt.token_ids)
            assert scored.prompt[0] is None
            entries = [entry for entry in scored.prompt if entry is not None]
            _assert_scores(entries, prompt.token_ids[1:], rows[: num_prompt_tokens - 1], 1)
            _assert_scores(scored.output, output, rows[num_prompt_tokens - 1 : -1], 3)
    if kernels == "auto" and library.available():
        assert all(answers[placement] == answers[placements[0]] for placement in placements)


async def test_a_scored_prompt_skips_the_cache_and_survives_preemption(model: Model) -> None:
    """KV for about two requests; whether a placement preempts depends on the turns that its workers take."""
    scored = [SCORED] * len(model.cases)
    num_preemptions = 0.0
    for placement in PLACEMENTS:
        roomy, _ = await _answers(model, placement, config_of(model.media, chunk=48), scored)
        tight, preempted = await _answers(model, placement, config_of(model.media, num_kv_blocks=14, chunk=48), scored)
        num_preemptions += preempted
        for one, other in zip(roomy, tight, strict=True):
            assert one.token_ids == other.token_ids
            ours, theirs = ([entry.chosen for entry in scores.prompt if entry] for scores in (one, other))
            assert [token.token_id for token in ours] == [token.token_id for token in theirs]
            logprobs = (torch.tensor([token.logprob for token in tokens]) for tokens in (ours, theirs))
            torch.testing.assert_close(*logprobs, rtol=0, atol=TOLERANCE)
    assert num_preemptions > 0


async def test_the_repetition_penalty_gives_transformers_tokens(model: Model) -> None:
    expected = generate(model.spec, model.cases, model.prompts, repetition_penalty=1.4)
    assert expected != generate(model.spec, model.cases, model.prompts)
    sampling = msgspec.structs.replace(GREEDY, repetition_penalty=1.4)
    for placement in PLACEMENTS:
        answers, _ = await _answers(model, placement, config_of(model.media), [sampling] * len(model.cases))
        assert [scored.token_ids for scored in answers] == expected


async def test_draws_are_the_same_in_every_placement_and_after_preemption(model: Model) -> None:
    """Penalties, bias and masks are functions of prompt and output, wherever these were computed."""
    sampling = [msgspec.structs.replace(VARIED, seed=1000 + k) for k in range(len(model.cases))]
    first, num_preemptions = await _answers(model, "EPD", config_of(model.media), sampling)
    assert len({tuple(scored.token_ids) for scored in first}) == len(first)
    for scored in first:
        assert 32 not in scored.token_ids
        assert not any(pair == (101, 116) for pair in zip(scored.token_ids, scored.token_ids[1:], strict=False))
        assert 7 not in scored.token_ids[: VARIED.min_tokens - 1]
    for placement in PLACEMENTS:
        for config in (config_of(model.media, chunk=16), config_of(model.media, num_kv_blocks=14, chunk=48)):
            again, preempted = await _answers(model, placement, config, sampling)
            num_preemptions += preempted
            assert [scored.token_ids for scored in again] == [scored.token_ids for scored in first]
            if library.available():
                assert again == first
    assert num_preemptions > 0
    other_seeds = [msgspec.structs.replace(VARIED, seed=2000 + k) for k in range(len(model.cases))]
    others, _ = await _answers(model, "EPD", config_of(model.media), other_seeds)
    assert others != first


GRAMMARS = [  # and what they match
    (Structure("choice", '["a cat", "a dog", "nothing at all"]'), re.compile("a cat|a dog|nothing at all")),
    (Structure("regex", "[a-f]{2,9}=(yes|no)[!?]?"), re.compile("[a-f]{2,9}=(yes|no)[!?]?")),
    (Structure("grammar", 'root ::= "(" root ")" | [0-9]'), re.compile(r"\(*[0-9]\)*")),
]


async def _structured(cluster: Cluster, case: Case, media: Path, number: int) -> Answer:
    structure, _ = GRAMMARS[number % len(GRAMMARS)]
    sampling = SamplingParams(
        seed=number, num_logprobs=0, grammar=compile_structure(structure), ignore_eos=number % 2 == 0
    )
    request = case.request(media, f"r{number}", sampling)
    return await answer(cluster, msgspec.structs.replace(request, max_tokens=35))


async def test_grammars_hold_in_every_placement_and_after_preemption(model: Model) -> None:
    """The same draws, each ended by its grammar, and the last token that the grammar takes is part of the text."""
    first: list[Answer] = []
    num_preemptions = 0.0
    for placement in PLACEMENTS:
        for num_kv_blocks in (400, 15):
            config = config_of(model.media, num_kv_blocks=num_kv_blocks, chunk=48)
            async with Cluster(model.spec, config, placement, seed=9) as cluster:
                answers = await asyncio.gather(
                    *(_structured(cluster, case, model.media, k) for k, case in enumerate(model.cases))
                )
                await cluster.until_idle()
                cluster.check()
                num_preemptions += _num_preemptions(cluster)
            for k, one in enumerate(answers):
                assert GRAMMARS[k % len(GRAMMARS)][1].fullmatch(one.text), one.text
                assert (one.ended.finish_reason, one.ended.stop_reason) == (FinishReason.STOP, None)
                assert sum(len(delta.logprobs) for delta in one.deltas) == len(one.token_ids)
            first = first or answers
            assert [one.token_ids for one in answers] == [one.token_ids for one in first]
    assert num_preemptions > 0
    assert len({one.text for one in first}) > len(GRAMMARS)


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_choices_are_the_draws_of_their_seeds_on_one_encode_and_one_prefill(model: Model, placement: str) -> None:
    """Each choice is what a request of its own with its seed would get, from a prompt whose images are encoded once."""
    number = next(k for k, case in enumerate(model.cases) if len(set(case.images)) == len(case.images) == 2)
    case, prompt = model.cases[number], model.prompts[number]
    sampling = msgspec.structs.replace(VARIED, seed=50, num_prompt_logprobs=0)
    async with Cluster(model.spec, config_of(model.media), "EPD", seed=7) as cluster:
        alone = [
            await _answer(cluster, case, model.media, f"r{k}", msgspec.structs.replace(sampling, seed=50 + k))
            for k in range(3)
        ]
    choices = [Scored([], [], []) for _ in range(3)]
    async with Cluster(model.spec, config_of(model.media), placement, seed=8) as cluster:
        request = msgspec.structs.replace(case.request(model.media, "r", sampling), n=3)
        async for event in cluster.router.handle(request):
            if isinstance(event, TextDelta):
                choices[event.choice].token_ids.extend(event.token_ids)
                choices[event.choice].output.extend(event.logprobs)
            elif isinstance(event, Started):
                assert [entry.chosen.token_id for entry in event.prompt_logprobs if entry] == prompt.token_ids[1:]
        await cluster.until_idle()
        cluster.check()
        workers = cluster.workers.values()
        counters = {
            name: sum(worker.counter(name) for worker in workers)
            for name in ("encode_items_total", "embed_transfer_items_total", "prompt_tokens_computed_total")
        }
    assert [choice.token_ids for choice in choices] == [scored.token_ids for scored in alone]
    assert len({tuple(choice.token_ids) for choice in choices}) == 3
    num_tokens = len(prompt.token_ids)
    tail = num_tokens - (num_tokens - 1) // 16 * 16
    assert counters == {
        "encode_items_total": 2,
        "embed_transfer_items_total": 2,
        "prompt_tokens_computed_total": num_tokens + 2 * tail,
    }
