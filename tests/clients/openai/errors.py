"""Each mistake gives the SDK's own exception for it, with the field that is wrong; and the next request works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai

from tests.clients.openai.connect import connect
from tests.clients.script import Server

TEXT: list[Any] = [{"role": "user", "content": "What is 2 plus 3?"}]


def _error(call: Callable[..., Any], fields: dict[str, Any]) -> openai.APIStatusError:
    try:
        answer = call(**fields)
    except openai.APIStatusError as error:
        return error
    raise AssertionError(f"no error, but an answer: {answer!r}")


def _raises(kind: type[openai.APIStatusError], call: Callable[..., Any], **fields: Any) -> dict[str, Any]:
    """The error's body, after looking at its shape."""
    error = _error(call, fields)
    assert type(error) is kind, f"{type(error).__name__} instead of {kind.__name__}: {error}"
    body = error.body
    assert isinstance(body, dict), f"not an error body: {body!r}"
    assert {"message", "type", "param", "code"} <= body.keys(), body
    assert body["message"], body
    assert error.response.headers["content-type"].startswith("application/json"), error.response.headers
    return body


def bad_requests(server: Server) -> None:
    create = connect(server).chat.completions.create

    def bad(param: str, **fields: Any) -> None:
        fields = {"model": server.model, "messages": TEXT} | fields
        for stream in (False, True):
            body = _raises(openai.BadRequestError, create, **fields, stream=stream)
            assert param in (body["param"] or ""), (param, body)

    bad("temperature", temperature=-1)
    bad("max_tokens", max_tokens=10**6)
    bad("top_p", top_p=1.5)
    bad("stop", stop=["a", "b", "c", "d", "e"])
    bad("messages", messages=[])
    bad("messages", messages=[{"role": "narrator", "content": "once"}])
    bad("tool_choice", tool_choice="required")
    for url in ("data:image/png;base64,AAAA", "file:///etc/hostname", "http://127.0.0.1:9/a.png", "nonsense"):
        bad("", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])


def not_found(server: Server) -> None:
    client, model = connect(server), "no-such-model"
    body = _raises(openai.NotFoundError, client.chat.completions.create, model=model, messages=TEXT)
    assert body["param"] == "model", body
    _raises(openai.NotFoundError, client.completions.create, model=model, prompt="a")
    _raises(openai.NotFoundError, client.responses.create, model=model, input="a")
    _raises(openai.NotFoundError, client.models.retrieve, model=model)


def wrong_key(server: Server) -> None:
    for key in ("not-the-key", f"{server.api_key}x"):
        client = connect(server, key)
        _raises(openai.AuthenticationError, client.models.list)
        _raises(openai.AuthenticationError, client.chat.completions.create, model=server.model, messages=TEXT)


def request_ids(server: Server) -> None:
    client = connect(server)
    answer = client.chat.completions.create(model=server.model, messages=TEXT, max_tokens=4)
    assert answer._request_id, "no x-request-id"
    raw = client.chat.completions.with_raw_response.create(
        model=server.model, messages=TEXT, max_tokens=4, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1", raw.headers


def still_answers(server: Server) -> None:
    answer = connect(server).chat.completions.create(model=server.model, messages=TEXT, temperature=0, max_tokens=8)
    assert answer.choices[0].message.content == "5", answer


CHECKS = (bad_requests, not_found, wrong_key, request_ids, still_answers)
