"""What a request says of its output in words, as the sampler reads it: `bad_words` become sequences of tokens.

Called by `router.py` for every request, before a worker hears of it.
"""

from __future__ import annotations

import msgspec
from tokenizers import Tokenizer

from triptych.types import Request


def constrain(request: Request, tokenizer: Tokenizer) -> Request:
    if not request.bad_words:
        return request
    sampling = msgspec.structs.replace(request.sampling, bad_words=bad_words(request.bad_words, tokenizer))
    return msgspec.structs.replace(request, sampling=sampling)


def bad_words(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Each word as it is spelt at the beginning of a text, and behind a space, where it is other tokens."""
    spelt: dict[tuple[int, ...], None] = {}  # a set that keeps its order
    for word in words:
        for text in (word, " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
            if token_ids:
                spelt[token_ids] = None
    return [list(token_ids) for token_ids in spelt]
