"""Grammars inside the engine: what is drawn matches, whatever happens to its request, and no other one suffers."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from tests.engine.requests import BLOCK_SIZE, make_request
from triptych.clock import ManualClock
from triptych.config import EngineConfig
from triptych.demo import checkpoint_path
from triptych.engine.batch import SequenceChunk, StepLogits
from triptych.engine.engine import Engine
from triptych.engine.grammar import GrammarVocabulary
from triptych.engine.kv_blocks import KVBlockPool
from triptych.engine.matchers import Matchers
from triptych.engine.request_state import RequestState
from triptych.engine.sampler import sample
from triptych.prompt.grammar import compile_structure
from triptych.types import FinishReason, SamplingParams, Structure

FILE = checkpoint_path() / "tokenizer.json"
VOCAB, EOS = 1536, 1531
VOCABULARY = GrammarVocabulary(FILE, VOCAB, [EOS])
REGEX = r"(red|green|blue)-[0-9]{2,4}"


class NoiseRunner:
    """Logits that are a function of the last token and its place alone."""

    def forward(self, chunks: Sequence[SequenceChunk]) -> StepLogits:
        logits = [self._logits(c.token_ids[-1], c.first_position + len(c.token_ids)) for c in chunks if c.sample]
        return StepLogits(torch.stack(logits) if logits else torch.empty((0, VOCAB)), [])

    def _logits(self, token_id: int, position: int) -> torch.Tensor:
        return torch.randn(VOCAB, generator=torch.Generator().manual_seed(10_000 * token_id + position)) * 3


class Bench:
    def __init__(self, *, vocabulary: GrammarVocabulary = VOCABULARY, num_blocks: int = 50) -> None:
        config = EngineConfig(block_size=BLOCK_SIZE, max_num_batched_tokens=16)
        self.matchers = Matchers(vocabulary)
        self.pool = KVBlockPool(num_blocks + 1)
        sampler = partial(sample, eos_token_ids=[EOS])
        self.engine = Engine(
            config, NoiseRunner(), sampler, self.matchers, self.pool, [EOS], 200, ManualClock(), lambda *_: None
        )
        self.failed: list[RequestState] = []

    def step(self) -> bool:
        result = self.engine.step()
        for request, _, reason, _ in result.sampled:
            if reason is not None:
                self.engine.end(request, reason)
        for request in result.failed:
            self.engine.end(request, FinishReason.ERROR)
        self.failed += result.failed
        self.engine.check()
        return result.did_work

    def run(self, *requests: RequestState, timeout_s: float = 30.0) -> None:
        for request in requests:
            self.engine.submit(request)
        deadline_s = time.monotonic() + timeout_s
        while len(self.engine.scheduler):
            assert time.monotonic() < deadline_s, "the requests do not end"
            if not self.step():
                time.sleep(0.001)


def grammar(kind: str, source: str) -> str:
    return compile_structure(Structure(kind, source))  # type: ignore[arg-type]


def request(
    name: str, *, output: Sequence[int] = (), prompt: Sequence[int] = (7, 8, 9), of: str = REGEX, **fields: Any
) -> RequestState:
    params = {"max_tokens": 40, "grammar": grammar("regex", of), **fields}
    tokens = [*prompt, *output]
    return make_request(name, tokens, sampling=SamplingParams(**params), num_output_tokens=len(output))


def output_ids(request: RequestState) -> list[int]:
    return request.token_ids[request.num_prompt_tokens :]


def text(request: RequestState) -> str:
    return b"".join(VOCABULARY.token_bytes[token_id] for token_id in output_ids(request)).decode()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_drawn_matches_and_stops_when_it_is_complete(temperature: float) -> None:
    bench = Bench()
    requests = [request(f"{k}", seed=k, prompt=(2, 3, k), temperature=temperature) for k in range(12)]
    bench.run(*requests)
    assert all(re.fullmatch(REGEX, text(r)) for r in requests)
    assert len({text(r) for r in requests}) > 4
    assert {r.finish_reason for r in requests} == {FinishReason.STOP}
    for r in requests:
        assert r.ends_in_text == (output_ids(r)[-1] != EOS)
    if temperature:  # four digits are the end, after fewer one is drawn
        assert {r.ends_in_text for r in requests} == {True, False}


def test_the_last_token_of_a_choice_ends_the_request_without_another_step() -> None:
    bench = Bench()
    one = request("a", of="(yes|no)")
    bench.run(one)
    assert text(one) in ("yes", "no")
    assert one.ends_in_text
    assert EOS not in output_ids(one)


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 30}, {"ignore_eos": True, "min_tokens": 30}])
def test_a_complete_grammar_wins_over_ignore_eos_and_min_tokens(fields: dict[str, Any]) -> None:
    bench = Bench()
    requests = [request(f"{k}", seed=k, prompt=(2, 3, k), **fields) for k in range(6)]
    bench.run(*requests)
    assert all(re.fullmatch(REGEX, text(r)) for r in requests)
    assert {r.finish_reason for r in requests} == {FinishReason.STOP}
    if "min_tokens" in fields:  # the end was kept away as long as something else could follow
        assert all(re.fullmatch(r"[a-z]+-[0-9]{4}", text(r)) for r in requests)


def test_other_parameters_hold_inside_the_grammar_and_never_break_it() -> None:
    bench = Bench()
    digits = [token_id for token_id in range(VOCAB) if VOCABULARY.token_bytes[token_id] == b"7"]
    bias: dict[str, Any] = {"logit_bias": dict.fromkeys(digits, 100.0), "temperature": 0.0}
    biased = request("biased", of="[0-9]{5}", **bias)
    nothing_left = request("nothing", of="(yes|no)", allowed_token_ids=[3], repetition_penalty=1.5)
    bench.run(biased, nothing_left)
    assert set(text(biased)) == {"7"}
    assert text(nothing_left) in ("yes", "no")


def test_a_request_goes_on_elsewhere_and_after_preemption_with_the_same_draws() -> None:
    whole = [request(f"{k}", seed=k, prompt=range(k, k + 9)) for k in range(4)]
    Bench().run(*whole)
    tight = Bench(num_blocks=10)
    preempted = [request(f"{k}", seed=k, prompt=range(k, k + 9)) for k in range(4)]
    tight.run(*preempted)
    assert tight.engine.scheduler.num_preemptions > 0
    assert [r.token_ids for r in preempted] == [r.token_ids for r in whole]
    for k, r in enumerate(whole):
        for cut in range(1, r.num_output_tokens):
            again = request("again", seed=k, prompt=range(k, k + 9), output=output_ids(r)[:cut])
            Bench().run(again)
            assert again.token_ids == r.token_ids


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"grammar": "// schema\nstart: /(/"}, "cannot be followed"),
        ({"grammar": "nonsense"}, "of which kind"),
        ({"output": [5]}, "does not match its grammar"),
    ],
)
def test_a_grammar_that_cannot_be_followed_fails_its_own_request(broken: dict[str, Any], reason: str) -> None:
    bench = Bench()
    bad, good = request("bad", **broken), request("good")
    bench.run(bad, good)
    assert bench.failed == [bad]
    assert reason in bad.failure
    assert bad.finish_reason is FinishReason.ERROR
    assert re.fullmatch(REGEX, text(good))
    assert bench.pool.num_free == bench.pool.num_blocks


def test_logits_that_are_no_numbers_fail_the_request_that_has_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoiseRunner, "_logits", lambda *_: torch.full((VOCAB,), torch.nan))
    bench = Bench()
    bad, other = request("bad"), make_request("other", [1, 2, 3], sampling=SamplingParams(max_tokens=3))
    bench.run(bad, other)
    assert bench.failed == [bad]
    assert other.finish_reason is FinishReason.LENGTH


class SlowVocabulary(GrammarVocabulary):
    """Is read when it is told to."""

    def __init__(self) -> None:
        super().__init__(FILE, VOCAB, [EOS])
        self.go_on = threading.Event()
        self.num_loads = 0

    def load(self) -> None:
        self.num_loads += 1
        assert self.go_on.wait(30)
        super().load()


def test_while_the_vocabulary_is_read_others_go_on_and_the_prompt_is_computed() -> None:
    vocabulary = SlowVocabulary()
    bench = Bench(vocabulary=vocabulary)
    first, second = request("first", prompt=range(9)), request("second", prompt=range(20, 22))
    other = make_request("other", [1, 2, 3], sampling=SamplingParams(max_tokens=10))
    for r in (first, second, other):
        bench.engine.submit(r)
    while bench.step():
        pass
    assert other.finish_reason is FinishReason.LENGTH
    assert [(r.num_computed_tokens, r.num_output_tokens) for r in (first, second)] == [(8, 0), (1, 0)]
    vocabulary.go_on.set()
    bench.run()
    assert re.fullmatch(REGEX, text(first))
    assert re.fullmatch(REGEX, text(second))
    assert vocabulary.num_loads == 1


def test_without_a_grammar_no_vocabulary_is_read() -> None:
    vocabulary = SlowVocabulary()
    Bench(vocabulary=vocabulary).run(make_request("other", [1, 2, 3], sampling=SamplingParams(max_tokens=3)))
    assert vocabulary.num_loads == 0


def test_a_tokenizer_that_cannot_be_read_fails_those_who_need_it(tmp_path: Any) -> None:
    bench = Bench(vocabulary=GrammarVocabulary(tmp_path / "none.json", VOCAB, [EOS]))
    bad, other = request("bad"), make_request("other", [1, 2, 3], sampling=SamplingParams(max_tokens=3))
    bench.run(bad, other)
    assert bench.failed == [bad]
    assert "none.json" in bad.failure
    assert other.finish_reason is FinishReason.LENGTH
