"""Checks of what chat, completions and responses share: how tokens are drawn, how long, and under which id."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable
from typing import TypeVar

from triptych.api.fields import Caller, GenerationFields, Served, StreamOptions
from triptych.errors import BadRequestError, NotFoundError
from triptych.types import SamplingParams

T = TypeVar("T")
N = TypeVar("N", int, float)

MAX_CHOICES = 128
MAX_MATCHED_CHARACTERS = 1024  # of one stop string, of one bad word
MAX_STOP_STRINGS = 4
MAX_BAD_WORDS = 256
MAX_LOGPROBS = 20
MAX_PENALTY = 2.0  # of presence and frequency, either way
MAX_BIAS = 100.0  # either way
SEED_RANGE = 2**63
INT_RANGE = 2**63  # what the wire format carries
GREEDY_BELOW = 1e-5  # of temperature, as in vLLM: logits divided by less overflow
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def given(value: T | None, default: T) -> T:
    return default if value is None else value


def in_range(field: str, value: N, low: float, high: float, why: str = "") -> N:
    if not low <= value <= high or value == math.inf:
        raise BadRequestError(why or f"`{field}` must be from {low:g} to {high:g}.", param=field)
    return value


def check_model(model: str | None, served: Served) -> None:
    if model is not None and model != served.model_name:
        raise NotFoundError(f"The model `{model[:200]}` does not exist; `{served.model_name}` does.", param="model")


def check_stream_options(options: StreamOptions | None, stream: bool | None) -> None:
    if options is not None and not stream:
        raise BadRequestError("`stream_options` needs `stream`: true.", param="stream_options")


def check_tokens(field: str, token_ids: Iterable[int], served: Served) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < served.vocabulary.size:
            why = f"`{field}` has {token_id}; the model's tokens are 0 to {served.vocabulary.size - 1}."
            raise BadRequestError(why, param=field)


def read_max_tokens(field: str, value: int, served: Served) -> int:
    """Whether the prompt leaves room is the router's question."""
    why = f"`{field}` must be from 1 to {served.max_model_len}, the longest prompt and output of this model."
    return in_range(field, value, 1, served.max_model_len, why)


