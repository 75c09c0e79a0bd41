"""What one choice has produced over all its attempts: token ids, the text that is final, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.messages import Logprobs, TokenOutput
from triptych.prompt.detokenize import IncrementalDetokenizer
from triptych.prompt.vocabulary import Vocabulary
from triptych.types import Event, FinishReason, Request, ScoredToken, TextDelta, TokenLogprobs


class RequestOutput:
    def __init__(
        self, request: Request, detokenizer: IncrementalDetokenizer, vocabulary: Vocabulary, choice: int = 0
    ) -> None:
        self._keep_stop_token = request.include_stop_str_in_output
        self._detokenizer = detokenizer
        self._vocabulary = vocabulary
        self._choice = choice
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def push(self, output: TokenOutput) -> list[Event]:
        """Take a worker's tokens; a stop string found in their text ends the choice here."""
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_token_id
        visible = output.token_ids
        if output.finish_reason is FinishReason.STOP and not (self._keep_stop_token or output.ends_in_text):
            visible = visible[:-1]  # the token that stopped it is not text
        text = self._detokenizer.push(visible)
        if self._detokenizer.stopped is None and self.finish_reason is not None:
            text += self._detokenizer.finish()
        if self._detokenizer.stopped is not None:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = self._detokenizer.stopped
        logprobs = [self._scored(entry) for entry in output.logprobs]
        return [TextDelta(text, len(self.token_ids), output.token_ids, self._choice, logprobs)]

    def prompt_logprobs(self, entries: Sequence[Logprobs]) -> list[TokenLogprobs | None]:
        """One a token of the prompt; nothing stands before the first one. Empty where none were asked for."""
        return [None, *map(self._scored, entries)] if entries else []

    def _scored(self, entry: Logprobs) -> TokenLogprobs:
        scored = [
            ScoredToken(token_id, self._vocabulary.token_bytes(token_id), logprob)
            for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True)
        ]
        return TokenLogprobs(scored[0], entry.rank, scored[1:])
