"""The OpenAPI document: it is valid, it has every route and field, and what the API says agrees with it."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate
from starlette.routing import Route

from tests.api.conftest import FakeRouter, worker_info
from tests.api.test_answers import payloads
from tests.api.test_chat_answers import CALLS, TWO
from tests.api.test_completions import SCORED
from triptych.api.app import create_app
from triptych.api.chat import ChatRequest
from triptych.api.completions import CompletionRequest
from triptych.api.constraints import CONSTRAINTS
from triptych.api.openapi import document
from triptych.api.responses import ResponsesRequest
from triptych.api.tokens import DetokenizeRequest, TokenizeChat, TokenizeText
from triptych.config import Config
from triptych.errors import OverloadedError
from triptych.observe.metrics import Metrics

DOCUMENT: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document()))  # as clients see it


def check(value: object, schema: dict[str, Any]) -> None:
    OAS31Validator({**schema, "components": DOCUMENT["components"]}).validate(value)


def check_answer(response: httpx.Response) -> None:
    request = response.request
    path = "/v1/models/{id}" if request.url.path.startswith("/v1/models/") else request.url.path
    declared = DOCUMENT["paths"][path][request.method.lower()]["responses"]
    assert str(response.status_code) in declared, f"{path} does not declare {response.status_code}"
    content = declared[str(response.status_code)]["content"]
    media = response.headers["content-type"].partition(";")[0]
    assert media in content
    if media == "application/json":
        check(response.json(), content[media]["schema"])


def test_the_document_is_valid() -> None:
    validate(DOCUMENT)


async def test_it_is_served(api: Any) -> None:
    assert (await api.http.get("/openapi.json")).json() == DOCUMENT


def test_every_route_is_there_and_nothing_else() -> None:
    served = set()
    for route in create_app(FakeRouter(), Config(), Metrics()).routes:
        assert isinstance(route, Route)
        if not route.path.startswith("/workers/"):
            path = route.path.replace("{name:path}", "{id}")
            served |= {(path, method) for method in (route.methods or {"POST"}) if method != "HEAD"}
    declared = {(path, method.upper()) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert declared == served


@pytest.mark.parametrize(
    "struct",
    [ChatRequest, CompletionRequest, ResponsesRequest, TokenizeText, TokenizeChat, DetokenizeRequest],
)
def test_every_field_is_there_and_nothing_else(struct: type[msgspec.Struct]) -> None:
    assert set(DOCUMENT["components"]["schemas"][struct.__name__]["properties"]) == set(struct.__struct_fields__)


def test_constraints_are_on_fields_that_can_have_them() -> None:
    for name, field in CONSTRAINTS:
        schema = DOCUMENT["components"]["schemas"][name]["properties"][field]
        assert CONSTRAINTS[name, field].items() <= schema.items() or any(
            CONSTRAINTS[name, field].items() <= part.items() for part in schema["anyOf"]
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "logprobs": True, "prompt_logprobs": 1, "return_token_ids": True, "timing": True},
        {"stream": True},
        {"n": 0},
        {"model": "other"},
        {"messages": 3},
    ],
)
async def test_chat_answers_agree(api: Any, fields: dict[str, Any]) -> None:
    api.router.script = TWO
    check_answer(await api.chat(**fields))


async def test_other_answers_agree(api: Any) -> None:
    for path in ("/v1/models", "/v1/models/demo", "/v1/models/x", "/health", "/ready", "/ping", "/version", "/load"):
        check_answer(await api.http.get(path))
    api.router.registry.register(worker_info())
    for path in ("/topology", "/metrics", "/openapi.json"):
        check_answer(await api.http.get(path))
    check_answer(await api.post("/tokenize", prompt="a", return_token_strs=True))
    check_answer(await api.post("/tokenize"))
    check_answer(await api.post("/detokenize", tokens=[5]))
    api.router.is_ready = False
    check_answer(await api.http.get("/health"))
    check_answer(await api.http.get("/ready"))
    api.router.script = CALLS
    check_answer(await api.chat())
    check_answer(await api.post("/v1/responses", input="hi"))
    api.router.script = SCORED
    check_answer(await api.post("/v1/completions", prompt="hi", echo=True, logprobs=1, prompt_logprobs=1))
    api.router.refusal = OverloadedError("full")
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        check_answer(await api.post(path))


async def test_chunks_agree(api: Any) -> None:
    schema = {"$ref": "#/components/schemas/ChatChunk"}
    for script in (TWO, CALLS):
        api.router.script = script
        options = {"include_usage": True, "continuous_usage_stats": True}
        fields = {"logprobs": True, "return_token_ids": True, "n": 2, "timing": True}
        for chunk in payloads(await api.chat(stream=True, stream_options=options, **fields))[:-1]:
            check(chunk, schema)
