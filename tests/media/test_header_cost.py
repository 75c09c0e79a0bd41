"""M7 and its kind: what a header may cost, in files that are otherwise right, and that real pictures stay below it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from PIL import Image

from triptych.config import MediaConfig
from triptych.errors import MediaError
from triptych.media.probe import probe_image
from triptych.types import ImageSize

from .hostile import (
    COSTLY_HEADERS,
    SIZE,
    in_gif,
    in_jpeg,
    in_png,
    png_of_exif_in_text,
    png_of_late_exif,
    progressive_jpeg,
)
from .pictures import encoded, exif_orientation, noise, png_chunk, red_left_edge

LIMITS = MediaConfig()


@pytest.mark.parametrize("name", COSTLY_HEADERS)
def test_costly_headers_are_refused_at_little_cost(name: str) -> None:
    content = COSTLY_HEADERS[name]()
    tracemalloc.start()
    try:
        with pytest.raises(MediaError, match=r"refused|limit|too large|Too much|cannot be read|damaged"):
            probe_image(content, LIMITS)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Some of them would take a gigabyte, and ten seconds.
    assert peak_bytes < 4 * SIZE + (70 << 20)


def test_what_real_pictures_have_is_no_cost() -> None:
    """Dozens of segments, texts, comments and numbers, each more than cameras and editors write."""
    picture = red_left_edge(64, 48)
    long_xmp = b"http://ns.adobe.com/xmp/extension/\0" + bytes(60000)
    pictures = [
        in_jpeg((b"\xff\xe1" + (len(long_xmp) + 2).to_bytes(2, "big") + long_xmp) * 100),
        in_jpeg(b"\xff" * 1000),
        progressive_jpeg(60),
        encoded(picture, "JPEG", exif=exif_orientation(1), comment=b"c" * 60000, icc_profile=bytes(2 << 20)),
        in_png(png_chunk(b"tEXt", b"prompt\0" + b"x" * 500_000), *([png_chunk(b"tEXt", b"a\0b")] * 1000)),
        in_gif(b"!\xfe" + (b"\xff" + b"c" * 255) * 2000 + b"\0"),
    ]
    for content in pictures:
        assert probe_image(content, LIMITS) == ImageSize(64, 48)
    for form in ("TIFF", "WEBP", "AVIF", "BMP"):
        large = Image.new("L", (64, 30_000)) if form == "TIFF" else noise(400, 300)
        options = {"tiffinfo": {278: 1}} if form == "TIFF" else {}
        assert probe_image(encoded(large, form, **options), LIMITS) == ImageSize(*large.size)


def test_what_follows_a_jpegs_end_does_not_count() -> None:
    """A phone's moving picture is a JPEG with a film behind it, whose bytes now and then look like scans."""
    content = encoded(red_left_edge(64, 48), "JPEG") + b"\xff\xda" * 5000
    assert probe_image(content, LIMITS) == ImageSize(64, 48)


@pytest.mark.parametrize("make", [png_of_late_exif, png_of_exif_in_text])
def test_exif_that_is_too_long_is_not_read(make: Callable[[], bytes]) -> None:
    content = make()
    tracemalloc.start()
    try:
        assert probe_image(content, LIMITS) == ImageSize(64, 48)
        assert tracemalloc.get_traced_memory()[1] < 8 * SIZE  # its numbers alone would be more
    finally:
        tracemalloc.stop()


def test_exif_in_a_text_of_a_png_counts() -> None:
    text = b"Raw profile type exif\0\nexif\n 9\n" + exif_orientation(6).tobytes().hex().encode()
    assert probe_image(in_png(png_chunk(b"tEXt", text)), LIMITS) == ImageSize(48, 64)
