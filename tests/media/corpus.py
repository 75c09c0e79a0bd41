"""More than three hundred files of every kind that people and attackers send, made from nothing, the same every time.

A sample says what is right for it: its pixels, or that it is refused, or, for damage, one of the two.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from .hostile import (
    COSTLY_HEADERS,
    JPEG,
    PNG,
    bmp,
    exif,
    grey_tiff,
    in_jpeg,
    in_png,
    lying_avif,
    png_of_exif_in_text,
    png_of_late_exif,
    progressive_jpeg,
    riff_chunk,
    rle_bmp,
    tiff,
    webp,
    webp_animation,
    webp_canvas,
)  # fmt: skip
from .pictures import MODES, encoded, exif_orientation, noise, png, png_chunk, png_of, read_plainly, red_left_edge
from .profiles import P3_PRIMARIES, display, gamma_curve, grey, inks, library_srgb


class Right(Enum):
    IMAGE = "an answer about its pixels"
    REFUSED = "a 4xx with a reason"
    EITHER = "one of the two"


class Sample(NamedTuple):
    name: str
    content: bytes
    right: Right
    label: str = "image/png"  # of its data: URL

    @property
    def reference(self) -> Image.Image:
        """What the file shows, read the plain way: for files that are right and have no profile to convert."""
        return read_plainly(self.content)


SIZES = [(1, 1), (33, 17), (120, 64)]


def corpus() -> list[Sample]:
    return [*plain(), *shapes(), *kinds(), *damaged(), *hostile(), *no_images()]


def plain() -> Iterator[Sample]:
    """Formats x modes x sizes."""
    for form, modes in MODES.items():
        for mode in modes:
            for width, height in SIZES:
                content = encoded(_picture(mode, width, height), form)
                yield Sample(f"{form} {mode} {width}x{height}", content, Right.IMAGE)


def _picture(mode: str, width: int, height: int) -> Image.Image:
    if mode in ("LA", "RGBA"):
        image = noise(width, height)
        image.putalpha(Image.linear_gradient("L").resize((width, height)))
        return image.convert(mode)
    return noise(width, height, mode)


def shapes() -> Iterator[Sample]:
    for width, height in [(2, 2), (26, 28), (332, 27), (1, 200), (200, 1), (3, 599), (1000, 8), (511, 513)]:
        yield Sample(f"shape {width}x{height}", encoded(noise(width, height), "PNG"), Right.IMAGE)
    for width, height in [(1, 10_000), (1093, 5), (201, 1)]:
        yield Sample(f"too long a shape {width}x{height}", encoded(noise(width, height), "PNG"), Right.REFUSED)


def kinds() -> Iterator[Sample]:
    """What a format can be beside its modes."""
    picture, photo = red_left_edge(64, 48), noise(64, 48)
    for form in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
        for orientation in range(1, 9):
            content = encoded(picture, form, exif=exif_orientation(orientation))
            yield Sample(f"{form} orientation {orientation}", content, Right.IMAGE)
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "lime", "blue")]
    for form in ("GIF", "WEBP", "PNG", "AVIF", "TIFF", "MPO"):
        content = _without_date(encoded(frames[0], form, save_all=True, append_images=frames[1:]))
        yield Sample(f"{form} of several frames", content, Right.IMAGE)
    options: dict[str, tuple[str, dict[str, Any]]] = {
        "progressive": ("JPEG", {"progressive": True}),
        "no subsampling": ("JPEG", {"subsampling": 0}),
        "restart markers": ("JPEG", {"restart_marker_rows": 1}),
        "comment": ("JPEG", {"comment": b"x" * 60_000}),
        "lossless": ("WEBP", {"lossless": True}),
        "interlaced": ("GIF", {"interlace": True}),
        **{
            f"tiff {name}": ("TIFF", {"compression": name}) for name in ("tiff_lzw", "tiff_deflate", "packbits", "jpeg")
        },
        "big endian": ("TIFF", {"tiffinfo": {}, "big_tiff": True}),
    }
    for name, (form, how) in options.items():
        yield Sample(f"{form} {name}", encoded(photo, form, **how), Right.IMAGE)
    yield Sample("TIFF group4", encoded(photo.convert("1"), "TIFF", compression="group4"), Right.IMAGE)
    yield from _png_kinds()
    yield from _profiles()


def _without_date(content: bytes) -> bytes:
    """An AVIF of several frames says when it was made."""
    for box in (b"mvhd", b"tkhd", b"mdhd"):
        at = content.find(box)
        if at >= 0:
            content = content[: at + 8] + bytes(16) + content[at + 24 :]
    return content


def _png_kinds() -> Iterator[Sample]:
    rng = np.random.default_rng(5)
    for depth in (1, 2, 4):
        levels = rng.integers(0, 2**depth, (20, 30), dtype=np.uint8)
        yield Sample(f"PNG {depth} bits", png_of(levels, depth=depth, colour=0), Right.IMAGE)
    for colour, channels in ((2, 3), (4, 2), (6, 4)):
        values = rng.integers(0, 65536, (20, 30, channels), dtype=np.uint16)
        yield Sample(f"PNG 16 bits of {channels} channels", png_of(values, 16, colour), Right.IMAGE)
    yield Sample("PNG interlaced", png_of(np.asarray(noise(33, 17)), interlaced=True), Right.IMAGE)
    yield Sample("PNG transparent colour", encoded(noise(20, 20, "L"), "PNG", transparency=9), Right.IMAGE)
    yield Sample("PNG transparent palette", encoded(noise(20, 20, "P"), "PNG", transparency=9), Right.IMAGE)
    yield Sample("PNG of small pieces", _in_pieces(encoded(noise(30, 30), "PNG"), 7), Right.IMAGE)
    body = encoded(noise(20, 20), "BMP")
    yield Sample("BMP of 32 bits", bmp(20, 20, bytes(20 * 20 * 4), depth=32), Right.IMAGE)
    yield Sample("BMP top down", body[:22] + struct.pack("<i", -20) + body[26:], Right.IMAGE)
    yield Sample("BMP of runs", rle_bmp(40, 30), Right.IMAGE)


def _in_pieces(content: bytes, length: int) -> bytes:
    """A PNG's pixels in as many chunks as that takes."""
    at = content.index(b"IDAT")
    size = int.from_bytes(content[at - 4 : at], "big")
    body = content[at + 4 : at + 4 + size]
    pieces = b"".join(png_chunk(b"IDAT", body[k : k + length]) for k in range(0, size, length))
    return content[: at - 4] + pieces + content[at + 8 + size :]


