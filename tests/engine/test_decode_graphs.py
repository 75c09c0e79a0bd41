"""Decode steps from fixed places: the same logits as without, whatever a graph's size is and what was in it before."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.test_attention import documented_varlen_attn
from tests.engine.test_runner import NUM_BLOCKS, NUM_DECODED, Model, Sequence, make_model
from triptych.engine import decode_graphs, varlen_attention
from triptych.engine.batch import SequenceChunk
from triptych.engine.decode_graphs import CudaRecorder, DecodeGraphs, Recorder
from triptych.engine.runner import ModelRunner


def plain_recorder(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
    """Replays by doing it again, with the result in the same place."""
    result = step()

    def replay() -> None:
        result.copy_(step())

    return result, replay


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model("qwen3_vl", "torch", 8, tmp_path_factory.mktemp("model"))


def _runner(model: Model, recorder: Recorder) -> ModelRunner:
    """All prompts are computed, and what comes now is decoded in graphs."""
    runner = model.runner()
    for sequence in model.sequences:
        runner.forward([sequence.chunk(0, len(sequence.token_ids) - NUM_DECODED)])
    runner._graphs = DecodeGraphs(runner._kv, runner._decode, model.spec.max_model_len, recorder)
    return runner


def test_steps_of_any_size_equal_steps_without_graphs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_attention, "varlen_attn", documented_varlen_attn)
    recorded: list[int] = []

    def recorder(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        logits, replay = plain_recorder(step)
        recorded.append(len(logits))
        return logits, replay

    runner, rng = _runner(model, recorder), random.Random(3)
    computed = [len(sequence.token_ids) - NUM_DECODED for sequence in model.sequences]
    while going := [i for i, sequence in enumerate(model.sequences) if computed[i] < len(sequence.token_ids)]:
        chosen = rng.sample(going, rng.randrange(1, len(going) + 1))
        chunks = [model.sequences[i].chunk(computed[i], computed[i] + 1) for i in chosen]
        expected = torch.stack([model.sequences[i].expected[computed[i]] for i in chosen])
        output = runner.forward(chunks)
        torch.testing.assert_close(output.logits, expected, rtol=0, atol=1e-4)
        assert output.scores == []
        for i in chosen:
            computed[i] += 1
    assert sorted(recorded) == [1, 2, 4], "one graph a size: three sequences use the one of four"


def test_other_steps_run_without_a_graph(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "SIZES", (1, 2))

    def recorder(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        raise AssertionError("not a decode step that a graph has room for")

    runner = _runner(model, recorder)
    one, two, three = (sequence for sequence in model.sequences[:3])

    def decode(sequence: Sequence) -> SequenceChunk:
        at = len(sequence.token_ids) - NUM_DECODED
        return sequence.chunk(at, at + 1)

    assert len(runner.forward([decode(one), decode(two), decode(three)]).logits) == 3
    assert len(runner.forward([decode(one)._replace(sample=False)]).logits) == 0
    assert len(runner.forward([decode(one), two.chunk(0, 5)]).logits) == 2


def test_where_nothing_can_be_recorded_steps_run_as_without(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[None] = []

    def recorder(step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        calls.append(None)
        raise RuntimeError("operation not permitted when stream is capturing")

    runner, sequence = _runner(model, recorder), model.sequences[1]
    for at in range(len(sequence.token_ids) - NUM_DECODED, len(sequence.token_ids)):
        logits = runner.forward([sequence.chunk(at, at + 1)]).logits
        torch.testing.assert_close(logits[0], sequence.expected[at], rtol=0, atol=1e-4)
    assert len(calls) == 1
    assert "without graphs: operation not permitted" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: whether a decode step can be recorded")
def test_a_recorded_step_equals_the_plain_one_on_a_gpu(tmp_path: Path) -> None:
    """In bfloat16, close to float32 on the CPU."""
    plain = make_model("qwen3_vl", "torch", 16, tmp_path)
    device = torch.device("cuda")
    kv = torch.zeros((NUM_BLOCKS, *plain.spec.kv_block_shape(16)), dtype=torch.bfloat16, device=device)
    runner = ModelRunner.load(replace(plain.spec, dtype="bfloat16"), kv, device=device)
    assert isinstance(runner._graphs, DecodeGraphs)
    assert isinstance(runner._graphs._recorder, CudaRecorder)
    sequence = plain.sequences[1]
    start = len(sequence.token_ids) - NUM_DECODED
    runner.forward([sequence.chunk(0, start)])
    for at in range(start, len(sequence.token_ids)):
        logits = runner.forward([sequence.chunk(at, at + 1)]).logits[0].cpu()
        torch.testing.assert_close(logits, sequence.expected[at], rtol=0, atol=0.1)
