"""Encoded bytes to RGB pixels. Runs in the processes that encode workers keep for it (`decode_process.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, TiffImagePlugin

from triptych.errors import MediaError
from triptych.media.colour import to_srgb
from triptych.media.header import PILLOW_ERRORS, open_image, orientation_of, reason_of
from triptych.types import ImageDecoding, ImageSize, Rgb

Pixels = NDArray[np.uint8]  # [height, width, 3], RGB

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_BAND_PIXELS = 1 << 20  # converted at once, so that a large image is not there three times


class DecodeJob(msgspec.Struct, frozen=True, array_like=True):
    """One image and the size and filter (Pillow's number) to which it is scaled."""

    content: bytes
    decoding: ImageDecoding
    resized: ImageSize
    resample: int


def decode_image(content: bytes, background: Rgb, max_pixels: int) -> Image.Image:
    """The first frame in mode RGB and sRGB, upright, composited over `background` where it is transparent.

    Raises MediaError with the reason where the bytes cannot be decoded.
    """
    with open_image(content, max_pixels) as image:
        orientation = orientation_of(image, content)  # before the load, which makes Pillow forget a TIFF's
        kind, raw_mode = image.format, _raw_mode(image)
        try:
            image.load()
            rgb = _to_rgb(_eight_bits(image, raw_mode), background)
            is_upright = orientation == 1 or isinstance(image, TiffImagePlugin.TiffImageFile)
            return rgb if is_upright else rgb.transpose(_TRANSPOSE[orientation])
        except (*PILLOW_ERRORS, ImageCms.PyCMSError) as error:
            raise MediaError(f"the {kind} image cannot be decoded: {reason_of(error)}") from error


def decode_pixels(job: DecodeJob, max_pixels: int) -> Pixels:
    """The image scaled to the size that the job asks for. Raises MediaError, also where it belies its header."""
    image = decode_image(job.content, job.decoding.background, max_pixels)
    if image.size != tuple(job.decoding.size):
        raise MediaError(f"the image is {image.width}x{image.height} pixels, which is not what its header says")
    try:
        return np.asarray(image.resize(job.resized, resample=Image.Resampling(job.resample)))
    except MemoryError as error:
        raise MediaError(f"the image cannot be scaled: {reason_of(error)}") from error


def _raw_mode(image: Image.Image) -> str:
    """How the file packs its pixels, in Pillow's words: the depth that Pillow's own modes do not tell."""
    tile = getattr(image, "tile", None)
    args = tile[0].args if tile else ""
    raw_mode = args[0] if isinstance(args, tuple) and args else args
    return raw_mode if isinstance(raw_mode, str) else ""


def _eight_bits(image: Image.Image, raw_mode: str) -> Image.Image:
    """8 bits a channel, and the one transparent colour in 8 bits too: Pillow leaves it in the file's own depth."""
    key = image.info.get("transparency")
    if image.mode.startswith(("I", "F")):
        grey = _wide_grey(image)
        if isinstance(key, int):
            alpha = np.where(np.asarray(image) == key, 0, 255).astype(np.uint8)
            grey.putalpha(Image.fromarray(alpha))
        grey.info |= {name: value for name, value in image.info.items() if name == "icc_profile"}
        return grey
    if key is None or image.mode not in ("L", "RGB"):
        return image
    if depth := re.search(r"^L;([24])$", raw_mode):
        image.info["transparency"] = key * 255 // (2 ** int(depth[1]) - 1)
    elif ";16" in raw_mode:
        image.info["transparency"] = tuple(level >> 8 for level in key)
    return image


def _wide_grey(image: Image.Image) -> Image.Image:
    """Grey of more than 8 bits, which `convert` would clip. Floats count from 0 to 1, or to 255 where they pass 1."""
    values = np.asarray(image)
    if image.mode == "F":
        values = np.nan_to_num(values, nan=0.0)
        scale = 255.0 if values.max(initial=0.0) <= 1.0 else 1.0
        return Image.fromarray(np.clip(values * scale + 0.5, 0, 255).astype(np.uint8))
    # The high byte, as Pillow itself reads colour images of 16 bits.
    return Image.fromarray((np.clip(values, 0, 65535).astype(np.uint16) >> 8).astype(np.uint8))


def _to_rgb(image: Image.Image, background: Rgb) -> Image.Image:
    profile, has_alpha = image.info.get("icc_profile"), image.has_transparency_data
    if image.mode == "RGB" and not has_alpha and to_srgb(profile, "RGB") is None:
        return image
    rgb = Image.new("RGB", image.size)
    for top, bottom in _bands(image.size):
        band = image.crop((0, top, image.width, bottom))
        rgb.paste(_band_to_rgb(band, profile, has_alpha, background), (0, top))
    return rgb


def _bands(size: tuple[int, int]) -> Iterator[tuple[int, int]]:
    width, height = size
    rows = max(_BAND_PIXELS // max(width, 1), 1)
    for top in range(0, height, rows):
        yield top, min(top + rows, height)


def _band_to_rgb(band: Image.Image, profile: object, has_alpha: bool, background: Rgb) -> Image.Image:
    rgba = band.convert("RGBA") if has_alpha else None
    if band.mode == "LA":
        colours = band.getchannel("L")
    elif band.mode in ("L", "CMYK"):  # what profiles are of, beside RGB
        colours = band
    else:
        colours = (rgba or band).convert("RGB")
    transform = to_srgb(profile, colours.mode)
    rgb = colours.convert("RGB") if transform is None else transform.apply(colours)
    if rgba is None:
        return rgb
    rgb.putalpha(rgba.getchannel("A"))
    return Image.alpha_composite(Image.new("RGBA", rgb.size, (*background, 255)), rgb).convert("RGB")
