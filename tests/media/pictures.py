"""Real pictures for the tests of media, made with Pillow."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
from PIL import ExifTags, Image

WHITE = "#ffffff"


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def exif_orientation(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def red_left_edge(width: int = 640, height: int = 480) -> Image.Image:
    image = Image.new("RGB", (width, height), "blue")
    image.paste((255, 0, 0), (0, 0, width // 8, height))
    return image


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)
