"""Chat messages: from OpenAI's and vLLM's many forms of content to the one form that the chat template reads.

Called by `api/chat.py` in the router process. Images are taken out in the order in which they stand; an image part
that stays behind is `{"type": "image"}`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from triptych.api.body import one_of
from triptych.errors import BadRequestError, MalformedRequestError, UnsupportedFieldError
from triptych.types import ImageInput

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
IMAGE_PARTS = ("image_url", "input_image")
DETAILS = ("auto", "low", "high", "original")
UNSUPPORTED_PARTS = (
    "video_url", "input_video", "audio_url", "input_audio", "image_embeds", "audio_embeds", "video_embeds",
    "prompt_embeds", "image_pil", "thinking", "tool_reference", "file", "input_file",
)  # fmt: skip

Part = str | dict[str, Any]


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a request's `messages`. Fields that are not named here are ignored."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


def read_messages(messages: list[ChatMessage]) -> tuple[list[dict[str, object]], list[ImageInput]]:
    """The messages as the chat template takes them, and their images in order."""
    if not messages:
        raise BadRequestError("`messages` must not be empty.", param="messages")
    images: list[ImageInput] = []
    return [read_message(message, f"messages.{k}", images) for k, message in enumerate(messages)], images


def read_message(message: ChatMessage, at: str, images: list[ImageInput], field: str = "content") -> dict[str, object]:
    """`at` is where the request has it, and its content in `field`; its images are added to `images`."""
    if message.role not in ROLES:
        raise BadRequestError(f"`{at}.role` must be {one_of(ROLES)}.", param=f"{at}.role")
    role = "system" if message.role == "developer" else message.role  # templates drop roles that they do not know
    content: object
    if isinstance(message.content, list):
        content = [_part(part, f"{at}.{field}.{k}", images) for k, part in enumerate(message.content)]
    elif message.content is None and role != "assistant":
        raise MalformedRequestError(f"`{at}.{field}` is missing.", param=f"body.{at}.{field}")
    else:
        content = message.content or ""
    out: dict[str, object] = {"role": role, "content": content}
    if message.tool_calls:
        out["tool_calls"] = [_tool_call(call, f"{at}.tool_calls.{k}") for k, call in enumerate(message.tool_calls)]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if value := getattr(message, name):
            out[name] = value
    return out


def _tool_call(call: dict[str, Any], at: str) -> dict[str, object]:
    """A call that the model made in an earlier turn; templates want its arguments as an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MalformedRequestError(f"`{at}.function` must be an object with a `name`.", param=f"body.{at}.function")
    arguments = read_arguments(function.get("arguments"), f"{at}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def read_arguments(arguments: object, at: str) -> object:
    """Those of an earlier call: JSON as text, an object, or nothing."""
    if not arguments:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequestError(f"`{at}` is not JSON.", param=at) from error


def _part(part: Part, at: str, images: list[ImageInput]) -> dict[str, object]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = _kind(part, at)
    if kind in TEXT_PARTS:
        return {"type": "text", "text": _string(part, "refusal" if kind == "refusal" else "text", at)}
    if kind in IMAGE_PARTS:
        images.append(_image(part, at))
        return {"type": "image"}
    if kind in UNSUPPORTED_PARTS:
        raise UnsupportedFieldError(f"Content parts of type `{kind}` are not implemented.", param=at)
    raise BadRequestError(f"`{at}.type` must be {one_of(TEXT_PARTS + IMAGE_PARTS)}, not {kind[:40]!r}.", param=at)


def _kind(part: dict[str, Any], at: str) -> str:
    """The part's `type`, or what its fields imply where it has none."""
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in ("text", *IMAGE_PARTS, *UNSUPPORTED_PARTS) if name in part), None)
    if not isinstance(kind, str):
        raise MalformedRequestError(f"`{at}.type` is missing.", param=f"body.{at}.type")
    return kind


def _image(part: dict[str, Any], at: str) -> ImageInput:
    """`image_url` as an object with `url`, a string, or null: what was sent with this `uuid`."""
    uuid = part.get("uuid") or ""
    if not isinstance(uuid, str):
        raise MalformedRequestError(f"`{at}.uuid` must be a string.", param=f"body.{at}.uuid")
    _check_options(part, at)
    image_url = part.get("image_url")
    if image_url is None and uuid:
        return ImageInput("", uuid, at)
    if isinstance(image_url, dict):
        _check_options(image_url, f"{at}.image_url")
        return ImageInput(_string(image_url, "url", f"{at}.image_url"), uuid, at)
    return ImageInput(_string(part, "image_url", at), uuid, at)


def _check_options(part: dict[str, Any], at: str) -> None:
    """OpenAI's fields beside the URL: a file that was stored before, and the detail, which changes nothing here."""
    if part.get("file_id"):
        why = f"`{at}.file_id` is not implemented: no files are kept here. Send the image in `image_url`."
        raise UnsupportedFieldError(why, param=f"{at}.file_id")
    detail = part.get("detail")
    if detail is not None and detail not in DETAILS:
        raise BadRequestError(f"`{at}.detail` must be {one_of(DETAILS)}.", param=f"{at}.detail")


def _string(part: dict[str, Any], field: str, at: str) -> str:
    value = part.get(field)
    if not isinstance(value, str):
        raise MalformedRequestError(f"`{at}.{field}` must be a string.", param=f"body.{at}.{field}")
    return value
