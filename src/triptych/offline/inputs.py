"""From conversations and prompts as Python has them to the router's requests, by the HTTP API's own parser.

So a field means the same in both, and a bad one raises the same error. Images that JSON cannot carry stay aside until
the request's turn comes: a long batch does not hold all of them twice.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, cast

import msgspec
from PIL import Image

from triptych.api.body import convert, decode_object
from triptych.api.chat import parse_chat
from triptych.api.fields import Caller, GenerationFields, Served
from triptych.api.generation import check_fields, read_request
from triptych.api.sampling import MAX_LOGPROBS, Ids, check_tokens, given, in_range, read_max_tokens
from triptych.api.unsupported import COMPLETIONS
from triptych.errors import BadRequestError, MalformedRequestError, MediaError
from triptych.offline.images import ImageLike, image_url, is_url
from triptych.types import ImageInput, Request

Message = Mapping[str, Any]
Conversation = Sequence[Message]
Prompt = str | Sequence[int] | Mapping[str, Any]


class PromptOptions(TypedDict, total=False):
    """Fields of the HTTP API that concern a prompt, by their names."""

    add_special_tokens: bool
    cache_salt: str
    priority: int
    mm_processor_kwargs: dict[str, Any]
    media_io_kwargs: dict[str, Any]


class ChatOptions(PromptOptions, total=False):
    """The same for a conversation."""

    chat_template: str
    chat_template_kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    documents: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    response_format: dict[str, Any]


_PLACE = "data:application/x-python-image,{}"  # the URL of an image that stays aside
_PROMPT_NAMES = ("prompt", "prompt_token_ids", "images", "multi_modal_data")
_CONVERSATION = "a conversation, a list of messages such as {'role': 'user', 'content': ...}"
_KEYS = ("image", "image_pil", "path", "url")  # of a part of type image or image_pil


class _PromptFields(GenerationFields, frozen=True, kw_only=True):
    """A completion request without its prompt, and with what may be said of images."""

    top_logprobs: int | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class Question(NamedTuple):
    """A checked request, and the images that its placeholder URLs stand for."""

    request: Request
    images: Mapping[str, ImageLike]
    prompt: str | None = None

    def complete(self) -> Request:
        """The request with every image's bytes. Reads files and encodes; raises MediaError that names the place."""
        return msgspec.structs.replace(self.request, images=[self._complete(image) for image in self.request.images])

    def _complete(self, image: ImageInput) -> ImageInput:
        if image.url not in self.images:
            return image
        try:
            return msgspec.structs.replace(image, url=image_url(self.images[image.url]))
        except MediaError as error:
            error.param = image.param
            raise


def conversations_of(messages: Conversation | Sequence[Conversation]) -> Sequence[Conversation]:
    """A list of conversations, of messages that may be one conversation. Raises BadRequestError for what is neither."""
    if not _is_list(messages):
        raise _wrong("messages", f"{_CONVERSATION}, or a list of such lists", messages)
    if messages and isinstance(messages[0], Mapping):
        return [cast(Conversation, messages)]
    return cast(Sequence[Conversation], messages)


def prompts_of(given: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, of what may be one: text, token ids or an object. Raises BadRequestError for what is none."""
    if not isinstance(given, str | Mapping) and not _is_list(given):
        raise _wrong("prompt", "text, token ids, an object such as {'prompt': ...}, or a list of them", given)
    if isinstance(given, str | Mapping) or (given and all(isinstance(token_id, int) for token_id in given)):
        return [cast(Prompt, given)]
    return cast(Sequence[Prompt], given)


def chat_question(messages: Conversation, fields: Mapping[str, Any], served: Served) -> Question:
    """Raises BadRequestError as the API does for the same body."""
    if not _is_list(messages):
        raise _wrong("messages", _CONVERSATION, messages)
    aside: dict[str, ImageLike] = {}
    plain = [_without_images(message, f"messages.{k}", aside) for k, message in enumerate(messages)]
    (request,) = parse_chat(_body({"messages": plain, **fields}), served, Caller()).requests
    return Question(request, aside)


def _body(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as a client's body would bring them."""
    try:
        return decode_object(msgspec.json.encode(fields))
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedRequestError(f"The request is not plain data: {error}.", param="body") from error


def _without_images(message: Message, at: str, aside: dict[str, ImageLike]) -> Message:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str) or not isinstance(content, Sequence):
        return message
    parts = [_without_image(part, f"{at}.content.{k}", aside) for k, part in enumerate(content)]
    return {**message, "content": parts}


