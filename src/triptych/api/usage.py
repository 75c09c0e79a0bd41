"""The `usage` of an answer, in OpenAI's form."""

from __future__ import annotations

import msgspec

from triptych.types import Started, Usage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    multimodal_tokens: dict[str, int]  # by modality


class UsageBody(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            usage.cached_tokens, {"image": usage.image_tokens} if usage.image_tokens else {}
        ),
    )


class RunningUsage:
    """The usage of a stream so far, over all its prompts and choices."""

    def __init__(self) -> None:
        self._started: dict[int, Started] = {}
        self._num_output_tokens: dict[tuple[int, int], int] = {}

    def started(self, prompt: int, started: Started) -> None:
        self._started[prompt] = started

    def output(self, prompt: int, choice: int, num_output_tokens: int) -> None:
        self._num_output_tokens[prompt, choice] = num_output_tokens

    def body(self) -> UsageBody:
        started = self._started.values()
        return usage_body(
            Usage(
                prompt_tokens=sum(len(each.prompt_token_ids) for each in started),
                completion_tokens=sum(self._num_output_tokens.values()),
                cached_tokens=sum(each.num_cached_tokens for each in started),
                image_tokens=sum(each.num_image_tokens for each in started),
            )
        )
