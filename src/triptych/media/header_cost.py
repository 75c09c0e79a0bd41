"""Refuses files whose header is built to cost more than a header: before `header.py` reads them, in every process.

Pillow reads headers in Python and keeps what they hold, so thirty megabytes of empty segments or of one tag's numbers
take seconds and gigabytes. What is counted here costs a few milliseconds, and real pictures have a fraction of it.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from triptych.errors import MediaError

MAX_PIECES = 4096  # segments, chunks or tags before the pixels
MAX_BLOCKS = 1 << 16  # where one is a few bytes and cheap
MAX_PADDING_BYTES = 64 << 10  # between the segments of a JPEG
MAX_METADATA_BYTES = 1 << 20  # of one kind whose parts are read one by one: EXIF, Photoshop's
MAX_TAG_VALUES = 100_000  # numbers in one tag: a strip of a TIFF is a row of pixels or more
MAX_JPEG_SCANS = 64  # each goes over all pixels again; progressive pictures have about ten


class _TiffForm(NamedTuple):
    """Formats of `struct` and places of what a TIFF begins with."""

    offset: str  # of the first directory
    offset_at: int
    num_tags: str
    tag: str  # its type and its number of values


_CLASSIC_TIFF = _TiffForm("I", 4, "H", "2xHI4x")
_BIG_TIFF = _TiffForm("Q", 8, "Q", "2xHQ8x")
_TIFF_BEGIN = re.compile(rb"II(?:\*\0|\0\*|\+\0)|MM(?:\*\0|\0\*|\0\+)")
_NUMBER_BYTES = {3: 2, 4: 4, 5: 8, 6: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}  # by tag type
_JPEG_MARKER = re.compile(rb"\xff([^\x00\xff])")
_JPEG_MARKER_IN_SCAN = re.compile(rb"\xff([^\x00\xd0-\xd7\xff])")
_JPEG_BARE = frozenset([0x01, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)])  # read without a length
_SOS, _EOI, _APP1, _APP13 = 0xDA, 0xD9, 0xE1, 0xED


def check_header_cost(content: bytes, max_pixels: int) -> None:
    """Raises MediaError. What is no image, or damaged, is left to whoever opens it."""
    if content.startswith(b"\xff\xd8\xff"):
        _check_jpeg(content)
    elif content.startswith(b"\x89PNG\r\n\x1a\n"):
        _check_png(content)
    elif content.startswith((b"GIF87a", b"GIF89a")):
        _check_gif(content)
    elif content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        _check_webp(content, max_pixels)
    elif _TIFF_BEGIN.match(content):
        _check_tags(content, 0, MAX_PIECES)
    elif content[4:8] == b"ftyp":
        _check_avif(content)


def too_many_pixels(width: int, height: int, max_pixels: int) -> MediaError:
    return MediaError(
        f"the image has {width}x{height} = {width * height} pixels, the limit is max_image_pixels = {max_pixels}"
    )


def _overloaded(kind: str, what: str) -> MediaError:
    return MediaError(f"the {kind} image is refused: more than {what}")


# -- JPEG --------------------------------------------------------------------------------------------------------------


def _check_jpeg(content: bytes) -> None:
    at, num_segments, num_padding = 2, 0, 0
    metadata = {_APP1: 0, _APP13: 0}
    while marker := _JPEG_MARKER.search(content, at, at + MAX_PADDING_BYTES + 3):
        num_segments += 1
        num_padding += marker.end() - at - 2
        if num_segments > MAX_PIECES or num_padding > MAX_PADDING_BYTES:
            raise _overloaded("JPEG", f"{MAX_PIECES} segments or {MAX_PADDING_BYTES} bytes between them")
        kind, at = marker[1][0], marker.end()
        length = 0 if kind in _JPEG_BARE else int.from_bytes(content[at : at + 2], "big")
        is_exif = kind == _APP1 and content.startswith(b"Exif\0\0", at + 2)
        if is_exif or kind == _APP13:
            metadata[kind] += length
            if metadata[kind] > MAX_METADATA_BYTES:
                raise _overloaded("JPEG", f"{MAX_METADATA_BYTES} bytes of metadata")
        at += length
        if kind == _SOS:
            _check_scans(content, at)
            return
    if len(content) - at > MAX_PADDING_BYTES:
        raise _overloaded("JPEG", f"{MAX_PADDING_BYTES} bytes between two segments")


def _check_scans(content: bytes, at: int) -> None:
    if content.count(b"\xff\xda", at) < MAX_JPEG_SCANS:
        return
    num_scans = 1
    for marker in _JPEG_MARKER_IN_SCAN.finditer(content, at):  # bytes behind the picture's end may look like scans
        num_scans += marker[1][0] == _SOS
        if marker[1][0] == _EOI:
            return
        if num_scans > MAX_JPEG_SCANS:
            raise _overloaded("JPEG", f"{MAX_JPEG_SCANS} scans")


# -- PNG and WebP: chunks ----------------------------------------------------------------------------------------------


def _check_png(content: bytes) -> None:
    at, num_chunks = 8, 0
    while at + 8 <= len(content):
        length, name = struct.unpack_from(">I4s", content, at)
        num_chunks += 1
        if name in (b"IDAT", b"IEND"):
            return
        if num_chunks > MAX_PIECES:
            raise _overloaded("PNG", f"{MAX_PIECES} chunks before the pixels")
        if name == b"eXIf" and length > MAX_METADATA_BYTES:
            raise _overloaded("PNG", f"{MAX_METADATA_BYTES} bytes of EXIF")
        at += 12 + length


def _check_webp(content: bytes, max_pixels: int) -> None:
    """The decoder makes the whole canvas when it is opened."""
    if content[12:16] == b"VP8X" and len(content) >= 30:
        width, height = (1 + int.from_bytes(content[at : at + 3], "little") for at in (24, 27))
        if width * height > max_pixels:
            raise too_many_pixels(width, height, max_pixels)
    at, num_chunks = 12, 0
    while at + 8 <= len(content):
        name, length = struct.unpack_from("<4sI", content, at)
        num_chunks += 1
        if num_chunks > MAX_BLOCKS:
            raise _overloaded("WEBP", f"{MAX_BLOCKS} chunks")
        if name == b"EXIF" and length > MAX_METADATA_BYTES:
            raise _overloaded("WEBP", f"{MAX_METADATA_BYTES} bytes of EXIF")
        at += 8 + length + (length & 1)


# -- GIF: blocks -------------------------------------------------------------------------------------------------------


def _check_gif(content: bytes) -> None:
    """Blocks of extensions before the first image."""
    if len(content) < 13:
        return
    at = 13 + (3 << (content[10] & 7) + 1 if content[10] & 0x80 else 0)
    num_blocks, inside = 0, False
    while at < len(content):
        num_blocks += 1
        if num_blocks > MAX_BLOCKS:
            raise _overloaded("GIF", f"{MAX_BLOCKS} blocks before the pixels")
        if inside:
            inside, at = content[at] > 0, at + 1 + content[at]
        elif content[at] == ord("!"):
            inside, at = True, at + 2
        elif content[at] == ord(","):
            return
        else:
            at += 1  # Pillow looks on


# -- TIFF and EXIF: tags -----------------------------------------------------------------------------------------------


def _check_tags(content: bytes, start: int, max_tags: int) -> None:
    """The first directory of what begins like a TIFF at `start`."""
    order = "<" if content[start] == ord("I") else ">"
    form = _BIG_TIFF if content[start + 2] == ord("+") else _CLASSIC_TIFF
    try:
        (offset,) = struct.unpack_from(order + form.offset, content, start + form.offset_at)
        first = min(start + offset, len(content))
        (num_tags,) = struct.unpack_from(order + form.num_tags, content, first)
    except struct.error:
        return
    first += struct.calcsize(form.num_tags)
    tag_bytes = struct.calcsize(order + form.tag)
    num_tags = min(num_tags, (len(content) - first) // tag_bytes)
    if num_tags > max_tags:
        raise _overloaded("TIFF", f"{max_tags} tags")
    for kind, count in struct.iter_unpack(order + form.tag, content[first : first + num_tags * tag_bytes]):
        if count > MAX_TAG_VALUES and count * _NUMBER_BYTES.get(kind, len(content) + 1) <= len(content):
            raise _overloaded("TIFF", f"{MAX_TAG_VALUES} values in one tag")


def _check_avif(content: bytes) -> None:
    """EXIF may lie anywhere. Other bytes that look like a TIFF's beginning hardly ever have a tag that matters."""
    if b"Exif" not in content:
        return
    for number, found in enumerate(_TIFF_BEGIN.finditer(content)):
        if number > MAX_PIECES:
            raise _overloaded("AVIF", f"{MAX_PIECES} pieces of EXIF")
        _check_tags(content, found.start(), max_tags=1 << 16)
