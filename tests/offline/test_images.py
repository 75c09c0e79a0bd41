"""Images as Python has them reach the model as the same pixels, whichever way they come."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from tests.media.pictures import MAX_PIXELS, WHITE, encoded, exif_orientation, noise, red_left_edge
from triptych.errors import MediaError
from triptych.media.decode import decode_image
from triptych.offline.images import ImageLike, image_url

MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "HSV", "YCbCr", "RGBX", "La", "RGBa")


def content(image: ImageLike) -> bytes:
    head, _, payload = image_url(image).partition(",")
    assert head == "data:application/octet-stream;base64"
    return base64.b64decode(payload)


def seen(image: ImageLike) -> Image.Image:
    """As an encode worker sees it."""
    return decode_image(content(image), WHITE, MAX_PIXELS)


@pytest.mark.parametrize("mode", MODES)
def test_a_pil_image_keeps_its_pixels(mode: str) -> None:
    source = noise(37, 23, "RGBA" if mode == "RGBa" else "LA" if mode == "La" else "RGB").convert(mode)
    shown = source.convert({"La": "LA", "RGBa": "RGBA"}.get(mode, mode)).convert("RGB")
    assert np.array_equal(np.asarray(seen(source)), np.asarray(shown))


def test_transparent_pixels_are_composited_like_a_files() -> None:
    image = Image.new("RGBA", (20, 20), (0, 0, 0, 0))
    assert np.asarray(seen(image)).min() == 255


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_deep_grey_is_scaled_like_a_files(dtype: type) -> None:
    values: NDArray[Any] = np.linspace(0, 1 if dtype is np.float32 else 65535, 256).astype(dtype).reshape(16, 16)
    grey = np.asarray(seen(Image.fromarray(values)))[..., 0].ravel().astype(int)
    assert (grey[0], grey[-1]) == (0, 255)
    assert np.abs(grey - np.arange(256)).max() <= 1


def test_big_endian_grey_is_scaled_too() -> None:
    values = np.array([[0, 255, 256, 65535]], dtype=">u2")
    assert np.asarray(seen(Image.fromarray(values)))[..., 0].tolist() == [[0, 0, 1, 255]]


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("loaded", [False, True])
def test_an_opened_picture_stands_upright(form: str, loaded: bool) -> None:
    turned = encoded(red_left_edge(64, 48), form, exif=exif_orientation(6))
    image = Image.open(BytesIO(turned))
    if loaded:
        image.load()
    assert np.array_equal(np.asarray(seen(image)), np.asarray(decode_image(turned, WHITE, MAX_PIXELS)))
    assert seen(image).size == (48, 64)
    assert seen(ImageOps.exif_transpose(Image.open(BytesIO(turned)))).size == (48, 64), "turned by the caller already"


def test_bytes_and_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    jpeg = encoded(red_left_edge(64, 48), "JPEG")
    path = tmp_path / "picture.jpg"
    path.write_bytes(jpeg)
    assert content(jpeg) == content(path) == content(str(path)) == jpeg


@pytest.mark.parametrize("url", ["data:image/png;base64,AAAA", "https://host/a.png", "HTTP://host/a", "file:///a.png"])
def test_a_url_stays_a_url(url: str) -> None:
    assert image_url(url) == url


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"no\.png' cannot be read: No such file"):
        image_url(tmp_path / "no.png")
    with pytest.raises(MediaError, match="Is a directory"):
        image_url(tmp_path)
    with pytest.raises(MediaError, match="null"):
        image_url("a\0b")


def test_a_damaged_file_that_pillow_opened_is_a_media_error() -> None:
    whole = encoded(noise(64, 64), "PNG")
    with pytest.raises(MediaError, match="cannot be read"):
        image_url(Image.open(BytesIO(whole[: len(whole) // 2])))
