"""Real pictures for the tests of media, made with Pillow."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps

from triptych.types import Rgb

WHITE = Rgb(255, 255, 255)
MAX_PIXELS = 64_000_000


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


# -- PNGs that Pillow does not write -----------------------------------------------------------------------------------

_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, body: bytes, depth: int = 8, colour: int = 2, *, interlaced: bool = False) -> bytes:
    """`body`: the rows, compressed."""
    return _png((width, height, depth, colour, interlaced), b"", body)


def _png(header: tuple[int, int, int, int, bool], before: bytes, body: bytes) -> bytes:
    width, height, depth, colour, interlaced = header
    start = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced))
    return b"\x89PNG\r\n\x1a\n" + start + before + png_chunk(b"IDAT", body) + png_chunk(b"IEND", b"")


def png_of(
    values: NDArray[Any], depth: int = 8, colour: int = 2, *, interlaced: bool = False, before: bytes = b""
) -> bytes:
    """Of values [height, width] or [height, width, channels]; `before`: chunks before the pixels."""
    height, width = values.shape[:2]
    passes = [values[y::dy, x::dx] for x, y, dx, dy in _ADAM7] if interlaced else [values]
    rows = [row for part in passes if part.size for row in part]
    body = zlib.compress(b"".join(b"\0" + _packed(row, depth) for row in rows))
    return _png((width, height, depth, colour, interlaced), before, body)


def _packed(row: NDArray[Any], depth: int) -> bytes:
    if depth >= 8:
        return row.astype(">u2" if depth == 16 else np.uint8).tobytes()
    bits = (row.reshape(-1, 1) >> np.arange(depth - 1, -1, -1)) & 1
    return np.packbits(bits.astype(np.uint8).reshape(-1)).tobytes()


# Every lossy and lossless form of every mode that a writer here can make.
MODES = {
    "PNG": ["1", "L", "LA", "P", "RGB", "RGBA"],
    "JPEG": ["L", "RGB", "CMYK"],
    "WEBP": ["L", "RGB", "RGBA"],
    "AVIF": ["L", "RGB", "RGBA"],
    "GIF": ["L", "P", "RGB"],
    "BMP": ["1", "L", "P", "RGB"],
    "TIFF": ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"],
}


def read_plainly(content: bytes) -> Image.Image:
    """What a file shows, for one that is right and has no profile to convert: upright, over white, RGB."""
    image = ImageOps.exif_transpose(Image.open(BytesIO(content)))
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, (*WHITE, 255)), image.convert("RGBA"))
    return image.convert("RGB")
