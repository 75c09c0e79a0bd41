"""`/openapi.json`: the routes that clients call, with schemas made from the very structs that they are read with.

The workers' own routes are left out: they are for loopback peers of the same version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from triptych import __version__
from triptych.api import models, state, tokens
from triptych.api.body import json_response
from triptych.api.chat import ChatRequest
from triptych.api.chat_answer import ChatChunk, ChatCompletion
from triptych.api.completion_answer import Completion
from triptych.api.completions import CompletionRequest
from triptych.api.constraints import CONSTRAINTS
from triptych.api.errors import ErrorBody
from triptych.api.response_body import ResponseBody, TypedEvent
from triptych.api.responses import ResponsesRequest

REFUSALS = {
    400: "A field is wrong, or known and not implemented; `param` names it.",
    401: "No API key that this server knows.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too long.",
    429: "Too many requests of one client; `Retry-After` says when to ask again.",
    500: "A failure of the server.",
    503: "The server is full, stopping, or lacks a worker; `Retry-After` says when to ask again.",
    504: "Media did not arrive in time, or the request's deadline passed.",
}


class Operation(NamedTuple):
    """One method of one path. `answers` has the type of the body by status."""

    method: str
    path: str
    summary: str
    answers: Mapping[int, Any]
    body: tuple[Any, ...] = ()  # one of these
    events: Any = None  # of its stream, where it has one
    refusals: tuple[int, ...] = ()


_POST = tuple(REFUSALS)

OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "An answer to a chat", {200: ChatCompletion}, (ChatRequest,), ChatChunk, _POST
    ),
    Operation(
        "post", "/v1/completions", "A text that goes on", {200: Completion}, (CompletionRequest,), Completion, _POST
    ),
    Operation(
        "post", "/v1/responses", "An answer to items", {200: ResponseBody}, (ResponsesRequest,), TypedEvent, _POST
    ),
    Operation(
        "post",
        "/tokenize",
        "The tokens of a text or a chat",
        {200: tokens.Tokens},
        (tokens.TokenizeText, tokens.TokenizeChat),
        refusals=_POST,
    ),
    Operation(
        "post", "/detokenize", "The text of tokens", {200: tokens.Text}, (tokens.DetokenizeRequest,), refusals=_POST
    ),
    Operation("get", "/v1/models", "What is served", {200: models.ModelList}, refusals=(401,)),
    Operation("get", "/v1/models/{id}", "One model", {200: models.ModelCard}, refusals=(401, 404)),
    Operation("get", "/health", "Real work in every worker", {200: state.HealthBody, 503: state.HealthBody}),
    Operation("get", "/ready", "Every stage has a worker", {200: state.ReadyBody, 503: state.ReadyBody}),
    Operation("get", "/ping", "The server answers", {200: state.PingBody}),
    Operation("post", "/ping", "The server answers", {200: state.PingBody}),
    Operation("get", "/version", "The version of Triptych", {200: state.VersionBody}),
    Operation("get", "/load", "Requests in flight", {200: state.LoadBody}, refusals=(401,)),
    Operation("get", "/topology", "The workers", {200: state.TopologyBody}, refusals=(401,)),
    Operation("get", "/metrics", "Prometheus metrics", {200: str}),
    Operation("get", "/openapi.json", "This document", {200: dict[str, Any]}),
)


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    types = _types()
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, schemas, strict=True))
    for (name, field), constraint in CONSTRAINTS.items():
        _constrain(components[name]["properties"][field], constraint)
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Triptych", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def route() -> Route:
    body = document()

    async def openapi(request: Request) -> Response:
        return json_response(body)

    return Route("/openapi.json", openapi)


def _types() -> list[Any]:
    found: list[Any] = [ErrorBody]
    for operation in OPERATIONS:
        found += [*operation.answers.values(), *operation.body, operation.events]
    return list(dict.fromkeys(kind for kind in found if kind is not None))


def _constrain(schema: dict[str, Any], constraint: dict[str, Any]) -> None:
    """On the part of a field's schema that is not null."""
    parts = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    parts[0].update(constraint)


def _operation(operation: Operation, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {
        str(status): {"description": REFUSALS[status], **_json(schemas[ErrorBody])} for status in operation.refusals
    }
    for status, kind in operation.answers.items():
        media = "text/plain" if kind is str else "application/json"
        responses[str(status)] = {"description": operation.summary, **_json(schemas[kind], media)}
    if operation.events is not None:
        responses["200"]["content"]["text/event-stream"] = {"schema": _event(schemas[operation.events])}
    made: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if operation.body:
        bodies = [schemas[kind] for kind in operation.body]
        made["requestBody"] = {"required": True, **_json(bodies[0] if len(bodies) == 1 else {"anyOf": bodies})}
    if "{id}" in operation.path:
        made["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return made


def _event(schema: dict[str, Any]) -> dict[str, Any]:
    """One server-sent event by its fields. The last data of chat and completions is `[DONE]`, which is no JSON."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


def _json(schema: dict[str, Any], media: str = "application/json") -> dict[str, Any]:
    return {"content": {media: {"schema": schema}}}
