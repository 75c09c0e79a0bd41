"""Structured output: a JSON schema, a pydantic model through the SDK's `parse`, and any JSON object."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel

from tests.clients.openai.connect import connect
from tests.clients.script import JSON_TOKENS, Server, chat_messages, questions

SCHEMA = {
    "type": "object",
    "properties": {
        "stamp": {"type": "string", "enum": ["PAID", "DRAFT", "COPY", "URGENT", "FINAL", "VOID", "SECRET", "SAMPLE"]},
        "pages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["stamp", "pages"],
    "additionalProperties": False,
}


class Finding(BaseModel):
    """What is asked about a page; without free text, which a small model would not end."""

    colour: Literal["red", "green", "blue", "yellow"]
    count: Literal[0, 1, 2, 3, 4, 5]
    certain: bool


def _object_in(choice: Any) -> dict[str, Any]:
    try:
        value = json.loads(choice.message.content)
    except ValueError:
        value = None
    assert isinstance(value, dict), f"not a JSON object: {choice}"
    return value


def json_schema(server: Server) -> None:
    fields: Any = {
        "messages": chat_messages(questions(1)[0]),
        "model": server.model,
        "temperature": 0,
        "max_tokens": JSON_TOKENS,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "stamp", "schema": SCHEMA, "strict": True},
        },
    }
    client = connect(server)
    choice = client.chat.completions.create(**fields).choices[0]
    assert choice.finish_reason == "stop", choice
    value = _object_in(choice)
    assert sorted(value) == ["pages", "stamp"], value
    assert value["stamp"] in SCHEMA["properties"]["stamp"]["enum"], value  # type: ignore[index]
    assert len(value["pages"]) <= 3, value
    assert all(isinstance(page, int) and 0 <= page <= 9 for page in value["pages"]), value
    streamed = "".join(
        part.delta.content or ""
        for chunk in client.chat.completions.create(**fields, stream=True)
        for part in chunk.choices
    )
    assert streamed == choice.message.content, (streamed, choice)


def parse(server: Server) -> None:
    client = connect(server)
    messages = chat_messages(questions(1)[0])
    answer = client.chat.completions.parse(
        model=server.model, messages=messages, temperature=0, max_tokens=JSON_TOKENS, response_format=Finding
    )
    found = answer.choices[0].message.parsed
    assert isinstance(found, Finding), answer
    with client.chat.completions.stream(
        model=server.model, messages=messages, temperature=0, max_tokens=JSON_TOKENS, response_format=Finding
    ) as events:
        last = events.until_done().get_final_completion()
    assert last.choices[0].message.parsed == found, (last, found)


def json_object(server: Server) -> None:
    answer = connect(server).chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Say the word apple."}],
        temperature=0,
        max_tokens=JSON_TOKENS,
        response_format={"type": "json_object"},
    )
    choice = answer.choices[0]
    text = choice.message.content or ""
    assert text.lstrip().startswith("{"), choice
    if choice.finish_reason == "stop":  # a small model may not find the end of its object
        _object_in(choice)


CHECKS = (json_schema, parse, json_object)