def _profiles() -> Iterator[Sample]:
    photo = noise(40, 30)
    profiles = {"sRGB": library_srgb(), "P3": display(P3_PRIMARIES), "short": b"x", "zeros": bytes(200)}
    for name, profile in profiles.items():
        for form in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
            yield Sample(f"{form} profile {name}", encoded(photo, form, icc_profile=profile), Right.EITHER)
    yield Sample("JPEG inks", encoded(photo.convert("CMYK"), "JPEG", icc_profile=inks()), Right.EITHER)
    linear = encoded(photo.convert("L"), "PNG", icc_profile=grey(gamma_curve(1)))
    yield Sample("PNG linear grey", linear, Right.EITHER)


BASES = {
    **{form: encoded(noise(60, 40), form) for form in MODES},
    "progressive": encoded(noise(60, 40), "JPEG", progressive=True),
    "alpha": encoded(_picture("RGBA", 60, 40), "WEBP"),
    "deflate": encoded(noise(60, 40), "TIFF", compression="tiff_deflate"),
    "animation": encoded(noise(60, 40), "GIF", save_all=True, append_images=[noise(60, 40, seed=1)]),
    "exif": encoded(noise(60, 40), "JPEG", exif=exif_orientation(6)),
}


def damaged() -> Iterator[Sample]:
    """Cut off, changed, padded, and called what they are not."""
    for name, content in BASES.items():
        for part in (0.02, 0.1, 0.5, 0.9):
            yield Sample(f"{name} cut to {part}", content[: int(part * len(content))], Right.EITHER)
        yield Sample(f"{name} without its end", content[:-128], Right.EITHER)
        yield Sample(f"{name} with bytes behind", content + b"\xff\xda" * 500, Right.IMAGE)
        yield Sample(f"{name} as another type", content, Right.IMAGE, "application/pdf")
        middle = len(content) // 2
        yield Sample(f"{name} with a hole", content[:middle] + bytes(64) + content[middle + 64 :], Right.EITHER)
        for seed in range(4):
            yield Sample(f"{name} changed {seed}", _changed(content, random.Random(seed)), Right.EITHER)
    for form in ("JPEG", "PNG", "GIF", "TIFF", "WEBP"):
        yield Sample(f"{form} minus 128 bytes of noise", encoded(noise(128, 128), form)[:-128], Right.REFUSED)
    yield from _damaged_exif()


