"""ICC profiles made from numbers: of displays with given primaries and curves, of grey, and of a printer's inks."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray
from PIL import ImageCms

SRGB_PRIMARIES = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
P3_PRIMARIES = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
D50 = np.array([0.9642, 1.0, 0.8249])
_D65 = np.array([0.3127 / 0.3290, 1.0, (1 - 0.3127 - 0.3290) / 0.3290])
_BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


def display(primaries: tuple[tuple[float, float], ...] = SRGB_PRIMARIES, curve: bytes | None = None) -> bytes:
    """An RGB display of white D65; `curve`: how its levels become light, sRGB's unless given."""
    columns = np.array([[x / y, 1.0, (1 - x - y) / y] for x, y in primaries]).T
    matrix = columns * np.linalg.solve(columns, _D65)  # RGB to XYZ under D65
    scale = np.diag((_BRADFORD @ D50) / (_BRADFORD @ _D65))
    adapted = np.linalg.inv(_BRADFORD) @ scale @ _BRADFORD @ matrix
    tags = {b"%cXYZ" % name: _xyz(adapted[:, k]) for k, name in enumerate(b"rgb")}
    tags |= {b"%cTRC" % name: curve or srgb_curve() for name in b"rgb"}
    return _profile(b"mntr", b"RGB ", b"XYZ ", tags)


def grey(curve: bytes) -> bytes:
    return _profile(b"mntr", b"GRAY", b"XYZ ", {b"kTRC": curve})


def inks() -> bytes:
    """A printer whose paper is white and whose every ink is black: lightness falls with the sum of the four."""
    table = b""
    for corner in range(16):
        lightness = 255 if corner == 0 else 0
        table += bytes([lightness, 128, 128])
    ramp = bytes(range(256))
    identity = struct.pack(">9i", *(65536 if k % 4 == 0 else 0 for k in range(9)))
    body = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + identity + ramp * 4 + table + ramp * 3
    return _profile(b"prtr", b"CMYK", b"Lab ", {b"A2B0": body})


def gamma_curve(gamma: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256))


def srgb_curve(points: int = 1024) -> bytes:
    """As old profiles have it: a table."""
    level = np.linspace(0, 1, points)
    light = np.where(level <= 0.04045, level / 12.92, ((level + 0.055) / 1.055) ** 2.4)
    return b"curv\0\0\0\0" + struct.pack(f">I{points}H", points, *np.round(light * 65535).astype(int).tolist())


def library_srgb() -> bytes:
    """With formulas for curves, as new profiles have it."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return profile[:24] + bytes(12) + profile[36:]  # without the time of its making


def _xyz(value: NDArray[np.float64]) -> bytes:
    return b"XYZ \0\0\0\0" + struct.pack(">3i", *np.round(value * 65536).astype(int).tolist())


def _profile(kind: bytes, space: bytes, connection: bytes, tags: dict[bytes, bytes]) -> bytes:
    text = b"made for a test\0"
    description = b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(78)
    tags = {b"desc": description, b"wtpt": _xyz(D50), b"cprt": b"text\0\0\0\0" + text} | tags
    offset, table, data = 128 + 4 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, body in tags.items():
        table += name + struct.pack(">II", offset + len(data), len(body))
        data += body + bytes(-len(body) % 4)
    size = 128 + len(table) + len(data)
    header = struct.pack(">I4x", size) + b"\x02\x40\0\0" + kind + space + connection + bytes(12) + b"acsp" + bytes(28)
    header += struct.pack(">3i", *np.round(D50 * 65536).astype(int).tolist())
    return header.ljust(128, b"\0") + table + data
