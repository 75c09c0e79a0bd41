"""What a worker does not believe of a prompt or of KV."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from triptych.messages import KVHandle, KVPublished, Range
from triptych.stages.checks import require_next_blocks, why_impossible
from triptych.types import Grid, ItemMetadata, Placeholder, SamplingParams, WorkerAddress

from .nodes import VOCAB, prefill, prompt_item

GOOD = prefill("r", list(range(20)), [prompt_item("a", 2, 3), prompt_item("b", 5, 4)])
ITEM = GOOD.items[0]


def changed(**fields: Any) -> str:
    return why_impossible(msgspec.structs.replace(GOOD, **fields), VOCAB)


def test_a_prompt_that_can_be_is_believed() -> None:
    assert why_impossible(GOOD, VOCAB) == ""
    assert changed(num_output_tokens=11) == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": []},
        {"token_ids": [1, -1]},
        {"token_ids": [VOCAB]},
        {"num_output_tokens": 20},
        {"num_output_tokens": -1},
        {"num_output_tokens": 12},
    ],
)
def test_tokens_that_cannot_be(fields: dict[str, Any]) -> None:
    assert changed(**fields)


@pytest.mark.parametrize(
    "item",
    [
        {"placeholder": Placeholder(-1, 3)},
        {"placeholder": Placeholder(18, 3)},
        {"placeholder": Placeholder(4, 3)},
        {"placeholder": Placeholder(2, 0)},
        {"metadata": ItemMetadata(Grid(1, 2, 6), 0, 3)},
        {"metadata": ItemMetadata(Grid(1, 2, 6), 4, 3)},
        {"metadata": ItemMetadata(Grid(1, 2, 6), 3, 4)},
        {"metadata": ItemMetadata(Grid(0, 2, 6), 3, 3)},
        {"metadata": ItemMetadata(Grid(1, 2**20, 2**20), 3, 3)},
    ],
)
def test_items_that_cannot_be(item: dict[str, Any]) -> None:
    assert changed(items=[msgspec.structs.replace(ITEM, **item), GOOD.items[1]])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan), ("temperature", -1.0), ("top_p", 0.0), ("top_p", math.nan), ("min_p", 1.5),
        ("top_k", -1), ("repetition_penalty", 0.0), ("presence_penalty", math.inf), ("max_tokens", 0),
        ("min_tokens", -1), ("num_logprobs", VOCAB + 1), ("logit_bias", {VOCAB: 1.0}), ("logit_bias", {1: math.nan}),
        ("allowed_token_ids", [-1]), ("bad_words", [[]]), ("bad_words", [[VOCAB]]), ("stop_token_ids", [-1]),
    ],
)  # fmt: skip
def test_sampling_that_cannot_be(name: str, value: Any) -> None:
    reason = changed(sampling=msgspec.structs.replace(SamplingParams(), **{name: value}))
    assert reason.startswith(name)


def published(first_block: int, num_blocks: int, num_tokens: int, first_token_id: int | None = None) -> KVPublished:
    handle = KVHandle(1, WorkerAddress("p", "e", "", ""), first_block, [Range(0, 1)] * num_blocks, [0] * num_blocks)
    return KVPublished("r", 0, handle=handle, num_tokens=num_tokens, first_token_id=first_token_id)


def test_blocks_that_follow_are_believed() -> None:
    require_next_blocks(published(2, 1, 12), 2, 18, 4, VOCAB, False)
    require_next_blocks(published(3, 2, 18, 7), 3, 18, 4, VOCAB, False)
    require_next_blocks(published(5, 0, 18, 7), 5, 18, 4, VOCAB, False)


@pytest.mark.parametrize(
    "message",
    [
        published(1, 1, 12), published(3, 1, 16), published(2, 1, 13), published(2, 1, 0), published(2, 4, 18),
        published(2, 1, 12, 7), published(2, 3, 18, VOCAB), published(2, 3, 18, -1), published(2, 3, 19),
    ],
)  # fmt: skip
def test_blocks_that_cannot_be(message: KVPublished) -> None:
    with pytest.raises(ValueError, match=r"blocks|tokens"):
        require_next_blocks(message, 2, 18, 4, VOCAB, False)


def test_nothing_follows_the_last_blocks() -> None:
    with pytest.raises(ValueError, match="do not follow"):
        require_next_blocks(published(5, 0, 18, 7), 5, 18, 4, VOCAB, True)
