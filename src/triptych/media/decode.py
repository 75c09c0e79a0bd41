"""Encoded bytes to RGB pixels. Called on encode workers, in the threads that preprocess beside the tower."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageColor, TiffImagePlugin

from triptych.errors import ConfigError, MediaError
from triptych.media.header import PILLOW_ERRORS, open_image, orientation_of

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(content: bytes, background: str) -> Image.Image:
    """The first frame in mode RGB, upright, composited over `background` (#rrggbb) where it is transparent.

    Raises MediaError with the reason where the bytes cannot be decoded.
    """
    colour = _colour(background)
    image = open_image(content)
    with image:
        orientation = orientation_of(image, content)  # before the load, which makes Pillow forget a TIFF's
        kind = image.format
        upright_on_load = isinstance(image, TiffImagePlugin.TiffImageFile)
        try:
            image.load()
            rgb = _to_rgb(image, colour)
        except PILLOW_ERRORS as error:
            raise MediaError(f"the {kind} image cannot be decoded: {error or type(error).__name__}") from error
    if orientation == 1 or upright_on_load:
        return rgb
    return rgb.transpose(_TRANSPOSE[orientation])


def _to_rgb(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    if image.mode.startswith(("I", "F")):
        return _wide_grey(image).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        below = Image.new("RGBA", rgba.size, (*background, 255))
        return Image.alpha_composite(below, rgba).convert("RGB")
    return image.convert("RGB")


def _wide_grey(image: Image.Image) -> Image.Image:
    """Grey of more than 8 bits, which `convert` would clip. Floats count from 0 to 1, or to 255 where they pass 1."""
    values = np.asarray(image)
    if image.mode == "F":
        values = np.nan_to_num(values, nan=0.0)
        scale = 255.0 if values.max(initial=0.0) <= 1.0 else 1.0
        return Image.fromarray(np.clip(values * scale + 0.5, 0, 255).astype(np.uint8))
    # The high byte, as Pillow itself reads colour images of 16 bits.
    return Image.fromarray((np.clip(values, 0, 65535).astype(np.uint16) >> 8).astype(np.uint8))


def _colour(background: str) -> tuple[int, int, int]:
    try:
        red, green, blue = ImageColor.getrgb(background)[:3]
    except ValueError as error:
        raise ConfigError(f"media.background = {background!r}: not a colour of the form #rrggbb") from error
    return red, green, blue