def _changed(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _damaged_exif() -> Iterator[Sample]:
    """An image is right whatever is wrong beside its pixels."""
    pieces = {
        "junk": b"Exif\0\0junk",
        "an offset beyond the end": b"Exif\0\0II*\0\xff\xff\xff\xff",
        "orientation 0": exif((274, 3, 1, 0)),
        "orientation 9": exif((274, 3, 1, 9)),
        "orientation of a fraction": exif((274, 5, 1, 26), behind=bytes(8)),
        "orientation of text": exif((274, 2, 4, 0x41414141)),
        "many orientations": exif((274, 3, 30000, 26), behind=b"\6\0" * 30000),
        "a loop": exif((34665, 4, 1, 8), (274, 3, 1, 1)),
        "unknown types": exif((274, 99, 1, 6), (40000, 200, 5, 5)),
        "huge counts": exif((274, 3, 0xFFFFFFFF, 26)),
    }
    for name, piece in pieces.items():
        segment = b"\xff\xe1" + struct.pack(">H", len(piece) + 2) + piece
        yield Sample(f"JPEG EXIF: {name}", in_jpeg(segment), Right.EITHER)
        yield Sample(f"PNG EXIF: {name}", in_png(png_chunk(b"eXIf", piece[6:])), Right.EITHER)


def hostile() -> Iterator[Sample]:
    for name, make in COSTLY_HEADERS.items():
        yield Sample(name, make(), Right.REFUSED)
    yield from _sizes()
    empty_row = zlib.compress(b"\0")
    refused = {
        "png without pixels": png(64, 48, b""),
        "png of one row": png(64, 48, empty_row),
        "png of another format": png(64, 48, b"\xff\xd8\xff" * 50),
        "png with no header": PNG[:8] + PNG[33:],
        "gif of no frames": b"GIF89a" + struct.pack("<HHBBB", 10, 10, 0, 0, 0) + b";",
        "gif of no pixels": b"GIF89a" + struct.pack("<HHBBB", 10, 10, 0, 0, 0) + b",",
        "tiff of no tags": tiff([]),
        "tiff whose strip is elsewhere": grey_tiff((273, 4, 1, 1 << 30)),
        "tiff whose directory is elsewhere": b"II*\0\xff\xff\xff\x7f",
        "tiff of huge tiles": grey_tiff(
            (322, 4, 1, 1 << 30), (323, 4, 1, 1 << 30), (324, 4, 1, 512), (325, 4, 1, 100), (259, 3, 1, 8),
            behind=zlib.compress(bytes(1 << 20)),
        ),
        "tiff of many samples": grey_tiff((277, 3, 1, 60000), behind=bytes(3072)),
        "webp without a frame": webp(webp_canvas(64, 48)),
        "webp whose chunk is longer than it": webp(b"VP8L" + struct.pack("<I", 1 << 31) + b"/"),
        "bmp of no pixels": bmp(64, 48, b""),
    }  # fmt: skip
    for name, content in refused.items():
        yield Sample(name, content, Right.REFUSED)
    either = {
        "tiff whose directory is its own next": _looped_tiff(),
        "webp of a larger canvas": webp_animation(640, 480),
        "jpeg of sixty scans": progressive_jpeg(60),
        "gif frame outside of its screen": _gif_outside(),
        "webp of unknown chunks": webp(webp_canvas(64, 48, 0), riff_chunk(b"abcd", bytes(99)) * 9),
        "png of a wrong checksum": PNG[:40] + bytes([PNG[40] ^ 1]) + PNG[41:],
        "avif that lies about its size": lying_avif(),  # its decoder scales what it finds
        "png of late exif": png_of_late_exif(),
        "png of exif in text": png_of_exif_in_text(),
        "jpeg of two pictures": JPEG + JPEG,
        "png and jpeg": PNG + JPEG,
    }
    for name, content in either.items():
        yield Sample(name, content, Right.EITHER)


def _sizes() -> Iterator[Sample]:
    """Headers of pictures that do not fit anywhere, and of none at all."""
    sof = JPEG.index(b"\xff\xc0") + 5
    avif = encoded(noise(40, 30), "AVIF")
    ispe = avif.index(b"ispe") + 8
    writers: dict[str, Callable[[int, int], bytes]] = {
        "png": lambda w, h: png(w, h, zlib.compress(bytes(100))),
        "jpeg": lambda w, h: JPEG[:sof] + struct.pack(">HH", h & 0xFFFF, w & 0xFFFF) + JPEG[sof + 4 :],
        "gif": lambda w, h: b"GIF89a" + struct.pack("<HHBBB", w & 0xFFFF, h & 0xFFFF, 0, 0, 0) + b",",
        "bmp": lambda w, h: bmp(w & 0x7FFFFFFF, h & 0x7FFFFFFF, bytes(100)),
        "webp": lambda w, h: webp_animation(max(w & 0xFFFFFF, 1), max(h & 0xFFFFFF, 1)),
        "tiff": lambda w, h: (
            grey_tiff(width=w, height=h) if w * h < 1 << 32 else grey_tiff((256, 4, 1, w), (257, 4, 1, h))
        ),
        "avif": lambda w, h: avif[:ispe] + struct.pack(">II", w, h) + avif[ispe + 8 :],
    }
    for name, make in writers.items():
        for width, height in [(0xFFFFFFFF, 0xFFFFFFFF), (65_535, 65_535), (20_000, 20_000), (0, 0), (0, 64)]:
            if name == "webp" and not width * height:
                continue  # its sizes are stored less one
            yield Sample(f"{name} of {width}x{height}", make(width, height), Right.REFUSED)


def _looped_tiff() -> bytes:
    content = bytearray(grey_tiff(behind=bytes(64 * 48)))
    num_tags = struct.unpack_from("<H", content, 8)[0]
    struct.pack_into("<I", content, 10 + 12 * num_tags, 8)
    return bytes(content)


def _gif_outside() -> bytes:
    content = bytearray(encoded(noise(20, 20, "L"), "GIF"))
    struct.pack_into("<HH", content, 6, 5, 5)
    return bytes(content)


def no_images() -> Iterator[Sample]:
    kinds = {
        "nothing": b"",
        "one byte": b"\xff",
        "text": b"hello",
        "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"/>',
        "HTML": b"<!doctype html><html></html>",
        "PDF": b"%PDF-1.7\n%...",
        "HEIC": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
        "MP4": b"\0\0\0\x18ftypisom\0\0\0\0isommp42",
        "icon": b"\0\0\1\0\1\0\x10\x10" + bytes(100),
        "Photoshop": b"8BPS\0\1" + bytes(100),
        "JPEG XL": b"\xff\x0a" + bytes(100),
        "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(100),
        "zip": b"PK\3\4" + bytes(100),
        "zeros": bytes(10_000),
        "noise": np.random.default_rng(0).bytes(10_000),
    }
    for name, content in kinds.items():
        yield Sample(f"no image: {name}", content, Right.REFUSED)
