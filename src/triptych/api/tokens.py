"""`/tokenize` and `/detokenize` in vLLM's form: how a prompt, or a chat with its images, becomes tokens, and back."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from triptych.api.body import convert, json_response
from triptych.api.chat import ChatRequest, read_limit, with_messages
from triptych.api.edge import caller_of
from triptych.api.endpoint import ApiParts
from triptych.api.fields import Served
from triptych.api.sampling import check_model, check_tokens, given, read_truncation
from triptych.api.unsupported import ABSENT, refuse_unsupported
from triptych.errors import BadRequestError
from triptych.types import Request, SamplingParams


class TokenizeText(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


OF_A_CHAT = {  # fields of a prompt that `TokenizeText` lacks
    field: ABSENT.get(field, ())
    for field in (
        "tools", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
        "documents", "mm_processor_kwargs", "media_io_kwargs", "truncate_prompt_tokens", "truncation_side",
    )
}  # fmt: skip


class TokenizeChat(ChatRequest, frozen=True, kw_only=True):
    """A chat request; what it says of its output is ignored."""

    return_token_strs: bool | None = None


class Tokens(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class Text(msgspec.Struct, frozen=True):
    prompt: str


def routes(parts: ApiParts) -> list[Route]:
    async def _read(http: HttpRequest, inside: ExitStack) -> dict[str, Any]:
        with parts.admission.arrive():
            body = await parts.bodies.read_json(http)
            inside.enter_context(parts.admission.enter())
        return body

    async def tokenize(http: HttpRequest) -> Response:
        with ExitStack() as inside:
            body = await _read(http, inside)
            served = parts.served()
            request, wants_strings = _request(body, served)
            request = msgspec.structs.replace(request, client=caller_of(http.scope).client)
            ids = (await parts.router.lay_out(request)).token_ids
            strings = [served.vocabulary.name(token_id) for token_id in ids] if wants_strings else None
            return json_response(Tokens(len(ids), served.max_model_len, ids, strings))

    async def detokenize(http: HttpRequest) -> Response:
        with ExitStack() as inside:
            asked = convert(await _read(http, inside), DetokenizeRequest)
            served = parts.served()
            check_model(asked.model, served)
            check_tokens("tokens", asked.tokens, served)
            return json_response(Text(served.vocabulary.decode(asked.tokens)))

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


def _request(body: dict[str, Any], served: Served) -> tuple[Request, bool]:
    """A request that is laid out and never run, and whether the tokens' names are wanted."""
    if ("messages" in body) == ("prompt" in body):
        raise BadRequestError("either `prompt` or `messages` must be there, and not both.", param="prompt")
    empty = Request("tokenize", [], [], SamplingParams())
    if "messages" in body:
        chat = convert(body, TokenizeChat)
        check_model(chat.model, served)
        request = msgspec.structs.replace(
            empty,
            add_special_tokens=chat.add_special_tokens,
            truncate_prompt_tokens=read_truncation(chat, read_limit(chat, served), served),
            truncation_side=given(chat.truncation_side, "left"),
        )
        return with_messages(request, chat, served), given(chat.return_token_strs, False)
    asked = convert(body, TokenizeText)
    check_model(asked.model, served)
    refuse_unsupported(body, OF_A_CHAT)
    request = msgspec.structs.replace(empty, prompt=asked.prompt, add_special_tokens=asked.add_special_tokens)
    return request, given(asked.return_token_strs, False)
