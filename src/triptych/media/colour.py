"""From the colours of an embedded ICC profile to sRGB. Called by `decode.py`.

A profile that is sRGB, whoever wrote it and however, changes no pixel: images that have it equal those that have none.
"""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO

import numpy as np
from PIL import Image, ImageCms

_MAX_PROFILE_BYTES = 4 << 20  # printers' profiles have up to two megabytes
_SPACES = {"RGB": "RGB ", "L": "GRAY", "CMYK": "CMYK"}  # of Pillow's modes, as profiles name them
_SAME_LEVELS = 3  # of 255: what rounding and different curves for the one sRGB make
_PROBED_LEVELS = 33  # along each axis


def to_srgb(profile: object, mode: str) -> ImageCms.ImageCmsTransform | None:
    """From images of `mode` (RGB, L or CMYK) to RGB; None where the profile changes nothing or cannot be used."""
    if not isinstance(profile, bytes) or not 0 < len(profile) <= _MAX_PROFILE_BYTES or mode not in _SPACES:
        return None
    return _transform(profile, mode)


@lru_cache(maxsize=8)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    try:
        source = ImageCms.ImageCmsProfile(BytesIO(profile))
        if source.profile.xcolor_space != _SPACES[mode]:
            return None
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
        return None if _is_identity(transform, mode) else transform
    except (ImageCms.PyCMSError, OSError, ValueError):
        return None  # damaged: as if there were none


def _is_identity(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    if mode == "CMYK":
        return False
    levels = np.linspace(0, 255, _PROBED_LEVELS).astype(np.uint8)
    if mode == "L":
        probe = Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    else:
        colours = np.stack(np.meshgrid(levels, levels, levels), axis=-1)
        probe = Image.fromarray(colours.reshape(_PROBED_LEVELS, -1, 3))
    before, after = np.asarray(probe.convert("RGB")), np.asarray(transform.apply(probe))
    return int(np.abs(before.astype(np.int16) - after).max()) <= _SAME_LEVELS