def read_stop(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOP_STRINGS or not all(stops):
        raise BadRequestError(f"`stop` must be 1 to {MAX_STOP_STRINGS} strings, none of them empty.", param="stop")
    _check_lengths("stop", stops)
    return stops


def _check_lengths(field: str, texts: Iterable[str]) -> None:
    """Each of them is looked for after every token."""
    if any(len(text) > MAX_MATCHED_CHARACTERS for text in texts):
        raise BadRequestError(f"`{field}` has a text of more than {MAX_MATCHED_CHARACTERS} characters.", param=field)


def read_bad_words(words: list[str] | None) -> list[str]:
    words = words or []
    if len(words) > MAX_BAD_WORDS or not all(words):
        why = f"`bad_words` must be at most {MAX_BAD_WORDS} words, none of them empty."
        raise BadRequestError(why, param="bad_words")
    _check_lengths("bad_words", words)
    return words


def read_truncation(fields: GenerationFields, max_tokens: int | None, served: Served) -> int | None:
    """-1 is all that fits beside the output."""
    name = "truncate_prompt_tokens"
    value = fields.truncate_prompt_tokens
    if value is None:
        if fields.truncation_side is not None:
            raise BadRequestError(f"`truncation_side` needs `{name}`.", param="truncation_side")
        return None
    room = max(1, served.max_model_len - (max_tokens or 1))
    if value == -1:
        return room
    return in_range(name, value, 1, served.max_model_len, f"`{name}` must be -1, or from 1 to {served.max_model_len}.")


def read_sampling(
    fields: GenerationFields, served: Served, max_tokens: int | None, num_logprobs: int | None
) -> SamplingParams:
    """Raises BadRequestError naming the field that is out of range. Tokens of `bad_words` are the router's."""
    temperature = in_range(
        "temperature", given(fields.temperature, 1.0), 0, math.inf, "`temperature` must not be negative."
    )
    seed = in_range("seed", given(fields.seed, secrets.randbelow(SEED_RANGE)), -SEED_RANGE, SEED_RANGE - 1)
    most = INT_RANGE - 1 if max_tokens is None else max_tokens
    why = "`min_tokens` must be from 0 to the request's limit of tokens."
    stop_token_ids = fields.stop_token_ids or []
    check_tokens("stop_token_ids", stop_token_ids, served)
    num_prompt_logprobs = fields.prompt_logprobs
    if num_prompt_logprobs is not None:
        in_range("prompt_logprobs", num_prompt_logprobs, 0, MAX_LOGPROBS)
    return SamplingParams(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=_above_zero("top_p", in_range("top_p", given(fields.top_p, 1.0), 0, 1)),
        top_k=_top_k(fields.top_k, served),
        min_p=in_range("min_p", given(fields.min_p, 0.0), 0, 1),
        seed=seed % SEED_RANGE,
        min_tokens=in_range("min_tokens", given(fields.min_tokens, 0), 0, most, why),
        stop_token_ids=sorted(set(stop_token_ids)),
        ignore_eos=given(fields.ignore_eos, False),
        presence_penalty=_penalty("presence_penalty", fields.presence_penalty),
        frequency_penalty=_penalty("frequency_penalty", fields.frequency_penalty),
        repetition_penalty=_repetition_penalty(fields.repetition_penalty),
        logit_bias=_logit_bias(fields.logit_bias, served),
        allowed_token_ids=_allowed(fields.allowed_token_ids, served),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def _top_k(value: int | None, served: Served) -> int:
    """vLLM's -1 is off, as 0 is; more than there are tokens is all of them."""
    return min(max(in_range("top_k", given(value, 0), -1, INT_RANGE - 1), 0), served.vocabulary.size)


def _above_zero(field: str, value: float) -> float:
    if value == 0:
        raise BadRequestError(f"`{field}` must be above 0.", param=field)
    return value


def _penalty(field: str, value: float | None) -> float:
    return in_range(field, given(value, 0.0), -MAX_PENALTY, MAX_PENALTY)


def _repetition_penalty(value: float | None) -> float:
    why = "`repetition_penalty` must be above 0 and finite."
    penalty = in_range("repetition_penalty", given(value, 1.0), 0, math.inf, why)
    return _above_zero("repetition_penalty", penalty)


def _logit_bias(bias: dict[str, float] | None, served: Served) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise BadRequestError(f"`logit_bias` has {key[:20]!r}, which is no token id.", param="logit_bias")
        check_tokens("logit_bias", [int(key)], served)
        found[int(key)] = in_range("logit_bias", value, -MAX_BIAS, MAX_BIAS)
    return found


def _allowed(token_ids: list[int] | None, served: Served) -> list[int]:
    if token_ids is None:
        return []
    if not token_ids:
        raise BadRequestError("`allowed_token_ids` must not be empty.", param="allowed_token_ids")
    check_tokens("allowed_token_ids", token_ids, served)
    return sorted(set(token_ids))


def read_n(n: int | None) -> int:
    return in_range("n", given(n, 1), 1, MAX_CHOICES)


def read_priority(priority: int | None) -> int:
    return in_range("priority", given(priority, 0), -INT_RANGE, INT_RANGE - 1)


def read_deadline(deadline_s: float | None) -> float | None:
    """Seconds. The server's own limit holds as well."""
    if deadline_s is None:
        return None
    return _above_zero("deadline_s", in_range("deadline_s", deadline_s, 0, math.inf, "`deadline_s` must be above 0."))


class Ids:
    """The answer's id, the request's own, which is unique even where clients repeat theirs, and the header's."""

    def __init__(self, prefix: str, request_id: str | None, caller: Caller) -> None:
        if request_id is not None and not REQUEST_ID.fullmatch(request_id):
            raise BadRequestError("`request_id` must be 1 to 128 letters, digits or `. _ : -`.", param="request_id")
        self.header = request_id or caller.request_id or secrets.token_hex(8)
        self.response = f"{prefix}{self.header}"
        self.request = f"{self.response}-{secrets.token_hex(4)}"
