"""Greedy answers of `LLM` equal transformers' `generate`, and so every deployment's, token for token in float32."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.equivalence.reference import NUM_OUTPUT_TOKENS, Case, generate, make_cases
from tests.equivalence.test_placements import media_item
from triptych import LLM, SamplingParams
from triptych.config import ModelConfig
from triptych.launch import Deployment
from triptych.models.registry import open_model
from triptych.prompt.layout import PromptBuilder
from triptych.testing_checkpoints import FamilyName, make_checkpoint

GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=NUM_OUTPUT_TOKENS)


def conversation(case: Case, image: Callable[[bytes], dict[str, Any]]) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else image(part) for part in case.parts]
    return [{"role": "user", "content": parts}]


def as_pil(content: bytes) -> dict[str, Any]:
    return {"type": "image_pil", "image_pil": Image.open(io.BytesIO(content))}


def as_bytes(content: bytes) -> dict[str, Any]:
    return {"type": "image", "image": content}


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_answers_equal_the_reference(family: FamilyName, tmp_path: Path) -> None:
    path = make_checkpoint(family, tmp_path / family)
    spec = open_model(str(path), ModelConfig())
    cases = make_cases(12, seed=11)
    builder = PromptBuilder(path, spec.family)
    prompts = [builder.build(case.messages(), [media_item(spec, content) for content in case.images]) for case in cases]
    expected = generate(spec, cases, prompts)
    with LLM(path, max_num_batched_tokens=64, num_kv_blocks=300) as llm:
        together = llm.chat([conversation(case, as_pil) for case in cases], GREEDY)
        one_by_one = [llm.chat(conversation(case, as_bytes), GREEDY)[0] for case in cases]
    for outputs in (together, one_by_one):
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert [list(output.prompt_token_ids) for output in outputs] == [prompt.token_ids for prompt in prompts]


@pytest.mark.slow
def test_worker_processes_give_the_same_answers_and_one_may_die(tmp_path: Path) -> None:
    path = make_checkpoint("qwen3_vl", tmp_path / "model")
    conversations = [conversation(case, as_pil) for case in make_cases(12, seed=12)]
    with LLM(path, num_kv_blocks=300) as here:
        expected = here.chat(conversations, GREEDY)
    with LLM(path, num_kv_blocks=300, placement="1E/1P/1D") as split:
        answers = split.chat(conversations, GREEDY)
        service = split._runtime._service
        assert isinstance(service, Deployment)
        killed = split.chat(conversations, GREEDY, use_tqdm=lambda **options: KillingBar(service))
    for outputs in (answers, killed):
        assert [output.outputs[0] for output in outputs] == [output.outputs[0] for output in expected]


class KillingBar:
    """kill -9 of the prefill worker when the first answer is here."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._killed = False

    def update(self, n: int, /) -> None:
        if not self._killed:
            self._killed = True
            self._deployment.kill("prefill-0")

    def close(self) -> None:
        assert self._killed
