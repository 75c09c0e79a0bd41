"""Draws the pages of document requests with Pillow: lines of text, so that a page compresses as a real one does.

Runs in the client before a round starts. The same generator gives the same page; two generators never do.
"""

from __future__ import annotations

import io
import random
from functools import cache

from PIL import Image, ImageDraw, ImageFont

from triptych.bench.workload import ImageFormat

_WORD_LIST = """
    the of and to in that is was for on are with as his they be at one have this from or had by hot but some what there
    we can out other were all your when up use word how said an each she which do their time if will way about many then
    them would write like so these her long make thing see him two has look more day could go come did my sound no most
    number who over know water than call first people may down side been now find any new work part take get place made
    live where after back little only round man year came show every good me give our under name very through just form
"""
WORDS: tuple[str, ...] = tuple(_WORD_LIST.split())
_MARGIN = 12  # pixels


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def words(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def page(rng: random.Random, size: tuple[int, int], form: ImageFormat = "PNG") -> bytes:
    """One encoded page of `size` (width, height in pixels). Its heading is a random number of 48 bits."""
    width, height = size
    image = Image.new("RGB", size, (250 + rng.randrange(6), 250 + rng.randrange(6), 245 + rng.randrange(11)))
    draw = ImageDraw.Draw(image)
    draw.text((_MARGIN, _MARGIN), f"{rng.getrandbits(48):012x}", font=_font(18), fill=(20, 20, 60))
    top = _MARGIN + 28
    while top < height - _MARGIN:
        text = words(rng, 1 + width // 42)  # a little longer than the line, as the edge of a crop
        draw.text((_MARGIN, top), text, font=_font(12), fill=(30, 30, 30))
        top += rng.choice((15, 15, 15, 24))
    left, low = rng.randrange(width // 2), rng.randrange(height // 2)
    fill = (rng.randrange(256), rng.randrange(256), rng.randrange(256))
    draw.rectangle((left, low, left + width // 6, low + height // 8), fill=fill)
    out = io.BytesIO()
    if form == "PNG":
        image.save(out, "PNG", compress_level=1)  # the client's time, not the server's
    else:
        image.save(out, "JPEG", quality=85)
    return out.getvalue()
