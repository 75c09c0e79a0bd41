"""The packaged checkpoint answers its held-out questions: with the same tokens everywhere, and mostly right."""

from __future__ import annotations

import asyncio
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from triptych import demo
from triptych.config import Config, EngineConfig, MediaConfig, ModelConfig
from triptych.demo import easy_vqa, pages
from triptych.demo.pages import Question
from triptych.models.registry import open_model
from triptych.testing import Cluster
from triptych.types import ImageInput, Request, SamplingParams, TextDelta

EACH = 12  # questions a task
RELIABLE = 0.9  # tasks whose accuracy, as shipped, is at least this must show it here
MARGIN = 0.15  # of a small sample
PLACEMENTS = ("EPD", "1E/1PD", "1E/1P/1D", "2E/1P/2D")


def _request(question: Question, directory: Path, request_id: str) -> Request:
    content: list[dict[str, object]] = []
    images: list[ImageInput] = []
    for part in question.parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
            continue
        path = directory / f"{request_id}-{len(images)}.png"
        path.write_bytes(_png(part))
        images.append(ImageInput(path.as_uri()))
        content.append({"type": "image"})
    sampling = SamplingParams(temperature=0.0)
    return Request(request_id, [{"role": "user", "content": content}], images, sampling, max_tokens=48)


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


async def _answers(
    placement: str, dtype: str, questions: Sequence[Question], directory: Path
) -> list[tuple[str, list[int]]]:
    """Text and tokens of each answer, eight questions at a time."""
    model = ModelConfig(dtype=dtype)  # type: ignore[arg-type]
    config = Config(
        model=model,
        engine=EngineConfig(num_kv_blocks=1000),
        media=MediaConfig(allowed_local_media_path=str(directory)),
    )
    at_once = asyncio.Semaphore(8)
    async with Cluster(open_model("demo", model), config, placement, seed=5) as cluster:

        async def ask(index: int, question: Question) -> tuple[str, list[int]]:
            text, token_ids = "", []
            async with at_once:
                async for event in cluster.router.handle(_request(question, directory, f"q{index}")):
                    if isinstance(event, TextDelta):
                        text += event.text
                        token_ids += event.token_ids
            return text, token_ids

        answers = await asyncio.gather(*(ask(i, question) for i, question in enumerate(questions)))
        await cluster.until_idle()
        cluster.check()
        encodes = sum(w.counter("encode_items_total") for name, w in cluster.workers.items() if "encode" in name)
        assert placement == "EPD" or encodes > 0, "nothing was encoded remotely"
        return answers


@pytest.mark.slow
async def test_every_placement_gives_the_same_tokens_and_mostly_the_right_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [*pages.held_out(EACH * len(pages.TASKS)), *easy_vqa.held_out(EACH)]
    shipped = json.loads((demo.checkpoint_path() / "accuracy.json").read_text())["tasks"]
    answers = {p: await _answers(p, "float32", questions, tmp_path) for p in PLACEMENTS}
    for placement in PLACEMENTS[1:]:
        assert answers[placement] == answers["EPD"], f"{placement} differs from EPD"
    rounded = await _answers("1E/1P/1D", "bfloat16", questions, tmp_path)
    exact_right = _right(questions, answers["1E/1P/1D"])
    rounded_right = _right(questions, rounded)
    with capsys.disabled():
        print(f"\n{'task':10} {'n':>4} {'float32':>8} {'bfloat16':>8} {'shipped':>8}")
        for task, n in Counter(question.task for question in questions).items():
            shares = (exact_right[task] / n, rounded_right[task] / n, shipped[task]["accuracy"])
            print(f"{task:10} {n:4} " + " ".join(f"{share:8.0%}" for share in shares))
    reliable = [task for task, score in shipped.items() if score["accuracy"] >= RELIABLE]
    assert len(reliable) >= 5
    for task in reliable:
        n = sum(question.task == task for question in questions)
        assert exact_right[task] / n >= shipped[task]["accuracy"] - MARGIN, task
        assert rounded_right[task] / n >= shipped[task]["accuracy"] - MARGIN, task


def _right(questions: Sequence[Question], answers: Sequence[tuple[str, list[int]]]) -> Counter[str]:
    return Counter(q.task for q, (text, _) in zip(questions, answers, strict=True) if text == q.answer)
