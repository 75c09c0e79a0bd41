"""Completions: prompts of every form, echo, the older log-probabilities, streams of several prompts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import TIMING
from tests.api.test_answers import payloads
from tests.api.test_errors import error_of
from triptych.api.tokens import OF_A_CHAT
from triptych.errors import EngineError
from triptych.types import (
    ChoiceFinished,
    Finished,
    FinishReason,
    ScoredToken,
    Started,
    TextDelta,
    TokenLogprobs,
    Usage,
)

ROUTE = "/v1/completions"
A, B, C = ScoredToken(97, b"a", -0.5), ScoredToken(98, b"b", -1.5), ScoredToken(99, b"cc", -2.5)
SCORED = [
    Started([120, 121], 1, 0, [None, TokenLogprobs(ScoredToken(121, b"y", -3.0), 4, [A])]),
    TextDelta("a", 1, [97], 0, [TokenLogprobs(A, 1, [A, B])]),
    TextDelta("cc", 2, [99], 0, [TokenLogprobs(C, 3, [A, B])]),
    ChoiceFinished(0, FinishReason.STOP, "x"),
    Finished(Usage(2, 2, 1), TIMING),
]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        (["hi", "you"], ["hi", "you"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_every_form_of_prompt(api: Any, prompt: object, prompts: list[object]) -> None:
    body = (await api.post(ROUTE, prompt=prompt, n=1, request_id="r")).json()
    assert [request.prompt for request in api.router.requests] == prompts
    assert len({request.request_id for request in api.router.requests}) == len(prompts)
    assert len({request.sampling.seed for request in api.router.requests}) == len(prompts)
    assert api.router.requests[0].max_tokens == 16
    assert (body["id"], body["object"]) == ("cmpl-r", "text_completion")
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
        (k, "a cat", "stop") for k in range(len(prompts))
    ]
    assert body["usage"]["completion_tokens"] == 3 * len(prompts)
    assert api.router.num_closed == len(prompts)


async def test_a_seed_is_the_same_for_every_prompt(api: Any) -> None:
    await api.post(ROUTE, prompt=["a", "b"], seed=5)
    assert [request.sampling.seed for request in api.router.requests] == [5, 5]


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({}, "Bad Request", "body.prompt"),
        ({"prompt": 3}, "Bad Request", "body.prompt"),
        ({"prompt": [1.5]}, "Bad Request", "body.prompt.0"),
        ({"prompt": []}, "BadRequestError", "prompt"),
        ({"prompt": ["a", 1]}, "BadRequestError", "prompt"),
        ({"prompt": [200]}, "BadRequestError", "prompt"),
        ({"prompt": [[1], [-1]]}, "BadRequestError", "prompt"),
        ({"prompt": ["a"] * 257}, "BadRequestError", "prompt"),
        ({"prompt": "a", "logprobs": 21}, "BadRequestError", "logprobs"),
        ({"prompt": "a", "logprobs": True}, "Bad Request", "body.logprobs"),
        ({"prompt": "a", "best_of": 2}, "BadRequestError", "best_of"),
        ({"prompt": "a", "suffix": "b"}, "BadRequestError", "suffix"),
        ({"prompt": "a", "max_tokens": 0}, "BadRequestError", "max_tokens"),
        ({"prompt": "a", "max_tokens": 101}, "BadRequestError", "max_tokens"),
        ({"prompt": "a", "use_beam_search": True}, "BadRequestError", "use_beam_search"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "BadRequestError", "prompt_logprobs"),
    ],
)
async def test_refused(api: Any, fields: dict[str, object], kind: str, param: str) -> None:
    assert error_of(await api.post(ROUTE, **fields)) == (400, kind, param)
    assert api.router.requests == []


async def test_best_of_as_many_as_are_asked_for(api: Any) -> None:
    assert (await api.post(ROUTE, prompt="a", n=2, best_of=2)).status_code == 200


async def test_logprobs_in_the_older_form(api: Any) -> None:
    api.router.script = SCORED
    (choice,) = (await api.post(ROUTE, prompt="xy", logprobs=2, return_token_ids=True)).json()["choices"]
    assert api.router.requests[0].sampling.num_prompt_logprobs is None
    assert choice["logprobs"] == {
        "tokens": ["a", "cc"],
        "token_logprobs": [-0.5, -2.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"a": -0.5, "b": -1.5, "cc": -2.5}],
        "text_offset": [0, 1],
    }
    assert (choice["token_ids"], choice["prompt_token_ids"], choice["stop_reason"]) == ([97, 99], [120, 121], "x")


async def test_echo_with_logprobs(api: Any) -> None:
    api.router.script = SCORED
    (choice,) = (await api.post(ROUTE, prompt="xy", logprobs=2, echo=True)).json()["choices"]
    assert api.router.requests[0].sampling.num_prompt_logprobs == 2
    assert choice["text"] == "xyacc"
    assert choice["logprobs"]["tokens"] == ["x", "y", "a", "cc"]
    assert choice["logprobs"]["token_logprobs"] == [None, -3.0, -0.5, -2.5]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"a": -0.5, "y": -3.0}]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert choice["prompt_logprobs"] is None


async def test_echo_alone(api: Any) -> None:
    """How evaluations score a text: nothing is generated."""
    api.router.script = SCORED
    body = (await api.post(ROUTE, prompt="xy", logprobs=1, echo=True, max_tokens=0)).json()
    (choice,) = body["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]) == ("xy", ["x", "y"], "length")
    assert body["usage"]["completion_tokens"] == 0
    assert api.router.requests[0].max_tokens == 1
    options = {"include_usage": True}
    chunks = payloads(await api.post(ROUTE, prompt="xy", echo=True, max_tokens=0, stream=True, stream_options=options))[
        :-1
    ]
    assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == "xy"
    assert chunks[-1]["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs(api: Any) -> None:
    api.router.script = SCORED
    (choice,) = (await api.post(ROUTE, prompt="xy", prompt_logprobs=1)).json()["choices"]
    assert choice["prompt_logprobs"][1]["121"] == {"logprob": -3.0, "rank": 4, "decoded_token": "y"}
    assert choice["logprobs"] is None


async def test_stream_of_several_prompts(api: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, done = payloads(await api.post(ROUTE, prompt=["a", "b"], stream=True, stream_options=options))
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in (0, 1):
        assert "".join(c["text"] for c in choices if c["index"] == index) == "a cat"
        assert [c["finish_reason"] for c in choices if c["index"] == index] == [None, None, "stop"]
    counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counted == sorted(counted)
    assert chunks[-1]["usage"]["total_tokens"] == 30
    assert (api.router.num_closed, api.router.num_cancelled) == (2, 0)


async def test_stream_with_echo_and_logprobs(api: Any) -> None:
    api.router.script = SCORED
    chunks = payloads(await api.post(ROUTE, prompt="xy", stream=True, echo=True, logprobs=2, return_token_ids=True))[
        :-1
    ]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "xyacc"
    assert [offset for c in choices if c["logprobs"] for offset in c["logprobs"]["text_offset"]] == [0, 1, 2, 3]
    assert choices[0]["prompt_token_ids"] == [120, 121]
    assert [c["token_ids"] for c in choices] == [None, [97], [99], None]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompt_that_fails_ends_all(api: Any, stream: bool) -> None:
    api.router.script = [EngineError("step")]
    response = await api.post(ROUTE, prompt=["a", "b"], stream=stream)
    assert error_of(response) == (500, "InternalServerError", None)


async def test_tokenize_text(api: Any) -> None:
    body = (await api.post("/tokenize", prompt="ab")).json()
    assert body == {"count": 2, "max_model_len": 100, "tokens": [97, 98], "token_strs": None}
    assert api.router.requests[0].add_special_tokens is None
    body = (await api.post("/tokenize", prompt="ab", return_token_strs=True, add_special_tokens=False)).json()
    assert body["token_strs"] == ["<97>", "<98>"]
    assert api.router.requests[1].add_special_tokens is False


async def test_tokenize_chat(api: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = (await api.post("/tokenize", messages=[{"role": "user", "content": [image]}])).json()
    assert (body["count"], body["tokens"]) == (2, [ord("1"), 7])
    assert (await api.post("/tokenize", messages=[], model="demo")).status_code == 400


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": 3}, "body.prompt"),
        ("/detokenize", {}, "body.tokens"),
        ("/detokenize", {"tokens": [200]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "body.tokens.0"),
    ],
)
async def test_tokens_refused(api: Any, path: str, fields: dict[str, object], param: str) -> None:
    status, _, named = error_of(await api.post(path, **fields))
    assert (status, named) == (400, param)


async def test_tokenize_cuts_the_prompt_as_the_answer_would(api: Any) -> None:
    messages = [{"role": "user", "content": "hi"}]
    response = await api.post("/tokenize", messages=messages, truncate_prompt_tokens=-1, max_tokens=40)
    assert response.status_code == 200
    await api.post("/tokenize", messages=messages, truncate_prompt_tokens=3, truncation_side="right")
    cuts = [(request.truncate_prompt_tokens, request.truncation_side) for request in api.router.requests]
    assert cuts == [(60, "left"), (3, "right")]
    response = await api.post("/tokenize", messages=messages, truncate_prompt_tokens=0)
    assert error_of(response) == (400, "BadRequestError", "truncate_prompt_tokens")


@pytest.mark.parametrize("field", sorted(OF_A_CHAT))
async def test_tokenize_of_a_text_has_no_fields_of_a_chat(api: Any, field: str) -> None:
    response = await api.post("/tokenize", prompt="ab", **{field: "anything"})
    assert error_of(response) == (400, "BadRequestError", field)
    for value in (None, *OF_A_CHAT[field]):
        assert (await api.post("/tokenize", prompt="ab", **{field: value})).status_code == 200


async def test_detokenize(api: Any) -> None:
    assert (await api.post("/detokenize", tokens=[97, 98])).json() == {"prompt": "ab"}
    assert error_of(await api.post("/detokenize", tokens=[1], model="x")) == (404, "NotFoundError", "model")
