"""The language part over paged KV, in chunks, with images, in mixed batches, against transformers' whole model."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from tests.kernels import why_no_kernels
from triptych.config import ModelConfig
from triptych.engine.batch import EmbeddingSlice, Scoring, SequenceChunk
from triptych.engine.runner import ModelRunner
from triptych.errors import EngineError
from triptych.kernels import library
from triptych.messages import Logprobs
from triptych.models.registry import ModelSpec, open_model
from triptych.models.vision import VisionRunner
from triptych.testing_checkpoints import FamilyName, make_checkpoint
from triptych.types import ImageSize, Modality, Placeholder, PromptItem

NUM_BLOCKS, NUM_DECODED = 96, 6
FAMILIES: list[FamilyName] = ["qwen3_vl", "qwen2_5_vl"]
BACKENDS = [("torch", 8), ("native", 16), ("native", 32)]  # kernels, block_size
CHUNK_SIZES = [1, 3, 16, 50, 1000]


class Sequence(NamedTuple):
    """A prompt with images and some tokens after it, with all that a step needs of it."""

    token_ids: list[int]
    positions: NDArray[np.int64]
    items: list[PromptItem]
    embeddings: list[torch.Tensor]
    expected: torch.Tensor  # logits [tokens, vocabulary] of transformers
    blocks: list[int]
    block_size: int

    def chunk(self, start: int, end: int, *, sample: bool = True) -> SequenceChunk:
        slices = []
        for item, embedding in zip(self.items, self.embeddings, strict=True):
            first, last = max(start, item.placeholder.offset), min(end, item.placeholder.end)
            if first < last:
                offset = item.placeholder.offset
                slices.append(EmbeddingSlice(first - start, embedding[first - offset : last - offset]))
        table = self.blocks[: -(-end // self.block_size)]
        positions = self.positions[:, start:end]
        return SequenceChunk(self.token_ids[start:end], start, positions, table, slices, sample)


class Model(NamedTuple):
    spec: ModelSpec
    sequences: list[Sequence]
    block_size: int

    def runner(self, *, pack_linears: bool = False) -> ModelRunner:
        """With KV of its own; what was never written is not a number."""
        kv = torch.full((NUM_BLOCKS, *self.spec.kv_block_shape(self.block_size)), torch.nan)
        return ModelRunner.load(self.spec, kv, pack_linears=pack_linears)


def _images(rng: random.Random, count: int) -> list[Image.Image]:
    noise = np.random.default_rng(rng.randrange(1 << 30))
    sizes = [(rng.randrange(40, 200), rng.randrange(40, 200)) for _ in range(count)]
    return [Image.fromarray(noise.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]


def _sequence(
    spec: ModelSpec, full: Any, rng: random.Random, num_images: int, blocks: Iterator[int], block_size: int
) -> Sequence:
    token_ids = [rng.randrange(250) for _ in range(5)]
    items, inputs = [], []
    for image in _images(rng, num_images):
        metadata = spec.family.image_metadata(ImageSize(*image.size))
        placeholder = Placeholder(len(token_ids), metadata.num_tokens)
        items.append(PromptItem(Modality.IMAGE, "0" * 64, placeholder, metadata))
        inputs.append((spec.family.preprocess(image, metadata), metadata.grid))
        token_ids += [*spec.family.expansion(metadata), *(rng.randrange(250) for _ in range(3))]
    prompt_positions, delta = spec.family.positions(token_ids, items)
    decoded = np.arange(len(token_ids), len(token_ids) + NUM_DECODED) + delta
    positions = np.concatenate([prompt_positions, np.tile(decoded, (3, 1))], axis=1)
    token_ids = token_ids + [rng.randrange(250) for _ in range(NUM_DECODED)]
    num_blocks = -(-len(token_ids) // block_size)
    return Sequence(
        token_ids,
        positions,
        items,
        VisionRunner.load(spec).encode(inputs),
        _expected(full, spec, token_ids, inputs),
        [next(blocks) for _ in range(num_blocks)],
        block_size,
    )


def _expected(full: Any, spec: ModelSpec, token_ids: list[int], inputs: list[Any]) -> torch.Tensor:
    ids = torch.tensor([token_ids])
    images: dict[str, torch.Tensor] = {}
    if inputs:
        images["pixel_values"] = torch.cat([torch.from_numpy(patches) for patches, _ in inputs])
        images["image_grid_thw"] = torch.tensor([grid for _, grid in inputs])
        images["mm_token_type_ids"] = (ids == spec.family.placeholder_token_id).int()
    full.model.rope_deltas = None
    with torch.inference_mode():
        logits: torch.Tensor = full(input_ids=ids, use_cache=False, **images).logits[0]
    return logits.float()


@pytest.fixture(scope="module", params=itertools.product(FAMILIES, BACKENDS), ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family, (kernels, block_size) = request.param
    if kernels == "native" and not library.available():
        pytest.skip(why_no_kernels())
    return make_model(family, kernels, block_size, tmp_path_factory.mktemp(family))


def make_model(family: FamilyName, kernels: Literal["torch", "native"], block_size: int, folder: Path) -> Model:
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(1)
    folder = make_checkpoint(family, folder, seed=11)
    full = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    spec = open_model(str(folder), ModelConfig(device="cpu", kernels=kernels))
    rng = random.Random(4)
    blocks = iter(rng.sample(range(1, NUM_BLOCKS), NUM_BLOCKS - 1))
    sequences = [_sequence(spec, full, rng, num_images, blocks, block_size) for num_images in (2, 0, 1, 3)]
    return Model(spec, sequences, block_size)


def _assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("pack_linears", [False, True])
def test_chunks_of_any_size_then_decode(model: Model, chunk_size: int, pack_linears: bool) -> None:
    runner = model.runner(pack_linears=pack_linears)
    sequence = model.sequences[0]
    total = len(sequence.token_ids)
    start = 0
    while start < total:
        end = min(start + chunk_size, total - NUM_DECODED) if start < total - NUM_DECODED else start + 1
        _assert_close(runner.forward([sequence.chunk(start, end)]).logits[0], sequence.expected[end - 1])
        start = end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_and_batches_change_no_bit_of_the_kernels_logits(model: Model, dtype: torch.dtype) -> None:
    """What lets placements be compared in bfloat16: a row's logits do not depend on what else a step computes."""
    if model.spec.kernels != "native":
        pytest.skip("torch's kernels differ with the number of rows")
    spec = replace(model.spec, dtype=str(dtype).removeprefix("torch."))
    sequences = [s._replace(embeddings=[e.to(dtype) for e in s.embeddings]) for s in model.sequences]
    kv = torch.zeros((NUM_BLOCKS, *spec.kv_block_shape(model.block_size)), dtype=dtype)
    runner = ModelRunner.load(spec, kv)
    whole = [runner.forward([s.chunk(0, len(s.token_ids))]).logits[0] for s in sequences]
    for step in (1, 7, 40):
        kv.zero_()
        for start in range(0, max(len(s.token_ids) for s in sequences), step):
            going = [s for s in sequences if start < len(s.token_ids)]
            logits = runner.forward([s.chunk(start, min(start + step, len(s.token_ids))) for s in going]).logits
            for row, sequence in zip(logits, going, strict=True):
                if start + step >= len(sequence.token_ids):
                    assert torch.equal(row, whole[next(i for i, s in enumerate(sequences) if s is sequence)])


