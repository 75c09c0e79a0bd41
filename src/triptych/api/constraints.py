"""Ranges and patterns that the checks of this package make, as the OpenAPI document tells them. Used by `openapi.py`.

They are not on the structs: a value out of range is another error than one of the wrong type, with another `param`.
"""

from __future__ import annotations

from typing import Any

from triptych.api.content import ROLES
from triptych.api.sampling import (
    INT_RANGE,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PENALTY,
    REQUEST_ID,
    SEED_RANGE,
)
from triptych.api.tools import MAX_TOOLS, TOOL_NAME

_LOGPROBS = {"minimum": 0, "maximum": MAX_LOGPROBS}
_TOKENS = {"items": {"type": "integer", "minimum": 0}}

SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"minimum": 0},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1, "maximum": INT_RANGE - 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "seed": {"minimum": -SEED_RANGE, "maximum": SEED_RANGE - 1},
    "presence_penalty": {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY},
    "frequency_penalty": {"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "priority": {"minimum": -INT_RANGE, "maximum": INT_RANGE - 1},
    "request_id": {"pattern": f"^{REQUEST_ID.pattern}$"},
}
GENERATION: dict[str, dict[str, Any]] = {
    **SAMPLING,
    "n": {"minimum": 1, "maximum": MAX_CHOICES},
    "min_tokens": {"minimum": 0},
    "stop_token_ids": _TOKENS,
    "allowed_token_ids": {**_TOKENS, "minItems": 1},
    "bad_words": {"items": {"type": "string", "minLength": 1}, "maxItems": MAX_BAD_WORDS},
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    },
    "prompt_logprobs": _LOGPROBS,
    "truncate_prompt_tokens": {"minimum": -1},
    "deadline_s": {"exclusiveMinimum": 0},
}
_CHAT: dict[str, dict[str, Any]] = {
    **GENERATION,
    "messages": {"minItems": 1},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "top_logprobs": _LOGPROBS,
    "tools": {"maxItems": MAX_TOOLS},
}

BY_STRUCT: dict[str, dict[str, dict[str, Any]]] = {
    "ChatRequest": _CHAT,
    "TokenizeChat": _CHAT,
    "CompletionRequest": {**GENERATION, "max_tokens": {"minimum": 0}, "logprobs": _LOGPROBS},
    "ResponsesRequest": {**SAMPLING, "max_output_tokens": {"minimum": 1}, "top_logprobs": _LOGPROBS},
    "DetokenizeRequest": {"tokens": _TOKENS},
    "ChatMessage": {"role": {"enum": list(ROLES)}},
    "Function": {"name": {"pattern": f"^{TOOL_NAME.pattern}$"}},
}
CONSTRAINTS = {(name, field): schema for name, fields in BY_STRUCT.items() for field, schema in fields.items()}
