"""What one choice has produced over all its attempts: token ids, the text that is final, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.messages import Logprobs, TokenOutput
from triptych.prompt.detokenize import IncrementalDetokenizer
from triptych.prompt.tool_calls import Piece, TextPiece, ToolCallParser
from triptych.prompt.vocabulary import Vocabulary
from triptych.types import Event, FinishReason, Request, ScoredToken, TextDelta, TokenLogprobs, ToolCallDelta


class RequestOutput:
    def __init__(
        self,
        request: Request,
        detokenizer: IncrementalDetokenizer,
        vocabulary: Vocabulary,
        calls: ToolCallParser | None = None,
        choice: int = 0,
    ) -> None:
        """`calls` finds the tool calls in the text, where there may be some."""
        self._keep_stop_token = request.include_stop_str_in_output
        self._detokenizer = detokenizer
        self._vocabulary = vocabulary
        self._calls = calls
        self._one_call = not request.parallel_tool_calls
        self._has_called = False
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
        pieces = self._pieces(text)
        if self._has_called and self.finish_reason is FinishReason.STOP and not self._is_cut():
            self.finish_reason = FinishReason.TOOL_CALLS
        first, others = (
            ("", pieces) if not pieces or isinstance(pieces[0], ToolCallDelta) else (pieces[0].text, pieces[1:])
        )
        logprobs = [self._scored(entry) for entry in output.logprobs]
        return [
            TextDelta(first, len(self.token_ids), output.token_ids, self._choice, logprobs),
            *map(self._event, others),
        ]

    def _pieces(self, text: str) -> list[Piece]:
        """The text, with the calls that are in it apart."""
        if self._calls is None:
            return [TextPiece(text)]
        pieces = self._calls.push(text)
        if self.finish_reason is not None:
            pieces += self._calls.finish()
        kept = [piece for piece in pieces if isinstance(piece, TextPiece) or piece.index == 0 or not self._one_call]
        self._has_called = self._has_called or any(isinstance(piece, ToolCallDelta) for piece in kept)
        return kept

    def _is_cut(self) -> bool:
        """The last call that was told of."""
        cut = self._calls.cut if self._calls is not None else None
        return cut is not None and (cut == 0 or not self._one_call)

    def _event(self, piece: Piece) -> Event:
        if isinstance(piece, ToolCallDelta):
            return piece
        return TextDelta(piece.text, len(self.token_ids), choice=self._choice)

    def prompt_logprobs(self, entries: Sequence[Logprobs]) -> list[TokenLogprobs | None]:
        """One a token of the prompt; nothing stands before the first one. Empty where none were asked for."""
        return [None, *map(self._scored, entries)] if entries else []

    def _scored(self, entry: Logprobs) -> TokenLogprobs:
        scored = [
            ScoredToken(token_id, self._vocabulary.token_bytes(token_id), logprob)
            for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True)
        ]
        return TokenLogprobs(scored[0], entry.rank, scored[1:])
