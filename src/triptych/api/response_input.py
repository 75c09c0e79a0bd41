"""What `/v1/responses` takes as `input`: a text, or items, turned into chat messages and their images."""

from __future__ import annotations

from typing import Any

from triptych.api.body import convert, one_of
from triptych.api.content import ChatMessage, read_arguments, read_message
from triptych.errors import BadRequestError, MalformedRequestError, UnsupportedFieldError
from triptych.types import ImageInput

ITEMS = ("message", "function_call", "function_call_output")
REFUSED_ITEMS = (
    "item_reference", "reasoning", "compaction", "file_search_call", "computer_call", "computer_call_output",
    "web_search_call", "image_generation_call", "code_interpreter_call", "local_shell_call",
    "local_shell_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call",
    "custom_tool_call", "custom_tool_call_output",
)  # fmt: skip

Message = dict[str, object]


def read_input(given: str | list[dict[str, Any]], instructions: str | None) -> tuple[list[Message], list[ImageInput]]:
    """Messages as the chat template takes them, and their images in order. Raises BadRequestError naming the item."""
    images: list[ImageInput] = []
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}], images
    if not given:
        raise BadRequestError("`input` must not be empty.", param="input")
    for k, item in enumerate(given):
        _add(messages, item, f"input.{k}", images)
    return messages, images


def _add(messages: list[Message], item: dict[str, Any], at: str, images: list[ImageInput]) -> None:
    kind = item.get("type")
    if kind is None or kind == "message":
        messages.append(read_message(_chat_message(item, at), at, images))
    elif kind == "function_call":
        _add_call(messages, item, at)
    elif kind == "function_call_output":
        fields = {"role": "tool", "content": item.get("output"), "tool_call_id": _text(item, "call_id", at)}
        messages.append(read_message(_chat_message(fields, at, "output"), at, images, "output"))
    elif kind in REFUSED_ITEMS:
        raise UnsupportedFieldError(f"Input items of type `{kind}` are not implemented.", param=at)
    else:
        raise BadRequestError(f"`{at}.type` must be {one_of(ITEMS)}, not {str(kind)[:40]!r}.", param=at)


def _chat_message(item: dict[str, Any], at: str, content: str = "content") -> ChatMessage:
    """`content` is what the client calls it."""
    fields = {name: item.get(name) for name in ("role", "content", "tool_call_id")}
    try:
        return convert({name: value for name, value in fields.items() if value is not None}, ChatMessage)
    except MalformedRequestError as error:
        field = (error.param or "").removeprefix("body.")
        place = f"{at}.{field.replace('content', content, 1)}"
        message = error.message.replace(f"`{field}`", f"`{place}`", 1)
        raise MalformedRequestError(message, param=f"body.{place}") from error


def _add_call(messages: list[Message], item: dict[str, Any], at: str) -> None:
    """To the assistant's message that stands before it, or to one of its own: calls of one turn are one message."""
    if not isinstance(item.get("arguments"), str | dict):
        raise MalformedRequestError(f"`{at}.arguments` must be JSON as text.", param=f"body.{at}.arguments")
    arguments = read_arguments(item["arguments"], f"{at}.arguments")
    function = {"name": _text(item, "name", at), "arguments": arguments}
    call = {"id": _text(item, "call_id", at), "type": "function", "function": function}
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant":
        earlier = last.get("tool_calls", [])
        assert isinstance(earlier, list)
        messages[-1] = {**last, "tool_calls": [*earlier, call]}
    else:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _text(item: dict[str, Any], field: str, at: str) -> str:
    value = item.get(field)
    if not isinstance(value, str) or not value:
        raise MalformedRequestError(f"`{at}.{field}` must be a string.", param=f"body.{at}.{field}")
    return value
