"""M1, M2, M3, M5, M8: pixels are upright, opaque and RGB, whatever the file holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps

from triptych.config import MediaConfig
from triptych.errors import ConfigError, MediaError
from triptych.media.decode import decode_image
from triptych.media.probe import probe_image

from .pictures import WHITE, encoded, exif_orientation, noise, red_left_edge


def pixels(image: Image.Image) -> NDArray[np.uint8]:
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(form: str, orientation: int) -> None:
    original = red_left_edge(64, 48)
    content = encoded(original, form, exif=exif_orientation(orientation))
    decoded = decode_image(content, WHITE)
    assert decoded.size == tuple(probe_image(content, MediaConfig()))
    original.getexif()[274] = orientation
    expected = ImageOps.exif_transpose(original)
    difference = np.abs(pixels(decoded).astype(int) - np.asarray(expected).astype(int))
    assert np.median(difference) <= 2  # lossy types differ about the edge


def test_a_phones_picture_has_its_red_edge_on_top() -> None:
    decoded = decode_image(encoded(red_left_edge(), "JPEG", exif=exif_orientation(6)), WHITE)
    assert decoded.size == (480, 640)
    assert pixels(decoded)[10, :, 0].min() > 200
    assert pixels(decoded)[600, :, 0].max() < 50


@pytest.mark.parametrize("tiff_tag", [True, False])
def test_a_tiffs_orientation_counts_once(tiff_tag: bool) -> None:
    xmp = b'<x:xmpmeta><rdf tiff:Orientation="6"/></x:xmpmeta>'
    options: dict[str, object] = {"exif": exif_orientation(6)} if tiff_tag else {"tiffinfo": {700: xmp}}
    content = encoded(red_left_edge(), "TIFF", **options)
    decoded = decode_image(content, WHITE)
    assert decoded.size == (480, 640) == tuple(probe_image(content, MediaConfig()))
    assert pixels(decoded)[10, :, 0].min() > 200


@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize(("background", "colour"), [(WHITE, (255, 255, 255)), ("#204060", (0x20, 0x40, 0x60))])
def test_black_under_transparency_is_never_seen(form: str, background: str, colour: tuple[int, int, int]) -> None:
    image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 32, 64))
    decoded = pixels(decode_image(encoded(image, form, **({"lossless": True} if form == "WEBP" else {})), background))
    assert np.abs(decoded[:, 40:].astype(int) - colour).max() <= (3 if form == "AVIF" else 0)
    assert np.abs(decoded[:, :24].astype(int) - (255, 0, 0)).max() <= (3 if form == "AVIF" else 0)


def test_half_transparent_is_blended() -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert abs(int(pixels(decode_image(encoded(image, "PNG"), WHITE))[0, 0, 0]) - 127) <= 1


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_opaque_modes_equal_the_plain_conversion(mode: str) -> None:
    content = encoded(noise(64, 64, mode), "PNG")
    assert np.array_equal(pixels(decode_image(content, WHITE)), np.asarray(noise(64, 64, mode).convert("RGB")))


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_alpha_modes(mode: str) -> None:
    image = noise(64, 64, "RGBA")
    image.putalpha(Image.linear_gradient("L").resize((64, 64)))
    image = image.convert(mode)
    expected = Image.alpha_composite(Image.new("RGBA", (64, 64), WHITE), image.convert("RGBA")).convert("RGB")
    assert np.array_equal(pixels(decode_image(encoded(image, "PNG"), WHITE)), np.asarray(expected))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_transparent_colour_of_an_opaque_mode(mode: str) -> None:
    """tRNS without an alpha channel: one value is transparent."""
    image = Image.new("RGB", (64, 64), "black")
    image.paste("white", (0, 0, 32, 64))
    image = image.convert(mode)
    transparent = image.getpixel((63, 0))
    assert transparent is not None
    content = encoded(image, "PNG", transparency=0 if mode == "1" else transparent)
    assert (pixels(decode_image(content, "#ff8000"))[:, 32:] == (255, 128, 0)).all()
    assert (pixels(decode_image(content, "#ff8000"))[:, :32] == 255).all()


def test_palette_with_alpha_bytes() -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.paste(0, (0, 0, 4, 8))
    decoded = pixels(decode_image(encoded(image, "PNG", transparency=b"\x00\xff"), WHITE))
    assert (decoded[:, :4] == 255).all()
    assert (decoded[:, 4:] == (255, 0, 0)).all()


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
def test_cmyk(form: str) -> None:
    content = encoded(red_left_edge().convert("CMYK"), form)
    decoded = pixels(decode_image(content, WHITE)).astype(int)
    assert np.abs(decoded[:, :70] - (254, 0, 0)).max() < 12
    assert np.abs(decoded[:, 100:] - (0, 0, 254)).max() < 12


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_grey_of_16_bits_is_scaled_and_not_clipped(form: str) -> None:
    ramp = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    decoded = pixels(decode_image(encoded(Image.fromarray(ramp), form), WHITE))
    assert np.array_equal(decoded[..., 1], (ramp >> 8).astype(np.uint8))


@pytest.mark.parametrize("top", [1.0, 255.0])
def test_float_grey(top: float) -> None:
    ramp = np.linspace(0, top, 64, dtype=np.float32).reshape(8, 8)
    ramp[0, 0] = np.nan
    decoded = pixels(decode_image(encoded(Image.fromarray(ramp), "TIFF"), WHITE))
    assert (decoded[0, 0, 0], decoded[7, 7, 0]) == (0, 255)


def test_integer_grey_of_32_bits() -> None:
    values = np.array([[0, 256, 65535, 1 << 20, -5]], dtype=np.int32)
    decoded = pixels(decode_image(encoded(Image.fromarray(values), "TIFF"), WHITE))
    assert decoded[0, :, 0].tolist() == [0, 1, 255, 255, 0]


def test_lab() -> None:
    to_lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    lab = ImageCms.applyTransform(red_left_edge(), to_lab)
    assert lab is not None
    decoded = pixels(decode_image(encoded(lab, "TIFF"), WHITE)).astype(int)
    assert np.abs(decoded[:, :70] - (255, 0, 0)).max() < 12


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "AVIF", "TIFF"])
def test_first_frame_of_an_animation(form: str) -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "lime", "blue")]
    content = encoded(frames[0], form, save_all=True, append_images=frames[1:])
    decoded = pixels(decode_image(content, WHITE)).astype(int)
    assert np.abs(decoded - (255, 0, 0)).max() < 6


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF"])
@pytest.mark.parametrize("part", [0.5, 0.98])
def test_truncated(form: str, part: float) -> None:
    content = encoded(noise(128, 128), form)
    with pytest.raises(MediaError, match=r"cannot be (decoded|read)|damaged"):
        decode_image(content[: int(len(content) * part)], WHITE)


def test_truncated_by_128_bytes_says_so() -> None:
    with pytest.raises(MediaError, match=r"JPEG image cannot be decoded: .*truncated"):
        decode_image(encoded(noise(128, 128), "JPEG")[:-128], WHITE)


def test_background_must_be_a_colour() -> None:
    with pytest.raises(ConfigError, match="background"):
        decode_image(encoded(noise(4, 4), "PNG"), "whitish")


BASES = [encoded(noise(24, 16), form) for form in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF")]


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=300, deadline=None)
@given(
    base=st.sampled_from(BASES),
    changes=st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=6),
)
def test_damaged_bytes_give_an_image_of_the_probed_size_or_a_media_error(
    base: bytes, changes: list[tuple[float, int]]
) -> None:
    content = bytearray(base)
    for place, value in changes:
        content[int(place * len(content))] = value
    limits = MediaConfig(max_image_pixels=1_000_000)
    try:
        size = probe_image(bytes(content), limits)
        decoded = decode_image(bytes(content), WHITE)
    except MediaError:
        return
    assert decoded.size == tuple(size)
    assert decoded.mode == "RGB"
