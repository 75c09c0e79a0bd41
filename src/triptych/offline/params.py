"""How the answers of `LLM` are drawn and when they end: the sampling fields of the HTTP API as one Python object."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from triptych.errors import BadRequestError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Fields of the HTTP API by their names, with its defaults where they are None, and checked as it checks them.

    `max_tokens` None: as many as fit. `logprobs` k gives each token's log-probability and those of the k likeliest
    tokens. Without a `seed` every request draws its own.
    """

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    structured_outputs: Mapping[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        """The fields that are set, as a chat request's body has them."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        body = {name: value for name, value in given.items() if value is not None}
        for name, value in body.items():
            if isinstance(value, float) and not math.isfinite(value):  # JSON has no such number
                raise BadRequestError(f"`{name}` must be a finite number.", param=name)
        if self.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": self.logprobs}
        return body
