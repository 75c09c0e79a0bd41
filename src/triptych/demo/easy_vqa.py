"""The easy-VQA task: 64x64 pictures of one shape, thirteen possible answers.

Needs the `demo` extra (package `easy-vqa`, MIT), so nothing else in Triptych imports this module.
"""

from __future__ import annotations

import random
from collections import defaultdict
from functools import cache
from typing import Literal

import easy_vqa
from PIL import Image, ImageChops

from triptych.demo.drawing import COLOURS, SHAPES, Box, Page, Region
from triptych.demo.pages import Question, Turn

Split = Literal["train", "test"]


@cache
def _split(split: Split) -> tuple[dict[int, list[Turn]], dict[int, str]]:
    """Turns and file of each picture of the data set's own training or test part."""
    questions = easy_vqa.get_train_questions() if split == "train" else easy_vqa.get_test_questions()
    paths = easy_vqa.get_train_image_paths() if split == "train" else easy_vqa.get_test_image_paths()
    turns: dict[int, list[Turn]] = defaultdict(list)
    for text, answer, picture in zip(*questions, strict=True):
        turns[picture].append(Turn("easy_vqa", text, answer))
    return turns, paths


def _open(path: str) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def _shape_box(image: Image.Image) -> Box:
    """Where the shape stands: all that is far from the commonest colour, the ground's."""
    histogram = [image.getchannel(band).histogram() for band in range(3)]
    ground = tuple(max(range(256), key=counts.__getitem__) for counts in histogram)
    difference = ImageChops.difference(image, Image.new("RGB", image.size, ground)).convert("L")
    return difference.point(lambda value: 255 * (value > 20)).getbbox() or (0, 0, image.width, image.height)


def training_pictures() -> list[tuple[Page, list[Turn]]]:
    """Every training picture with its questions; the shape and colour are read off the answers, "" when not asked."""
    turns, paths = _split("train")
    pictures = []
    for picture in sorted(turns):
        image = _open(paths[picture])
        answers = {turn.answer for turn in turns[picture]}
        shape = next((answer for answer in answers if answer in SHAPES), "")
        colour = next((answer for answer in answers if answer in COLOURS), "")
        region = Region("shapes", shape, _shape_box(image), colour=colour)
        pictures.append((Page(image, (region,), shape=shape, colour=colour, count=1), turns[picture]))
    return pictures


def held_out(n: int, seed: int = 0) -> list[Question]:
    """`n` questions of the data set's test part, whose pictures training never saw."""
    turns, paths = _split("test")
    rng = random.Random(f"held out {seed}")
    chosen = rng.sample([(picture, turn) for picture in sorted(turns) for turn in turns[picture]], n)
    return [Question("easy_vqa", (_open(paths[picture]), turn.text), turn.answer) for picture, turn in chosen]
