"""The request fields that chat and completions share, as OpenAI's and vLLM's users know them.

null is the same as leaving a field out. What is not named here, nor in `unsupported.py`, is ignored.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from triptych.api.seam import VocabularyLike


class Served(NamedTuple):
    """What the checks need to know of the model and the server."""

    model_name: str
    max_model_len: int
    vocabulary: VocabularyLike
    trust_chat_template: bool = False


class Caller(NamedTuple):
    """Who asks, as far as the connection tells: the id of `x-request-id`, "" where there is none."""

    request_id: str = ""
    client: str = ""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(msgspec.Struct, frozen=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """`structures` and `triggers`, or `format`, are those of a structural tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's: exactly one of them is set."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of its output, whatever its prompt is."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    echo: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    session_id: str | None = None
    deadline_s: float | None = None  # ours: from the request's arrival to its last token
    timing: bool | None = None  # ours: the answer carries the request's timeline
