"""Tool calls: required and named ones, whose arguments must fit their schema; auto and none; streamed; and the result.

The packaged model was not trained to call tools, so only calls that the server must bring about are asserted.
"""

from __future__ import annotations

import json
from typing import Any

from tests.clients.openai.connect import connect
from tests.clients.script import JSON_TOKENS, Server, chat_messages, data_url, questions

SHAPES = ["circle", "rectangle", "triangle", "star", "cross"]


def tool(name: str, **properties: Any) -> Any:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": f"{name} a page", "parameters": parameters}}


TOOLS = [
    tool("mark", page={"type": "integer", "minimum": 1, "maximum": 9}, shape={"type": "string", "enum": SHAPES}),
    tool("turn", clockwise={"type": "boolean"}),
]


def fits(name: str, arguments: str) -> None:
    """Raises AssertionError unless the arguments fit the schema of the tool of this name."""
    values = json.loads(arguments)
    if name == "mark":
        assert sorted(values) == ["page", "shape"], values
        assert isinstance(values["page"], int), values
        assert 1 <= values["page"] <= 9, values
        assert values["shape"] in SHAPES, values
    else:
        assert name == "turn", name
        assert list(values) == ["clockwise"], values
        assert isinstance(values["clockwise"], bool), values


def ask(server: Server, **fields: Any) -> Any:
    """The one choice of an answer about a picture."""
    answer = connect(server).chat.completions.create(
        model=server.model,
        messages=chat_messages(questions(1)[0]),
        temperature=0,
        max_tokens=JSON_TOKENS,
        tools=TOOLS,
        **fields,
    )
    return answer.choices[0]


def only_call(choice: Any) -> Any:
    calls = choice.message.tool_calls or []
    assert len(calls) == 1, f"not one tool call: {choice}"
    return calls[0]


def tool_required(server: Server) -> None:
    choice = ask(server, tool_choice="required", parallel_tool_calls=False)
    call = only_call(choice)
    assert call.type == "function", choice
    assert call.id, choice
    fits(call.function.name, call.function.arguments)
    assert choice.finish_reason in ("tool_calls", "stop"), choice
    assert not choice.message.content, choice


def tool_named(server: Server) -> None:
    for name in ("mark", "turn"):
        choice = ask(server, tool_choice={"type": "function", "function": {"name": name}})
        call = only_call(choice)
        assert call.function.name == name, choice
        fits(call.function.name, call.function.arguments)
        assert choice.finish_reason in ("tool_calls", "stop"), choice


def tool_auto_and_none(server: Server) -> None:
    choice = ask(server, tool_choice="auto")
    if choice.message.tool_calls:
        assert choice.finish_reason in ("tool_calls", "length"), choice
        for call in choice.message.tool_calls:
            assert call.function.name in ("mark", "turn"), choice
    else:
        assert isinstance(choice.message.content, str), choice
        assert choice.finish_reason in ("stop", "length"), choice
    choice = ask(server, tool_choice="none")
    assert not choice.message.tool_calls, choice
    assert isinstance(choice.message.content, str), choice


def tool_stream(server: Server) -> None:
    for tool_choice in ("required", {"type": "function", "function": {"name": "mark"}}):
        chunks: Any = ask_stream(server, tool_choice)
        calls: dict[int, dict[str, str]] = {}
        ends = []
        for chunk in chunks:
            for choice in chunk.choices:
                ends += [choice.finish_reason] if choice.finish_reason else []
                for part in choice.delta.tool_calls or []:
                    call = calls.setdefault(part.index, {"id": "", "name": "", "arguments": ""})
                    call["id"] += part.id or ""
                    call["name"] += part.function.name or ""
                    call["arguments"] += part.function.arguments or ""
        assert calls, f"no tool calls in the stream: {[chunk.choices for chunk in chunks]}"
        assert sorted(calls) == list(range(len(calls))), calls
        for call in calls.values():
            assert call["id"], calls
            fits(call["name"], call["arguments"])
        assert len(ends) == 1, ends
        assert ends[0] in ("tool_calls", "stop"), ends


def ask_stream(server: Server, tool_choice: Any) -> list[Any]:
    return list(
        connect(server).chat.completions.create(
            model=server.model,
            messages=chat_messages(questions(1)[0]),
            temperature=0,
            max_tokens=JSON_TOKENS,
            tools=TOOLS,
            tool_choice=tool_choice,
            parallel_tool_calls=False,
            stream=True,
        )
    )


def tool_result(server: Server) -> None:
    """The whole exchange: the call goes back with what the tool said, text and a picture, and the model answers."""
    question = questions(1)[0]
    messages = chat_messages(question)
    picture = {"type": "image_url", "image_url": {"url": data_url(question.images[0])}}
    call = only_call(ask(server, tool_choice="required", parallel_tool_calls=False))
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "The next page:"}, picture]},
        {"role": "user", "content": question.text},
    ]
    answer = connect(server).chat.completions.create(
        model=server.model, messages=messages, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=16
    )
    assert isinstance(answer.choices[0].message.content, str), answer


CHECKS = (tool_required, tool_named, tool_auto_and_none, tool_stream, tool_result)
