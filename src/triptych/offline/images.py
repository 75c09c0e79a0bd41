"""Images as Python has them, PIL images, paths and bytes, turned into the URLs that the router reads.

The router then treats them as any client's: sniffed by content, turned as their EXIF says, checked, hashed.
"""

from __future__ import annotations

import base64
import io
import os
import re
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image

from triptych.errors import MediaError
from triptych.media.header import PILLOW_ERRORS, reason_of

ImageLike = Image.Image | str | os.PathLike[str] | bytes

# The form that keeps every value of a mode, and what the other modes are converted to.
_FORMS = {
    **dict.fromkeys(("1", "L", "LA", "I;16", "P", "RGB", "RGBA"), "PNG"),
    **dict.fromkeys(("CMYK", "F", "I"), "TIFF"),
}
_FAST: dict[str, dict[str, Any]] = {"PNG": {"compress_level": 1}, "TIFF": {"compression": "raw"}}
_CONVERTED = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA", "I;16B": "I", "I;16L": "I", "I;16N": "I"}  # else RGB
_URL = re.compile(r"(data|https?|file):", re.IGNORECASE)


def is_url(image: object) -> bool:
    return isinstance(image, str) and _URL.match(image) is not None


def image_url(image: ImageLike) -> str:
    """A `data:` URL of the image, or the URL that it is. Raises MediaError for a file that cannot be read."""
    if isinstance(image, str) and is_url(image):
        return image
    if isinstance(image, Image.Image):
        content = _encoded(image)
    elif isinstance(image, bytes):
        content = image
    else:
        try:
            content = Path(image).expanduser().read_bytes()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise MediaError(f"image {os.fspath(image)[:200]!r} cannot be read: {reason}") from error
    return f"data:application/octet-stream;base64,{base64.b64encode(content).decode('ascii')}"


def _encoded(image: Image.Image) -> bytes:
    """Without loss, and with the orientation and the colours that the image says it has."""
    buffer, exif = io.BytesIO(), Image.Exif()
    try:
        image.load()  # first: it turns a TIFF upright
        exif[ExifTags.Base.Orientation] = image.getexif().get(ExifTags.Base.Orientation, 1)
        mode = image.mode if image.mode in _FORMS else _CONVERTED.get(image.mode, "RGB")
        converted = image if mode == image.mode else image.convert(mode)
        # A profile of the former colours would be wrong for the new ones.
        profile = image.info.get("icc_profile") if mode == image.mode else None
        form = _FORMS[mode]
        converted.save(buffer, form, exif=exif, icc_profile=profile, **_FAST[form])
    except PILLOW_ERRORS as error:  # of a file that Pillow opened and reads only now
        raise MediaError(f"the PIL image cannot be read: {reason_of(error)}") from error
    return buffer.getvalue()
