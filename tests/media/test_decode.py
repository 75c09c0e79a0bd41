"""M1, M2, M3, M5, M8: pixels are upright, opaque and RGB, whatever the file holds."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps

from triptych.config import MediaConfig
from triptych.errors import MediaError
from triptych.media.decode import decode_image
from triptych.media.probe import probe_image
from triptych.types import Rgb

from .pictures import MAX_PIXELS, WHITE, encoded, exif_orientation, noise, png_chunk, png_of, red_left_edge


def decoded_image(content: bytes, background: Rgb = WHITE) -> Image.Image:
    return decode_image(content, background, MAX_PIXELS)


def pixels(image: Image.Image) -> NDArray[np.uint8]:
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(form: str, orientation: int) -> None:
    original = red_left_edge(64, 48)
    content = encoded(original, form, exif=exif_orientation(orientation))
    decoded = decoded_image(content)
    assert decoded.size == tuple(probe_image(content, MediaConfig()))
    original.getexif()[274] = orientation
    expected = ImageOps.exif_transpose(original)
    difference = np.abs(pixels(decoded).astype(int) - np.asarray(expected).astype(int))
    assert np.median(difference) <= 2  # lossy types differ about the edge


def test_a_phones_picture_has_its_red_edge_on_top() -> None:
    decoded = decoded_image(encoded(red_left_edge(), "JPEG", exif=exif_orientation(6)))
    assert decoded.size == (480, 640)
    assert pixels(decoded)[10, :, 0].min() > 200
    assert pixels(decoded)[600, :, 0].max() < 50


@pytest.mark.parametrize("tiff_tag", [True, False])
def test_a_tiffs_orientation_counts_once(tiff_tag: bool) -> None:
    xmp = b'<x:xmpmeta><rdf tiff:Orientation="6"/></x:xmpmeta>'
    options: dict[str, object] = {"exif": exif_orientation(6)} if tiff_tag else {"tiffinfo": {700: xmp}}
    content = encoded(red_left_edge(), "TIFF", **options)
    decoded = decoded_image(content)
    assert decoded.size == (480, 640) == tuple(probe_image(content, MediaConfig()))
    assert pixels(decoded)[10, :, 0].min() > 200


@pytest.mark.parametrize("form", ["PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("background", [WHITE, Rgb(0x20, 0x40, 0x60)])
def test_black_under_transparency_is_never_seen(form: str, background: Rgb) -> None:
    image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 32, 64))
    decoded = pixels(decoded_image(encoded(image, form, **({"lossless": True} if form == "WEBP" else {})), background))
    assert np.abs(decoded[:, 40:].astype(int) - background).max() <= (3 if form == "AVIF" else 0)
    assert np.abs(decoded[:, :24].astype(int) - (255, 0, 0)).max() <= (3 if form == "AVIF" else 0)


def test_half_transparent_is_blended() -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert abs(int(pixels(decoded_image(encoded(image, "PNG")))[0, 0, 0]) - 127) <= 1


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_opaque_modes_equal_the_plain_conversion(mode: str) -> None:
    content = encoded(noise(64, 64, mode), "PNG")
    assert np.array_equal(pixels(decoded_image(content)), np.asarray(noise(64, 64, mode).convert("RGB")))


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_alpha_modes(mode: str) -> None:
    image = noise(64, 64, "RGBA")
    image.putalpha(Image.linear_gradient("L").resize((64, 64)))
    image = image.convert(mode)
    expected = Image.alpha_composite(Image.new("RGBA", (64, 64), (*WHITE, 255)), image.convert("RGBA")).convert("RGB")
    assert np.array_equal(pixels(decoded_image(encoded(image, "PNG"))), np.asarray(expected))


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB"])
def test_transparent_colour_of_an_opaque_mode(mode: str) -> None:
    """tRNS without an alpha channel: one value is transparent."""
    image = Image.new("RGB", (64, 64), "black")
    image.paste("white", (0, 0, 32, 64))
    image = image.convert(mode)
    transparent = image.getpixel((63, 0))
    assert transparent is not None
    content = encoded(image, "PNG", transparency=0 if mode == "1" else transparent)
    assert (pixels(decoded_image(content, Rgb(255, 128, 0)))[:, 32:] == (255, 128, 0)).all()
    assert (pixels(decoded_image(content, Rgb(255, 128, 0)))[:, :32] == 255).all()


def test_palette_with_alpha_bytes() -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.paste(0, (0, 0, 4, 8))
    decoded = pixels(decoded_image(encoded(image, "PNG", transparency=b"\x00\xff")))
    assert (decoded[:, :4] == 255).all()
    assert (decoded[:, 4:] == (255, 0, 0)).all()


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
def test_cmyk(form: str) -> None:
    content = encoded(red_left_edge().convert("CMYK"), form)
    decoded = pixels(decoded_image(content)).astype(int)
    assert np.abs(decoded[:, :70] - (254, 0, 0)).max() < 12
    assert np.abs(decoded[:, 100:] - (0, 0, 254)).max() < 12


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_grey_of_16_bits_is_scaled_and_not_clipped(form: str) -> None:
    ramp = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    decoded = pixels(decoded_image(encoded(Image.fromarray(ramp), form)))
    assert np.array_equal(decoded[..., 1], (ramp >> 8).astype(np.uint8))


def test_grey_of_16_bits_with_a_transparent_value() -> None:
    values = np.full((8, 8), 40_000, dtype=np.uint16)
    values[:, 4:] = 40_001
    decoded = pixels(decoded_image(encoded(Image.fromarray(values), "PNG", transparency=40_000), Rgb(255, 0, 0)))
    assert (decoded[:, :4] == (255, 0, 0)).all()
    assert (decoded[:, 4:] == 40_001 >> 8).all()


@pytest.mark.parametrize("alpha", [False, True])
def test_colours_of_16_bits(alpha: bool) -> None:
    """The high byte counts, as everywhere in Pillow. Pillow writes no such PNG."""
    values = np.random.default_rng(0).integers(0, 65536, (9, 7, 4 if alpha else 3), dtype=np.uint16)
    content = png_of(values, depth=16, colour=6 if alpha else 2)
    expected = Image.fromarray((values >> 8).astype(np.uint8))
    if alpha:
        expected = Image.alpha_composite(Image.new("RGBA", expected.size, (*WHITE, 255)), expected).convert("RGB")
    assert np.array_equal(pixels(decoded_image(content)), np.asarray(expected))


def test_grey_and_alpha_of_16_bits() -> None:
    values = np.full((4, 4, 2), 0x8000, dtype=np.uint16)
    values[:2, :, 1] = 0
    decoded = pixels(decoded_image(png_of(values, depth=16, colour=4)))
    assert (decoded[:2] == 255).all()
    assert np.abs(decoded[2:].astype(int) - 191).max() <= 1


@pytest.mark.parametrize(("depth", "key"), [(1, 0), (1, 1), (2, 1), (2, 3), (4, 7), (8, 77)])
def test_a_transparent_grey_counts_in_the_files_own_depth(depth: int, key: int) -> None:
    """A hidden colour must not show because the file has fewer levels than Pillow's image."""
    levels = np.arange(2**depth, dtype=np.uint8).reshape(1, -1)
    trns = png_chunk(b"tRNS", struct.pack(">H", key))
    decoded = pixels(decoded_image(png_of(levels, depth=depth, colour=0, before=trns), Rgb(1, 2, 3)))
    expected = np.stack([levels * (255 // (2**depth - 1))] * 3, axis=-1)
    expected[0, key] = (1, 2, 3)
    assert np.array_equal(decoded, expected)


def test_a_transparent_colour_of_16_bits() -> None:
    values = np.array([[[0x1234, 0x5678, 0x9ABC], [0xFFFF, 0, 0]]], dtype=np.uint16)
    trns = png_chunk(b"tRNS", values[0, 0].astype(">u2").tobytes())
    decoded = pixels(decoded_image(png_of(values, depth=16, colour=2, before=trns), Rgb(1, 2, 3)))
    assert decoded.tolist() == [[[1, 2, 3], [255, 0, 0]]]


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (8, 8), (33, 17)])
def test_interlaced(size: tuple[int, int]) -> None:
    image = np.asarray(noise(*size))
    assert np.array_equal(pixels(decoded_image(png_of(image, interlaced=True))), image)


def test_ycck() -> None:
    """Four inks that are stored as luma and chroma of the first three: the Adobe marker says so, and libjpeg undoes it.

    Pillow writes plain inks only. With the other marker the same numbers are read as YCCK.
    """
    inks = np.full((16, 16, 4), (100, 150, 120, 40), dtype=np.uint8)
    content = encoded(Image.fromarray(inks, "CMYK"), "JPEG", quality=100, subsampling=0)
    at = content.index(b"Adobe") + 11
    content = content[:at] + b"\2" + content[at + 1 :]
    y, cb, cr, k = (255 - float(value) for value in (100, 150, 120, 40))  # as Adobe stores them
    rgb = np.array([y + 1.402 * (cr - 128), y - 0.344136 * (cb - 128) - 0.714136 * (cr - 128), y + 1.772 * (cb - 128)])
    assert np.abs(pixels(decoded_image(content)) - (255 - rgb) * k / 255).max() <= 3


@pytest.mark.parametrize("top", [1.0, 255.0])
def test_float_grey(top: float) -> None:
    ramp = np.linspace(0, top, 64, dtype=np.float32).reshape(8, 8)
    ramp[0, 0] = np.nan
    decoded = pixels(decoded_image(encoded(Image.fromarray(ramp), "TIFF")))
    assert (decoded[0, 0, 0], decoded[7, 7, 0]) == (0, 255)


def test_integer_grey_of_32_bits() -> None:
    values = np.array([[0, 256, 65535, 1 << 20, -5]], dtype=np.int32)
    decoded = pixels(decoded_image(encoded(Image.fromarray(values), "TIFF")))
    assert decoded[0, :, 0].tolist() == [0, 1, 255, 255, 0]


def test_lab() -> None:
    to_lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    lab = ImageCms.applyTransform(red_left_edge(), to_lab)
    assert lab is not None
    decoded = pixels(decoded_image(encoded(lab, "TIFF"))).astype(int)
    assert np.abs(decoded[:, :70] - (255, 0, 0)).max() < 12


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "AVIF", "TIFF"])
def test_first_frame_of_an_animation(form: str) -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "lime", "blue")]
    content = encoded(frames[0], form, save_all=True, append_images=frames[1:])
    decoded = pixels(decoded_image(content)).astype(int)
    assert np.abs(decoded - (255, 0, 0)).max() < 6


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF"])
@pytest.mark.parametrize("part", [0.5, 0.98])
def test_truncated(form: str, part: float) -> None:
    content = encoded(noise(128, 128), form)
    with pytest.raises(MediaError, match=r"cannot be (decoded|read)|damaged"):
        decoded_image(content[: int(len(content) * part)])


def test_truncated_by_128_bytes_says_so() -> None:
    with pytest.raises(MediaError, match=r"JPEG image cannot be decoded: .*truncated"):
        decoded_image(encoded(noise(128, 128), "JPEG")[:-128])


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
        decoded = decoded_image(bytes(content))
    except MediaError:
        return
    assert decoded.size == tuple(size)
    assert decoded.mode == "RGB"
