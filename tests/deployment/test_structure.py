"""Structures and tools through OpenAI's client against the packaged model, which would never give them by itself."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from pydantic import BaseModel

from triptych.config import ApiConfig, Config
from triptych.launch import Deployment
from triptych.placement import Placement

QUESTION: Any = [{"role": "user", "content": "What is 2 plus 3?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"left": {"enum": [1, 2, 3]}, "how": {"enum": ["plus", "minus"]}},
    "required": ["left", "how"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
ADD: Any = {"type": "function", "function": {"name": "add"}}


class Sum(BaseModel):
    sign: Literal["plus", "minus"]
    right: bool


@pytest_asyncio.fixture(params=["EPD", "1E/1P/1D"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[AsyncOpenAI]:
    async with (
        Deployment(Config(api=ApiConfig(port=0)), Placement.parse(request.param)) as deployment,
        AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def text_of(client: AsyncOpenAI, **fields: Any) -> str:
    answer = await client.chat.completions.create(model="demo", messages=QUESTION, **fields)
    assert answer.choices[0].finish_reason == "stop", answer
    return answer.choices[0].message.content or ""


async def test_every_kind_of_structure(client: AsyncOpenAI) -> None:
    outputs: Any = {"structured_outputs": {"choice": ["four", "fourteen"]}}
    assert await text_of(client, extra_body=outputs) in ("four", "fourteen")
    outputs = {"structured_outputs": {"regex": "[0-9]{3}-[a-c]"}}
    assert re.fullmatch("[0-9]{3}-[a-c]", await text_of(client, extra_body=outputs))
    outputs = {"structured_outputs": {"grammar": 'root ::= "a" [0-9] "b"'}}
    assert re.fullmatch("a[0-9]b", await text_of(client, extra_body=outputs))
    schema: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": PARAMETERS, "strict": True}}
    assert set(json.loads(await text_of(client, response_format=schema))) == {"left", "how"}
    parsed = await client.chat.completions.parse(model="demo", messages=QUESTION, response_format=Sum)
    assert isinstance(parsed.choices[0].message.parsed, Sum)
    response = await client.responses.parse(model="demo", input="What is 2 plus 3?", text_format=Sum)
    assert isinstance(response.output_parsed, Sum)


async def test_several_choices_each_keep_the_structure(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="demo", messages=QUESTION, n=3, temperature=1, extra_body={"guided_regex": "[0-9]{2}"}
    )
    assert all(re.fullmatch("[0-9]{2}", choice.message.content or "") for choice in answer.choices)


async def test_a_structure_that_cannot_be_is_refused_by_name(client: AsyncOpenAI) -> None:
    for param, fields in {
        "structured_outputs.regex": {"structured_outputs": {"regex": "("}},
        "guided_grammar": {"guided_grammar": "start: ("},
        "response_format.json_schema": {
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
        },
    }.items():
        with pytest.raises(openai.BadRequestError) as caught:
            await text_of(client, extra_body=fields)
        assert caught.value.param == param, caught.value


async def test_what_is_too_complex_to_follow_is_the_clients_fault(client: AsyncOpenAI) -> None:
    """Only a worker finds it, tokens later."""
    outputs: Any = {"structured_outputs": {"regex": "(?:.*a.{0,300}){3}z"}}
    with pytest.raises(openai.BadRequestError, match="too many expressions") as caught:
        await text_of(client, temperature=2, seed=1, max_tokens=600, extra_body=outputs)
    assert caught.value.param == "structured_outputs.regex"
    assert await text_of(client, extra_body={"structured_outputs": {"regex": "[0-9]"}}) in "0123456789"


async def test_white_space_does_not_run_away(client: AsyncOpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": PARAMETERS}}
    text = await text_of(client, response_format=form, max_tokens=250)
    assert re.search(r"\s{23}", text) is None, text
    compact: Any = {"structured_outputs": {"json": PARAMETERS, "disable_any_whitespace": True}}
    text = await text_of(client, extra_body=compact)
    assert text == json.dumps(json.loads(text))


async def test_calls_that_must_come(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="demo", messages=QUESTION, tools=TOOLS, tool_choice=ADD)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "add"
    assert set(json.loads(call.function.arguments)) == {"left", "how"}

    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    history = [*QUESTION, choice.message.to_dict(), result]
    answer = await client.chat.completions.create(
        model="demo", messages=history, tools=TOOLS, tool_choice="none", max_tokens=4
    )
    assert answer.choices[0].message.tool_calls in (None, [])


async def test_calls_streamed(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="demo", messages=QUESTION, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.name in ("add", "stop")
    assert isinstance(json.loads(call.function.arguments), dict)


async def test_calls_of_the_responses_api(client: AsyncOpenAI) -> None:
    tools: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}]
    choice: Any = {"type": "function", "name": "add"}
    async with client.responses.stream(
        model="demo", input="What is 2 plus 3?", tools=tools, tool_choice=choice
    ) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.function_call_arguments.delta"]
        response = await stream.get_final_response()
    (item,) = response.output
    assert item.type == "function_call"
    assert item.arguments == "".join(deltas)
    assert set(json.loads(item.arguments)) == {"left", "how"}
    again: Any = [
        {"role": "user", "content": "What is 2 plus 3?"},
        item.to_dict(),
        {"type": "function_call_output", "call_id": item.call_id, "output": "5"},
    ]
    answer = await client.responses.create(model="demo", input=again, max_output_tokens=4)
    assert [item.type for item in answer.output] == ["message"]
