"""The chat request as OpenAI's and vLLM's users send it, turned into `types.Request`.

Called by `api/app.py` in the router process. Looks at names, types and ranges only: media, tokens and lengths are the
router's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from triptych.api.body import convert
from triptych.api.call import Call
from triptych.api.chat_answer import ChatForm
from triptych.api.content import ChatMessage, read_messages
from triptych.api.fields import Caller, GenerationFields, Served
from triptych.api.generation import check_fields, read_request, read_shown
from triptych.api.sampling import MAX_LOGPROBS, Ids, given, in_range, read_max_tokens
from triptych.api.tools import Choice, Tool, read_tools
from triptych.api.unsupported import CHAT
from triptych.errors import BadRequestError, UnsupportedFieldError
from triptych.types import Request, ToolChoice

TEMPLATE_NAMES = frozenset(  # the chat template's own variables, which a request may not replace
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
    }
)


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    """Every field of a chat request that is implemented. null is the same as leaving a field out."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


def parse_chat(body: dict[str, Any], served: Served, caller: Caller) -> Call:
    """Raises MalformedRequestError, UnsupportedFieldError, BadRequestError or NotFoundError, naming the field."""
    chat = convert(body, ChatRequest)
    check_fields(body, chat, served, CHAT)
    ids = Ids("chatcmpl-", chat.request_id, caller)
    num_logprobs = _num_logprobs(chat)
    request = read_request(chat, served, caller, ids, read_limit(chat, served), num_logprobs)
    request = with_messages(request, chat, served)
    request = msgspec.structs.replace(
        request,
        parallel_tool_calls=given(chat.parallel_tool_calls, True),
        max_tokens_param="max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens",
    )
    if request.structure is not None and request.tool_choice is ToolChoice.REQUIRED:
        raise BadRequestError(
            f"`{request.structure.param}` excludes a `tool_choice` that demands a call.", param=request.structure.param
        )
    shown = read_shown(chat, served, ids, num_logprobs is not None)
    form = ChatForm(shown, _echoed(request) if chat.echo else "", request.n)
    return Call([request], form, bool(chat.stream), ids.header)


def with_messages(request: Request, chat: ChatRequest, served: Served) -> Request:
    """The request with its messages and all that the chat template reads. Raises BadRequestError naming the field."""
    messages, images = read_messages(chat.messages)
    offer = read_tools(chat.tools, chat.tool_choice)
    go_on = given(chat.continue_final_message, False)
    if go_on and chat.add_generation_prompt:
        raise BadRequestError(
            "`continue_final_message` and `add_generation_prompt` exclude each other.", param="continue_final_message"
        )
    if go_on and messages[-1].get("tool_calls"):
        raise BadRequestError(
            "`continue_final_message` cannot go on with one that has `tool_calls`.",
            param="continue_final_message",
        )
    if chat.chat_template is not None and not served.trust_chat_template:
        raise UnsupportedFieldError(
            "`chat_template` is taken from requests only with the server's setting `api.trust_request_chat_template`.",
            param="chat_template",
        )
    return msgspec.structs.replace(
        request,
        messages=messages,
        images=images,
        tools=offer.tools,
        tool_choice=offer.choice,
        forced_tool=offer.forced,
        add_generation_prompt=given(chat.add_generation_prompt, not go_on),
        continue_final_message=go_on,
        chat_template=given(chat.chat_template, ""),
        template_kwargs=_template_kwargs(chat.chat_template_kwargs),
        documents=given(chat.documents, []),
        processor_options=given(chat.mm_processor_kwargs, {}),
        media_options=given(chat.media_io_kwargs, {}),
    )


def read_limit(chat: ChatRequest, served: Served) -> int | None:
    """`max_completion_tokens` goes before the older `max_tokens`."""
    for field in ("max_completion_tokens", "max_tokens"):
        value = getattr(chat, field)
        if value is not None:
            return read_max_tokens(field, value, served)
    return None


def _num_logprobs(chat: ChatRequest) -> int | None:
    if chat.logprobs:
        return in_range("top_logprobs", given(chat.top_logprobs, 0), 0, MAX_LOGPROBS)
    if chat.top_logprobs:
        raise BadRequestError("`top_logprobs` needs `logprobs`: true.", param="top_logprobs")
    return None


def _template_kwargs(kwargs: dict[str, Any] | None) -> dict[str, object]:
    kwargs = kwargs or {}
    if taken := TEMPLATE_NAMES & kwargs.keys():
        names = ", ".join(sorted(taken))
        raise BadRequestError(f"`chat_template_kwargs` may not set {names}.", param="chat_template_kwargs")
    return dict(kwargs)


def _echoed(request: Request) -> str:
    """As in vLLM: the text of a last message that is the assistant's, which the answer goes on from."""
    last = request.messages[-1]
    if last["role"] != "assistant":
        return ""
    content = last["content"]
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content)
