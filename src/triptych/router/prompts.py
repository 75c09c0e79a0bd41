"""A request's prompt: tokens with every item at its place, within the model's limit. Called by `router.py`.

Whatever is refused here is refused before a worker hears of the request.
"""

from __future__ import annotations

import msgspec

from triptych.errors import BadRequestError
from triptych.prompt.layout import PromptBuilder, num_characters
from triptych.prompt.truncation import truncate
from triptych.types import MediaItem, Prompt, Request

MOST_CHARACTERS_A_TOKEN = 16  # on the average of a whole prompt; prose has four or five


def lay_out(builder: PromptBuilder, request: Request, media: list[MediaItem], max_model_len: int) -> Prompt:
    """Raises BadRequestError for text that cannot fit, before it is tokenized: that would hold up everybody."""
    length = num_characters([*_texts(request)])
    if length > MOST_CHARACTERS_A_TOKEN * max_model_len:
        raise BadRequestError(
            f"the {_name(request)} has {length} characters, more than fit into the model's limit of "
            f"{max_model_len} tokens",
            param=_name(request),
        )
    prompt = _build(builder, request, media)
    if request.truncate_prompt_tokens is not None:
        prompt = truncate(prompt, request.truncate_prompt_tokens, request.truncation_side)
    return prompt


def read_by(prompt: Prompt, media: list[MediaItem]) -> list[MediaItem]:
    """Those that have a place in the prompt: a cut prompt may have lost some."""
    placed = {item.mm_hash for item in prompt.items}
    return [item for item in media if item.mm_hash in placed]


def _texts(request: Request) -> list[object]:
    """All that a chat template, or the tokenizer, may read."""
    return [
        request.prompt,
        request.messages,
        request.template_kwargs,
        request.tools,
        request.documents,
        request.chat_template,
    ]


def _build(builder: PromptBuilder, request: Request, media: list[MediaItem]) -> Prompt:
    if request.prompt is not None:
        return builder.build_plain(request.prompt, request.add_special_tokens is not False, media)
    return builder.build(
        request.messages,
        media,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens,
        chat_template=request.chat_template,
        template_kwargs=request.template_kwargs,
        tools=request.tools,
        documents=request.documents,
    )


def _name(request: Request) -> str:
    """Of the field that holds the prompt."""
    return request.messages_param if request.prompt is None else "prompt"


def bound_output(request: Request, prompt: Prompt, max_model_len: int) -> Request:
    """Set max_tokens to what was asked for or what fits. Raises BadRequestError where that is impossible."""
    num_prompt_tokens = len(prompt.token_ids)
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise BadRequestError(
            f"the prompt has {num_prompt_tokens} tokens, the model's limit is {max_model_len}", param=_name(request)
        )
    if request.max_tokens is not None and request.max_tokens > room:
        raise BadRequestError(
            f"{num_prompt_tokens} prompt tokens and {request.max_tokens_param}={request.max_tokens} exceed the model's "
            f"limit of {max_model_len}",
            param=request.max_tokens_param,
        )
    sampling = msgspec.structs.replace(request.sampling, max_tokens=request.max_tokens or room)
    return msgspec.structs.replace(request, sampling=sampling)