@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches(model: Model, seed: int) -> None:
    """Sequences advance by steps of any size in batches of any make-up, some of them sampling."""
    rng = random.Random(seed)
    runner = model.runner()
    computed = [0] * len(model.sequences)
    while any(c < len(s.token_ids) for c, s in zip(computed, model.sequences, strict=True)):
        chunks, expected = [], []
        for i in rng.sample(range(len(computed)), len(computed)):
            sequence, start = model.sequences[i], computed[i]
            left = len(sequence.token_ids) - start
            if left and rng.random() < 0.8:
                end = start + min(left, rng.choice([1, 1, 2, 7, 16, 33]))
                chunks.append(sequence.chunk(start, end, sample=rng.random() < 0.7))
                computed[i] = end
                if chunks[-1].sample:
                    expected.append(sequence.expected[end - 1])
        if chunks:
            logits = runner.forward(chunks).logits
            assert logits.shape == (len(expected), model.spec.family.text.vocab)
            if expected:
                _assert_close(logits, torch.stack(expected))


def _scored(sequence: Sequence, chunk: SequenceChunk, num_top: int = 3) -> SequenceChunk:
    start = chunk.first_position
    return chunk._replace(scoring=Scoring(sequence.token_ids[start + 1 : start + 1 + len(chunk.token_ids)], num_top))


