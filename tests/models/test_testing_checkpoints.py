"""The tiny checkpoints: complete, repeatable, and with outputs that depend on what they should depend on."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from triptych.models.registry import ModelSpec
from triptych.testing_checkpoints import make_checkpoint
from triptych.types import ImageSize


def _answer(spec: ModelSpec, full_model: Any, seed: int, question: str) -> list[int]:
    noise = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((120, 90), Image.Resampling.NEAREST)
    metadata = spec.family.image_metadata(ImageSize(*image.size))
    tokenizer = Tokenizer.from_file(str(spec.path / "tokenizer.json"))
    before, after = f"<|im_start|>user\n{question}<|vision_start|>", "<|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    token_ids = tokenizer.encode(before).ids + spec.family.expansion(metadata) + tokenizer.encode(after).ids
    ids = torch.tensor([token_ids])
    output = full_model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=torch.from_numpy(spec.family.preprocess(image, metadata)),
        image_grid_thw=torch.tensor([metadata.grid]),
        mm_token_type_ids=(ids == spec.family.placeholder_token_id).int(),
        max_new_tokens=16,
        min_new_tokens=16,
        do_sample=False,
    )
    answer: list[int] = output[0, len(token_ids) :].tolist()
    return answer


def test_greedy_outputs_depend_on_image_and_text(spec: ModelSpec, full_model: Any) -> None:
    answers = [_answer(spec, full_model, seed, "What is it?") for seed in range(3)]
    answers.append(_answer(spec, full_model, 0, "Where is it?"))
    assert len({tuple(answer) for answer in answers}) == len(answers)
    assert all(len(set(answer)) > 4 for answer in answers), answers


def test_one_seed_makes_one_checkpoint(tmp_path: Path) -> None:
    one, two, other = (make_checkpoint("qwen3_vl", tmp_path / str(i), seed=seed) for i, seed in enumerate((1, 1, 2)))
    for file in sorted(one.iterdir()):
        same = file.read_bytes() == (two / file.name).read_bytes()
        assert same, file.name
    shard = "model-00001-of-00003.safetensors"
    assert (one / shard).read_bytes() != (other / shard).read_bytes()
