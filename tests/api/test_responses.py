"""The Responses API: its input, whole answers and typed events, all of it read by OpenAI's own types."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api.conftest import FakeVocabulary
from tests.api.test_chat_answers import CALLS, TWO
from tests.api.test_errors import error_of
from triptych.api.fields import Caller, Served
from triptych.api.responses import parse_response
from triptych.errors import EngineError
from triptych.types import ChoiceFinished, FinishReason, ImageInput, Request, Structure, TextDelta, ToolChoice

ROUTE = "/v1/responses"
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def parse(**fields: object) -> Request:
    body = msgspec.json.decode(msgspec.json.encode(fields))
    (request,) = parse_response(body, Served("demo", 100, FakeVocabulary()), Caller()).requests
    return request


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The stream's events, checked against OpenAI's types and for their numbers."""
    assert response.status_code == 200
    found = []
    for k, block in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        kind, payload = block.split("\n")
        event = json.loads(payload.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        assert event["sequence_number"] == k
        EVENTS.validate_python(event)
        found.append(event)
    return found


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "done"}


# -- input -------------------------------------------------------------------------------------------------------------


def test_a_text_and_instructions() -> None:
    request = parse(input="hi", instructions="be brief", max_output_tokens=9, temperature=0, top_p=0.5, seed=3)
    assert request.messages == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert (request.max_tokens, request.sampling.temperature, request.sampling.seed) == (9, 0, 3)
    assert request.tool_choice is ToolChoice.NONE


def test_items_with_images_and_calls() -> None:
    request = parse(
        input=[
            {"role": "developer", "content": "rules"},
            {
                "type": "message",
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "what"},
                    {"type": "input_image", "image_url": "u1", "detail": "auto"},
                ],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "calling"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "done"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_image", "image_url": "u2"}],
            },
        ]
    )
    assert [message["role"] for message in request.messages] == ["system", "user", "assistant", "tool", "tool"]
    calls: Any = request.messages[2]["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [("c1", {"a": 1}), ("c2", {})]
    assert request.messages[3] == {"role": "tool", "content": "done", "tool_call_id": "c1"}
    assert request.messages[4]["content"] == [{"type": "image"}]
    assert request.images == [ImageInput("u1", "", "input.1.content.1"), ImageInput("u2", "", "input.6.output.0")]


def test_an_item_whose_type_is_null_is_a_message() -> None:
    assert parse(input=[{"type": None, "role": "user", "content": "hi"}]).messages == [
        {"role": "user", "content": "hi"}
    ]


def test_tools_and_structure() -> None:
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
    request = parse(input="hi", tools=[tool], tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False)
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    assert request.tools == [{"type": "function", "function": function}]
    assert (request.tool_choice, request.forced_tool, request.parallel_tool_calls) == (ToolChoice.REQUIRED, "f", False)
    form = {"type": "json_schema", "name": "n", "schema": {"type": "null"}, "strict": True}
    assert parse(input="hi", text={"format": form}).structure == Structure(
        "json_schema", '{"type":"null"}', "text.format"
    )
    assert parse(input="hi", text={"format": {"type": "json_object"}}).structure == Structure(
        "json_object", "", "text.format"
    )


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({}, "Bad Request", "body.input"),
        ({"input": 3}, "Bad Request", "body.input"),
        ({"input": ["hi"]}, "Bad Request", "body.input.0"),
        ({"input": []}, "BadRequestError", "input"),
        ({"input": [{"content": "hi"}]}, "Bad Request", "body.input.0.role"),
        ({"input": [{"role": "user", "content": 3}]}, "Bad Request", "body.input.0.content"),
        ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "BadRequestError", "input.0.content.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "BadRequestError", "input.0"),
        ({"input": [{"type": "strange"}]}, "BadRequestError", "input.0"),
        ({"input": [CALL | {"call_id": None}]}, "Bad Request", "body.input.0.call_id"),
        ({"input": [CALL | {"arguments": None}]}, "Bad Request", "body.input.0.arguments"),
        ({"input": [CALL | {"arguments": 5}]}, "Bad Request", "body.input.0.arguments"),
        ({"input": [CALL | {"arguments": "{"}]}, "BadRequestError", "input.0.arguments"),
        ({"input": [RESULT | {"output": 5}]}, "Bad Request", "body.input.0.output"),
        ({"input": [RESULT | {"output": [5]}]}, "Bad Request", "body.input.0.output.0"),
        ({"input": [RESULT | {"output": [{"type": "x"}]}]}, "BadRequestError", "input.0.output.0"),
        ({"input": [RESULT | {"output": [{"type": "text"}]}]}, "Bad Request", "body.input.0.output.0.text"),
        ({"input": "hi", "previous_response_id": "r"}, "BadRequestError", "previous_response_id"),
        ({"input": "hi", "background": True}, "BadRequestError", "background"),
        ({"input": "hi", "conversation": "c"}, "BadRequestError", "conversation"),
        ({"input": "hi", "truncation": "auto"}, "BadRequestError", "truncation"),
        ({"input": "hi", "reasoning": {"effort": "high"}}, "BadRequestError", "reasoning"),
        ({"input": "hi", "include": ["file_search_call.results"]}, "BadRequestError", "include"),
        ({"input": "hi", "max_output_tokens": 0}, "BadRequestError", "max_output_tokens"),
        ({"input": "hi", "top_logprobs": 21}, "BadRequestError", "top_logprobs"),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "Bad Request", "body.tools.0.type"),
        ({"input": "hi", "tools": [{"type": "function", "name": "a b"}]}, "BadRequestError", "tools.0.name"),
        ({"input": "hi", "text": {"format": {"type": "json_schema"}}}, "Bad Request", "body.text.format.schema"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "Bad Request", "body.input.0.output"),
    ],
)
async def test_refused(api: Any, fields: dict[str, object], kind: str, param: str) -> None:
    response = await api.post(ROUTE, **fields)
    assert error_of(response)[::2] == (400, param), response.text
    assert response.json()["error"]["type"] == kind
    assert api.router.requests == []