@pytest.mark.parametrize("chunk_size", [7, 50, 1000])
def test_scores_of_a_prompt_with_images(model: Model, chunk_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other requests, a few rows of logits at a time."""
    monkeypatch.setattr("triptych.engine.runner.SCORED_ROWS", 16)
    runner, sequence, other = model.runner(), model.sequences[0], model.sequences[2]
    num_tokens = len(sequence.token_ids)
    scores: list[Logprobs] = []
    for start in range(0, num_tokens, chunk_size):
        end = min(start + chunk_size, num_tokens)
        beside = other.chunk(0, min(20, len(other.token_ids)))
        output = runner.forward([beside, _scored(sequence, sequence.chunk(start, end))])
        _assert_close(output.logits, torch.stack([other.expected[19], sequence.expected[end - 1]]))
        assert len(output.scores) == 1
        scores += output.scores[0]
    expected = torch.log_softmax(sequence.expected, -1)
    assert [entry.token_ids[0] for entry in scores] == sequence.token_ids[1:]
    for row, entry in zip(expected, scores, strict=False):
        _assert_close(torch.tensor(entry.logprobs), row[entry.token_ids])
        _assert_close(torch.tensor(entry.logprobs[1:]), row.topk(3).values)
        assert abs(entry.rank - 1 - int((row > row[entry.token_ids[0]]).sum())) <= 1


def test_chunks_change_no_bit_of_the_kernels_scores(model: Model) -> None:
    if model.spec.kernels != "native":
        pytest.skip("torch's kernels differ with the number of rows")
    runner, sequence = model.runner(), model.sequences[0]
    end = len(sequence.token_ids)
    (whole,) = runner.forward([_scored(sequence, sequence.chunk(0, end, sample=False))]).scores
    for step in (1, 9, 64):
        scores = []
        for start in range(0, end, step):
            chunk = sequence.chunk(start, min(start + step, end))
            scores += runner.forward([_scored(sequence, chunk)]).scores[0]
        assert scores == whole
    unscored = runner.forward([sequence.chunk(0, end)]).logits
    assert torch.equal(runner.forward([_scored(sequence, sequence.chunk(0, end))]).logits, unscored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_get_the_token_that_their_logits_say(model: Model, dtype: torch.dtype) -> None:
    """Beside rows that want logits and rows that want none; without kernels all of them get logits."""
    spec = replace(model.spec, dtype=str(dtype).removeprefix("torch."))
    runner = ModelRunner.load(spec, torch.zeros((NUM_BLOCKS, *spec.kv_block_shape(model.block_size)), dtype=dtype))
    wholes = [
        sequence._replace(embeddings=[e.to(dtype) for e in sequence.embeddings]).chunk(0, len(sequence.token_ids))
        for sequence in model.sequences
    ]
    expected = runner.forward(wholes).logits
    chunks = [chunk._replace(sample=i != 1, greedy=i in (0, 1, 3)) for i, chunk in enumerate(wholes)]
    logits, _, tokens = runner.forward(chunks)
    asked = [i for i in range(len(chunks)) if i != 1]
    assert set(tokens) <= {0, 2}  # of those that sample, in their order; bounds of so small a model may leave one open
    assert bool(tokens) == runner.is_native
    for place, token in tokens.items():
        assert token == int(expected[asked[place]].argmax())
    rest = [i for place, i in enumerate(asked) if place not in tokens]
    torch.testing.assert_close(logits, expected[rest], rtol=0, atol=0 if runner.is_native else 1e-4)


def test_embeddings_and_deepstack_reach_the_logits(model: Model) -> None:
    """Without deepstack's rows, or with another image's, the logits are others."""
    runner, sequence = model.runner(), model.sequences[2]
    end, hidden = len(sequence.token_ids), model.spec.family.text.hidden
    _assert_close(runner.forward([sequence.chunk(0, end)]).logits[0], sequence.expected[-1])
    changed = [embedding.clone() for embedding in sequence.embeddings]
    if model.spec.family.vision.num_deepstack:
        changed[0][:, hidden:] = 0
    else:
        changed[0][:] = changed[0].flip(0)
    logits = runner.forward([sequence._replace(embeddings=changed).chunk(0, end)]).logits[0]
    assert (logits - sequence.expected[-1]).abs().max() > 0.05


def test_kv_of_an_earlier_request_does_not_matter(model: Model) -> None:
    runner, (first, second) = model.runner(), model.sequences[:2]
    reused = second._replace(blocks=first.blocks)
    runner.forward([first.chunk(0, len(first.token_ids))])
    logits = runner.forward([reused.chunk(0, len(reused.token_ids))]).logits
    _assert_close(logits[0], second.expected[-1])


def test_no_row_samples(model: Model) -> None:
    logits = model.runner().forward([model.sequences[1].chunk(0, 4, sample=False)]).logits
    assert logits.shape == (0, model.spec.family.text.vocab)
    assert logits.dtype == torch.float32


def test_misfits_are_refused(model: Model) -> None:
    runner, sequence = model.runner(), model.sequences[2]
    narrow = sequence._replace(embeddings=[e[:, :8] for e in sequence.embeddings])
    with pytest.raises(ValueError, match="does not fit the model"):
        runner.forward([narrow.chunk(0, len(sequence.token_ids))])
    with pytest.raises(ValueError, match="does not fit the model"):
        ModelRunner.load(model.spec, torch.zeros(4, *model.spec.kv_block_shape(model.block_size), dtype=torch.bfloat16))


def test_probe_uses_the_scratch_block_alone(model: Model) -> None:
    kv = torch.zeros((4, *model.spec.kv_block_shape(model.block_size)))
    runner = ModelRunner.load(model.spec, kv)
    assert (runner.embeds_dtype, runner.embeds_width) == (torch.float32, model.spec.embed_width)
    assert runner.report.shards_read == 2
    runner.probe()
    assert kv[0].any()
    assert not kv[1:].any()


def test_probe_sees_a_broken_model(tmp_path: Path) -> None:
    spec = open_model(str(make_checkpoint("qwen3_vl", tmp_path)), ModelConfig(device="cpu"))
    runner = ModelRunner.load(spec, torch.zeros((2, *spec.kv_block_shape(4))))
    runner._language.embedding.weight.data = torch.full_like(runner._language.embedding.weight, torch.inf)
    with pytest.raises(EngineError, match="finite"):
        runner.probe()
