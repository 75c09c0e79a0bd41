"""What the load asks: held-out questions of the demo, each with the one answer that it must always get.

A picture may get a comment chunk that makes its bytes, and so its identity, new: it has to be encoded, and its pixels
and the answer stay the same.
"""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from typing import Any, NamedTuple

from PIL import Image

from triptych.demo.pages import Question, Task, held_out

TASKS: tuple[Task, ...] = ("text", "title", "picture", "describe", "list", "text", "count", "item")
TEMPERATURE = 0.8


class Asked(NamedTuple):
    """One request of the load, before it is made unlike the others."""

    question: Question
    pictures: tuple[bytes, ...]  # PNG
    max_tokens: int
    seed: int | None  # None: greedy

    def body(self, rng: random.Random | None = None, *, stream: bool = False) -> dict[str, Any]:
        """With `rng` its pictures and its salt are new: nothing of it is in any cache."""
        pictures = iter(self.pictures)
        content: list[dict[str, Any]] = []
        for part in self.question.parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content.append({"type": "image_url", "image_url": {"url": _data_url(next(pictures), rng)}})
        body: dict[str, Any] = {
            "model": "demo",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "skip_special_tokens": False,  # so that every token shows in the text
            "stream": stream,
            "temperature": 0 if self.seed is None else TEMPERATURE,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        if self.seed is not None:
            body["seed"] = self.seed
        if rng is not None:
            body["cache_salt"] = f"{rng.getrandbits(64):x}"
        return body


def make_questions(count: int, seed: int) -> list[Asked]:
    """Text, one picture and several, in turn; every third one is sampled with a seed."""
    rng = random.Random(f"questions {seed}")
    asked = []
    for index, question in enumerate(held_out(count, seed, tasks=TASKS)):
        pictures = tuple(_png(image) for image in question.images)
        sampled = rng.getrandbits(32) if index % 3 == 2 else None
        asked.append(Asked(question, pictures, rng.choice((8, 24, 60)), sampled))
    return asked


def new_picture(seed: int) -> bytes:
    """A page that nobody asked about yet."""
    return _png(held_out(1, seed, tasks=("title",))[0].images[0])


def question_about(picture: bytes, text: str = "What is the title of the page?", max_tokens: int = 8) -> Asked:
    parts = (Image.open(io.BytesIO(picture)), text)
    return Asked(Question("title", parts, ""), (picture,), max_tokens, None)


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def _data_url(png: bytes, rng: random.Random | None) -> str:
    if rng is not None:
        png = with_comment(png, f"{rng.getrandbits(64):x}")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def with_comment(png: bytes, comment: str) -> bytes:
    """The same pixels in other bytes: a tEXt chunk before the last one (PNG, 11.3.4.3)."""
    text = b"tEXt" + b"Comment\0" + comment.encode("latin-1")
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    end = png.rindex(b"IEND") - 4
    return png[:end] + chunk + png[end:]
