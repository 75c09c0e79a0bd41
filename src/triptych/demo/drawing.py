"""Draws synthetic pages and pictures with Pillow, and remembers where each thing stands.

Called by `pages.py` (questions) and by the training script, which also reads the boxes of the regions. The same random
generator always gives the same page. Words, colours and shapes come from the closed lists below.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

from PIL import Image, ImageDraw, ImageFont

RegionKind = Literal["title", "number", "item", "shapes", "stamp"]
Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the drawn image

_WORD_LIST = """
    apple river stone lamp cloud tiger bread chair horse piano garden window silver bridge market forest candle
    engine pencil winter summer planet rocket pepper butter castle desert island jungle kitten lemon mirror needle
    orange pocket rabbit saddle ticket valley walnut yogurt zebra anchor basket copper dragon falcon guitar hammer
    insect jacket kettle ladder magnet napkin oyster parrot quartz ribbon shovel temple violin wagon maple ocean
    paper queen robin sugar table uncle video water youth brick coral delta eagle flute grape honey ivory jewel
    knife light money north olive pearl
"""
WORDS: tuple[str, ...] = tuple(_WORD_LIST.split())
STAMPS: tuple[str, ...] = ("PAID", "DRAFT", "COPY", "URGENT", "FINAL", "VOID", "SECRET", "SAMPLE")
SHAPES: tuple[str, ...] = ("circle", "rectangle", "triangle", "star", "cross")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 70, 220),
    "yellow": (245, 215, 30),
    "black": (15, 15, 15),
    "gray": (130, 130, 130),
    "brown": (150, 60, 40),
    "teal": (20, 150, 150),
}
MAX_COUNT = 5
_MARGIN = 8
_LINE = 36  # pixels between the items of a list: more than a merged patch (32), so that no two share a row of patches


@dataclass(frozen=True)
class Region:
    """One thing on a page: `value` is the word, the digits, the stamp or the name of the shape."""

    kind: RegionKind
    value: str
    box: Box
    index: int = 0  # place in the list, from 0; only for items
    colour: str = ""  # only for shapes


@dataclass(frozen=True)
class Page:
    """A drawn page or picture and all that can be asked about it. What a page does not have is empty or 0."""

    image: Image.Image
    regions: tuple[Region, ...]
    title: str = ""
    number: str = ""  # three digits
    items: tuple[str, ...] = ()
    shape: str = ""
    colour: str = ""
    count: int = 0
    stamp: str = ""


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def centres(text: str) -> list[float]:
    """Where the middle of each character stands along a line of text, from 0 to 1."""
    font = _font(20)
    ends = [font.getlength(text[:k]) for k in range(len(text) + 1)]
    return [(left + right) / 2 / ends[-1] for left, right in pairwise(ends)]


def write(draw: ImageDraw.ImageDraw, xy: tuple[float, float], text: str, size: int, ink: str) -> Box:
    """Write one line of text and return the box of its ink."""
    draw.text(xy, text, font=_font(size), fill=ink)
    return draw.textbbox(xy, text, font=_font(size))


def tint(colour: str, rng: random.Random) -> tuple[int, int, int]:
    """One of COLOURS, a little off."""
    r, g, b = (max(0, min(255, channel + rng.randint(-12, 12))) for channel in COLOURS[colour])
    return r, g, b


def draw_shape(draw: ImageDraw.ImageDraw, shape: str, fill: tuple[int, int, int], box: Box) -> None:
    """Fill `box` with one of SHAPES."""
    left, top, right, bottom = box
    x, y, rx, ry = (left + right) / 2, (top + bottom) / 2, (right - left) / 2, (bottom - top) / 2
    if shape == "circle":
        draw.ellipse(box, fill=fill)
    elif shape == "rectangle":
        draw.rectangle(box, fill=fill)
    elif shape == "triangle":
        draw.polygon([(x, top), (right, bottom), (left, bottom)], fill=fill)
    elif shape == "star":
        turns = [(math.pi * (k / 5 - 0.5), 1.0 if k % 2 == 0 else 0.42) for k in range(10)]
        draw.polygon([(x + rx * r * math.cos(a), y + ry * r * math.sin(a)) for a, r in turns], fill=fill)
    else:
        draw.rectangle((left, y - ry / 3, right, y + ry / 3), fill=fill)
        draw.rectangle((x - rx / 3, top, x + rx / 3, bottom), fill=fill)


def draw_stamp(canvas: Image.Image, word: str, x: int, y: int, rng: random.Random) -> Box:
    """A framed word, turned by a few degrees."""
    ink = tint(rng.choice(("red", "blue", "green")), rng)
    width = round(_font(18).getlength(word)) + 12
    patch = Image.new("RGBA", (width, 28), (0, 0, 0, 0))
    draw = ImageDraw.Draw(patch)
    draw.rectangle((0, 0, width - 1, 27), outline=ink, width=2)
    draw.text((6, 3), word, font=_font(18), fill=ink)
    patch = patch.rotate(rng.uniform(-6, 6), expand=True, resample=Image.Resampling.BICUBIC)
    canvas.paste(patch, (x, y), patch)
    return (x, y, x + patch.width, y + patch.height)


def _shapes(draw: ImageDraw.ImageDraw, page: dict[str, str], count: int, x: int, y: int, rng: random.Random) -> Box:
    """A row of equal shapes."""
    fill, size = tint(page["colour"], rng), rng.randint(20, 26)
    for k in range(count):
        left = x + 32 * k
        draw_shape(draw, page["shape"], fill, (left, y + 4, left + size, y + 4 + size))
    return (x, y + 4, x + 32 * (count - 1) + size, y + 4 + size)


def draw_page(rng: random.Random) -> Page:
    """A page of 136-224 by about 130-310 pixels: a title and two to four of number, list, shapes and stamp."""
    width = rng.randint(136, 224)
    blocks = rng.sample(["number", "items", "shapes", "stamp"], rng.choice((2, 3, 3, 4)))
    items = tuple(rng.sample(WORDS, rng.randint(2, 3))) if "items" in blocks else ()
    look = {"shape": rng.choice(SHAPES), "colour": rng.choice(list(COLOURS))} if "shapes" in blocks else {}
    height = 2 * _MARGIN + 40 + sum(_LINE * len(items) if block == "items" else 42 for block in blocks)
    canvas = Image.new("RGB", (width, height + rng.randint(0, 30)), tuple(rng.randint(232, 255) for _ in range(3)))
    draw = ImageDraw.Draw(canvas)
    ink = rng.choice(("black", "navy", "#402010"))
    title, number, stamp, count = rng.choice(WORDS), "", "", 0
    left, y = _MARGIN + rng.randint(0, 24), _MARGIN + rng.randint(0, 6)
    regions = [Region("title", title, write(draw, (left, y), title.capitalize(), rng.randint(22, 26), ink))]
    draw.line((_MARGIN, y + 33, width - _MARGIN, y + 33), fill=ink, width=2)
    y += 40
    for block in blocks:
        x = _MARGIN + rng.randint(0, 16 if block == "shapes" else width - 132)
        if block == "number":
            number = str(rng.randint(100, 999))
            regions.append(Region("number", number, write(draw, (x, y + 4), number, rng.randint(22, 28), ink)))
        elif block == "items":
            for index, word in enumerate(items):
                box = write(draw, (x, y + 7), "- " + word, 18, ink)
                regions.append(Region("item", word, (box[0] + 12, *box[1:]), index))
                y += _LINE
        elif block == "shapes":
            count = rng.randint(1, min(MAX_COUNT, (width - x) // 32))
            box = _shapes(draw, look, count, x, y, rng)
            regions.append(Region("shapes", look["shape"], box, colour=look["colour"]))
        else:
            stamp = rng.choice(STAMPS)
            regions.append(Region("stamp", stamp, draw_stamp(canvas, stamp, x, y, rng)))
        y += 0 if block == "items" else 42
    return Page(canvas, tuple(regions), title, number, items, count=count, stamp=stamp, **look)


def draw_picture(rng: random.Random) -> Page:
    """A picture of 64-160 pixels a side with one shape somewhere on a plain ground."""
    width, height = rng.randint(64, 160), rng.randint(64, 160)
    canvas = Image.new("RGB", (width, height), tuple(rng.randint(225, 255) for _ in range(3)))
    shape, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
    size = rng.uniform(0.25, 0.7) * min(width, height)
    left, top = rng.uniform(2, width - size - 2), rng.uniform(2, height - size - 2)
    box = (left, top, left + size, top + size)
    draw_shape(ImageDraw.Draw(canvas), shape, tint(colour, rng), box)
    return Page(canvas, (Region("shapes", shape, box, colour=colour),), shape=shape, colour=colour, count=1)
