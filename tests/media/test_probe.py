"""M1, M5, M7, M8: sizes come from headers, limits hold before a pixel is decoded."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
from PIL import Image, ImageFile

from triptych.config import MediaConfig
from triptych.errors import MediaError
from triptych.media.header import FORMATS
from triptych.media.probe import probe_image
from triptych.types import ImageSize

from .hostile import huge_png
from .pictures import encoded, exif_orientation, noise, png_chunk, red_left_edge

LIMITS = MediaConfig()


@pytest.fixture
def no_pixels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails the test if any picture is decoded."""

    def load(self: ImageFile.ImageFile) -> None:
        raise AssertionError("a pixel was decoded")

    with monkeypatch.context() as patch:
        patch.setattr(ImageFile.ImageFile, "load", load)
        yield


FORMS = [encoded(red_left_edge(), form) for form in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")]


@pytest.mark.usefixtures("no_pixels")
@pytest.mark.parametrize("content", FORMS, ids=lambda content: content[:4].hex())
def test_size_of_every_type(content: bytes) -> None:
    assert probe_image(content, LIMITS) == ImageSize(640, 480)


@pytest.mark.usefixtures("no_pixels")
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_swaps_the_size(form: str, orientation: int) -> None:
    content = encoded(red_left_edge(64, 48), form, exif=exif_orientation(orientation))
    assert probe_image(content, LIMITS) == (ImageSize(48, 64) if orientation >= 5 else ImageSize(64, 48))


@pytest.mark.usefixtures("no_pixels")
def test_orientation_behind_a_pngs_pixels() -> None:
    plain = encoded(red_left_edge(64, 48), "PNG")
    late = png_chunk(b"eXIf", exif_orientation(6).tobytes().removeprefix(b"Exif\0\0"))
    assert probe_image(plain[:-12] + late + plain[-12:], LIMITS) == ImageSize(48, 64)
    damaged = late[:-1] + bytes([late[-1] ^ 1])
    assert probe_image(plain[:-12] + damaged + plain[-12:], LIMITS) == ImageSize(64, 48)


@pytest.mark.usefixtures("no_pixels")
@pytest.mark.parametrize("exif", [b"Exif\0\0junk", b"Exif\0\0II*\0\xff\xff\xff\xff", exif_orientation(9).tobytes()])
@pytest.mark.filterwarnings("ignore:.*EXIF.*:UserWarning")
def test_damaged_exif_is_no_orientation(exif: bytes) -> None:
    assert probe_image(encoded(red_left_edge(64, 48), "JPEG", exif=exif), LIMITS) == ImageSize(64, 48)


@pytest.mark.usefixtures("no_pixels")
def test_a_huge_png_is_refused_by_its_header_in_flat_memory() -> None:
    content = huge_png()
    assert len(content) < 100_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(MediaError, match=r"20000x20000 = 400000000 pixels, the limit is max_image_pixels = 64000000"):
        probe_image(content, LIMITS)
    roomy = MediaConfig(max_image_pixels=1_000_000_000)  # Pillow's own limits are out of the way
    assert probe_image(content, roomy) == ImageSize(20000, 20000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB; the pixels are 50 MB and more


def test_limit_of_bytes() -> None:
    content = encoded(noise(32, 32), "PNG")
    assert probe_image(content, MediaConfig(max_image_bytes=len(content))) == ImageSize(32, 32)
    with pytest.raises(MediaError, match="max_image_bytes = 10"):
        probe_image(content, MediaConfig(max_image_bytes=10))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', r"image/svg\+xml"),
        (b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- x -->\n<svg width="1"/>', r"image/svg\+xml"),
        (b"%PDF-1.7", "application/pdf"),
        (b"<!doctype html><html>", "text/html"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "image/heic"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp42", "video/mp4"),
        (b"\0\0\1\0\1\0\x10\x10", "image/x-icon"),
        (b"hello", "no image of a known type"),
        (b"iVBORw0KGgoAAAANSUhEUg==", "base64 as text"),
        (b"/9j/4AAQSkZJRgABAQAAAQABAAD", "base64 as text"),
        (b"\x89PNG\r\n\x1a\n", "damaged"),
        (b"\xff\xd8\xff", "damaged"),
        (FORMS[0][:30], "damaged|cannot be read"),
    ],
)
def test_what_is_no_image_is_named(content: bytes, reason: str) -> None:
    with pytest.raises(MediaError, match=reason):
        probe_image(content, LIMITS)


def test_the_label_does_not_matter_but_the_content() -> None:
    """A multi-picture JPEG, as phones make them, is a JPEG."""
    content = encoded(red_left_edge(), "MPO", save_all=True, append_images=[red_left_edge()])
    assert probe_image(content, LIMITS) == ImageSize(640, 480)


def test_every_type_is_one_that_pillow_has() -> None:
    Image.init()
    assert set(FORMATS) <= set(Image.OPEN)
