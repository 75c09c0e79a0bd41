"""Packing of a step: order of rows, slots, what must be refused."""

import numpy as np
import pytest
import torch

from triptych.engine.batch import EmbeddingSlice, ScoredRows, Scoring, SequenceChunk, StepBatch


def _chunk(
    num_tokens: int,
    first_position: int,
    blocks: list[int],
    *,
    sample: bool = True,
    embeddings: list[EmbeddingSlice] | None = None,
) -> SequenceChunk:
    positions = np.arange(first_position, first_position + num_tokens)
    token_ids = (1000 * first_position + np.arange(num_tokens)).tolist()
    return SequenceChunk(token_ids, first_position, np.tile(positions, (3, 1)), blocks, embeddings or [], sample)


def test_decode_rows_come_first_and_samples_keep_their_order() -> None:
    rows = torch.zeros(2, 8)
    batch = StepBatch.pack(
        [
            _chunk(5, 3, [7, 2], embeddings=[EmbeddingSlice(3, rows), EmbeddingSlice(0, rows[:1])]),
            _chunk(1, 9, [4, 6, 1]),
            _chunk(2, 0, [3], sample=False),
            _chunk(1, 4, [5, 8]),
        ],
        block_size=4,
    )
    assert batch.token_ids.tolist() == [9000, 4000, 3000, 3001, 3002, 3003, 3004, 0, 1]
    assert batch.positions[2].tolist() == [9, 4, 3, 4, 5, 6, 7, 0, 1]
    assert batch.sample_rows.tolist() == [6, 0, 1]
    assert batch.slots.tolist() == [5, 32, 31, 8, 9, 10, 11, 12, 13]
    assert [(s.first_row, s.num_rows, s.num_context) for s in batch.sequences] == [
        (0, 1, 9),
        (1, 1, 4),
        (2, 5, 3),
        (7, 2, 0),
    ]
    assert [row for row, _ in batch.embeddings] == [2, 5]


def test_scored_rows_are_found_among_the_packed_ones() -> None:
    scoring = [Scoring([8, 9, 7], 2), Scoring([5, 6], 0)]
    chunks = [_chunk(3, 0, [1]), _chunk(1, 2, [2]), _chunk(4, 0, [3], sample=False)]
    batch = StepBatch.pack(
        [chunks[0]._replace(scoring=scoring[0]), chunks[1], chunks[2]._replace(scoring=scoring[1])], 4
    )
    assert batch.scored == [ScoredRows(1, scoring[0]), ScoredRows(4, scoring[1])]
    assert StepBatch.pack(chunks, 4).scored == []


def test_blocks_beyond_the_step_are_not_looked_at() -> None:
    batch = StepBatch.pack([_chunk(3, 2, [9, 8, 7, 6])], block_size=4)
    assert batch.sequences[0].blocks.tolist() == [9, 8]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "needs a chunk"),
        ([_chunk(0, 0, [1])], "needs a token"),
        ([_chunk(4, 1, [1])], "1 blocks of 4 for 5 tokens"),
        ([_chunk(3, 0, [1])._replace(positions=np.zeros((3, 2), dtype=np.int64))], "positions of shape"),
        ([_chunk(3, 0, [1], embeddings=[EmbeddingSlice(2, torch.zeros(2, 8))])], "2 embedding rows at 2"),
        ([_chunk(2, 0, [1])._replace(scoring=Scoring([1, 2, 3], 0))], "3 tokens to score"),
    ],
)
def test_contradictions_are_refused(chunks: list[SequenceChunk], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepBatch.pack(chunks, block_size=4)
