"""From conversations and prompts as Python has them to the router's requests, by the HTTP API's own parser.

So a field means the same in both, and a bad one raises the same error. Images that JSON cannot carry stay aside until
the request's turn comes: a long batch does not hold all of them twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, cast

import msgspec

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
    """A list of conversations, of messages that may be one conversation."""
    if messages and isinstance(messages[0], Mapping):
        return [cast(Conversation, messages)]
    return cast(Sequence[Conversation], messages)


def prompts_of(given: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, of what may be one: text, token ids or an object."""
    if isinstance(given, str | Mapping) or (given and all(isinstance(token_id, int) for token_id in given)):
        return [cast(Prompt, given)]
    return cast(Sequence[Prompt], given)


def chat_question(messages: Conversation, fields: Mapping[str, Any], served: Served) -> Question:
    """Raises BadRequestError as the API does for the same body."""
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
    return {"type": "image_url", "image_url": {"url": _put_aside(image, aside)}, "uuid": part.get("uuid")}


def _put_aside(image: ImageLike, aside: dict[str, ImageLike]) -> str:
    if is_url(image):
        return cast(str, image)
    place = _PLACE.format(len(aside))
    aside[place] = image
    return place


def prompt_question(prompt: Prompt, fields: Mapping[str, Any], served: Served) -> Question:
    """A prompt that no chat template touches: text, token ids, or an object with either and its images."""
    images: Sequence[ImageLike] = ()
    asked: object = prompt
    if isinstance(prompt, Mapping):
        images = _images_of(prompt)
        asked = prompt.get("prompt") if prompt.get("prompt_token_ids") is None else prompt["prompt_token_ids"]
    text = asked if isinstance(asked, str) else None
    aside: dict[str, ImageLike] = {}
    request = msgspec.structs.replace(
        _prompt_request(_body(fields), served),
        prompt=_token_ids(asked, served) if text is None else text,
        images=[ImageInput(_put_aside(image, aside), param=f"images.{k}") for k, image in enumerate(images)],
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


def _images_of(prompt: Mapping[str, Any]) -> Sequence[ImageLike]:
    """`images`, or vLLM's `multi_modal_data`, where one image may stand without a list."""
    images = prompt.get("images")
    if images is None:
        images = (prompt.get("multi_modal_data") or {}).get("image") or ()
    return images if isinstance(images, list | tuple) else (images,)


def _token_ids(prompt: object, served: Served) -> list[int]:
    if not isinstance(prompt, Sequence) or not all(isinstance(token_id, int) for token_id in prompt):
        raise BadRequestError("`prompt` must be text or token ids.", param="prompt")
    check_tokens("prompt", prompt, served)
    return list(prompt)
