"""The engine around a runner that only records: ends of requests, embeddings held and let go, what a chunk is given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec import structs

from tests.engine.requests import BLOCK_SIZE, IMAGE_TOKEN, distinct_tokens, item, make_request
from triptych.clock import ManualClock
from triptych.config import EngineConfig
from triptych.engine.batch import Drawn, SampleRow, SequenceChunk, StepLogits
from triptych.engine.engine import Engine
from triptych.engine.grammar import GrammarVocabulary
from triptych.engine.kv_blocks import KVBlockPool
from triptych.engine.matchers import Matchers
from triptych.engine.request_state import RequestState, Status
from triptych.messages import Logprobs
from triptych.types import FinishReason, PromptItem, SamplingParams

EOS = 2
STOP = 3
WORD = 9
VOCAB = 10


class RecordingRunner:
    """`known` is the token of greedy chunks, if the runner knows it without logits."""

    def __init__(self) -> None:
        self.steps: list[list[SequenceChunk]] = []
        self.known: int | None = None

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepLogits:
        self.steps.append(list(chunks))
        scores = [[Logprobs([t], [0.0], 1) for t in chunk.scoring.token_ids] for chunk in chunks if chunk.scoring]
        sampling = [chunk for chunk in chunks if chunk.sample]
        tokens = {}
        if self.known is not None:
            tokens = {place: self.known for place, chunk in enumerate(sampling) if chunk.greedy}
        return StepLogits(torch.zeros(len(sampling) - len(tokens), 10), scores, tokens)


class Bench:
    """An engine whose next tokens are `tokens`, then words for ever."""

    def __init__(
        self,
        *tokens: int,
        num_blocks: int = 50,
        max_model_len: int = 100,
        cache_bytes: int = 1 << 20,
        max_num_batched_tokens: int = 64,
        tokenizer_file: Path = Path("none"),
    ) -> None:
        self.tokens = list(tokens)
        self.rows: list[SampleRow] = []
        self.runner = RecordingRunner()
        self.demands: list[tuple[str, list[str]]] = []
        config = EngineConfig(
            block_size=BLOCK_SIZE,
            embedding_cache_bytes=cache_bytes,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.pool = KVBlockPool(num_blocks + 1)
        matchers = Matchers(GrammarVocabulary(tokenizer_file, VOCAB, [EOS]))
        self.engine = Engine(
            config, self.runner, self._sample, matchers, self.pool, [EOS], max_model_len, ManualClock(), self._demand
        )

    def _sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[Drawn]:
        assert len(logits) == len(rows)
        self.rows += [row._replace(token_ids=list(row.token_ids)) for row in rows]
        return [Drawn(self.tokens.pop(0) if self.tokens else WORD) for _ in rows]

    def _demand(self, request: RequestState, mm_hashes: list[str]) -> None:
        self.demands.append((request.key.request_id, mm_hashes))

    def run(self, *requests: RequestState, embeddings: dict[str, int] | None = None, max_steps: int = 50) -> None:
        """Submit and step until every request has finished. `embeddings` arrive at once, by their lengths."""
        for request in requests:
            self.engine.submit(request)
        for mm_hash, length in (embeddings or {}).items():
            self.engine.add_embedding(mm_hash, embedding(length))
        for _ in range(max_steps):
            if not len(self.engine.scheduler):
                return
            self.step()
        raise AssertionError("the requests do not end")

    def run_until(self, request: RequestState, max_steps: int = 50) -> None:
        for _ in range(max_steps):
            if request.status is Status.FINISHED:
                return
            self.step()
        raise AssertionError("the request does not end")

    def step(self) -> None:
        for request, _, reason, _ in self.engine.step().sampled:
            if reason is not None:
                self.engine.end(request, reason)
        self.engine.scheduler.check()
        self.engine.embeddings.check()

    def assert_empty(self) -> None:
        self.engine.check()
        assert len(self.engine.scheduler) == 0
        assert self.pool.num_free == self.pool.num_blocks
        assert self.engine.embeddings.num_referenced == 0


def embedding(length: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((length, 4), value)


def image_prompt(name: str = "a", before: int = 2, length: int = 4, after: int = 2, mm_hash: str = "x") -> RequestState:
    tokens = [*distinct_tokens(0, before), *[IMAGE_TOKEN] * length, *distinct_tokens(1, after)]
    return make_request(name, tokens, [item(mm_hash, before, length)])


def test_tokens_that_the_runner_knows_reach_their_requests() -> None:
    """The others of the step are drawn from logits, which is what everything but a plain greedy request needs."""
    bench = Bench()
    bench.runner.known = 4
    greedy, plain = SamplingParams(max_tokens=2, temperature=0.0), SamplingParams(max_tokens=2)
    others = [plain, structs.replace(greedy, num_logprobs=0), structs.replace(greedy, presence_penalty=1.0)]
    params = [others[0], greedy, others[1], greedy, others[2]]
    requests = [make_request(str(i), distinct_tokens(i, 4), sampling=p) for i, p in enumerate(params)]
    bench.run(*requests)
    assert [request.token_ids[4:] for request in requests] == [[WORD, WORD], [4, 4]] * 2 + [[WORD, WORD]]
    assert [[row.sampling for row in bench.rows].count(p) for p in [*others, greedy]] == [2, 2, 2, 0]


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "num_output", "stop_token_id"),
    [
        (SamplingParams(max_tokens=3), [WORD] * 9, FinishReason.LENGTH, 3, None),
        (SamplingParams(max_tokens=9), [WORD, EOS], FinishReason.STOP, 2, None),
        (SamplingParams(max_tokens=9, stop_token_ids=[STOP]), [WORD, STOP], FinishReason.STOP, 2, STOP),
        (SamplingParams(max_tokens=4, ignore_eos=True), [EOS] * 9, FinishReason.LENGTH, 4, None),
        (SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[STOP]), [EOS, STOP], FinishReason.STOP, 2, STOP),
        (SamplingParams(max_tokens=9, min_tokens=3), [EOS] * 9, FinishReason.STOP, 3, None),
        (SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=[STOP]), [STOP] * 9, FinishReason.STOP, 3, STOP),
        (SamplingParams(max_tokens=1), [EOS], FinishReason.STOP, 1, None),
    ],
    ids=["max", "eos", "stop_id", "ignore_eos", "ignore_eos_stop_id", "min", "min_stop_id", "eos_at_max"],
)
def test_finish_reasons(
    sampling: SamplingParams, tokens: list[int], reason: FinishReason, num_output: int, stop_token_id: int | None
) -> None:
    bench = Bench(*tokens)
    request = make_request("a", distinct_tokens(0, 5), sampling=sampling)
    bench.run(request)
    assert (request.finish_reason, request.num_output_tokens) == (reason, num_output)
    assert request.stop_token_id == stop_token_id
    bench.assert_empty()


def test_the_models_limit_ends_a_request() -> None:
    bench = Bench(max_model_len=8)
    request = make_request("a", distinct_tokens(0, 5))
    bench.run(request)
    assert (request.finish_reason, len(request.token_ids)) == (FinishReason.LENGTH, 8)


def test_tokens_of_an_earlier_attempt_count_towards_max_tokens() -> None:
    bench = Bench()
    request = make_request("a", distinct_tokens(0, 5), sampling=SamplingParams(max_tokens=4), num_output_tokens=3)
    bench.run(request)
    assert request.num_output_tokens == 4


@pytest.mark.parametrize("status", list(Status))
def test_a_cancel_in_any_status_frees_all(status: Status) -> None:
    bench = Bench(num_blocks=4, max_num_batched_tokens=16)
    engine = bench.engine
    other = make_request("other", distinct_tokens(5, 8))
    request = make_request("a", distinct_tokens(0, 8))
    match status:
        case Status.WAITING:
            engine.submit(request)
        case Status.WAITING_FOR_EMBEDDINGS:
            request = image_prompt()
            engine.submit(request)
            engine.step()
            engine.step()
        case Status.WAITING_FOR_KV:
            request = make_request("a", distinct_tokens(0, 8), kv_from_elsewhere=True)
            engine.submit(request)
            assert engine.step().admitted_for_kv == [request]
        case Status.RUNNING:
            engine.submit(request)
            engine.step()
        case Status.PREEMPTED:
            engine.submit(other)
            engine.submit(request)
            engine.step()
            engine.step()
        case Status.FINISHED:
            engine.submit(request)
            engine.cancel(request.key)
    assert request.status is status
    assert engine.cancel(request.key) == (status is not Status.FINISHED)
    assert request.finish_reason is FinishReason.ABORT
    engine.cancel(other.key)
    bench.assert_empty()


def test_a_cancel_of_an_unknown_request_is_harmless() -> None:
    assert not Bench().engine.cancel(make_request("a", [1]).key)


# -- embeddings --------------------------------------------------------------------------------------------------------


def test_submit_returns_what_is_missing_each_once_and_in_order() -> None:
    bench = Bench()
    items: list[PromptItem] = [item("x", 0, 4), item("y", 4, 4), item("x", 8, 4)]
    cached, missing = bench.engine.submit(make_request("a", [IMAGE_TOKEN] * 13, items))
    assert (cached, missing) == (0, ["x", "y"])
    assert bench.engine.wants_embedding("x")
    assert not bench.engine.wants_embedding("z")


def test_what_submit_asked_for_is_not_demanded_again() -> None:
    bench = Bench()
    bench.engine.submit(image_prompt())
    for _ in range(3):
        bench.engine.step()
    assert bench.demands == []


def test_an_embedding_that_is_here_is_not_asked_for() -> None:
    bench = Bench()
    bench.engine.submit(image_prompt("a"))
    bench.engine.add_embedding("x", embedding(4))
    assert bench.engine.submit(image_prompt("b"))[1] == []


def test_a_prompt_whose_prefix_covers_the_image_needs_no_embedding() -> None:
    bench = Bench(EOS, cache_bytes=0)
    bench.engine.submit(image_prompt(after=3))
    bench.engine.add_embedding("x", embedding(4))
    bench.run()
    assert "x" not in bench.engine.embeddings
    assert bench.engine.submit(image_prompt("b", after=3)) == (8, [])


def test_one_embedding_lets_every_request_that_waits_for_it_go_on() -> None:
    bench = Bench(EOS, EOS)
    requests = [image_prompt("a", before=0), image_prompt("b", before=0)]
    for request in requests:
        bench.engine.submit(request)
    bench.engine.step()
    assert [r.status for r in requests] == [Status.WAITING_FOR_EMBEDDINGS] * 2
    bench.engine.add_embedding("x", embedding(4))
    bench.run()
    assert [r.finish_reason for r in requests] == [FinishReason.STOP] * 2
    bench.assert_empty()


def test_a_needed_embedding_outlives_a_cache_of_no_capacity() -> None:
    bench = Bench(EOS, cache_bytes=0)
    request = image_prompt()
    bench.engine.submit(request)
    bench.engine.add_embedding("x", embedding(4))
    assert "x" in bench.engine.embeddings
    bench.run()
    assert "x" not in bench.engine.embeddings


def test_a_chunk_gets_the_rows_that_fall_into_it() -> None:
    bench = Bench(EOS, max_num_batched_tokens=4)
    bench.engine.submit(image_prompt(before=2, length=5, after=2))
    bench.engine.add_embedding("x", torch.arange(5.0)[:, None].expand(5, 4))
    bench.run()
    slices = [[(s.offset, s.rows[:, 0].tolist()) for s in chunk.embeddings] for (chunk,) in bench.runner.steps]
    assert slices == [[(2, [0.0, 1.0])], [(0, [2.0, 3.0, 4.0])], []]


def test_a_chunk_names_its_tokens_positions_and_blocks() -> None:
    bench = Bench(WORD, EOS, max_num_batched_tokens=4)
    bench.run(make_request("a", [11, 12, 13, 14, 15, 16]))
    chunks = [chunk for (chunk,) in bench.runner.steps]
    assert [chunk.token_ids for chunk in chunks] == [[11, 12, 13, 14], [15, 16], [WORD]]
    assert [chunk.first_position for chunk in chunks] == [0, 4, 6]
    assert [chunk.positions[0].tolist() for chunk in chunks] == [[0, 1, 2, 3], [4, 5], [6]]
    assert [chunk.sample for chunk in chunks] == [False, True, True]
    assert len(chunks[-1].block_table) == 2


def test_embeddings_are_kept_across_a_preemption() -> None:
    bench = Bench(num_blocks=6)
    first = make_request("first", distinct_tokens(3, 12), sampling=SamplingParams(max_tokens=5))
    second = image_prompt("second", before=0, length=8, after=2)
    second.sampling = SamplingParams(max_tokens=5)
    bench.engine.submit(first)
    bench.engine.submit(second)
    bench.engine.add_embedding("x", embedding(8))
    bench.run()
    assert bench.engine.scheduler.num_preemptions > 0
    assert bench.demands == []
    assert (first.num_output_tokens, second.num_output_tokens) == (5, 5)
    bench.assert_empty()


def test_a_preempted_request_whose_embedding_was_evicted_demands_it_once() -> None:
    bench = Bench(num_blocks=4, cache_bytes=0)
    bench.pool._prefix_caching = False
    first = make_request("first", distinct_tokens(3, 8), sampling=SamplingParams(max_tokens=3))
    second = image_prompt("second", before=0, length=6, after=2)
    second.sampling = SamplingParams(max_tokens=3)
    bench.engine.submit(first)
    assert bench.engine.submit(second)[1] == ["x"]
    bench.engine.add_embedding("x", embedding(6))
    for _ in range(8):
        for request, _, reason, _ in bench.engine.step().sampled:
            if reason is not None:
                bench.engine.end(request, reason)
    assert first.finish_reason is FinishReason.LENGTH
    assert second.status is Status.WAITING_FOR_EMBEDDINGS
    assert bench.demands == [("second", ["x"])]
    bench.engine.add_embedding("x", embedding(6))
    bench.run()
    assert second.finish_reason is FinishReason.LENGTH
    assert len(bench.demands) == 1


def test_a_demand_that_was_forgotten_is_made_anew() -> None:
    bench = Bench()
    request = image_prompt()
    bench.engine.submit(request)
    bench.engine.step()
    bench.engine.forget_demand(request.key, "x")
    assert not bench.engine.wants_embedding("x")
    bench.engine.step()
    assert bench.demands == [("a", ["x"])]
    assert bench.engine.wants_embedding("x")


def test_embeddings_beyond_the_capacity_are_evicted_when_nobody_needs_them() -> None:
    bench = Bench(cache_bytes=4 * 4 * 4)
    for name, mm_hash in (("a", "x"), ("b", "y")):
        bench.engine.submit(image_prompt(name, mm_hash=mm_hash))
        bench.engine.add_embedding(mm_hash, embedding(4))
    assert len(bench.engine.embeddings) == 2
    bench.engine.cancel(make_request("a", [1]).key)
    assert "x" not in bench.engine.embeddings
    assert "y" in bench.engine.embeddings


# -- what the answer to a prompt relied on -----------------------------------------------------------------------------


def warm(bench: Bench) -> RequestState:
    """Image x is computed and cached in blocks; a request whose image y is not here waits with nothing but these."""
    bench.run(warmed := image_prompt("warm", before=0, length=8, after=1), embeddings={"x": 8})
    assert warmed.finish_reason is FinishReason.STOP
    tokens = [IMAGE_TOKEN] * 16
    waiting = make_request("waits", tokens, [item("x", 0, 8), item("y", 8, 8)], sampling=SamplingParams(max_tokens=1))
    assert bench.engine.submit(waiting) == (8, ["y"])
    bench.engine.embeddings.evict_one()
    assert "x" not in bench.engine.embeddings
    return waiting


def test_blocks_that_the_answer_relied_on_stay_while_others_need_blocks() -> None:
    bench = Bench(EOS, *[WORD] * 10, num_blocks=8, cache_bytes=1 << 10)
    waiting = warm(bench)
    other = make_request("other", distinct_tokens(3, 16), sampling=SamplingParams(max_tokens=8))
    bench.engine.submit(other)
    bench.run_until(other)
    assert waiting.num_cached_tokens == 0  # it has not begun
    bench.engine.add_embedding("y", embedding(8))
    bench.run()
    assert (waiting.num_cached_tokens, bench.demands) == (8, [])
    bench.assert_empty()


def test_under_pressure_they_give_way_and_the_item_is_asked_for() -> None:
    bench = Bench(EOS, *[WORD] * 10, num_blocks=6, cache_bytes=1 << 10)
    waiting = warm(bench)
    other = make_request("other", distinct_tokens(3, 16), sampling=SamplingParams(max_tokens=8))
    bench.engine.submit(other)
    bench.run_until(other)
    assert bench.engine.scheduler.num_preemptions == 0
    bench.engine.add_embedding("y", embedding(8))
    bench.engine.step()
    assert bench.demands == [("waits", ["x"])]
    bench.engine.add_embedding("x", embedding(8))
    bench.run()
    assert waiting.finish_reason is FinishReason.LENGTH
    bench.assert_empty()


def test_a_request_that_is_cancelled_while_it_waits_lets_its_blocks_go() -> None:
    bench = Bench(EOS, num_blocks=8, cache_bytes=1 << 10)
    bench.engine.cancel(warm(bench).key)
    bench.assert_empty()


# -- siblings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "after", "is_kept"), [(6, 0, True), (7, 1, True), (6, 1, False)])
def test_what_siblings_compute_again_keeps_its_embedding_until_the_cancel(
    length: int, after: int, is_kept: bool
) -> None:
    """Blocks of 4, the image after 2 tokens: siblings find blocks that are full and do not hold the last token."""
    bench = Bench(EOS, EOS, cache_bytes=0)
    prompt = image_prompt(before=2, length=length, after=after)
    first = make_request("r", prompt.token_ids, prompt.items, has_siblings=True)
    bench.engine.submit(first)
    bench.engine.add_embedding("x", embedding(length))
    ((_, _, reason, _),) = bench.engine.step().sampled
    bench.engine.end(first, reason)
    bench.engine.add_embedding("other", embedding(6))
    assert ("x" in bench.engine.embeddings) == is_kept
    assert bench.engine.embeddings.num_referenced == is_kept
    sibling = make_request("r#1", prompt.token_ids, prompt.items)
    assert bench.engine.submit(sibling)[1] == []
    bench.run_until(sibling)
    assert ("x" in bench.engine.embeddings) == is_kept
    assert not bench.engine.cancel(first.key)
    bench.engine.embeddings.shrink()
    assert "x" not in bench.engine.embeddings
    bench.assert_empty()


# -- what is sampled from, and scored ----------------------------------------------------------------------------------

SCORED = SamplingParams(max_tokens=3, num_prompt_logprobs=2)


def scored_tokens(bench: Bench) -> list[list[int]]:
    return [chunk.scoring.token_ids if chunk.scoring else [] for step in bench.runner.steps for chunk in step]


def test_the_sampler_is_given_parameters_prompt_and_output() -> None:
    bench = Bench()
    request = make_request("a", [11, 12, 13], sampling=SCORED)
    bench.run(request)
    assert bench.rows == [SampleRow(SCORED, [11, 12, 13, *[WORD] * k], 3) for k in range(3)]
    assert [row.num_output_tokens for row in bench.rows] == [0, 1, 2]


def test_each_token_of_the_prompt_but_the_first_is_scored_once_whatever_the_chunks() -> None:
    prompt = distinct_tokens(0, 11)
    bench = Bench(max_num_batched_tokens=4)
    request = make_request("a", prompt, sampling=SCORED)
    bench.run(request)
    assert scored_tokens(bench) == [prompt[1:5], prompt[5:9], prompt[9:], [], []]
    assert [entry.token_ids for entry in request.prompt_logprobs] == [[token] for token in prompt[1:]]
    assert bench.runner.steps[0][0].scoring is not None
    assert bench.runner.steps[0][0].scoring.num_top == 2


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    bench = Bench()
    request = make_request("a", [11], sampling=SCORED)
    bench.run(request)
    assert (request.prompt_logprobs, scored_tokens(bench)) == ([], [[], [], []])


def test_a_prompt_that_is_scored_is_computed_though_it_is_cached_and_needs_its_embeddings() -> None:
    bench = Bench(EOS, cache_bytes=0)
    bench.engine.submit(image_prompt("a", after=7))
    bench.engine.add_embedding("x", embedding(4))
    bench.run()
    again = image_prompt("b", after=7)
    scored = make_request("b", again.token_ids, again.items, sampling=SCORED)
    assert bench.engine.scheduler.num_cached_tokens(again) == 12
    assert bench.engine.submit(scored) == (0, ["x"])
    bench.engine.add_embedding("x", embedding(4))
    bench.run()
    assert [entry.token_ids[0] for entry in scored.prompt_logprobs] == scored.token_ids[1:13]
    assert scored.num_cached_tokens == 0
    bench.assert_empty()


@pytest.mark.parametrize("num_blocks", [6, 7])
def test_scores_survive_preemption(num_blocks: int) -> None:
    """A decoding request takes the blocks of one that is within its prompt."""
    bench = Bench(num_blocks=num_blocks, max_num_batched_tokens=6)
    first = make_request("first", distinct_tokens(3, 5), sampling=SamplingParams(max_tokens=17))
    prompt = distinct_tokens(4, 17)
    scored = make_request("scored", prompt, sampling=SCORED)
    bench.engine.submit(first)
    bench.engine.step()
    bench.run(scored, max_steps=100)
    assert bench.engine.scheduler.num_preemptions > 0
    assert [entry.token_ids for entry in scored.prompt_logprobs] == [[token] for token in prompt[1:]]
    tokens = [token for scored_here in scored_tokens(bench) for token in scored_here]
    assert set(tokens) == set(prompt[1:])
    bench.assert_empty()


@pytest.mark.parametrize("elsewhere", [True, False])
def test_what_goes_on_here_scores_no_prompt(elsewhere: bool) -> None:
    """Its first token was sent already, and the scores with it."""
    bench = Bench()
    if elsewhere:
        request = make_request("a", distinct_tokens(0, 6), sampling=SCORED, kv_from_elsewhere=True)
        bench.engine.submit(request)
        bench.engine.step()
        bench.engine.kv_arrived(request, 6, WORD)
        bench.run()
    else:
        request = make_request("a", distinct_tokens(0, 6), sampling=SCORED, num_output_tokens=1)
        bench.run(request)
    assert request.num_output_tokens == 3
    assert not any(scored_tokens(bench))


# -- KV from elsewhere -------------------------------------------------------------------------------------------------


def test_with_the_first_token_a_request_begins_to_decode_here() -> None:
    bench = Bench(EOS)
    request = make_request("a", distinct_tokens(0, 6), kv_from_elsewhere=True)
    assert bench.engine.submit(request) == (0, [])
    bench.engine.step()
    assert bench.engine.kv_arrived(request, 4, None) is None
    assert not bench.engine.step().did_work
    assert bench.engine.kv_arrived(request, 6, WORD) is None
    bench.run()
    ((chunk,),) = bench.runner.steps
    assert (chunk.token_ids, chunk.first_position) == ([WORD], 6)
    assert request.token_ids[-2:] == [WORD, EOS]
    bench.assert_empty()


def test_an_idle_engine_does_no_work_and_runs_no_forward() -> None:
    bench = Bench()
    assert not bench.engine.step().did_work
    assert bench.runner.steps == []
