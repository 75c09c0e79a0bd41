"""Every error of the API: its status, its type and the field that it names."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from triptych.api.body import decode_object
from triptych.api.chat import ChatRequest
from triptych.api.completions import CompletionRequest
from triptych.api.responses import ResponsesRequest
from triptych.api.unsupported import ABSENT, CHAT
from triptych.errors import (
    BadRequestError,
    DeadlineExceededError,
    EngineError,
    MalformedRequestError,
    MediaError,
    MediaTimeoutError,
    NoCapacityError,
    OverloadedError,
)

ROUTE = "/v1/chat/completions"
WHITESPACE = "structured_outputs.whitespace_pattern"
TOOL = {"type": "function", "function": {"name": "f"}}
TOOL_CHOICE = "`tool_choice` must be one of auto, none, required, an object."


def error_of(response: httpx.Response) -> tuple[int, str, str | None]:
    """Status, type and param; checks the form of the body on the way."""
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    assert error["message"]
    return response.status_code, error["type"], error["param"]


def message_of(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"", None),
        (b"[1]", None),
        (b"\xff\xfe", None),
        (b"[" * 19_000, None),
        (b'{"messages":' + b"[" * 19_000, None),
        (b"{}", "body.messages"),
        (b'{"messages": "hi"}', "body.messages"),
        (b'{"messages": [{"content": "hi"}]}', "body.messages.0.role"),
        (b'{"messages": [{"role": "user"}]}', "body.messages.0.content"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "body.messages.0.content"),
        (b'{"messages": [{"role": "user", "content": [3]}]}', "body.messages.0.content.0"),
        (b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "body.messages.0.content.0.text"),
        (b'{"messages": [{"role": "user", "content": [{}]}]}', "body.messages.0.content.0.type"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}',
            "body.messages.0.content.0.image_url.url",
        ),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "body.messages.0.content.0.image_url",
        ),
        (b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": "3"}', "body.max_tokens"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "stream": 1}', "body.stream"),
        (b'{"messages": [], "tools": ["x"]}', "body.tools.0"),
        (b'{"messages": [], "tools": [{"type": "x"}]}', "body.tools.0.type"),
        (b'{"messages": [], "tools": [{"type": "function"}]}', "body.tools.0.function"),
        (b'{"messages": [], "tools": [{"type": "function", "function": {"name": 3}}]}', "body.tools.0.function.name"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "stop": [1]}', "body.stop.0"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "stop_token_ids": ["x"]}', "body.stop_token_ids.0"),
    ],
)
async def test_malformed_body(api: Any, body: bytes, param: str | None) -> None:
    response = await api.http.post(ROUTE, content=body, headers={"content-type": "application/json"})
    assert error_of(response) == (400, "Bad Request", param)
    assert api.router.requests == []


@pytest.mark.parametrize("field", ["zz", "chat_template_kwargs", "messages"])
def test_a_body_of_very_many_values_is_refused_before_it_is_read(field: str) -> None:
    body = b'{"messages": [], "%s": [%s]}' % (field.encode(), b",".join([b"0"] * 250_000))
    with pytest.raises(MalformedRequestError, match="more than 200000 values"):
        decode_object(body)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_other_content_type(api: Any, content_type: str) -> None:
    response = await api.http.post(ROUTE, content=b"{}", headers={"content-type": content_type})
    assert error_of(response) == (400, "Bad Request", None)


async def test_charset_in_the_content_type_is_fine(api: Any) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    headers = {"content-type": "application/json; charset=utf-8"}
    assert (await api.http.post(ROUTE, content=body, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 101}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": -1, "max_tokens": 3}, "max_completion_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 4, "max_tokens": 3}, "min_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", "b" * 1025]}, "stop"),
        ({"bad_words": ["b" * 1025]}, "bad_words"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids"),
        ({"priority": 2**63}, "priority"),
        ({"request_id": "two words"}, "request_id"),
        ({"request_id": ""}, "request_id"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 0}, "n"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": -1}, "deadline_s"),
        ({"n": 129}, "n"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"200": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [200]}, "allowed_token_ids"),
        ({"stop_token_ids": [200]}, "stop_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a"] * 257}, "bad_words"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 101}, "truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"chat_template": "x"}, "chat_template"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools.1.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a\n"}}]}, "tools.0.function.name"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"json_object": True, "whitespace_pattern": "[a ]*"}},
            WHITESPACE,
        ),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "[ ]**"}}, WHITESPACE),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " " * 101}},
            WHITESPACE,
        ),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " ", "disable_any_whitespace": True}},
            WHITESPACE,
        ),
        ({"guided_choice": []}, "guided_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "critic", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages.0.content.0"),
    ],
)
async def test_value_out_of_range(api: Any, fields: dict[str, object], param: str) -> None:
    assert error_of(await api.chat(**fields)) == (400, "BadRequestError", param)
    assert api.router.requests == []


NOT_NEUTRAL: dict[str, object] = {
    "best_of": 2,
    "function_call": "auto",
    "reasoning_effort": "high",
    "verbosity": "low",
    "modalities": ["audio"],
    "length_penalty": 0.5,
    "spaces_between_special_tokens": False,
    "mm_payload": {},
}


@pytest.mark.parametrize("field", sorted(CHAT))
async def test_unsupported_field(api: Any, field: str) -> None:
    value = NOT_NEUTRAL.get(field, "anything")
    assert error_of(await api.chat(**{field: value})) == (400, "BadRequestError", field)


def _missing(own: type[msgspec.Struct]) -> list[str]:
    return sorted({*ChatRequest.__struct_fields__, *CHAT} - {*own.__struct_fields__})


ELSEWHERE = [
    *[("/v1/completions", {"prompt": "a"}, field) for field in _missing(CompletionRequest)],
    *[("/v1/responses", {"input": "a"}, field) for field in _missing(ResponsesRequest)],
]


@pytest.mark.parametrize(("route", "body", "field"), ELSEWHERE)
async def test_what_chat_knows_and_another_route_lacks_is_refused_there(
    api: Any, route: str, body: dict[str, object], field: str
) -> None:
    response = await api.post(route, **body, **{field: NOT_NEUTRAL.get(field, "anything")})
    assert error_of(response) == (400, "BadRequestError", field)
    neutral = {**ABSENT, **CHAT, "stream_options": ({},)}.get(field, ())
    for value in (None, *neutral):
        assert (await api.post(route, **body, **{field: value})).status_code == 200


async def test_neutral_and_unknown_fields_change_nothing(api: Any) -> None:
    neutral = {field: values[0] if values else None for field, values in CHAT.items()}
    assert (await api.chat(**neutral, zzz=1, user="me", parallel_tool_calls=True)).status_code == 200
    assert (await api.chat(**dict.fromkeys(CHAT))).status_code == 200
    assert (await api.chat(best_of=1.0, tool_choice="none", response_format={"type": "text"})).status_code == 200


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "video_url", "video_url": {"url": "data:,"}}, "messages.0.content.0"),
        ({"type": "input_audio", "input_audio": {}}, "messages.0.content.0"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "messages.0.content.0"),
        ({"image_embeds": "AAAA"}, "messages.0.content.0"),
    ],
)
async def test_unsupported_part(api: Any, part: dict[str, object], param: str) -> None:
    response = await api.chat(messages=[{"role": "user", "content": [part]}])
    assert error_of(response) == (400, "BadRequestError", param)


async def test_unknown_model(api: Any) -> None:
    assert error_of(await api.chat(model="gpt-9")) == (404, "NotFoundError", "model")
    assert error_of(await api.http.get("/v1/models/gpt-9")) == (404, "NotFoundError", "model")


async def test_no_route_and_wrong_method(api: Any) -> None:
    response = await api.http.get("/v1/nothing")
    assert error_of(response) == (404, "NotFoundError", None)
    assert message_of(response) == "There is no `/v1/nothing` here."
    for path in (ROUTE, "/tokenize"):
        response = await api.http.get(path)
        assert error_of(response) == (405, "MethodNotAllowedError", None)
        assert message_of(response) == f"`{path}` takes POST, not GET."
        assert response.headers["allow"] == "POST"
    assert error_of(await api.http.get("/" + "x" * 5000))[0] == 404


USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (ROUTE, {}, "`messages` is missing."),
        (ROUTE, {"messages": USER, "max_tokens": "3"}, "`max_tokens` must be `int | null`, not `str`."),
        (ROUTE, {"messages": USER, "stop": [1]}, "`stop.0` must be `str`, not `int`."),
        (ROUTE, {"messages": USER, "logit_bias": {"1": "a"}}, "`logit_bias` must be `float`, not `str`."),
        (
            ROUTE,
            {"messages": [], "tools": [{"type": "function", "function": {}}]},
            "`tools.0.function.name` is missing.",
        ),
        (ROUTE, {"messages": USER, "tools": [{"type": "retrieval"}]}, "`tools.0.type` must be function."),
        *[
            (ROUTE, {"messages": USER, "tools": [TOOL], "tool_choice": choice}, TOOL_CHOICE)
            for choice in ("any", 3, ["auto"])
        ],
        (
            ROUTE,
            {"messages": USER, "tool_choice": {"type": "allowed_tools"}},
            "`tool_choice.type` must be function.",
        ),
        (
            ROUTE,
            {"messages": USER, "response_format": {"type": "xml"}},
            "`response_format.type` must be one of json_object, json_schema, structural_tag, text.",
        ),
        (
            ROUTE,
            {"messages": USER, "truncation_side": "middle"},
            "`truncation_side` must be one of left, right.",
        ),
        (
            ROUTE,
            {"messages": [{"role": "critic", "content": "hi"}]},
            "`messages.0.role` must be one of system, developer, user, assistant, tool, function.",
        ),
        (
            ROUTE,
            {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
            "`messages.0.content.0.type` must be one of text, input_text, output_text, refusal, image_url, "
            "input_image, not 'smell'.",
        ),
        (
            ROUTE,
            {"messages": USER, "modalities": ["audio"]},
            '`modalities` is not implemented here; it may only be ["text"].',
        ),
        (ROUTE, {"messages": USER, "audio": {}}, "`audio` is not implemented here."),
        (
            "/v1/responses",
            {"input": "hi", "truncation": "auto"},
            '`truncation` is not implemented here; it may only be "disabled".',
        ),
        (
            "/v1/responses",
            {"input": "hi", "text": {"verbosity": "chatty"}},
            "`text.verbosity` must be one of high, low, medium.",
        ),
        (
            "/v1/responses",
            {"input": [{"type": "strange"}]},
            "`input.0.type` must be one of message, function_call, function_call_output, not 'strange'.",
        ),
        ("/v1/responses", {"input": [{"content": "hi"}]}, "`input.0.role` is missing."),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [5]}]},
            "`input.0.output.0` must be `str | object`, not `int`.",
        ),
    ],
)
async def test_a_mistake_is_told_in_one_sentence(api: Any, path: str, body: dict[str, object], message: str) -> None:
    response = await api.post(path, **body)
    assert error_of(response)[0] == 400
    assert message_of(response) == message


def image(**part: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", **part}]}]


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        (image(file_id="file-1"), ""),
        (image(image_url={"file_id": "file-1"}), ".image_url"),
        (image(image_url="http://host/x", file_id="file-1"), ""),
    ],
)
async def test_a_file_that_was_stored_before_is_refused_by_name(api: Any, messages: object, place: str) -> None:
    response = await api.chat(messages=messages)
    assert error_of(response) == (400, "BadRequestError", f"messages.0.content.0{place}.file_id")
    assert "`image_url`" in message_of(response)
    item = {"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}
    response = await api.post("/v1/responses", input=[item])
    assert error_of(response) == (400, "BadRequestError", "input.0.content.0.file_id")
    assert api.router.requests == []


async def test_the_detail_of_an_image_is_one_that_there_is(api: Any) -> None:
    for detail in ("auto", "low", "high", "original", None):
        messages = image(image_url={"url": "u", "detail": detail}, file_id=None)
        assert (await api.chat(messages=messages)).status_code == 200
    response = await api.chat(messages=image(image_url={"url": "u", "detail": "ultra"}))
    assert error_of(response) == (400, "BadRequestError", "messages.0.content.0.image_url.detail")
    assert message_of(response).endswith("must be one of auto, low, high, original.")
    response = await api.chat(messages=image(image_url="u", detail=3))
    assert error_of(response) == (400, "BadRequestError", "messages.0.content.0.detail")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MediaError("the image is empty", param="messages.0.content.1"), "`messages.0.content.1`: the image is empty."),
        (BadRequestError("7 tokens and max_tokens=9", param="max_tokens"), "7 tokens and max_tokens=9."),
        (DeadlineExceededError("the deadline passed"), "The deadline passed."),
        (NoCapacityError("prefill-0 is lost; ask again."), "prefill-0 is lost; ask again."),
    ],
)
async def test_what_the_router_says_becomes_a_sentence_with_the_field(api: Any, error: Any, message: str) -> None:
    api.router.script = [error]
    assert message_of(await api.chat()) == message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (MediaError("not an image", param="messages"), 400, "BadRequestError"),
        (BadRequestError("too long", param="max_tokens"), 400, "BadRequestError"),
        (MediaTimeoutError("slow"), 504, "GatewayTimeoutError"),
        (DeadlineExceededError("slow"), 504, "GatewayTimeoutError"),
        (EngineError("step"), 500, "InternalServerError"),
        (OverloadedError("full"), 503, "ServiceUnavailableError"),
        (NoCapacityError("no encode"), 503, "ServiceUnavailableError"),
    ],
)
async def test_error_of_the_router_is_the_status(api: Any, error: Any, status: int, kind: str, stream: bool) -> None:
    api.router.script = [error]
    response = await api.chat(stream=stream)
    assert error_of(response) == (status, kind, error.param)
    assert response.headers.get("retry-after") == ("1" if status == 503 else None)


@pytest.mark.parametrize("stream", [False, True])
async def test_our_own_bug_is_a_500_that_tells_nothing(api: Any, stream: bool) -> None:
    api.router.script = [RuntimeError("secret")]
    response = await api.chat(stream=stream)
    assert error_of(response) == (500, "InternalServerError", None)
    assert "secret" not in response.text


async def test_body_too_large_by_its_header_is_not_read(api: Any) -> None:
    async def never() -> Any:
        for chunk in (b"", b""):
            raise AssertionError("the body was read")
            yield chunk  # type: ignore[unreachable]

    headers = {"content-type": "application/json", "content-length": "20001"}
    response = await api.http.post(ROUTE, content=never(), headers=headers)
    assert error_of(response) == (413, "RequestEntityTooLargeError", None)


async def test_body_too_large_while_reading(api: Any) -> None:
    read = 0

    async def chunks() -> Any:
        nonlocal read
        for _ in range(100):
            read += 1
            yield b" " * 1000

    response = await api.http.post(ROUTE, content=chunks(), headers={"content-type": "application/json"})
    assert error_of(response) == (413, "RequestEntityTooLargeError", None)
    assert read <= 22


async def test_closed_admission(api: Any) -> None:
    api.admission.close()
    response = await api.chat()
    assert error_of(response) == (503, "ServiceUnavailableError", None)
    assert response.headers["retry-after"] == "1"


async def test_a_refused_request_is_counted_and_logged_without_its_text(api: Any, caplog: Any) -> None:
    with caplog.at_level("INFO", logger="triptych.request"):
        await api.chat(temperature=-1, messages=[{"role": "user", "content": "my secret"}])
    assert b'triptych:request_failure_total{error="BadRequestError"} 1.0' in api.metrics.render()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "triptych.request"]
    assert "status=400 error=BadRequestError" in line
    assert "secret" not in caplog.text


async def test_the_limit_of_tokens_keeps_the_name_that_the_client_used(api: Any) -> None:
    for fields in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 6}):
        await api.chat(**fields)
    await api.post("/v1/completions", prompt="a", max_tokens=5)
    await api.post("/v1/responses", input="a", max_output_tokens=5)
    assert [(request.max_tokens, request.max_tokens_param) for request in api.router.requests] == [
        (5, "max_tokens"),
        (5, "max_completion_tokens"),
        (5, "max_completion_tokens"),
        (5, "max_tokens"),
        (5, "max_output_tokens"),
    ]
    assert [request.messages_param for request in api.router.requests] == ["messages"] * 4 + ["input"]


async def test_a_message_with_calls_cannot_be_gone_on_with(api: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so", "tool_calls": [call]}]
    for route in (ROUTE, "/tokenize"):
        response = await api.post(route, messages=messages, continue_final_message=True)
        assert error_of(response) == (400, "BadRequestError", "continue_final_message")
    assert (await api.post(ROUTE, messages=messages)).status_code == 200
