"""`data:` URLs to bytes, in memory that is a small multiple of the URL whatever it holds. Called by `fetch.py`."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote_to_bytes

from triptych.errors import MediaError
from triptych.media.url import refuse, too_large

_SLICE_BYTES = 1 << 20  # unescaped at once: the library's function takes about fifty bytes for each escape


def read_data_url(url: str, max_bytes: int) -> bytes:
    """Raises MediaError for what is no data URL, is no base64 where it says so, or is longer than `max_bytes`."""
    head, comma, payload = url[len("data:") :].partition(",")
    if not comma:
        raise MediaError("the data URL has no comma between its type and its data")
    if len(payload) > 4 * max_bytes + 1024:
        raise too_large(url, max_bytes)  # even if it is base64 with every character escaped
    raw = payload.encode("utf-8", "surrogatepass")
    if b"%" in raw:
        raw = _unescape(raw)
    content = _decode_base64(url, raw) if head.rpartition(";")[2].strip().lower() == "base64" else raw
    if len(content) > max_bytes:
        raise too_large(url, max_bytes)
    return content


def _unescape(raw: bytes) -> bytes:
    content = bytearray()
    at = 0
    while at < len(raw):
        end = at + _SLICE_BYTES
        cut = raw.find(b"%", end - 2, end)  # an escape may begin in this slice and end in the next
        end = cut if cut >= 0 else end
        content += unquote_to_bytes(raw[at:end])
        at = end
    return bytes(content)


def _decode_base64(url: str, raw: bytes) -> bytes:
    text = raw.translate(None, b" \t\r\n\f")
    try:
        return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise refuse(url, "has invalid base64 behind its comma") from error
