"""P1 to P7, M15 and M16 of the API over HTTP against real processes, split and in one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from tests.deployment.conftest import chat, image_part
from triptych.config import Config
from triptych.launch import Deployment
from triptych.placement import Placement

CHAT = "/v1/chat/completions"


@pytest_asyncio.fixture(params=["EPD", "1E/1P/1D"])
async def http(config: Config, request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    config = msgspec.structs.replace(
        config,
        router=msgspec.structs.replace(config.router, heartbeat_s=0.2),
        media=msgspec.structs.replace(config.media, max_images=2),
    )
    async with (
        Deployment(config, Placement.parse(request.param)) as deployment,
        httpx.AsyncClient(base_url=deployment.url, timeout=120, trust_env=False) as client,
    ):
        yield client


async def counters(http: httpx.AsyncClient) -> dict[str, float]:
    """Of all workers together, from heartbeats that followed the call."""
    await asyncio.sleep(0.5)
    found: dict[str, float] = {}
    for worker in (await http.get("/topology")).json()["workers"]:
        for name, value in worker["counters"].items():
            found[name] = found.get(name, 0) + value
    return found


async def ask(http: httpx.AsyncClient, *parts: Any, **fields: Any) -> dict[str, Any]:
    response = await http.post(CHAT, json=chat(*parts, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def refused(http: httpx.AsyncClient, body: dict[str, object]) -> tuple[int, str | None, str]:
    response = await http.post(CHAT, json=body)
    error = response.json()["error"]
    return response.status_code, error["param"], error["message"]


async def test_three_choices_of_one_encode_and_one_prefill(http: httpx.AsyncClient) -> None:
    before = await counters(http)
    answer = await ask(http, image_part(1), "what is it", n=3, temperature=0.8, max_tokens=12, seed=1)
    after = await counters(http)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    assert answer["usage"]["completion_tokens"] == 36
    assert after["encode_items_total"] - before.get("encode_items_total", 0) == 1
    computed = after["prompt_tokens_computed_total"] - before.get("prompt_tokens_computed_total", 0)
    prompt = answer["usage"]["prompt_tokens"]
    assert prompt <= computed < 2 * prompt, "siblings read the blocks that the first choice filled"

    body = chat(image_part(1), "what is it", n=3, temperature=0.8, max_tokens=12, seed=1, stream=True)
    texts = ["", "", ""]
    async with http.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in answer["choices"]]


async def test_one_token(http: httpx.AsyncClient) -> None:
    answer = await ask(http, "hi", max_tokens=1)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (1, "length")
    response = await http.post(CHAT, json=chat("hi", max_tokens=1, stream=True, return_token_ids=True))
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert sum(len(choice.get("token_ids", [])) for choice in choices) == 1
    assert choices[-1]["finish_reason"] == "length"


async def test_logprobs_of_output_and_prompt(http: httpx.AsyncClient) -> None:
    fields = {"max_tokens": 6, "logprobs": True, "top_logprobs": 3, "prompt_logprobs": 1, "return_token_ids": True}
    answer = await ask(http, image_part(2), "what is it", **fields)
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"]) == 6
    for entry in content:
        top = entry["top_logprobs"]
        assert len(top) == 3
        assert [each["logprob"] for each in top] == sorted((each["logprob"] for each in top), reverse=True)
        assert (entry["token"], entry["logprob"]) == (top[0]["token"], top[0]["logprob"]), "greedy takes the likeliest"
    prompt = answer["prompt_logprobs"]
    assert len(prompt) == answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    assert prompt[0] is None
    for token_id, entries in zip(answer["prompt_token_ids"][1:], prompt[1:], strict=True):
        assert str(token_id) in entries
        assert min(entry["rank"] for entry in entries.values()) == 1
        assert len(entries) in (1, 2)


async def test_cached_tokens_are_what_prefill_saw(http: httpx.AsyncClient) -> None:
    first = await ask(http, image_part(3), "what is it")
    second = await ask(http, image_part(3), "what is it not")
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["usage"]["prompt_tokens"]
    assert cached % 16 == 0, "whole blocks"


async def test_refused_once_and_before_any_byte_of_a_stream(http: httpx.AsyncClient) -> None:
    status, param, _ = await refused(http, chat("hi", max_tokens=10**6, stream=True))
    assert (status, param) == (400, "max_tokens")
    status, param, message = await refused(http, chat("hi", stop_token_ids=[10**6]))
    assert (status, param) == (400, "stop_token_ids")
    assert "1000000" in message
    fields: dict[str, Any] = {"use_beam_search": True, "logprob_token_ids": [5], "reasoning_effort": "high"}
    for field, value in fields.items():
        status, param, message = await refused(http, chat("hi", **{field: value}))
        assert (status, param) == (400, field)
        assert field in message
    text = (await http.get("/metrics")).text
    assert 'triptych:request_failure_total{error="BadRequestError"} 2.0' in text, "each was tried once"


async def test_an_image_in_a_tool_message(http: httpx.AsyncClient) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [image_part(4)]},
    ]
    answer = await ask(http, "", messages=messages)
    assert answer["usage"]["prompt_tokens_details"]["multimodal_tokens"]["image"] > 0


async def test_images_of_all_turns_count_against_the_limit(http: httpx.AsyncClient) -> None:
    messages: list[dict[str, object]] = []
    for turn in range(3):
        messages.append({"role": "user", "content": [image_part(turn)]})
        messages.append({"role": "assistant", "content": "yes"})
    status, param, message = await refused(http, chat("", messages=messages))
    assert (status, param) == (400, "messages")
    assert "3 images" in message
    assert "limit is 2" in message
    assert (await ask(http, "", messages=messages[:4]))["choices"]


async def test_completions_continue_a_text_in_every_form(http: httpx.AsyncClient) -> None:
    fields = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    tokens = (await http.post("/tokenize", json={"prompt": "what is"})).json()["tokens"]
    prompts: list[Any] = ["what is", ["what is", "who"], tokens, [tokens, tokens]]
    answers = [(await http.post("/v1/completions", json={"prompt": p, **fields})).json() for p in prompts]
    first = answers[0]["choices"][0]
    assert first["prompt_token_ids"] == tokens
    for answer in answers[1:]:
        assert answer["choices"][0]["token_ids"] == first["token_ids"]
    text = (await http.post("/detokenize", json={"tokens": first["token_ids"]})).json()["prompt"]
    assert text.startswith(first["text"].rstrip("\ufffd"))
