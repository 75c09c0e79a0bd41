"""Whether a well-formed message can mean anything here: asked before a worker relies on another process's numbers.

Runs on the compute thread of prefill and decode workers. A router never sends what is refused here; a bug, another
build or an intruder may, and must not take a worker down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from triptych.messages import KVPublished, PromptMessage
from triptych.types import PromptItem, SamplingParams

MAX_PATCHES_A_TOKEN = 4096  # far more than any tower merges into one embedding


def why_impossible(message: PromptMessage, vocab: int) -> str:
    """Empty for a prompt that can be computed, as far as one can know without the model."""
    num_prompt_tokens = len(message.token_ids) - message.num_output_tokens
    if message.num_output_tokens < 0 or num_prompt_tokens < 1:
        return f"{message.num_output_tokens} of {len(message.token_ids)} tokens are output"
    if not _are_tokens(message.token_ids, vocab):
        return f"a token is not among {vocab}"
    return _why_no_items(message.items, num_prompt_tokens) or _why_no_sampling(message.sampling, vocab)


def _why_no_items(items: list[PromptItem], num_prompt_tokens: int) -> str:
    end = 0
    for item in items:
        place, metadata = item.placeholder, item.metadata
        if place.offset < end or place.length < 1 or place.end > num_prompt_tokens:
            return f"placeholder {place.offset} to {place.end} does not follow {end} in {num_prompt_tokens} tokens"
        if metadata.num_tokens != place.length or not 0 < metadata.num_embeds <= place.length:
            return f"an item of {metadata.num_tokens} tokens and {metadata.num_embeds} embeds has {place.length} places"
        if min(metadata.grid) < 1 or math.prod(metadata.grid) > MAX_PATCHES_A_TOKEN * place.length:
            return f"an item of grid {tuple(metadata.grid)} has {place.length} places"
        end = place.end
    return ""


def _why_no_sampling(sampling: SamplingParams, vocab: int) -> str:
    numbers = {
        "temperature": 0.0 <= sampling.temperature < math.inf,
        "top_p": 0.0 < sampling.top_p <= 1.0,
        "min_p": 0.0 <= sampling.min_p <= 1.0,
        "top_k": 0 <= sampling.top_k < 2**31,
        "repetition_penalty": 0.0 < sampling.repetition_penalty < math.inf,
        "presence_penalty": math.isfinite(sampling.presence_penalty),
        "frequency_penalty": math.isfinite(sampling.frequency_penalty),
        "max_tokens": sampling.max_tokens >= 1,
        "min_tokens": sampling.min_tokens >= 0,
        "num_logprobs": 0 <= (sampling.num_logprobs or 0) <= vocab,
        "num_prompt_logprobs": 0 <= (sampling.num_prompt_logprobs or 0) <= vocab,
        "stop_token_ids": all(token_id >= 0 for token_id in sampling.stop_token_ids),
        "logit_bias": _are_tokens(sampling.logit_bias, vocab) and all(map(math.isfinite, sampling.logit_bias.values())),
        "allowed_token_ids": _are_tokens(sampling.allowed_token_ids, vocab),
        "bad_words": all(word and _are_tokens(word, vocab) for word in sampling.bad_words),
    }
    return next((f"{name} is {getattr(sampling, name)}" for name, good in numbers.items() if not good), "")


def _are_tokens(token_ids: Iterable[int], vocab: int) -> bool:
    return all(0 <= token_id < vocab for token_id in token_ids)


def require_next_blocks(
    message: KVPublished, next_block: int, num_tokens: int, block_size: int, vocab: int, is_complete: bool
) -> None:
    """Raises ValueError unless the blocks follow those before them and their tokens are among the request's."""
    handle, end = message.handle, message.handle.first_block + len(message.handle.blocks)
    if is_complete or handle.first_block != next_block:
        raise ValueError(f"blocks from {handle.first_block} on do not follow {next_block}")
    if not 0 < message.num_tokens <= min(num_tokens, end * block_size) or end > -(-num_tokens // block_size):
        raise ValueError(f"{end} blocks hold {message.num_tokens} of {num_tokens} tokens")
    token_id = message.first_token_id
    if token_id is not None and (message.num_tokens != num_tokens or not 0 <= token_id < vocab):
        raise ValueError(f"token {token_id} after {message.num_tokens} of {num_tokens} tokens")
