"""LiteLLM against a server, as its provider `openai/`. `python -m tests.clients.litellm.run URL MODEL`."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network for prices as it is imported

import litellm

from tests.clients.script import JSON_TOKENS, MAX_TOKENS, Server, chat_messages, questions, run, server_from_arguments

litellm.suppress_debug_info = True  # its advertisements, between the checks

TEXT: list[Any] = [{"role": "user", "content": "Count from 2 to 7."}]
TEXT_ANSWER = "2 3 4 5 6 7"
TOOL = {
    "type": "function",
    "function": {
        "name": "turn",
        "description": "Turn the page.",
        "parameters": {
            "type": "object",
            "properties": {"clockwise": {"type": "boolean"}},
            "required": ["clockwise"],
            "additionalProperties": False,
        },
    },
}


def _fields(server: Server, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": f"openai/{server.model}",
        "api_base": server.base_url,
        "api_key": server.api_key,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "num_retries": 0,
        "max_retries": 0,
        "timeout": 120,
    } | fields


def ask(server: Server, **fields: Any) -> Any:
    return litellm.completion(**_fields(server, {"messages": TEXT} | fields))


def completion(server: Server) -> None:
    answer = ask(server)
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (TEXT_ANSWER, "stop"), answer
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 0, answer


def pictures(server: Server) -> None:
    for question in questions(4):
        answer = ask(server, messages=chat_messages(question))
        assert answer.choices[0].message.content == question.answer, (answer, question)


def stream(server: Server) -> None:
    (question,) = questions(1)
    messages = chat_messages(question)
    chunks = list(ask(server, messages=messages, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == question.answer, (chunks, question)
    whole = litellm.stream_chunk_builder(chunks, messages=messages)
    assert whole.choices[0].message.content == question.answer, whole
    assert whole.usage.completion_tokens > 0, whole


def asynchronous(server: Server) -> None:
    async def ask_all() -> list[str]:
        answers = await asyncio.gather(
            *(litellm.acompletion(**_fields(server, {"messages": chat_messages(question)})) for question in asked)
        )
        return [answer.choices[0].message.content for answer in answers]

    asked = questions(4)
    assert asyncio.run(ask_all()) == [question.answer for question in asked]


def several_choices(server: Server) -> None:
    answer = ask(server, n=2)
    assert [choice.message.content for choice in answer.choices] == [TEXT_ANSWER, TEXT_ANSWER], answer


def plain_completion(server: Server) -> None:
    prompt = "<|im_start|>user\nCount from 2 to 7.<|im_end|>\n<|im_start|>assistant\n"
    fields = _fields(server, {"prompt": prompt, "model": f"text-completion-openai/{server.model}"})
    answer = litellm.text_completion(**fields)
    assert answer.choices[0].text == TEXT_ANSWER, answer


def tools(server: Server) -> None:
    answer = ask(server, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=JSON_TOKENS)
    calls = answer.choices[0].message.tool_calls or []
    assert [call.function.name for call in calls] == ["turn"], answer
    assert list(json.loads(calls[0].function.arguments)) == ["clockwise"], answer


def structured_output(server: Server) -> None:
    schema = TOOL["function"]["parameters"]  # type: ignore[index]
    response_format = {"type": "json_schema", "json_schema": {"name": "turn", "schema": schema, "strict": True}}
    answer = ask(server, response_format=response_format, max_tokens=JSON_TOKENS)
    content = answer.choices[0].message.content
    assert content.startswith("{"), answer
    assert list(json.loads(content)) == ["clockwise"], answer


def errors(server: Server) -> None:
    for kind, fields in (
        (litellm.BadRequestError, {"temperature": -1}),
        (litellm.NotFoundError, {"model": "openai/no-such-model"}),
    ):
        try:
            answer = ask(server, **fields)
        except kind:
            continue
        raise AssertionError(f"no {kind.__name__}, but an answer: {answer}")


if __name__ == "__main__":
    run(
        server_from_arguments(__doc__),
        (
            completion,
            pictures,
            stream,
            asynchronous,
            several_choices,
            plain_completion,
            tools,
            structured_output,
            errors,
        ),
    )
