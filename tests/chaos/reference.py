"""The reference's greedy answers to the load's questions: transformers' `generate` on the whole model, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer

from tests.chaos.asking import Answer
from tests.chaos.questions import Asked
from tests.equivalence.reference import Case, generate
from triptych.config import MediaConfig, ModelConfig
from triptych.media.probe import probe_image
from triptych.models.registry import ModelSpec, open_model
from triptych.prompt.layout import PromptBuilder
from triptych.types import MediaItem, Modality, Prompt


def reference_answers(questions: Sequence[Asked]) -> dict[int, Answer]:
    """By place in `questions`; sampled ones have none."""
    torch.set_num_threads(1)  # threads that wait for each other are slow where others use the cores too
    spec = open_model("demo", ModelConfig(dtype="float32"))
    builder = PromptBuilder(spec.path, spec.family)
    load: Any = AutoTokenizer.from_pretrained
    tokenizer = load(str(spec.path))
    greedy = {index: asked for index, asked in enumerate(questions) if asked.seed is None}
    cases = [_case(index, asked) for index, asked in greedy.items()]
    prompts = [_prompt(spec, builder, case) for case in cases]
    outputs = generate(spec, cases, prompts, max(asked.max_tokens for asked in greedy.values()))
    answers = {}
    for (index, asked), output in zip(greedy.items(), outputs, strict=True):
        tokens = output[: asked.max_tokens]
        answers[index] = Answer(tokenizer.decode(tokens), len(tokens), "length")
    return answers


def _case(index: int, asked: Asked) -> Case:
    pictures = iter(asked.pictures)
    return Case(str(index), [part if isinstance(part, str) else next(pictures) for part in asked.question.parts])


def _prompt(spec: ModelSpec, builder: PromptBuilder, case: Case) -> Prompt:
    metadata = [spec.family.image_metadata(probe_image(png, MediaConfig())) for png in case.images]
    items = [MediaItem(Modality.IMAGE, "", png, about) for png, about in zip(case.images, metadata, strict=True)]
    return builder.build(case.messages(), items)
