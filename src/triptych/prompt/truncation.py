"""`truncate_prompt_tokens`: a prompt cut to its last or first tokens, with images whole or not at all."""

from __future__ import annotations

from typing import Literal

import msgspec

from triptych.errors import BadRequestError
from triptych.types import Placeholder, Prompt, PromptItem


def truncate(prompt: Prompt, num_kept: int, side: Literal["left", "right"]) -> Prompt:
    """At most `num_kept` tokens: `side` is where the others go. Raises BadRequestError for a cut through an image."""
    size = len(prompt.token_ids)
    start, end = (max(0, size - num_kept), size) if side == "left" else (0, min(size, num_kept))
    items = []
    for item in prompt.items:
        placeholder = item.placeholder
        if placeholder.end <= start or placeholder.offset >= end:
            continue
        if placeholder.offset < start or placeholder.end > end:
            raise BadRequestError(
                f"{num_kept} tokens would cut an image of {placeholder.length} tokens in two",
                param="truncate_prompt_tokens",
            )
        items.append(_moved(item, -start))
    return Prompt(prompt.token_ids[start:end], items)


def _moved(item: PromptItem, by: int) -> PromptItem:
    placeholder = Placeholder(item.placeholder.offset + by, item.placeholder.length)
    return msgspec.structs.replace(item, placeholder=placeholder)
