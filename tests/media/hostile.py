"""Files that are built to cost a decoder more than a picture does. Each is a few megabytes, some a few bytes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from PIL import Image

from .pictures import encoded, noise, png, png_chunk, red_left_edge

SIZE = 6 << 20  # of those that win by length
_PICTURE = red_left_edge(64, 48)
JPEG, PNG, GIF, TIFF = (encoded(_PICTURE, form) for form in ("JPEG", "PNG", "GIF", "TIFF"))
AFTER_IHDR = 33


def huge_png(edge: int = 20000) -> bytes:
    """One colour, a bit a pixel."""
    packer = zlib.compressobj(9)
    row = bytes(1 + (edge + 7) // 8)
    body = b"".join(packer.compress(row) for _ in range(edge)) + packer.flush()
    return png(edge, edge, body, depth=1, colour=0)


def in_png(*chunks: bytes) -> bytes:
    return PNG[:AFTER_IHDR] + b"".join(chunks) + PNG[AFTER_IHDR:]


def in_jpeg(segments: bytes) -> bytes:
    return JPEG[:2] + segments + JPEG[2:]


def in_gif(blocks: bytes) -> bytes:
    at = 13 + (3 << (GIF[10] & 7) + 1 if GIF[10] & 0x80 else 0)
    return GIF[:at] + blocks + GIF[at:]


def webp(*chunks: bytes) -> bytes:
    body = b"WEBP" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def riff_chunk(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("<I", len(body)) + body + bytes(len(body) & 1)


def webp_canvas(width: int, height: int, flags: int = 0x10) -> bytes:
    edges = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return riff_chunk(b"VP8X", bytes([flags, 0, 0, 0]) + edges)


def webp_animation(width: int, height: int) -> bytes:
    """A small frame on a large canvas."""
    frame = encoded(_PICTURE, "WEBP", lossless=True)[12:]
    where = bytes(6) + (63).to_bytes(3, "little") + (47).to_bytes(3, "little") + bytes(4)
    return webp(webp_canvas(width, height, 0x12), riff_chunk(b"ANIM", bytes(6)), riff_chunk(b"ANMF", where + frame))


Tag = tuple[int, int, int, int]  # tag, type, number of values, value or offset


def tiff(tags: list[Tag], behind: bytes = b"", order: str = "<") -> bytes:
    head = struct.pack(order + "2sHI", b"II" if order == "<" else b"MM", 42, 8)
    body = struct.pack(order + "H", len(tags))
    body += b"".join(struct.pack(order + "HHII", *tag) for tag in sorted(tags))
    return head + body + struct.pack(order + "I", 0) + behind


def grey_tiff(*more: Tag, behind: bytes = b"", width: int = 64, height: int = 48) -> bytes:
    """Raw and grey; `more` replaces tags or adds some. The offset of `behind` is `tiff_data(len(more))` or less."""
    tags: dict[int, Tag] = {
        tag: (tag, kind, 1, value)
        for tag, kind, value in (
            (256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 1), (262, 3, 1), (277, 3, 1), (273, 4, TIFF_DATA),
            (278, 4, height), (279, 4, width * height),
        )
    }  # fmt: skip
    tags |= {tag[0]: tag for tag in more}
    content = tiff(list(tags.values()))
    return content.ljust(TIFF_DATA, b"\0") + behind


TIFF_DATA = 512  # where `behind` begins


def bigtiff_of_many_tags() -> bytes:
    head = struct.pack("<2sHHHQ", b"II", 43, 8, 0, 16)
    tag = b"".join(struct.pack("<HHQ8s", k & 0xFFFF, 3, 1, b"\1") for k in range(1, 60000))
    return head + struct.pack("<Q", 1 << 40) + tag


def exif(*tags: Tag, behind: bytes = b"", order: str = "<") -> bytes:
    return b"Exif\0\0" + tiff(list(tags), behind, order)


def bmp(width: int, height: int, body: bytes, depth: int = 24, compression: int = 0, palette: bytes = b"") -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, width, height, 1, depth, compression, len(body), 0, 0, 0, 0)
    at = 14 + len(header) + len(palette)
    return struct.pack("<2sIHHI", b"BM", at + len(body), 0, 0, at) + header + palette + body


def rle_bmp(width: int, height: int) -> bytes:
    """Each row is one pixel and the word that it ends; the decoder fills the rest byte by byte."""
    return bmp(width, height, b"\1\0\0\0" * height + b"\0\1", depth=8, compression=1, palette=bytes(1024))


def progressive_jpeg(num_scans: int) -> bytes:
    """A picture whose last refinement comes again and again."""
    content = encoded(_PICTURE, "JPEG", progressive=True)
    last = content[content.rindex(b"\xff\xc4", 0, content.rindex(b"\xff\xda")) : -2]
    return content[:-2] + last * (num_scans - content.count(b"\xff\xda")) + b"\xff\xd9"


def lying_avif() -> bytes:
    """The header says 64x64, the coded frame has 1200x900."""
    content = encoded(Image.new("RGB", (1200, 900), "red"), "AVIF", speed=10)
    at = content.index(b"ispe") + 8
    return content[:at] + struct.pack(">II", 64, 64) + content[at + 8 :]


def avif_of_heavy_exif() -> bytes:
    numbers = b"\xff\xfe\xfd\x7f" * (SIZE // 4)
    heavy = exif((274, 3, 1, 6), (40000, 4, SIZE // 4, 38), behind=numbers)
    return encoded(_PICTURE, "AVIF", exif=heavy)


def _repeat(piece: bytes) -> bytes:
    return piece * (SIZE // len(piece))


def _orientations() -> bytes:
    """EXIF whose orientation is three million numbers."""
    return exif((274, 3, SIZE // 2, 26), behind=b"\6\0" * (SIZE // 2))[6:]


def png_of_late_exif() -> bytes:
    return PNG[:-12] + png_chunk(b"eXIf", _orientations()) + PNG[-12:]


def png_of_exif_in_text() -> bytes:
    return in_png(png_chunk(b"tEXt", b"Raw profile type exif\0\nexif\n 9\n" + _orientations().hex().encode()))


# Refused for what their header would cost; everything else about them may be right.
COSTLY_HEADERS: dict[str, Callable[[], bytes]] = {
    "png of empty chunks": lambda: in_png(_repeat(png_chunk(b"abCd", b""))),
    "png of texts": lambda: in_png(_repeat(png_chunk(b"tEXt", b"a\0b"))),
    "png of long exif": lambda: in_png(png_chunk(b"eXIf", exif(behind=bytes(SIZE))[6:])),
    "png of a compressed text": lambda: in_png(png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(64 << 20), 9))),
    "png of an international text": lambda: in_png(
        png_chunk(b"iTXt", b"a\0\1\0\0\0" + zlib.compress(bytes(64 << 20), 9))
    ),
    "png of a compressed profile": lambda: in_png(png_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(64 << 20), 9))),
    "png of much text": lambda: in_png(
        png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 20), 9)) * 80
    ),
    "jpeg of empty segments": lambda: in_jpeg(_repeat(b"\xff\xe1\0\2")),
    "jpeg of fill bytes": lambda: in_jpeg(_repeat(b"\xff")),
    "jpeg of junk": lambda: in_jpeg(_repeat(b"a")),
    "jpeg of junk behind markers": lambda: in_jpeg(_repeat(b"\xff\xf0" + b"a" * 60000)),
    "jpeg of exif in pieces": lambda: in_jpeg(
        _repeat(b"\xff\xe1" + struct.pack(">H", 60008) + b"Exif\0\0" + bytes(60000))
    ),
    "jpeg of photoshop's blocks": lambda: in_jpeg(
        _repeat(b"\xff\xed" + struct.pack(">H", 60016) + b"Photoshop 3.0\0" + b"8BIM\4\4\0\0\0\0\0\0" * 5000)
    ),
    "jpeg of many scans": lambda: progressive_jpeg(5000),
    "gif of comments": lambda: in_gif(b"!\xfe" + _repeat(b"\1c") + b"\0"),
    "gif of extensions": lambda: in_gif(_repeat(b"!\xf0\1a\0")),
    "gif of nothing": lambda: in_gif(_repeat(b"x")),
    "tiff of strips": lambda: grey_tiff(
        (273, 4, SIZE // 4, TIFF_DATA), (278, 4, 1, 1), behind=b"\xff\xfe\xfd\x7f" * (SIZE // 4)
    ),
    "tiff of depths": lambda: grey_tiff((258, 3, SIZE // 2, TIFF_DATA), behind=b"\xff\xfe" * (SIZE // 2)),
    "tiff of fractions": lambda: grey_tiff((282, 5, SIZE // 8, TIFF_DATA), behind=b"\xff\xfe\1\1" * (SIZE // 4)),
    "tiff of tags": lambda: tiff([(k, 3, 1, 1) for k in range(256, 60000)]),
    "big tiff of tags": bigtiff_of_many_tags,
    "webp of a huge canvas": lambda: webp_animation(1 << 14, 1 << 14),
    "webp of chunks": lambda: webp(webp_canvas(64, 48), _repeat(riff_chunk(b"abcd", b""))),
    "webp of long exif": lambda: webp(
        webp_canvas(64, 48, 8), encoded(_PICTURE, "WEBP")[12:], riff_chunk(b"EXIF", bytes(SIZE))
    ),
    "avif of heavy exif": avif_of_heavy_exif,
    "huge png": huge_png,
}  # fmt: skip


def noisy(form: str, width: int = 60, height: int = 40) -> bytes:
    return encoded(noise(width, height), form)
