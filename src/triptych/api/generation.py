"""From the fields that chat and completions share to a `types.Request` without its prompt, and what an answer shows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from triptych.api.fields import Caller, GenerationFields, Served
from triptych.api.sampling import (
    Ids,
    check_model,
    check_stream_options,
    given,
    read_bad_words,
    read_deadline,
    read_n,
    read_priority,
    read_sampling,
    read_stop,
    read_truncation,
)
from triptych.api.structure import read_structure
from triptych.api.unsupported import refuse_unsupported
from triptych.errors import BadRequestError
from triptych.types import Request


class Shown(msgspec.Struct, frozen=True):
    """What is the same in every body of one answer, and what the request asked to see."""

    response_id: str
    model: str
    created: int  # seconds of the epoch
    include_usage: bool = False
    continuous_usage: bool = False
    timing: bool = False
    logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False


def check_fields(body: Mapping[str, Any], fields: GenerationFields, served: Served, neutral: Mapping[str, Any]) -> None:
    """What is wrong whatever the prompt is: the model's name, fields that are not served, options of streams."""
    check_model(fields.model, served)
    refuse_unsupported(body, neutral)
    check_stream_options(fields.stream_options, fields.stream)
    if fields.stream and fields.prompt_logprobs is not None:
        raise BadRequestError("`prompt_logprobs` cannot be streamed.", param="prompt_logprobs")


def read_shown(fields: GenerationFields, served: Served, ids: Ids, logprobs: bool) -> Shown:
    options = fields.stream_options
    return Shown(
        response_id=ids.response,
        model=served.model_name,
        created=int(time.time()),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.include_usage and options.continuous_usage_stats),
        timing=given(fields.timing, False),
        logprobs=logprobs,
        token_ids=given(fields.return_token_ids, False),
        tokens_as_ids=given(fields.return_tokens_as_token_ids, False),
    )


def read_request(
    fields: GenerationFields,
    served: Served,
    caller: Caller,
    ids: Ids,
    max_tokens: int | None,
    num_logprobs: int | None,
) -> Request:
    """The request without `messages`, `prompt` and what belongs to them. Raises BadRequestError naming the field."""
    return Request(
        request_id=ids.request,
        messages=[],
        images=[],
        sampling=read_sampling(fields, served, max_tokens, num_logprobs),
        max_tokens=max_tokens,
        n=read_n(fields.n),
        stream=given(fields.stream, False),
        stop=read_stop(fields.stop),
        include_stop_str_in_output=given(fields.include_stop_str_in_output, False),
        skip_special_tokens=given(fields.skip_special_tokens, True),
        add_special_tokens=fields.add_special_tokens,
        bad_words=read_bad_words(fields.bad_words),
        structure=read_structure(fields),
        truncate_prompt_tokens=read_truncation(fields, max_tokens, served),
        truncation_side=given(fields.truncation_side, "left"),
        cache_salt=given(fields.cache_salt, ""),
        priority=read_priority(fields.priority),
        deadline_s=read_deadline(fields.deadline_s),
        session_id=given(fields.session_id, ""),
        client=caller.client,
    )
