"""LangChain's `ChatOpenAI` against a server. `python -m tests.clients.langchain.run URL MODEL`."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.clients.script import JSON_TOKENS, MAX_TOKENS, Server, chat_content, questions, run, server_from_arguments

TEXT = "Count from 2 to 7."
TEXT_ANSWER = "2 3 4 5 6 7"


class Finding(BaseModel):
    """What is asked about a page."""

    colour: Literal["red", "green", "blue", "yellow"]
    count: Literal[0, 1, 2, 3, 4, 5]


@tool  # type: ignore[untyped-decorator]  # LangChain is not in the environment that checks types
def turn(clockwise: bool, times: Literal[1, 2, 3]) -> str:
    """Turn the page."""
    return f"turned {times} times {'right' if clockwise else 'left'}"


def connect(server: Server, **fields: Any) -> ChatOpenAI:
    fields = {"model": server.model, "temperature": 0, "max_tokens": MAX_TOKENS, "timeout": 120} | fields
    return ChatOpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0, **fields)


def invoke(server: Server) -> None:
    answer = connect(server).invoke([SystemMessage("Be short."), HumanMessage(TEXT)])
    assert isinstance(answer, AIMessage), answer
    assert isinstance(answer.content, str), answer
    answer = connect(server).invoke(TEXT)
    assert answer.content == TEXT_ANSWER, answer
    assert answer.response_metadata["finish_reason"] == "stop", answer
    assert answer.response_metadata["model_name"] == server.model, answer
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0, usage


def pictures(server: Server) -> None:
    chat = connect(server)
    asked = questions(4)
    answers = chat.batch([[HumanMessage(chat_content(question))] for question in asked])
    assert [answer.content for answer in answers] == [question.answer for question in asked], answers


def standard_picture_block(server: Server) -> None:
    """LangChain's own form of an image, which it turns into OpenAI's."""
    (question,) = questions(1)
    content: list[Any] = [
        {"type": "image", "mime_type": "image/png", "base64": part["image_url"]["url"].partition(",")[2]}
        if part["type"] == "image_url"
        else part
        for part in chat_content(question)
    ]
    answer = connect(server).invoke([HumanMessage(content)])
    assert answer.content == question.answer, (answer, question)


def stream(server: Server) -> None:
    (question,) = questions(1)
    chunks = list(connect(server, stream_usage=True).stream([HumanMessage(chat_content(question))]))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == question.answer, (whole, question)
    assert whole.usage_metadata["output_tokens"] > 0, whole
    assert whole.response_metadata["finish_reason"] == "stop", whole


def asynchronous(server: Server) -> None:
    async def ask() -> tuple[str, str]:
        chat = connect(server)
        whole = await chat.ainvoke(TEXT)
        return whole.content, "".join([chunk.content async for chunk in chat.astream(TEXT)])

    assert asyncio.run(ask()) == (TEXT_ANSWER, TEXT_ANSWER)


def several_choices(server: Server) -> None:
    result = connect(server, n=2).generate([[HumanMessage(TEXT)]])
    assert [choice.text for choice in result.generations[0]] == [TEXT_ANSWER, TEXT_ANSWER], result


def structured_output(server: Server) -> None:
    (question,) = questions(1)
    for method in ("json_schema", "function_calling"):
        chat = connect(server, max_tokens=JSON_TOKENS).with_structured_output(Finding, method=method, include_raw=True)
        found = chat.invoke([HumanMessage(chat_content(question))])
        assert found["parsing_error"] is None, found
        assert isinstance(found["parsed"], Finding), (method, found)


def tools(server: Server) -> None:
    """The call, what the tool said, and an answer to it; and the call again, as a stream."""
    messages: list[Any] = [HumanMessage("Turn the page.")]
    chat = connect(server, max_tokens=JSON_TOKENS).bind_tools([turn], tool_choice="turn")
    call = chat.invoke(messages)
    assert isinstance(call, AIMessage), call
    assert [made["name"] for made in call.tool_calls] == ["turn"], call
    (made,) = call.tool_calls
    said = turn.invoke(made)
    assert isinstance(said, ToolMessage), said
    assert said.content.startswith("turned"), said
    answer = connect(server).bind_tools([turn], tool_choice="none").invoke([*messages, call, said])
    assert not answer.tool_calls, answer
    assert isinstance(answer.content, str), answer

    chunks = list(chat.stream(messages))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [(streamed["name"], streamed["args"]) for streamed in whole.tool_calls] == [("turn", made["args"])], whole

    forced = connect(server, max_tokens=JSON_TOKENS).bind_tools([turn], tool_choice="any", parallel_tool_calls=False)
    assert [made["name"] for made in forced.invoke(messages).tool_calls] == ["turn"]


def responses(server: Server) -> None:
    (question,) = questions(1)
    answer = connect(server, use_responses_api=True).invoke([HumanMessage(chat_content(question))])
    assert answer.text == question.answer, (answer, question)


def errors(server: Server) -> None:
    for kind, fields in (
        (openai.BadRequestError, {"temperature": -1}),
        (openai.NotFoundError, {"model": "no-such-model"}),
    ):
        try:
            answer = connect(server, **fields).invoke(TEXT)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}, but an answer: {answer}")


if __name__ == "__main__":
    run(
        server_from_arguments(__doc__),
        (
            invoke,
            pictures,
            standard_picture_block,
            stream,
            asynchronous,
            several_choices,
            structured_output,
            tools,
            responses,
            errors,
        ),
    )
