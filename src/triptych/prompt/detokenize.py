"""Token ids to text as they come: never half a character, never a part of what may become a stop string.

Runs in the router, one per request; called for every token.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # what the decoder makes of bytes that are no character (yet)
MAX_BYTES_OF_A_CHARACTER = 4  # in UTF-8: more tokens than this without a character are no character at all


class IncrementalDetokenizer:
    """`push` returns text that is final. After a stop string, `stopped` names it and no more text comes.

    A token's text depends on its left neighbours (a space, the rest of a character), so each push decodes a window of
    the last few tokens twice, without and with the new ones, and emits the difference.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._skip_special_tokens = skip_special_tokens
        self._include_stop = include_stop
        self._window: list[int] = []  # tokens that the next text may depend on
        self._num_emitted = 0  # of them, those whose text is out
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped: str | None = None

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that the tokens made final."""
        if self.stopped is not None:
            return ""
        text = "".join(self._decode_one(token_id) for token_id in token_ids)
        return self._check_stop(text, is_end=False)

    def finish(self) -> str:
        """What was held back; bytes that never became a character show as replacement characters."""
        if self.stopped is not None:
            return ""
        return self._check_stop(self._new_text(), is_end=True)

    def _decode_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        num_pending = len(self._window) - self._num_emitted
        if text.endswith(REPLACEMENT) and num_pending < MAX_BYTES_OF_A_CHARACTER:
            return ""  # perhaps the first bytes of a character
        if text:
            self._window = self._window[self._num_emitted :]
            self._num_emitted = len(self._window)
        return text

    def _new_text(self) -> str:
        """Text of the window beyond that of its tokens that are out."""
        before = self._decode(self._window[: self._num_emitted])
        return self._decode(self._window)[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text

    def _check_stop(self, text: str, *, is_end: bool) -> str:
        """Cut at the first stop string; else hold back the longest tail that may become one."""
        if not self._stop:
            return text
        text = self._held + text
        self._held = ""
        found = [(at, -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, _, self.stopped = min(found)
            return text[: at + len(self.stopped)] if self._include_stop else text[:at]
        if not is_end:
            held = self._longest_beginning(text)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        return text

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        longest = min(max(map(len, self._stop)) - 1, len(text))
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
