"""Media URLs as messages and logs may show them. Used by everything that reads one."""

from __future__ import annotations

from triptych.errors import MediaError

_SHOWN_CHARS = 60


def shorten_url(url: str) -> str:
    """A URL without media, query or credentials."""
    scheme, colon, rest = url.partition("?")[0].partition("#")[0].partition(":")
    if scheme.lower() == "data":
        head, comma, payload = url[len("data:") :].partition(",")
        return f"data:{head[:_SHOWN_CHARS]},... ({len(payload)} characters)" if comma else "data:..."
    slashes = "//" if rest.startswith("//") else ""
    authority, slash, path = rest.removeprefix("//").partition("/")
    shown = f"{scheme}{colon}{slashes}{authority.rpartition('@')[2]}{slash}{path}"
    return shown if len(shown) <= _SHOWN_CHARS else shown[:_SHOWN_CHARS] + "..."


def refuse(url: str, reason: str) -> MediaError:
    """To be raised: what this URL is or does, in words that go on behind it."""
    return MediaError(f"media URL {shorten_url(url)!r} {reason}")


def too_large(url: str, limit: int) -> MediaError:
    return refuse(url, f"has more than max_image_bytes = {limit} bytes")
