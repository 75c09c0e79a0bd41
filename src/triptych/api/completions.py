"""The older completion request: one prompt or several, as text or as tokens, turned into one `types.Request` each.

Called by `api/app.py` in the router process.
"""

from __future__ import annotations

import secrets
from typing import Any, cast

import msgspec

from triptych.api.body import convert
from triptych.api.call import Call
from triptych.api.chat import ChatRequest
from triptych.api.completion_answer import CompletionForm
from triptych.api.fields import Caller, GenerationFields, Served
from triptych.api.generation import check_fields, read_request, read_shown
from triptych.api.sampling import MAX_LOGPROBS, SEED_RANGE, Ids, check_tokens, given, in_range, read_max_tokens
from triptych.api.unsupported import CHAT, COMPLETIONS, elsewhere
from triptych.errors import BadRequestError, UnsupportedFieldError
from triptych.types import Request

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API
MAX_PROMPTS = 256


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """Every field of a completion request that is implemented. null is the same as leaving a field out."""

    prompt: str | list[str | int | list[int]]  # one of: text, texts, tokens, lists of tokens
    logprobs: int | None = None
    best_of: int | None = None


REFUSED = elsewhere(CompletionRequest, COMPLETIONS, ChatRequest, CHAT)


def parse_completion(body: dict[str, Any], served: Served, caller: Caller) -> Call:
    """Raises MalformedRequestError, UnsupportedFieldError, BadRequestError or NotFoundError, naming the field."""
    asked = convert(body, CompletionRequest)
    check_fields(body, asked, served, REFUSED)
    ids = Ids("cmpl-", asked.request_id, caller)
    echo = given(asked.echo, False)
    prompts = _prompts(asked.prompt, served)
    num_logprobs = None if asked.logprobs is None else in_range("logprobs", asked.logprobs, 0, MAX_LOGPROBS)
    prompt_only = echo and asked.max_tokens == 0  # a token is drawn all the same, and not shown
    max_tokens = 1 if prompt_only else _max_tokens(asked, served)
    request = read_request(asked, served, caller, ids, max_tokens, num_logprobs)
    if asked.best_of is not None and asked.best_of != request.n:
        raise UnsupportedFieldError("`best_of` is not implemented, unless it equals `n`.", param="best_of")
    if echo and num_logprobs is not None and request.sampling.num_prompt_logprobs is None:
        sampling = msgspec.structs.replace(request.sampling, num_prompt_logprobs=num_logprobs)
        request = msgspec.structs.replace(request, sampling=sampling)
    requests = [_for_prompt(request, k, prompt, asked.seed is None) for k, prompt in enumerate(prompts)]
    shown = read_shown(asked, served, ids, num_logprobs is not None)
    whole = request.truncate_prompt_tokens is None
    echoed = [prompt if isinstance(prompt, str) and whole else None for prompt in prompts] if echo else None
    shows_prompt = asked.prompt_logprobs is not None
    form = CompletionForm(shown, served.vocabulary, request.n, echoed, prompt_only, shows_prompt)
    return Call(requests, form, bool(asked.stream), ids.header)


def _max_tokens(asked: CompletionRequest, served: Served) -> int:
    return read_max_tokens("max_tokens", given(asked.max_tokens, min(DEFAULT_MAX_TOKENS, served.max_model_len)), served)


def _prompts(prompt: str | list[str | int | list[int]], served: Served) -> list[str | list[int]]:
    """Raises BadRequestError for a list of unlike things, for tokens that are none, and for too many prompts."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(part) for part in prompt}
    if len(kinds) != 1:
        why = "`prompt` must be a text, texts, tokens, or lists of tokens; not a mixture of them, and not empty."
        raise BadRequestError(why, param="prompt")
    prompts = cast(list[str | list[int]], [prompt] if kinds == {int} else prompt)
    if len(prompts) > MAX_PROMPTS:
        raise BadRequestError(f"`prompt` has {len(prompts)} prompts, the limit is {MAX_PROMPTS}.", param="prompt")
    for part in prompts:
        if isinstance(part, list):
            check_tokens("prompt", part, served)
    return prompts


def _for_prompt(request: Request, index: int, prompt: str | list[int], draws_anew: bool) -> Request:
    """Prompts that bring no seed draw apart from each other."""
    sampling = request.sampling
    if draws_anew:
        sampling = msgspec.structs.replace(sampling, seed=secrets.randbelow(SEED_RANGE))
    request_id = f"{request.request_id}-{index}" if index else request.request_id
    return msgspec.structs.replace(request, request_id=request_id, prompt=prompt, sampling=sampling)
