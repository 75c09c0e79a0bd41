"""Colour profiles: sRGB ones change no bit, others are converted, damaged ones are as if they were not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from triptych.media.decode import decode_image

from .pictures import MAX_PIXELS, WHITE, encoded, noise
from .profiles import P3_PRIMARIES, display, gamma_curve, grey, inks, library_srgb, srgb_curve


def decoded(image: Image.Image, form: str, profile: bytes, **options: Any) -> NDArray[np.int64]:
    content = encoded(image, form, icc_profile=profile, **options)
    return np.asarray(decode_image(content, WHITE, MAX_PIXELS)).astype(int)


SRGB = {
    "formula": library_srgb(),
    "table of 1024": display(),
    "table of 4096": display(curve=srgb_curve(4096)),
    "short table": display(curve=srgb_curve(256)),
}


@pytest.mark.parametrize("name", SRGB)
@pytest.mark.parametrize(
    ("form", "mode"),
    [(form, "RGB") for form in ("PNG", "JPEG", "WEBP", "TIFF", "AVIF")]
    + [(form, "RGBA") for form in ("PNG", "WEBP", "TIFF", "AVIF")],
)
def test_an_srgb_profile_changes_no_bit(name: str, form: str, mode: str) -> None:
    image = noise(64, 48, mode)
    plain = decode_image(encoded(image, form), WHITE, MAX_PIXELS)
    assert np.array_equal(decoded(image, form, SRGB[name]), np.asarray(plain))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
def test_colours_of_a_wider_display_become_stronger(form: str) -> None:
    """P3's (200, 100, 100) is sRGB's (211, 95, 97), as its matrices give it."""
    image = Image.new("RGB", (32, 32), (200, 100, 100))
    how: dict[str, dict[str, Any]] = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}, "AVIF": {"quality": 95}}
    options = how.get(form, {})
    pixels = decoded(image, form, display(P3_PRIMARIES), **options)
    assert np.abs(pixels - _p3_to_srgb(np.array([200, 100, 100]))).max() <= (
        0 if form in ("PNG", "TIFF", "WEBP") else 3
    )


def _p3_to_srgb(levels: NDArray[np.int64]) -> NDArray[np.float64]:
    """By the published matrix between the two, and the curve that they share."""
    level = levels / 255
    light = np.where(level <= 0.04045, level / 12.92, ((level + 0.055) / 1.055) ** 2.4)
    matrix = np.array([[1.2249, -0.2247, 0.0], [-0.0420, 1.0419, 0.0], [-0.0197, -0.0786, 1.0979]])
    light = np.clip(matrix @ light, 0, 1)
    out: NDArray[np.float64] = np.where(light <= 0.0031308, light * 12.92, 1.055 * light ** (1 / 2.4) - 0.055)
    return np.round(255 * out)


def test_grey_of_another_gamma() -> None:
    image = Image.linear_gradient("L")
    pixels = decoded(image, "PNG", grey(gamma_curve(1.0)))
    assert 185 <= pixels[128, 0, 0] <= 190  # half the light
    assert (pixels[..., 0] == pixels[..., 1]).all()
    assert np.array_equal(decoded(image, "PNG", grey(srgb_curve())), np.asarray(image.convert("RGB")))


def test_a_profile_applies_under_alpha_and_before_the_background() -> None:
    image = Image.new("RGBA", (8, 8), (200, 100, 100, 255))
    image.paste((200, 100, 100, 0), (0, 0, 4, 8))
    pixels = decoded(image, "PNG", display(P3_PRIMARIES))
    assert (pixels[:, :4] == 255).all()
    assert (pixels[:, 4:] == _p3_to_srgb(np.array([200, 100, 100]))).all()


@pytest.mark.parametrize("mode", ["P", "LA", "L+tRNS"])
def test_profiles_of_other_modes(mode: str) -> None:
    profile = display(P3_PRIMARIES) if mode == "P" else grey(gamma_curve(1.0))
    image = Image.new("RGB", (8, 8), (200, 100, 100)).quantize(4) if mode == "P" else Image.new("L", (8, 8), 128)
    if mode == "LA":
        image = image.convert("LA")
    pixels = decoded(image, "PNG", profile, **({"transparency": 3} if mode == "L+tRNS" else {}))
    expected = _p3_to_srgb(np.array([200, 100, 100])) if mode == "P" else np.array([188] * 3)
    assert np.abs(pixels - expected).max() <= 1


@pytest.mark.parametrize("form", ["JPEG", "TIFF"])
def test_inks_of_a_printer(form: str) -> None:
    image = Image.new("CMYK", (32, 32), (0, 0, 0, 0))
    image.paste((255, 0, 0, 0), (16, 0, 32, 32))
    pixels = decoded(image, form, inks())
    assert pixels[:, :8].min() > 245
    assert pixels[:, 24:].max() < 10  # that printer's cyan is black, where the plain formula has it bright


UNUSABLE = {
    "empty": b"",
    "short": b"x",
    "zeros": bytes(128),
    "ones": b"\xff" * 3000,
    "cut": display()[:200],
    "without its signature": display().replace(b"acsp", b"acsq"),
    "of another space": grey(gamma_curve(1)),
    "too long": display(P3_PRIMARIES) + bytes(4 << 20),
}


@pytest.mark.parametrize("profile", UNUSABLE.values(), ids=UNUSABLE)
def test_a_profile_that_cannot_be_used_is_ignored(profile: bytes) -> None:
    image = noise(32, 24)
    assert np.array_equal(decoded(image, "TIFF", profile), np.asarray(image))


def test_damaged_profiles_never_end_in_anything_but_an_image() -> None:
    image, base = noise(16, 16), display(P3_PRIMARIES)
    rng = np.random.default_rng(0)
    for _ in range(150):
        profile = bytearray(base)
        for _ in range(int(rng.integers(1, 8))):
            profile[int(rng.integers(0, 420))] = int(rng.integers(0, 256))
        assert decoded(image, "TIFF", bytes(profile)).shape == (16, 16, 3)
