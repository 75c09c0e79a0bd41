"""Answers of several choices, with log-probabilities, token ids, tool calls and running usage."""

from __future__ import annotations

from typing import Any

from tests.api.conftest import TIMING
from tests.api.test_answers import payloads
from triptych.types import (
    ChoiceFinished,
    Finished,
    FinishReason,
    ScoredToken,
    Started,
    TextDelta,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
)

A, B = ScoredToken(97, b"a", -0.5), ScoredToken(98, b"b", -1.5)
HALF = ScoredToken(130, b"\xc3", float("-inf"))
STARTED = Started([1, 2], 1, 0, [None, TokenLogprobs(A, 3, [B])])
TWO = [
    STARTED,
    TextDelta("a", 1, [97], 0, [TokenLogprobs(A, 1, [A, B])]),
    TextDelta("b", 1, [98], 1, [TokenLogprobs(B, 2, [A])]),
    TextDelta("", 2, [130], 1, [TokenLogprobs(HALF, 9, [])]),
    ChoiceFinished(1, FinishReason.STOP, "x"),
    ChoiceFinished(0, FinishReason.LENGTH, None),
    Finished(Usage(2, 3, 1), TIMING),
]
CALLS = [
    STARTED,
    TextDelta("so", 1),
    ToolCallDelta(0, 0, "call_1", "f", ""),
    ToolCallDelta(0, 0, "", "", '{"a":'),
    ToolCallDelta(0, 0, "", "", "1}"),
    ToolCallDelta(0, 1, "call_2", "g", "{}"),
    ChoiceFinished(0, FinishReason.TOOL_CALLS, None),
    Finished(Usage(2, 9), TIMING),
]
SCORED_A = {"token": "a", "logprob": -0.5, "bytes": [97]}
SCORED_B = {"token": "b", "logprob": -1.5, "bytes": [98]}


async def test_choices_stand_in_the_order_of_their_indices(api: Any) -> None:
    api.router.script = TWO
    body = (await api.chat(n=2)).json()
    assert [(c["index"], c["message"]["content"], c["finish_reason"], c["stop_reason"]) for c in body["choices"]] == [
        (0, "a", "length", None),
        (1, "b", "stop", "x"),
    ]
    assert [(c["logprobs"], c["token_ids"]) for c in body["choices"]] == [(None, None)] * 2
    assert (body["usage"]["completion_tokens"], body["prompt_token_ids"]) == (3, None)


async def test_logprobs(api: Any) -> None:
    api.router.script = TWO
    body = (await api.chat(n=2, logprobs=True, top_logprobs=2, prompt_logprobs=1, return_token_ids=True)).json()
    first, second = (choice["logprobs"]["content"] for choice in body["choices"])
    assert first == [SCORED_A | {"top_logprobs": [SCORED_A, SCORED_B]}]
    assert second == [
        SCORED_B | {"top_logprobs": [SCORED_A]},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [195], "top_logprobs": []},
    ]
    assert [choice["token_ids"] for choice in body["choices"]] == [[97], [98, 130]]
    assert body["prompt_token_ids"] == [1, 2]
    assert body["prompt_logprobs"] == [
        None,
        {
            "97": {"logprob": -0.5, "rank": 3, "decoded_token": "a"},
            "98": {"logprob": -1.5, "rank": 1, "decoded_token": "b"},
        },
    ]


async def test_tokens_as_ids(api: Any) -> None:
    api.router.script = TWO
    body = (await api.chat(n=2, logprobs=True, return_tokens_as_token_ids=True)).json()
    assert body["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:97"


async def test_stream_of_choices_with_running_usage(api: Any) -> None:
    api.router.script = TWO
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, done = payloads(await api.chat(n=2, stream=True, stream_options=options))
    assert done == "[DONE]"
    got = [
        (c["index"], c["delta"].get("content"), c["finish_reason"], chunk["usage"]["completion_tokens"])
        for chunk in chunks[:-1]
        for c in chunk["choices"]
    ]
    assert got == [
        (0, "", None, 0), (1, "", None, 0), (0, "a", None, 1), (1, "b", None, 2), (1, None, "stop", 3),
        (0, None, "length", 3),
    ]  # fmt: skip
    assert [chunk["usage"]["prompt_tokens"] for chunk in chunks] == [2] * len(chunks)
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], 3)


async def test_stream_with_logprobs_has_a_chunk_for_a_token_without_text(api: Any) -> None:
    api.router.script = TWO
    chunks = payloads(await api.chat(n=2, stream=True, logprobs=True, return_token_ids=True))[:-1]
    assert chunks[0]["prompt_token_ids"] == [1, 2]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    texts = [c for chunk in chunks[2:-2] for c in chunk["choices"]]
    assert [(c["delta"]["content"], c["token_ids"]) for c in texts] == [("a", [97]), ("b", [98]), ("", [130])]
    assert texts[0]["logprobs"]["content"] == [SCORED_A | {"top_logprobs": [SCORED_A, SCORED_B]}]


async def test_tool_calls(api: Any) -> None:
    api.router.script = CALLS
    (choice,) = (await api.chat()).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "so"
    assert choice["message"]["tool_calls"] == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
        {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    api.router.script = [CALLS[0], *CALLS[2:]]
    (choice,) = (await api.chat()).json()["choices"]
    assert choice["message"]["content"] is None, "nothing was said beside the call"


async def test_tool_calls_streamed(api: Any) -> None:
    api.router.script = CALLS
    chunks = payloads(await api.chat(stream=True))[:-1]
    parts = [c["delta"]["tool_calls"] for chunk in chunks for c in chunk["choices"] if "tool_calls" in c["delta"]]
    assert parts == [
        [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"a":'}}],
        [{"index": 0, "function": {"arguments": "1}"}}],
        [{"index": 1, "id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}}],
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_echo_of_the_assistants_own_beginning(api: Any) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So "}]
    body = (await api.chat(messages=messages, echo=True)).json()
    assert body["choices"][0]["message"]["content"] == "So a cat"
    chunks = payloads(await api.chat(messages=messages, echo=True, stream=True))[:-1]
    assert "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]) == "So a cat"
    assert (await api.chat(echo=True)).json()["choices"][0]["message"]["content"] == "a cat"
