"""Media URLs as messages and logs may show them. Used by everything that reads one."""

from __future__ import annotations

from triptych.errors import MediaError

_SHOWN_CHARS = 60


def shorten_url(url: str) -> str:
    """A URL without media, query or credentials."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() == "data":
        head, comma, payload = rest.partition(",")
        return f"data:{head[:_SHOWN_CHARS]},... ({len(payload)} characters)" if comma else "data:..."
    place = rest.partition("?")[0].partition("#")[0]
    authority, slash, path = place.removeprefix("//").partition("/")
    shown = f"{scheme[:_SHOWN_CHARS]}://{authority.rpartition('@')[2]}{slash}{path}"
    return shown if len(shown) <= _SHOWN_CHARS else shown[:_SHOWN_CHARS] + "..."


def refuse(url: str, reason: str) -> MediaError:
    """To be raised: what is wrong with this URL."""
    return MediaError(f"media URL {shorten_url(url)!r}: {reason}")


def too_large(url: str, limit: int) -> MediaError:
    return refuse(url, f"more than max_image_bytes = {limit} bytes")
