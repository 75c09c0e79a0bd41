"""What one step computes, as plain data and as packed rows: decode rows first, then chunks of prompts.

The engine makes `SequenceChunk`s for `engine/runner.py`, which packs them, and `SampleRow`s for `engine/sampler.py`.
numpy only: the engine needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from triptych.messages import Logprobs
from triptych.types import SamplingParams

if TYPE_CHECKING:
    import torch

Ints = NDArray[np.int64]


class EmbeddingSlice(NamedTuple):
    """Embeddings that replace tokens of a chunk."""

    offset: int  # of the first row, in tokens from the start of the chunk
    rows: torch.Tensor  # [k, hidden * (1 + deepstack layers)]


class Scoring(NamedTuple):
    """What is wanted at a chunk's first rows: log-probabilities of these tokens, one a row, and of the likeliest."""

    token_ids: list[int]
    num_top: int


class SequenceChunk(NamedTuple):
    """The tokens of one sequence that a step computes: one when it decodes, several of a prompt."""

    token_ids: list[int]
    first_position: int  # tokens of the sequence whose KV is computed already
    positions: Ints  # rotary, [3, len(token_ids)]
    block_table: list[int]  # KV blocks of the sequence, with room for these tokens
    embeddings: list[EmbeddingSlice]
    sample: bool  # whether the last token's logits are wanted
    scoring: Scoring | None = None
    greedy: bool = False  # whether the token with the largest of these logits will do


class StepLogits(NamedTuple):
    """What a step leads to, in the order of its chunks."""

    logits: torch.Tensor  # [chunks that sample and are not in `tokens`, vocabulary], float32
    scores: list[list[Logprobs]]  # of each chunk with `scoring`
    # Of greedy chunks, by their places among those that sample, if the runner knows them without logits.
    tokens: Mapping[int, int] = MappingProxyType({})


class SampleRow(NamedTuple):
    """All that the next token of one request depends on, beside its logits."""

    sampling: SamplingParams
    token_ids: Sequence[int]  # prompt, then output
    num_prompt_tokens: int
    grammar_mask: NDArray[np.int32] | None = None  # a bit a token, from the lowest on: those that the grammar allows

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def changes_logits(self) -> bool:
        """Whether `logits.py` has something to do before a token is drawn."""
        params = self.sampling
        return bool(
            self.grammar_mask is not None
            or params.allowed_token_ids
            or params.bad_words
            or self.num_output_tokens < params.min_tokens
            or params.logit_bias
            or params.repetition_penalty != 1
            or params.frequency_penalty
            or params.presence_penalty
        )

    @property
    def is_greedy(self) -> bool:
        """Whether its token is the one with the largest logit, and nothing else is asked of the logits."""
        params = self.sampling
        is_plain = params.temperature <= 0 and params.num_logprobs is None and not params.grammar
        return is_plain and not self.changes_logits


class Drawn(NamedTuple):
    token_id: int
    logprobs: Logprobs | None = None  # where they were asked for


class ScoredRows(NamedTuple):
    """Packed rows from `first_row` on whose log-probabilities are wanted."""

    first_row: int
    scoring: Scoring


class SequenceRows(NamedTuple):
    """A sequence's place among the packed rows."""

    first_row: int
    num_rows: int
    num_context: int  # tokens before these rows, whose KV is in `blocks`
    blocks: Ints  # those that hold the context and these rows, no more

    @property
    def end_row(self) -> int:
        return self.first_row + self.num_rows


@dataclass(frozen=True)
class StepBatch:
    """T packed rows."""

    token_ids: Ints  # [T]
    positions: Ints  # [3, T]
    slots: Ints  # [T], block * block_size + offset: where each row's KV is written
    sequences: list[SequenceRows]
    embeddings: list[EmbeddingSlice]  # offsets are rows, ascending
    sample_rows: Ints  # [chunks that sample], in the order of the chunks
    greedy: Ints  # places in `sample_rows` of greedy chunks
    scored: list[ScoredRows]  # of each chunk with `scoring`, in the order of the chunks

    @classmethod
    def pack(cls, chunks: Sequence[SequenceChunk], block_size: int) -> StepBatch:
        """Raises ValueError for a chunk that contradicts itself."""
        if not chunks:
            raise ValueError("a step needs a chunk")
        order = sorted(range(len(chunks)), key=lambda i: len(chunks[i].token_ids) > 1)  # stable
        sequences, slots, row = [], [], 0
        rows_of: dict[int, SequenceRows] = {}
        embeddings: list[EmbeddingSlice] = []
        for index in order:
            chunk = chunks[index]
            _check(chunk, block_size)
            sequence = _rows(chunk, row, block_size)
            sequences.append(sequence)
            slots.append(_slots(sequence, block_size))
            embeddings += [EmbeddingSlice(row + offset, rows) for offset, rows in sorted(chunk.embeddings, key=_offset)]
            row = sequence.end_row
            rows_of[index] = sequence
        packed = [chunks[index] for index in order]
        sampling = [(i, chunk) for i, chunk in enumerate(chunks) if chunk.sample]
        return cls(
            token_ids=np.concatenate([np.asarray(chunk.token_ids, dtype=np.int64) for chunk in packed]),
            positions=np.concatenate([chunk.positions for chunk in packed], axis=1),
            slots=np.concatenate(slots),
            sequences=sequences,
            embeddings=embeddings,
            sample_rows=np.array([rows_of[i].end_row - 1 for i, _ in sampling], dtype=np.int64),
            greedy=np.array([place for place, (_, c) in enumerate(sampling) if c.greedy], dtype=np.int64),
            scored=[ScoredRows(rows_of[i].first_row, c.scoring) for i, c in enumerate(chunks) if c.scoring],
        )


def _offset(embedding: EmbeddingSlice) -> int:
    return embedding.offset


def _check(chunk: SequenceChunk, block_size: int) -> None:
    num_tokens = len(chunk.token_ids)
    if num_tokens == 0:
        raise ValueError("a chunk needs a token")
    if chunk.positions.shape != (3, num_tokens):
        raise ValueError(f"positions of shape {chunk.positions.shape} for {num_tokens} tokens")
    if len(chunk.block_table) * block_size < chunk.first_position + num_tokens:
        raise ValueError(
            f"{len(chunk.block_table)} blocks of {block_size} for {chunk.first_position + num_tokens} tokens"
        )
    if chunk.scoring and len(chunk.scoring.token_ids) > num_tokens:
        raise ValueError(f"{len(chunk.scoring.token_ids)} tokens to score in a chunk of {num_tokens}")
    for offset, rows in chunk.embeddings:
        if offset < 0 or offset + len(rows) > num_tokens:
            raise ValueError(f"{len(rows)} embedding rows at {offset} in a chunk of {num_tokens} tokens")


def _rows(chunk: SequenceChunk, row: int, block_size: int) -> SequenceRows:
    num_rows, num_context = len(chunk.token_ids), chunk.first_position
    num_blocks = -(-(num_context + num_rows) // block_size)
    blocks = np.asarray(chunk.block_table[:num_blocks], dtype=np.int64)
    return SequenceRows(row, num_rows, num_context, blocks)


def _slots(sequence: SequenceRows, block_size: int) -> Ints:
    indices = np.arange(sequence.num_context, sequence.num_context + sequence.num_rows)
    slots: Ints = sequence.blocks[indices // block_size] * block_size + indices % block_size
    return slots
