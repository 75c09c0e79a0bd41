"""Rotary positions from grids, against transformers' `get_rope_index`."""

import random
from typing import Any

import numpy as np
import torch

from triptych.models.registry import ModelSpec
from triptych.types import ImageSize, Modality, Placeholder, PromptItem


def _prompt(spec: ModelSpec, rng: random.Random, num_images: int) -> tuple[list[int], list[PromptItem]]:
    token_ids: list[int] = [rng.randrange(250) for _ in range(rng.randrange(4))]
    items = []
    for number in range(num_images):
        metadata = spec.family.image_metadata(ImageSize(rng.randrange(20, 400), rng.randrange(20, 400)))
        placeholder = Placeholder(len(token_ids), metadata.num_tokens)
        items.append(PromptItem(Modality.IMAGE, f"{number:064x}", placeholder, metadata))
        token_ids += spec.family.expansion(metadata)
        token_ids += [rng.randrange(250) for _ in range(rng.randrange(1, 6))]
    return token_ids, items


def test_positions_equal_get_rope_index(spec: ModelSpec, full_model: Any) -> None:
    rng = random.Random(1)
    for num_images in (1, 2, 5, 1, 3):
        token_ids, items = _prompt(spec, rng, num_images)
        positions, delta = spec.family.positions(token_ids, items)
        ids = torch.tensor([token_ids])
        expected, expected_delta = full_model.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == spec.family.placeholder_token_id).int(),
            image_grid_thw=torch.tensor([item.metadata.grid for item in items]),
        )
        assert positions.dtype == np.int64
        np.testing.assert_array_equal(positions, expected[:, 0].numpy())
        assert delta == expected_delta.item()


def test_an_image_at_the_end(spec: ModelSpec) -> None:
    token_ids, items = _prompt(spec, random.Random(2), 1)
    token_ids = token_ids[: items[0].placeholder.end]
    positions, delta = spec.family.positions(token_ids, items)
    assert positions.shape == (3, len(token_ids))
    assert positions.max() + 1 == len(token_ids) + delta


def test_text_alone_counts_on(spec: ModelSpec) -> None:
    positions, delta = spec.family.positions([7, 8, 9], [])
    np.testing.assert_array_equal(positions, [[0, 1, 2]] * 3)
    assert delta == 0
    assert spec.family.positions([], []).positions.shape == (3, 0)
