"""Options of decoding: a request's `media_io_kwargs` over the server's settings. Called by `router/media.py`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from triptych.errors import BadRequestError
from triptych.types import Rgb

_COLOUR = re.compile(r"#([0-9a-fA-F]{2})([0-9a-fA-F]{2})([0-9a-fA-F]{2})")
_BACKGROUND = "rgba_background_color"  # vLLM's name


def read_colour(value: object) -> Rgb:
    """`#rrggbb`, or three levels from 0 to 255. Raises ValueError."""
    if isinstance(value, str) and (match := _COLOUR.fullmatch(value)):
        return Rgb(*(int(level, 16) for level in match.groups()))
    if isinstance(value, list | tuple) and len(value) == 3 and all(_is_level(level) for level in value):
        return Rgb(*value)
    raise ValueError("not a colour of the form #rrggbb")


def _is_level(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 255


def background_of(options: Mapping[str, object], default: Rgb) -> Rgb:
    """The colour under transparent pixels. Raises BadRequestError naming what is unknown or wrong."""
    for name in options:
        if name != "image":
            raise _bad_option(name, "is not implemented; image is")
    image = options.get("image")
    if image is None:
        return default
    if not isinstance(image, Mapping):
        raise _bad_option("image", "must be an object")
    for name in image:
        if name != _BACKGROUND:
            raise _bad_option(f"image.{name}", f"is not implemented; {_BACKGROUND} is")
    if image.get(_BACKGROUND) is None:
        return default
    try:
        return read_colour(image[_BACKGROUND])
    except ValueError:
        raise _bad_option(f"image.{_BACKGROUND}", "must be three integers from 0 to 255, or #rrggbb") from None


def _bad_option(name: str, reason: str) -> BadRequestError:
    field = f"media_io_kwargs.{name[:80]}"
    return BadRequestError(f"`{field}` {reason}.", param=field)
