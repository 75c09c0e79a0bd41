"""Train the demo checkpoint from nothing on one core, write it and say how good it is.

    python demo/train.py --out DIR

Two steps: the vision tower learns to read (`vision.py`), then the language model learns to answer from its frozen
features (`decoder.py`). The accuracy is measured on the written files, as a server would load them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLForConditionalGeneration,
)

from checkpoint import build_config, build_processor, build_tokenizer, save_checkpoint
from decoder import Conversations, build_pools, train_decoder
from triptych.demo import easy_vqa, pages
from triptych.demo.pages import Question
from vision import train_tower

SEED = 0
VISION_STEPS = 3000
DECODER_STEPS = 1800
PAGES = 3500  # encoded once, and drawn from for every conversation
EACH = 60  # held-out questions for each task


def answer(
    model: Qwen3VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    processor: Qwen2VLImageProcessorPil,
    question: Question,
) -> str:
    """The model's greedy answer, by transformers' own `generate`."""
    prompt = tokenizer.apply_chat_template(question.messages(), tokenize=False, add_generation_prompt=True)
    inputs: dict[str, torch.Tensor] = {}
    if question.images:
        images = processor(images=list(question.images), return_tensors="pt")
        inputs = {"pixel_values": images["pixel_values"], "image_grid_thw": images["image_grid_thw"]}
        first, *others = prompt.split("<|image_pad|>")
        counts = (images["image_grid_thw"].prod(-1) // 4).tolist()
        prompt = first + "".join("<|image_pad|>" * n + rest for n, rest in zip(counts, others, strict=True))
    token_ids = tokenizer(prompt, return_tensors="pt").input_ids
    inputs["mm_token_type_ids"] = (token_ids == model.config.image_token_id).int()
    output = model.generate(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=48, **inputs)
    return str(tokenizer.decode(output[0, token_ids.shape[1] :], skip_special_tokens=True))


def swap_images(questions: Sequence[Question]) -> list[Question]:
    """The same questions, each image replaced by the next question's, in its own size: only the content changes."""
    images = [image for question in questions for image in question.images]
    others = iter(images[7:] + images[:7])

    def other(part: Image.Image | str) -> Image.Image | str:
        return part if isinstance(part, str) else next(others).resize(part.size)

    return [replace(question, parts=tuple(other(part) for part in question.parts)) for question in questions]


def _score(good: Sequence[bool]) -> dict[str, float]:
    return {"n": len(good), "correct": sum(good), "accuracy": round(sum(good) / len(good), 4)}


def measure(folder: Path, questions: Sequence[Question], dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Accuracy per task of the checkpoint in `folder`; an answer counts only when it is right to the letter."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    right: dict[str, list[bool]] = {}
    for question in questions:
        good = answer(model, tokenizer, processor, question) == question.answer
        right.setdefault(question.task, []).append(good)
    return {task: _score(good) for task, good in right.items()}


def evaluate(folder: Path, train_s: float, each: int = EACH) -> None:
    """Measure the written checkpoint in both dtypes and with swapped images; print and write `accuracy.json`."""
    questions = pages.held_out(each * len(pages.TASKS)) + easy_vqa.held_out(3 * each)
    seen = [question for question in questions if question.images]
    exact, rounded = measure(folder, questions, torch.float32), measure(folder, questions, torch.bfloat16)
    swapped = measure(folder, swap_images(seen), torch.float32)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    report = {
        "tasks": exact,
        "tasks_bfloat16": rounded,
        "tasks_swapped_images": swapped,
        "train_s": round(train_s),
        "num_parameters": model.num_parameters(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seed": SEED,
    }
    (folder / "accuracy.json").write_text(json.dumps(report, indent=2) + "\n")
    print(f"{'task':10} {'n':>4} {'float32':>8} {'bfloat16':>8} {'swapped':>8}")
    for task, score in exact.items():
        blind = f"{swapped[task]['accuracy']:8.1%}" if task in swapped else ""
        print(f"{task:10} {score['n']:4} {score['accuracy']:8.1%} {rounded[task]['accuracy']:8.1%} {blind}")


def train(folder: Path, tower: Path | None) -> float:
    """Both steps; returns the seconds they took. `tower` is a saved first step to go on from."""
    start = time.monotonic()
    torch.manual_seed(SEED)
    tokenizer, processor = build_tokenizer(), build_processor()
    model = Qwen3VLForConditionalGeneration(build_config(tokenizer))
    easy = easy_vqa.training_pictures()
    if tower is None:
        train_tower(model.model.visual, processor, [page for page, _ in easy], VISION_STEPS)
        save_checkpoint(model, tokenizer, folder)
        torch.save(model.model.visual.state_dict(), folder.with_name(folder.name + "-tower.pt"))
    else:
        model.model.visual.load_state_dict(torch.load(tower))
    model.model.visual.requires_grad_(False).set_attn_implementation("sdpa")
    conversations = Conversations(tokenizer, build_pools(model, processor, easy, PAGES), random.Random("train decoder"))
    train_decoder(model, conversations, DECODER_STEPS, lambda: save_checkpoint(model, tokenizer, folder))
    save_checkpoint(model, tokenizer, folder)
    return time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--tower", type=Path, help="go on from the vision tower that an earlier run saved")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train_s = train(options.out, options.tower)
    print(f"trained in {train_s / 60:.0f} minutes", flush=True)
    evaluate(options.out, train_s)


if __name__ == "__main__":
    main()
