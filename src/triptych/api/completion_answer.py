"""The bodies of completion answers, whole and in chunks, in OpenAI's older form. Built from router events.

The choices of several prompts are numbered through: those of the first prompt, then those of the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from triptych.api.chat_answer import SYSTEM_FINGERPRINT
from triptych.api.errors import error_body
from triptych.api.gather import Answer, GatheredChoice, total
from triptych.api.generation import Shown
from triptych.api.logprobs import CompletionLogprobs, PromptLogprobs, completion_logprobs, prompt_logprobs
from triptych.api.seam import VocabularyLike
from triptych.api.sse import DONE, data
from triptych.api.usage import RunningUsage, UsageBody, usage_body
from triptych.types import (
    ChoiceFinished,
    Event,
    Finished,
    ScoredToken,
    Started,
    TextDelta,
    Timing,
    TokenLogprobs,
    Usage,
)


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(msgspec.Struct, frozen=True):
    """A whole answer, and a chunk of a stream as well."""

    id: str
    model: str
    created: int  # seconds of the epoch
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str = SYSTEM_FINGERPRINT
    timing: Timing | UnsetType = UNSET  # of the first prompt


class CompletionForm:
    """`echoed` has the text of each prompt, None where it is that of its tokens; it is None without echo.

    `prompt_only`: the token that was drawn is not shown.
    """

    def __init__(
        self,
        shown: Shown,
        vocabulary: VocabularyLike,
        num_choices: int,
        echoed: list[str | None] | None,
        prompt_only: bool,
        prompt_logprobs: bool,
    ) -> None:
        self.shown = shown
        self.num_choices = num_choices
        self.echoed = echoed
        self.prompt_only = prompt_only
        self._vocabulary = vocabulary
        self._prompt_logprobs = prompt_logprobs

    def whole(self, answers: Sequence[Answer]) -> Completion:
        choices = [
            self._choice(prompt, prompt * self.num_choices + index, answer.started, choice)
            for prompt, answer in enumerate(answers)
            for index, choice in enumerate(answer.choices)
        ]
        usage = self.usage([answer.end.usage for answer in answers])
        return self.body(choices, usage, answers[0].end.timing if self.shown.timing else UNSET)

    def _choice(self, prompt: int, index: int, started: Started, gathered: GatheredChoice) -> CompletionChoice:
        shown, ended = self.shown, gathered.end
        scored: list[TokenLogprobs | None] = [] if self.prompt_only else [*gathered.logprobs]
        text, token_ids = ("", []) if self.prompt_only else (gathered.text, gathered.token_ids)
        if self.echoed is not None:
            text = self.prompt_text(prompt, started) + text
            scored = [*started.prompt_logprobs, *scored]
        return CompletionChoice(
            index,
            text,
            completion_logprobs(scored, shown.tokens_as_ids, first=self.first(started)) if shown.logprobs else None,
            "length" if self.prompt_only else ended.finish_reason.value,
            None if self.prompt_only else ended.stop_reason,
            prompt_logprobs(started.prompt_logprobs) if self._prompt_logprobs else None,
            token_ids if shown.token_ids else None,
            started.prompt_token_ids if shown.token_ids else None,
        )

    def prompt_text(self, prompt: int, started: Started) -> str:
        """What is echoed before each choice of the prompt."""
        if self.echoed is None:
            return ""
        text = self.echoed[prompt]
        return self._vocabulary.decode(started.prompt_token_ids) if text is None else text

    def first(self, started: Started) -> ScoredToken | None:
        """The prompt's first token, which has no log-probability."""
        if not started.prompt_token_ids:
            return None
        token_id = started.prompt_token_ids[0]
        return ScoredToken(token_id, self._vocabulary.token_bytes(token_id), 0.0)

    def usage(self, usages: Sequence[Usage]) -> UsageBody:
        usage = total(usages)
        return usage_body(msgspec.structs.replace(usage, completion_tokens=0) if self.prompt_only else usage)

    def body(
        self,
        choices: list[CompletionChoice],
        usage: UsageBody | UnsetType = UNSET,
        timing: Timing | UnsetType = UNSET,
    ) -> Completion:
        shown = self.shown
        return Completion(shown.response_id, shown.model, shown.created, choices, usage, timing=timing)

    def stream(self) -> CompletionStream:
        return CompletionStream(self)


class CompletionStream:
    def __init__(self, form: CompletionForm) -> None:
        self._form = form
        self._usage = RunningUsage()
        self._offsets: dict[int, int] = {}  # of the next token's text, by choice
        self._finished: dict[int, Finished] = {}  # by prompt

    def event(self, prompt: int, event: Event) -> Iterator[bytes]:
        form = self._form
        first_choice = prompt * form.num_choices
        match event:
            case Started():
                self._usage.started(prompt, event)
                for index in range(first_choice, first_choice + form.num_choices):
                    yield from self._opening(prompt, index, event)
            case TextDelta() if not form.prompt_only:
                self._usage.output(prompt, event.choice, event.num_output_tokens)
                yield from self._text(first_choice + event.choice, event)
            case ChoiceFinished():
                reason, stop = ("length", None) if form.prompt_only else (event.finish_reason.value, event.stop_reason)
                yield self._chunk(
                    CompletionChoice(first_choice + event.choice, "", finish_reason=reason, stop_reason=stop)
                )
            case Finished():
                self._finished[prompt] = event

    def end(self) -> Iterator[bytes]:
        """The usage and the timing, where they were asked for."""
        form, shown = self._form, self._form.shown
        ends = [self._finished[prompt] for prompt in sorted(self._finished)]
        if shown.include_usage or shown.timing:
            usage = form.usage([end.usage for end in ends]) if shown.include_usage else UNSET
            yield data(form.body([], usage, ends[0].timing if shown.timing else UNSET))
        yield DONE

    def failed(self, error: Exception) -> Iterator[bytes]:
        yield data(error_body(error))

    def _opening(self, prompt: int, index: int, started: Started) -> Iterator[bytes]:
        """The echoed prompt of one choice, or its tokens where they were asked for."""
        form, shown = self._form, self._form.shown
        text = form.prompt_text(prompt, started)
        logprobs = None
        if form.echoed is not None and shown.logprobs:
            logprobs = completion_logprobs(started.prompt_logprobs, shown.tokens_as_ids, first=form.first(started))
        self._offsets[index] = len(text)
        if text or logprobs or shown.token_ids:
            ids = started.prompt_token_ids if shown.token_ids else None
            yield self._chunk(CompletionChoice(index, text, logprobs, prompt_token_ids=ids))

    def _text(self, index: int, event: TextDelta) -> Iterator[bytes]:
        """A token whose text is not final yet makes a chunk only where more than text was asked for."""
        shown = self._form.shown
        if not event.text and not ((shown.logprobs or shown.token_ids) and event.token_ids):
            return
        logprobs = None
        if shown.logprobs:
            offset = self._offsets.get(index, 0)
            logprobs = completion_logprobs(event.logprobs, shown.tokens_as_ids, offset)
            self._offsets[index] = offset + sum(
                len(entry.chosen.content.decode(errors="replace")) for entry in event.logprobs
            )
        ids = event.token_ids if shown.token_ids else None
        yield self._chunk(CompletionChoice(index, event.text, logprobs, token_ids=ids))

    def _chunk(self, choice: CompletionChoice) -> bytes:
        usage = self._usage.body() if self._form.shown.continuous_usage else UNSET
        return data(self._form.body([choice], usage))
