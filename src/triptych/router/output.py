"""What a request has produced over all its attempts: token ids, the text that is final, and how it ended."""

from __future__ import annotations

from triptych.messages import TokenOutput
from triptych.prompt.detokenize import IncrementalDetokenizer
from triptych.types import FinishReason, Request, TextDelta


class RequestOutput:
    def __init__(self, request: Request, detokenizer: IncrementalDetokenizer) -> None:
        self._keep_stop_token = request.include_stop_str_in_output
        self._detokenizer = detokenizer
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def push(self, output: TokenOutput) -> TextDelta:
        """Take a worker's tokens; a stop string found in their text ends the request here."""
        self.token_ids += output.token_ids
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_token_id
        visible = output.token_ids
        if output.finish_reason is FinishReason.STOP and not self._keep_stop_token:
            visible = visible[:-1]  # the token that stopped it is not text
        text = self._detokenizer.push(visible)
        if self._detokenizer.stopped is None and self.finish_reason is not None:
            text += self._detokenizer.finish()
        if self._detokenizer.stopped is not None:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = self._detokenizer.stopped
        return TextDelta(text, len(self.token_ids), output.token_ids)
