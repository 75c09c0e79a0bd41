"""Questions about synthetic pages and pictures, with their one right answer.

`held_out` is for tests and evaluation: its seeds are disjoint from those of training, which draws its own pages and
calls `ask`. A question carries text and images as an ordered tuple of parts, as a chat message does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from PIL import Image

from triptych.demo.drawing import WORDS, Page, draw_page, draw_picture

Task = Literal["title", "number", "list", "item", "count", "shape", "colour", "stamp", "describe", "picture", "text"]
PAGE_TASKS: tuple[Task, ...] = ("title", "number", "list", "item", "count", "shape", "colour", "stamp", "describe")
TASKS: tuple[Task, ...] = (*PAGE_TASKS, "picture", "text")
MAX_IMAGES = 6

_ORDINALS = ("first", "second", "third")
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


@dataclass(frozen=True)
class Question:
    """One single-turn question. `parts` is the content of the user's message in order."""

    task: str
    parts: tuple[Image.Image | str, ...]
    answer: str

    @property
    def images(self) -> tuple[Image.Image, ...]:
        return tuple(part for part in self.parts if isinstance(part, Image.Image))

    @property
    def text(self) -> str:
        return "\n".join(part for part in self.parts if isinstance(part, str))

    def messages(self) -> list[dict[str, object]]:
        """The question in the message format of the chat template; the images themselves go to the processor."""
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in self.parts]
        return [{"role": "user", "content": content}]


class Turn(NamedTuple):
    """A question's text and its answer; the images are the conversation's."""

    task: str
    text: str
    answer: str
    position: int = 0  # of the image that it names, from 1; 0 when it names none


def _plural(shape: str, count: int = 2) -> str:
    return shape if count == 1 else shape + ("es" if shape.endswith("s") else "s")


def _describe(page: Page) -> str:
    facts = [f"title {page.title}"]
    if page.number:
        facts.append(f"number {page.number}")
    if page.items:
        facts.append("list " + " ".join(page.items))
    if page.count:
        facts.append(f"{page.count} {page.colour} {_plural(page.shape, page.count)}")
    if page.stamp:
        facts.append(f"stamp {page.stamp}")
    return ", ".join(facts)


def _ask_page(task: Task, page: Page, place: str, rng: random.Random) -> tuple[tuple[str, ...], str]:
    """The ways to ask for one task about the page that `place` names, and the answer."""
    at = f"on {place}"
    if task == "title":
        return (f"What is the title of {place}?", f"Give the title {at}."), page.title
    if task == "number":
        return (f"Which number is {at}?", f"What is the number {at}?"), page.number
    if task == "list":
        return (f"What is in the list {at}?", f"Read the list {at}."), " ".join(page.items)
    if task == "item":
        index = rng.randrange(len(page.items))
        return (f"What is the {_ORDINALS[index]} item {at}?",), page.items[index]
    if task == "count":
        return (f"How many shapes are {at}?", f"How many {_plural(page.shape)} are {at}?"), str(page.count)
    if task == "shape":
        return (f"Which shape is {at}?", f"What kind of shapes are {at}?"), page.shape
    if task == "colour":
        return (f"Which colour are the shapes {at}?", f"What colour is the {page.shape} {at}?"), page.colour
    if task == "stamp":
        return (f"What does the stamp {at} say?", f"Read the stamp {at}."), page.stamp
    return (f"Describe {place}.", f"What is {at}?"), _describe(page)


def _ask_picture(page: Page, place: str, rng: random.Random) -> tuple[tuple[str, ...], str]:
    if rng.random() < 0.5:
        return (f"What colour is the shape in {place}?", f"Which colour is in {place}?"), page.colour
    return (f"What shape is in {place}?", f"Which shape is in {place}?"), page.shape


def tasks_of(page: Page) -> list[Task]:
    """The tasks that can be asked about this page."""
    has: dict[Task, bool] = {
        "number": bool(page.number),
        "list": bool(page.items),
        "item": bool(page.items),
        "count": bool(page.count),
        "shape": bool(page.count),
        "colour": bool(page.count),
        "stamp": bool(page.stamp),
    }
    return [task for task in PAGE_TASKS if has.get(task, True)]


def ask(task: Task, page: Page, position: int | None, rng: random.Random) -> Turn:
    """Ask for `task` about the page that is image number `position` (from 1) of the conversation.

    None asks for "the page", which is plain only when there is one image.
    """
    noun = "picture" if task == "picture" else "page"
    place = f"{noun} {position}" if position else f"the {noun}"
    wordings, answer = _ask_picture(page, place, rng) if noun == "picture" else _ask_page(task, page, place, rng)
    return Turn(task, rng.choice(wordings), answer, position or 0)


def ask_text(rng: random.Random) -> Turn:
    """A question that needs no image."""
    word, low, day = rng.choice(WORDS), rng.randint(0, 9), rng.randrange(7)
    high = rng.randint(low, 9)
    text, answer = rng.choice(
        [
            (f"Say the word {word}.", word),
            (f"What is {low} plus {high - low}?", str(high)),
            (f"Which day comes after {_DAYS[day]}?", _DAYS[(day + 1) % 7]),
            (f"Count from {low} to {high}.", " ".join(str(n) for n in range(low, high + 1))),
        ]
    )
    return Turn("text", text, answer)


def arrange(images: Sequence[Image.Image], text: str, text_first: bool) -> tuple[Image.Image | str, ...]:
    """The parts of a message: the images in order, with the text before or after them."""
    return (text, *images) if text_first else (*images, text)


def _question(task: Task, rng: random.Random) -> Question:
    if task == "text":
        turn = ask_text(rng)
        return Question(task, (turn.text,), turn.answer)
    draw: Callable[[random.Random], Page] = draw_picture if task == "picture" else draw_page
    pages = [draw(rng) for _ in range(rng.randint(1, MAX_IMAGES))]
    position = rng.randrange(len(pages))
    while task != "picture" and task not in tasks_of(pages[position]):
        pages[position] = draw(rng)
    alone = len(pages) == 1 and rng.random() < 0.3
    turn = ask(task, pages[position], None if alone else position + 1, rng)
    return Question(task, arrange([page.image for page in pages], turn.text, rng.random() < 0.25), turn.answer)


def held_out(n: int, seed: int = 0, tasks: Sequence[Task] = TASKS) -> list[Question]:
    """`n` questions that training never saw, dealt over `tasks` in turn, one to six images each."""
    return [_question(tasks[k % len(tasks)], random.Random(f"held out {seed} {k}")) for k in range(n)]
