"""An image's header: its type by content, its orientation and size, without a decoded pixel.

Runs in the router (called by `probe.py`) and on encode workers (called by `decode.py`), so that both see one size.
"""

from __future__ import annotations

import logging
import re
import struct
import warnings
import zlib
from io import BytesIO

from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,  # noqa: F401 - importing a plug-in registers it; Pillow would else import all forty
    ExifTags,
    GifImagePlugin,  # noqa: F401
    Image,
    JpegImagePlugin,  # noqa: F401
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401
)

from triptych.errors import MediaError
from triptych.media.header_cost import MAX_METADATA_BYTES, check_header_cost
from triptych.types import ImageSize

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")

# What damaged or hostile bytes make Pillow's plug-ins raise, in `open` and in `load`.
PILLOW_ERRORS = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, AttributeError, EOFError, ArithmeticError, RuntimeError,
    MemoryError, struct.error, zlib.error,
)  # fmt: skip

AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # an encode worker has the cores that it is given

# Pillow's own limit warns at one size and raises at twice that; ours is a setting that `probe_image` checks.
Image.MAX_IMAGE_PIXELS = None
# What it warns of in damaged files names their numbers, and Python remembers every different text for good; what it
# logs of them is a line for each.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\..*ImagePlugin")
logging.getLogger("PIL").setLevel(logging.CRITICAL)

_OTHER_TYPES = (
    (re.compile(rb"\s*(?:<\?xml|<!--|<!DOCTYPE svg|<svg)(?s:.*?)(?:<|\b)svg\b", re.I), "image/svg+xml"),
    (re.compile(rb"\s*<(?:!DOCTYPE html|html|head|body)", re.I), "text/html"),
    (re.compile(rb"%PDF-"), "application/pdf"),
    (re.compile(rb"iVBORw0KGgo|/9j/|R0lGOD|UklGR"), "base64 as text (a data URL says ;base64 before its comma)"),
    (re.compile(rb"(?s:.{4})ftyp(?:heic|heix|heim|heis|hevc|mif1|msf1)"), "image/heic"),
    (re.compile(rb"(?s:.{4})ftyp(?!avi[fs])"), "video/mp4"),
    (re.compile(rb"\x1aE\xdf\xa3"), "video/webm"),
    (re.compile(rb"\x00\x00\x01\x00"), "image/x-icon"),
    (re.compile(rb"8BPS"), "image/vnd.adobe.photoshop"),
    (re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "), "image/jxl"),
    (re.compile(rb"\0\0\0\x0cjP  "), "image/jp2"),
)
_SNIFF_BYTES = 4096
_PNG_TEXT_EXIF = "Raw profile type exif"  # where it was kept before PNG had a chunk for it


def open_image(content: bytes, max_pixels: int) -> Image.Image:
    """The image with its header read and no pixel decoded. Raises MediaError naming the type of anything else."""
    if not content:
        raise MediaError("the image is empty (0 bytes)")
    check_header_cost(content, max_pixels)
    try:
        return Image.open(BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise MediaError(f"{_describe(content)}; supported are {', '.join(FORMATS)}") from None
    except PILLOW_ERRORS as error:
        raise MediaError(f"the image's header cannot be read: {reason_of(error)}") from error


def reason_of(error: Exception) -> str:
    """What an error of Pillow means: what it says is for programmers."""
    if isinstance(error, MemoryError):
        return "it needs more memory than there is for one image"
    if isinstance(error, EOFError) or "truncated" in str(error):
        return "it is truncated"
    return "its data is damaged, or of a kind that is not supported"


def orientation_of(image: Image.Image, content: bytes) -> int:
    """EXIF orientation 1-8 of an image that is open and not loaded; 1 where there is none or it is damaged."""
    if isinstance(image, PngImagePlugin.PngImageFile):
        if len(image.info.get(_PNG_TEXT_EXIF, "")) > 2 * MAX_METADATA_BYTES:  # in hexadecimal
            del image.info[_PNG_TEXT_EXIF]
        if "exif" not in image.info and (exif := _late_png_exif(content)) is not None:
            image.info["exif"] = exif
    try:
        # The base class's method: PNG's own one decodes the whole image to look for EXIF behind the pixels.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
    except PILLOW_ERRORS:
        return 1
    return orientation if orientation in range(1, 9) else 1


def size_of(image: Image.Image, orientation: int) -> ImageSize:
    """Size after orientation. A TIFF that Pillow opened has the one of its own tag applied already."""
    applied = isinstance(image, TiffImagePlugin.TiffImageFile) and ExifTags.Base.Orientation in image.tag_v2
    width, height = image.size
    return ImageSize(height, width) if orientation >= 5 and not applied else ImageSize(width, height)


def _late_png_exif(content: bytes) -> bytes | None:
    """The eXIf chunk wherever it stands; it may follow the pixels. Its checksum tells it from bytes that look alike."""
    at = content.rfind(b"eXIf")
    if at < 4:
        return None
    length = int.from_bytes(content[at - 4 : at], "big")
    end = at + 4 + length
    if length > MAX_METADATA_BYTES or zlib.crc32(content[at:end]) != int.from_bytes(content[end : end + 4], "big"):
        return None
    return b"Exif\0\0" + content[at + 4 : end]


def _describe(content: bytes) -> str:
    start = content[:_SNIFF_BYTES].removeprefix(b"\xef\xbb\xbf")
    for pattern, name in _OTHER_TYPES:
        if pattern.match(start):
            return f"{name} is not a supported image type"
    return f"the {len(content)} bytes are no image of a known type, or its header is damaged"
