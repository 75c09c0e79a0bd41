"""Requests are what their workload says, the same for one seed and new for another."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
from PIL import Image

from triptych.bench.requests import Request, RequestFactory, Session
from triptych.bench.workload import PRESETS, Workload, custom, named
from triptych.errors import ConfigError

W1 = PRESETS["W1"]


def bodies(sessions: list[Session]) -> list[dict[str, Any]]:
    return [body(request) for session in sessions for request in session]


def body(request: Request, *answers: str) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(request.body("m", answers))
    return made


def images(made: dict[str, Any]) -> list[str]:
    parts = [part for message in made["messages"] if message["role"] == "user" for part in message["content"]]
    return [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]


def picture(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def test_a_seed_gives_the_same_bytes_and_another_none_of_them() -> None:
    first, again, other = (bodies(RequestFactory(W1, seed).sessions(6)) for seed in (1, 1, 2))
    assert first == again
    seen = [url for made in first + other for url in images(made)]
    assert len(set(seen)) == len(seen)


def test_greedy_streamed_and_of_the_length_asked_for() -> None:
    [made] = bodies(RequestFactory(Workload(name="w", output_tokens=7), 0).sessions(1))
    expected = {"model": "m", "max_tokens": 7, "ignore_eos": True, "temperature": 0, "stream": True}
    assert expected.items() <= made.items()
    assert made["stream_options"] == {"include_usage": True}
    assert images(made) == []


def test_w1_mixes_counts_and_sizes_alike() -> None:
    made = bodies(RequestFactory(W1, 3).sessions(12))
    sizes = [(len(images(one)), picture(images(one)[0]).size) for one in made]
    assert sorted(sizes) == sorted(2 * [(num, (side, side)) for num in (4, 5, 6) for side in (336, 448)])
    assert sizes != sorted(sizes)


def test_w4_repeats_what_the_primers_brought() -> None:
    factory = RequestFactory(PRESETS["W4"], 0)
    primed = [url for made in bodies(factory.primers()) for url in images(made)]
    assert len(set(primed)) == len(primed) == PRESETS["W4"].primed_images
    assert {url for made in bodies(factory.sessions(12)) for url in images(made)} <= set(primed)
    assert images(bodies(RequestFactory(PRESETS["W4"], 9).primers())[0]) == primed[:6], "in every round the same ones"


def test_a_share_of_repeated_images() -> None:
    half = Workload(name="half", image_counts=(5, 5), sizes=((64, 64),), share_repeated=0.5)
    seen = [url for made in bodies(RequestFactory(half, 0).sessions(40)) for url in images(made)]
    assert 0.35 < 1 - len(set(seen)) / len(seen) < 0.65


def test_w5_has_its_share_of_large_requests() -> None:
    load = custom({"base": "W5", "name": "small-W5", "large_size": [96, 64]})
    sessions = RequestFactory(load, 0).sessions(20)
    kinds = [request.kind for session in sessions for request in session]
    assert sorted(kinds) == ["images"] * 18 + ["large"] * 2
    large = [body(session[0]) for session in sessions if session[0].kind == "large"]
    assert [len(images(made)) for made in large] == [20, 20]
    assert picture(images(large[0])[0]).size == (96, 64)


def test_w6_brings_images_in_half_of_its_requests() -> None:
    made = [request for session in RequestFactory(PRESETS["W6"], 0).sessions(8) for request in session]
    assert sorted((request.kind, request.num_images) for request in made) == [("images", 4)] * 4 + [("text", 0)] * 4
    assert {request.output_tokens for request in made} == {128}


def test_the_length_of_a_text_follows_the_tokens_of_a_word() -> None:
    load = Workload(name="long", prompt_tokens=900)
    assert len(RequestFactory(load, 0, tokens_per_word=1.5).text().split()) == 1 + 600


def test_a_session_resends_its_history_with_the_answers_it_got() -> None:
    load = Workload(name="agent", image_counts=(1, 1), sizes=((64, 64),), turns=3)
    [session] = RequestFactory(load, 0).sessions(3)
    first, last = body(session[0]), body(session[2], 'say "hi"', "\u00e9")
    assert last["messages"][0] == first["messages"][0]
    assert [message["role"] for message in last["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert [message["content"] for message in last["messages"][1::2]] == ['say "hi"', "\u00e9"]
    assert [request.num_images for request in session] == [1, 2, 3]
    assert [request.index for request in session] == [0, 1, 2]
    with pytest.raises(ValueError):
        session[2].body("m", ["only one"])


@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_pages_are_pictures_of_realistic_size(form: str) -> None:
    load = custom({"base": "W1-336", "name": "w", "image_format": form})
    url = images(bodies(RequestFactory(load, 0).sessions(1))[0])[0]
    assert picture(url).format == form
    assert 10_000 < len(base64.b64decode(url.partition(",")[2])) < 120_000


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"name": "w", "image_count": 3}, "image_count"),
        ({"name": "w", "image_counts": [6, 4]}, "the least is more"),
        ({"name": "w", "share_large": 1.5}, "share_large"),
        ({"name": "w", "sizes": []}, "sizes"),
        ({"name": "w", "primed_images": 3}, "primed_images"),
        ({"base": "W9", "name": "w"}, "W9"),
        ({"turns": 2}, "name"),
    ],
)
def test_bad_workloads_are_refused_by_field(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        custom(fields)


def test_unknown_names_are_told_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="W1, "):
        named("W99")
