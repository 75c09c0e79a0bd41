"""A request's options of decoding: what is read, and what is refused by name."""

from __future__ import annotations

import pytest

from triptych.errors import BadRequestError
from triptych.media.options import background_of, read_colour
from triptych.types import Rgb

DEFAULT = Rgb(1, 2, 3)


def test_colours() -> None:
    assert read_colour("#ff8000") == read_colour("#FF8000") == read_colour([255, 128, 0]) == Rgb(255, 128, 0)
    for wrong in ("white", "#fff", "#ff80001", [1, 2], [1, 2, 256], [1, 2, -1], [1, 2, True], [1.0, 2, 3], None, 7):
        with pytest.raises(ValueError, match="#rrggbb"):
            read_colour(wrong)


def test_what_is_left_out_is_the_servers() -> None:
    empty: list[dict[str, object]] = [{}, {"image": {}}, {"image": None}, {"image": {"rgba_background_color": None}}]
    for options in empty:
        assert background_of(options, DEFAULT) == DEFAULT
    assert background_of({"image": {"rgba_background_color": [9, 8, 7]}}, DEFAULT) == Rgb(9, 8, 7)
    assert background_of({"image": {"rgba_background_color": "#090807"}}, DEFAULT) == Rgb(9, 8, 7)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"video": {"num_frames": 8}}, "media_io_kwargs.video"),
        ({"image": 3}, "media_io_kwargs.image"),
        ({"image": {"mode": "L"}}, "media_io_kwargs.image.mode"),
        ({"image": {"rgba_background_color": "white"}}, "media_io_kwargs.image.rgba_background_color"),
        ({"x" * 500: 1}, "media_io_kwargs." + "x" * 80),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        background_of(options, DEFAULT)
    assert caught.value.param == field
    assert field in caught.value.message
