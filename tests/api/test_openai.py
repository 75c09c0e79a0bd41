"""What a chat request becomes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from triptych.api.openai import ChatCall, parse_chat
from triptych.types import ImageInput, SamplingParams

PIXEL = "data:image/png;base64,AAAA"


def parse(messages: list[dict[str, Any]] | None = None, **fields: object) -> ChatCall:
    body = {"messages": messages or [{"role": "user", "content": "hi"}]} | fields
    return parse_chat(msgspec.json.encode(body), model_name="demo", max_model_len=100)


def test_defaults() -> None:
    call = parse()
    request = call.request
    assert request.messages == [{"role": "user", "content": "hi"}]
    assert (request.max_tokens, request.stop, request.images) == (None, [], [])
    assert (call.stream, call.include_usage, call.timing) == (False, False, False)
    assert call.response_id == request.request_id
    assert call.response_id.removeprefix("chatcmpl-").isalnum()
    assert len(call.response_id) == len("chatcmpl-") + 16
    assert request.sampling == SamplingParams(seed=request.sampling.seed)


def test_every_field_arrives() -> None:
    request = parse(
        max_tokens=9, max_completion_tokens=7, temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=5, stop=["a", "b"],
        stop_token_ids=[1], ignore_eos=True, min_tokens=2, skip_special_tokens=False, include_stop_str_in_output=True,
        add_generation_prompt=False, chat_template_kwargs={"x": 1}, cache_salt="s", priority=-3,
    ).request  # fmt: skip
    assert request.sampling == SamplingParams(
        temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=5, min_tokens=2, stop_token_ids=[1], ignore_eos=True
    )
    assert (request.max_tokens, request.stop, request.template_kwargs) == (7, ["a", "b"], {"x": 1})
    assert (request.skip_special_tokens, request.include_stop_str_in_output) == (False, True)
    assert (request.add_generation_prompt, request.cache_salt, request.priority) == (False, "s", -3)


def test_null_is_the_same_as_leaving_out() -> None:
    names = (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_options",
    )
    assert parse(seed=1, request_id="r", **dict.fromkeys(names)).request.sampling == parse(seed=1).request.sampling


def test_one_stop_string_and_a_switched_off_top_k() -> None:
    request = parse(stop="end", top_k=-1).request
    assert (request.stop, request.sampling.top_k) == (["end"], 0)


@pytest.mark.parametrize(("given", "used"), [(0, 0), (1e-320, 0), (9e-6, 0), (1e-5, 1e-5), (2, 2)])
def test_a_temperature_next_to_nothing_is_greedy(given: float, used: float) -> None:
    assert parse(temperature=given).request.sampling.temperature == used


@pytest.mark.parametrize(("given", "used"), [(0, 0), (7, 7), (-1, 2**63 - 1), (-(2**63), 0)])
def test_seed(given: int, used: int) -> None:
    assert parse(seed=given).request.sampling.seed == used


def test_a_seed_is_drawn_where_none_is_given() -> None:
    assert len({parse().request.sampling.seed for _ in range(8)}) == 8


def test_ids_of_two_requests_that_name_the_same_id() -> None:
    first, second = parse(request_id="mine"), parse(request_id="mine")
    assert first.response_id == second.response_id == "chatcmpl-mine"
    assert first.request.request_id != second.request.request_id
    assert first.request.request_id.startswith("chatcmpl-mine-")


def test_all_forms_of_parts_in_any_order_and_role() -> None:
    request = parse(
        [
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "u1", "detail": "low"}, "uuid": "k"},
                    "bare",
                    {"type": "text", "text": "t"},
                    {"type": "image_url", "image_url": "u2"},
                    {"type": "input_text", "text": "i"},
                    {"type": "input_image", "image_url": PIXEL},
                    {"text": "no type"},
                    {"image_url": "u3", "uuid": None},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": {"url": "u4"}}]},
        ]
    ).request
    image = {"type": "image"}
    assert request.messages[0] == {"role": "system", "content": "be brief"}
    assert request.messages[1]["content"] == [
        image,
        {"type": "text", "text": "bare"},
        {"type": "text", "text": "t"},
        image,
        {"type": "text", "text": "i"},
        image,
        {"type": "text", "text": "no type"},
        image,
    ]
    assert request.messages[2] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }
    assert request.messages[3] == {"role": "tool", "content": [image], "tool_call_id": "c"}
    assert request.images == [
        ImageInput("u1", "k"), ImageInput("u2"), ImageInput(PIXEL), ImageInput("u3"), ImageInput("u4")
    ]  # fmt: skip