# -- answers -----------------------------------------------------------------------------------------------------------


async def test_whole_answer(api: Any) -> None:
    response = await api.post(ROUTE, input="hi", request_id="x", metadata={"a": "b"}, store=True)
    body = OpenAIResponse.model_validate(response.json())
    assert (body.id, body.status, body.output_text, body.metadata) == ("resp_x", "completed", "a cat", {"a": "b"})
    assert response.json()["store"] is False
    assert body.usage is not None
    assert (body.usage.input_tokens, body.usage.output_tokens, body.usage.total_tokens) == (12, 3, 15)
    assert body.usage.input_tokens_details.cached_tokens == 4


async def test_an_answer_that_was_cut_off(api: Any) -> None:
    api.router.script[3] = ChoiceFinished(0, FinishReason.LENGTH, None)
    body = (await api.post(ROUTE, input="hi")).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert events(await api.post(ROUTE, input="hi", stream=True))[-1]["type"] == "response.incomplete"


async def test_calls(api: Any) -> None:
    api.router.script = CALLS
    body = OpenAIResponse.model_validate((await api.post(ROUTE, input="hi")).json())
    kinds = [(item.type, getattr(item, "call_id", None), getattr(item, "arguments", None)) for item in body.output]
    assert kinds == [
        ("message", None, None),
        ("function_call", "call_1", '{"a":1}'),
        ("function_call", "call_2", "{}"),
    ]
    assert len({item.id for item in body.output}) == 3


async def test_only_the_last_item_was_cut_off(api: Any) -> None:
    api.router.script = [*CALLS[:-2], ChoiceFinished(0, FinishReason.LENGTH, None), CALLS[-1]]
    whole = (await api.post(ROUTE, input="hi")).json()["output"]
    streamed = events(await api.post(ROUTE, input="hi", stream=True))[-1]["response"]["output"]
    for output in (whole, streamed):
        assert [item["status"] for item in output] == ["completed", "completed", "incomplete"]


async def test_logprobs(api: Any) -> None:
    api.router.script = [event for event in TWO if getattr(event, "choice", 0) == 0]
    body = await api.post(ROUTE, input="hi", include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = body.json()["output"][0]["content"]
    assert [(entry["token"], len(entry["top_logprobs"])) for entry in part["logprobs"]] == [("a", 2)]
    assert (await api.post(ROUTE, input="hi")).json()["output"][0]["content"][0]["logprobs"] == []


async def test_stream(api: Any) -> None:
    found = events(await api.post(ROUTE, input="hi", stream=True))
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["delta"] for event in found if "delta" in event] == ["a ", "cat"]
    assert found[6]["text"] == found[7]["part"]["text"] == found[8]["item"]["content"][0]["text"] == "a cat"
    assert found[-1]["response"]["output"] == [found[8]["item"]]
    assert found[-1]["response"]["usage"]["total_tokens"] == 15


async def test_stream_of_calls(api: Any) -> None:
    api.router.script = CALLS
    found = events(await api.post(ROUTE, input="hi", stream=True))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[8:] == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [item["type"] for item in found[-1]["response"]["output"]] == ["message", "function_call", "function_call"]
    assert found[11]["arguments"] == '{"a":1}'


async def test_a_stream_without_text_still_has_its_message(api: Any) -> None:
    del api.router.script[1:3]
    found = events(await api.post(ROUTE, input="hi", stream=True))
    assert [event["type"] for event in found][2] == "response.output_item.added"
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_a_stream_that_fails(api: Any) -> None:
    api.router.script = [TextDelta("a", 1), EngineError("step failed")]
    last = events(await api.post(ROUTE, input="hi", stream=True))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "Step failed."}
    api.router.script = [EngineError("step failed")]
    assert error_of(await api.post(ROUTE, input="hi", stream=True))[0] == 500
