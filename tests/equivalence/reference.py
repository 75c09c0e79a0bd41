"""The reference: transformers' own image processor and `generate`, on the whole model in one process."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from triptych.models.registry import ModelSpec
from triptych.types import ImageInput, Prompt, Request, SamplingParams

NUM_OUTPUT_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
WORDS = [
    "what",
    "is",
    "in",
    "the",
    "picture",
    "describe",
    "the",
    "image",
    "then",
    "say",
    "what",
    "the",
    "user",
    "wants",
    "to",
    "know",
    "about",
    "it",
    "all",
]


class Case(NamedTuple):
    """One question: parts in order, a picture's bytes or a text."""

    name: str
    parts: list[bytes | str]

    @property
    def images(self) -> list[bytes]:
        return [part for part in self.parts if isinstance(part, bytes)]

    def messages(self) -> list[dict[str, object]]:
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in self.parts]
        return [{"role": "user", "content": content}]

    def request(self, directory: Path, request_id: str, sampling: SamplingParams = GREEDY) -> Request:
        urls = []
        for k, content in enumerate(self.images):
            path = directory / f"{self.name}-{k}.png"
            path.write_bytes(content)
            urls.append(ImageInput(path.as_uri()))
        return Request(request_id, self.messages(), urls, sampling, max_tokens=NUM_OUTPUT_TOKENS)


def make_cases(count: int, seed: int) -> list[Case]:
    """Questions with 0 to 6 pictures of odd sizes; some share a beginning, some repeat a picture."""
    rng = random.Random(seed)
    cases = []
    for i in range(count):
        pictures = [
            picture(rng.randrange(1 << 30), rng.randrange(20, 150), rng.randrange(20, 150)) for _ in range(i % 7)
        ]
        if i % 5 == 4 and pictures:
            pictures[-1] = pictures[0]
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(3, 40)))
        parts: list[bytes | str] = [*pictures, text]
        if i % 3 == 1:
            rng.shuffle(parts)
        cases.append(Case(f"case{i}", parts))
    shared = cases[6].parts[:-1]  # equal pictures first: a prefix that later cases can reuse
    return [*cases, Case("again", cases[6].parts), Case("other-end", [*shared, "and then say what it is"])]


def picture(seed: int, width: int, height: int) -> bytes:
    """A smooth random picture: pixels that differ everywhere, and survive resizing."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(buffer, "PNG")
    return buffer.getvalue()


def generate(
    spec: ModelSpec, cases: list[Case], prompts: list[Prompt], num_tokens: int = NUM_OUTPUT_TOKENS, **options: Any
) -> list[list[int]]:
    """Greedy tokens of the whole model for each prompt, one by one, in float32."""
    model, processor = _load(spec)
    outputs = []
    for case, prompt in zip(cases, prompts, strict=True):
        with torch.inference_mode():
            full = model.generate(
                **_inputs(processor, case, prompt, prompt.token_ids), do_sample=False, eos_token_id=-1, pad_token_id=0,
                min_new_tokens=num_tokens, max_new_tokens=num_tokens, **options,
            )  # fmt: skip
        outputs.append(full[0, len(prompt.token_ids) :].tolist())
    return outputs


def log_probabilities(
    spec: ModelSpec, cases: list[Case], prompts: list[Prompt], outputs: list[list[int]]
) -> list[torch.Tensor]:
    """Of the token after each one of prompt and output: [tokens, vocabulary], in float32."""
    model, processor = _load(spec)
    results = []
    for case, prompt, output in zip(cases, prompts, outputs, strict=True):
        model.model.rope_deltas = None
        with torch.inference_mode():
            logits = model(**_inputs(processor, case, prompt, prompt.token_ids + output), use_cache=False).logits[0]
        results.append(torch.log_softmax(logits.float(), -1))
    return results


def _load(spec: ModelSpec) -> tuple[Any, Any]:
    model: Any = AutoModelForImageTextToText.from_pretrained(spec.path, dtype=torch.float32)
    load: Any = AutoImageProcessor.from_pretrained
    return model.eval(), load(spec.path, backend="pil")


def _inputs(processor: Any, case: Case, prompt: Prompt, token_ids: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([token_ids])
    inputs: dict[str, torch.Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if case.images:
        images = [Image.open(io.BytesIO(content)).convert("RGB") for content in case.images]
        processed = processor(images=images, return_tensors="pt")
        is_image = torch.zeros_like(ids)
        for item in prompt.items:
            is_image[0, item.placeholder.offset : item.placeholder.end] = 1
        inputs |= {
            "pixel_values": processed["pixel_values"],
            "image_grid_thw": processed["image_grid_thw"],
            "mm_token_type_ids": is_image.int(),
        }
    return inputs