def _without_image(part: object, at: str, aside: dict[str, ImageLike]) -> object:
    """The part as the API knows it: an image becomes an `image_url`, of its own or of a place where it stays aside."""
    if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_pil"):
        return part
    image = next((part[key] for key in _KEYS if part.get(key) is not None), None)
    if image is None:
        raise MalformedRequestError(f"`{at}` has no `image`.", param=f"body.{at}.image")
    url = _put_aside(image, f"{at}.image", aside)
    return {"type": "image_url", "image_url": {"url": url}, "uuid": part.get("uuid")}


def _put_aside(image: object, at: str, aside: dict[str, ImageLike]) -> str:
    if not isinstance(image, Image.Image | str | os.PathLike | bytes):
        raise _wrong(at, "a PIL image, a path, bytes or a URL", image)
    if is_url(image):
        return cast(str, image)
    place = _PLACE.format(len(aside))
    aside[place] = image
    return place


def _image_input(image: object, at: str, aside: dict[str, ImageLike]) -> ImageInput:
    return ImageInput(_put_aside(image, at, aside), param=at)


def prompt_question(prompt: Prompt, fields: Mapping[str, Any], served: Served) -> Question:
    """A prompt that no chat template touches: text, token ids, or an object with either and its images."""
    images: Sequence[object] = ()
    asked: object = prompt
    if isinstance(prompt, Mapping):
        _check_names(prompt)
        images = _images_of(prompt)
        asked = prompt.get("prompt") if prompt.get("prompt_token_ids") is None else prompt["prompt_token_ids"]
    text = asked if isinstance(asked, str) else None
    aside: dict[str, ImageLike] = {}
    request = msgspec.structs.replace(
        _prompt_request(_body(fields), served),
        prompt=_token_ids(asked, served) if text is None else text,
        images=[_image_input(image, f"images.{k}", aside) for k, image in enumerate(images)],
    )
    return Question(request, aside, text)


def _prompt_request(body: dict[str, Any], served: Served) -> Request:
    fields = convert(body, _PromptFields)
    check_fields(body, fields, served, COMPLETIONS)
    num_logprobs = fields.top_logprobs
    if num_logprobs is not None:
        in_range("logprobs", num_logprobs, 0, MAX_LOGPROBS)
    max_tokens = None if fields.max_tokens is None else read_max_tokens("max_tokens", fields.max_tokens, served)
    request = read_request(fields, served, Caller(), Ids("cmpl-", None, Caller()), max_tokens, num_logprobs)
    return msgspec.structs.replace(
        request,
        processor_options=given(fields.mm_processor_kwargs, {}),
        media_options=given(fields.media_io_kwargs, {}),
    )


def _check_names(prompt: Mapping[str, Any]) -> None:
    """Nothing that would be ignored, and nothing twice."""
    for name in prompt:
        if name not in _PROMPT_NAMES:
            known = ", ".join(f"`{each}`" for each in _PROMPT_NAMES)
            raise BadRequestError(f"`{name}` is not part of a prompt; there are {known}.", param=str(name))
    for name, other in (("prompt", "prompt_token_ids"), ("images", "multi_modal_data")):
        if prompt.get(name) is not None and prompt.get(other) is not None:
            raise BadRequestError(f"A prompt has `{name}` or `{other}`, not both.", param=name)


def _images_of(prompt: Mapping[str, Any]) -> Sequence[object]:
    """`images`, or vLLM's `multi_modal_data`, where one image may stand without a list."""
    images = prompt.get("images")
    if images is None:
        data = prompt.get("multi_modal_data") or {}
        if not isinstance(data, Mapping) or data.keys() - {"image"}:
            raise _wrong("multi_modal_data", "an object with `image` and nothing else", data)
        images = data.get("image") or ()
    return images if isinstance(images, list | tuple) else (images,)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _wrong(name: str, expected: str, value: object) -> MalformedRequestError:
    return MalformedRequestError(f"`{name}` must be {expected}; it is {_kind(value)}.", param=name)


def _kind(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        return f"an object with {', '.join(f'`{key}`' for key in value) or 'nothing'}"
    return f"of type {type(value).__name__}"


def _token_ids(prompt: object, served: Served) -> list[int]:
    if not isinstance(prompt, Sequence) or not all(isinstance(token_id, int) for token_id in prompt):
        raise BadRequestError("`prompt` must be text or token ids.", param="prompt")
    check_tokens("prompt", prompt, served)
    return list(prompt)
