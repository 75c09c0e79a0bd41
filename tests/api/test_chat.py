"""What a chat request becomes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.api.conftest import FakeVocabulary
from triptych.api.call import Call
from triptych.api.chat import parse_chat
from triptych.api.fields import Caller, Served
from triptych.types import ImageInput, Request, SamplingParams, Structure, ToolChoice

PIXEL = "data:image/png;base64,AAAA"


def parse_call(messages: list[dict[str, Any]] | None = None, caller: Caller | None = None, **fields: Any) -> Call:
    body = {"messages": messages or [{"role": "user", "content": "hi"}]} | fields
    served = Served("demo", 100, FakeVocabulary(), trust_chat_template="chat_template" in fields)
    return parse_chat(msgspec.json.decode(msgspec.json.encode(body)), served, caller or Caller())


def parse(messages: list[dict[str, Any]] | None = None, **fields: Any) -> Request:
    (request,) = parse_call(messages, **fields).requests
    return request


def test_defaults() -> None:
    call = parse_call()
    (request,) = call.requests
    assert (call.stream, len(call.request_id)) == (False, 16)
    assert call.request_id in request.request_id
    assert request == Request(
        request.request_id,
        [{"role": "user", "content": "hi"}],
        [],
        SamplingParams(seed=request.sampling.seed),
        tool_choice=ToolChoice.NONE,
    )


def test_every_field_arrives() -> None:
    request = parse(
        max_tokens=9, max_completion_tokens=7, temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=5, stop=["a", "b"],
        stop_token_ids=[1], ignore_eos=True, min_tokens=2, skip_special_tokens=False, include_stop_str_in_output=True,
        add_generation_prompt=False, chat_template_kwargs={"x": 1}, cache_salt="s", priority=-3,
    )  # fmt: skip
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
    assert parse(seed=1, request_id="r", **dict.fromkeys(names)).sampling == parse(seed=1).sampling


def test_one_stop_string_and_a_switched_off_top_k() -> None:
    request = parse(stop="end", top_k=-1)
    assert (request.stop, request.sampling.top_k) == (["end"], 0)


@pytest.mark.parametrize("top_k", [10**6, 2**31, 2**63 - 1])
def test_a_top_k_beyond_the_vocabulary_is_all_of_it(top_k: int) -> None:
    assert parse(top_k=top_k).sampling.top_k == FakeVocabulary().size


@pytest.mark.parametrize(("given", "used"), [(0, 0), (1e-320, 0), (9e-6, 0), (1e-5, 1e-5), (2, 2)])
def test_a_temperature_next_to_nothing_is_greedy(given: float, used: float) -> None:
    assert parse(temperature=given).sampling.temperature == used


@pytest.mark.parametrize(("given", "used"), [(0, 0), (7, 7), (-1, 2**63 - 1), (-(2**63), 0)])
def test_seed(given: int, used: int) -> None:
    assert parse(seed=given).sampling.seed == used


def test_a_seed_is_drawn_where_none_is_given() -> None:
    assert len({parse().sampling.seed for _ in range(8)}) == 8


def test_ids_of_two_requests_that_name_the_same_id() -> None:
    first, second = parse(request_id="mine"), parse(request_id="mine")
    assert first.request_id != second.request_id
    assert first.request_id.startswith("chatcmpl-mine-")


def test_the_requests_own_id_goes_before_the_headers() -> None:
    header = Caller("from-header", "someone")
    assert parse_call(caller=header).request_id == "from-header"
    assert parse_call(caller=header, request_id="mine").request_id == "mine"
    assert parse_call(caller=header).requests[0].client == "someone"


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
    )
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
        ImageInput("u1", "k", "messages.1.content.0"),
        ImageInput("u2", "", "messages.1.content.3"),
        ImageInput(PIXEL, "", "messages.1.content.5"),
        ImageInput("u3", "", "messages.1.content.7"),
        ImageInput("u4", "", "messages.3.content.0"),
    ]


def test_sampling_of_openai_and_vllm() -> None:
    request = parse(
        n=3, logprobs=True, top_logprobs=2, prompt_logprobs=1, presence_penalty=-2, frequency_penalty=0.5,
        repetition_penalty=1.1, logit_bias={"7": -100, "9": 2}, allowed_token_ids=[1, 2], bad_words=["a b"],
        truncate_prompt_tokens=9, truncation_side="right", add_special_tokens=False, session_id="s",
    )  # fmt: skip
    sampling = request.sampling
    assert (request.n, sampling.num_logprobs, sampling.num_prompt_logprobs) == (3, 2, 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (-2, 0.5, 1.1)
    assert (sampling.logit_bias, sampling.allowed_token_ids) == ({7: -100, 9: 2}, [1, 2])
    assert (request.bad_words, sampling.bad_words) == (["a b"], [])  # their tokens are the router's
    assert (request.truncate_prompt_tokens, request.truncation_side) == (9, "right")
    assert (request.add_special_tokens, request.session_id) == (False, "s")


def test_truncation_to_what_fits() -> None:
    assert parse(truncate_prompt_tokens=-1, max_tokens=30).truncate_prompt_tokens == 70
    assert parse(truncate_prompt_tokens=-1).truncate_prompt_tokens == 99


def test_template_fields() -> None:
    request = parse(
        chat_template="{{ x }}", documents=[{"title": "t"}], continue_final_message=True,
        mm_processor_kwargs={"max_pixels": 3}, media_io_kwargs={"image": {"background": "#000000"}},
    )  # fmt: skip
    assert (request.chat_template, request.documents) == ("{{ x }}", [{"title": "t"}])
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    assert (request.processor_options, request.media_options) == (
        {"max_pixels": 3}, {"image": {"background": "#000000"}}
    )  # fmt: skip


TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": None}},
    {"type": "function", "function": {"name": "g", "description": "d"}},
]


def test_tools() -> None:
    request = parse(tools=TOOLS)
    assert request.tools[0] == {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert (request.tool_choice, request.forced_tool, request.parallel_tool_calls) == (ToolChoice.AUTO, "", True)
    assert parse(tools=TOOLS, tool_choice="required").tool_choice is ToolChoice.REQUIRED
    assert parse(tools=TOOLS, tool_choice="none").tool_choice is ToolChoice.NONE
    forced = parse(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "g"}}, parallel_tool_calls=False)
    assert (forced.tool_choice, forced.forced_tool, forced.parallel_tool_calls) == (ToolChoice.REQUIRED, "g", False)


@pytest.mark.parametrize(
    ("fields", "kind", "source", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}},
            "json_schema", '{"type":"null"}', "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "x"}}},
            "structural_tag", '{"type":"structural_tag","format":{"type":"x"}}', "response_format",
        ),
        ({"structured_outputs": {"json": {"a": 1}}}, "json_schema", '{"a":1}', "structured_outputs.json"),
        ({"structured_outputs": {"json": '{"a":2}'}}, "json_schema", '{"a":2}', "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a","b"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "g"}}, "grammar", "g", "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, "json_object", "", "structured_outputs.json_object"),
        ({"guided_json": {"a": 1}}, "json_schema", '{"a":1}', "guided_json"),
        ({"guided_regex": "b"}, "regex", "b", "guided_regex"),
        ({"guided_choice": ["x"]}, "choice", '["x"]', "guided_choice"),
        ({"guided_grammar": "g"}, "grammar", "g", "guided_grammar"),
    ],
)  # fmt: skip
def test_structure(fields: dict[str, Any], kind: Any, source: str, param: str) -> None:
    assert parse(**fields).structure == Structure(kind, source, param)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"disable_any_whitespace": False, "whitespace_pattern": ""}, None),
        ({"disable_any_whitespace": True}, ""),
        ({"whitespace_pattern": "[ ]?"}, "[ ]?"),
        ({"whitespace_pattern": r"(?:\n|[ \t]{1,4})*"}, r"(?:\n|[ \t]{1,4})*"),
        ({"whitespace_pattern": r"\s?"}, r"[ \n\r\t]?"),
    ],
)
def test_white_space_of_a_structure(fields: dict[str, Any], expected: str | None) -> None:
    structure = parse(structured_outputs={"json_object": True, **fields}).structure
    assert structure is not None
    assert structure.whitespace == expected


def test_text_is_no_structure() -> None:
    assert parse(response_format={"type": "text"}, structured_outputs=None).structure is None


def test_an_image_by_its_uuid_alone() -> None:
    part = {"type": "image_url", "image_url": None, "uuid": "x"}
    assert parse([{"role": "user", "content": [part]}]).images == [ImageInput("", "x", "messages.0.content.0")]
