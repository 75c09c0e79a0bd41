"""Output token ids to text as they come, with stop strings. One for each request, in the router.

Text that was given out never changes: half a character, and what may become a stop string, wait for the next tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from triptych.byte_spelling import spelt_byte

_HALF = "\ufffd"  # what a tokenizer makes of bytes that are not a whole character (yet)
_MAX_CHAR_TOKENS = 4  # a character has at most four bytes, a token at least one


class IncrementalDetokenizer:
    """Equal to decoding all tokens at once, at a cost that does not grow with what came before."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Stop strings are looked for in the text of what follows the first `min_tokens` tokens."""
        self._tokenizer = tokenizer
        self._skipped = _special_ids(tokenizer) if skip_special_tokens else frozenset()
        self._include_stop_str = include_stop_str
        self._stops = [StopString(text) for text in stop if text]
        self._num_unstoppable = min_tokens  # tokens to come that no stop string ends
        self._held = ""  # may become a stop string
        # The last tokens that gave text, then those that came since: a token's text depends on the one before it
        # (sentencepiece drops the first space of all). `_given` characters of the window's text are given out.
        self._window: list[int] = []
        self._num_old = 0  # leading tokens of the window whose text is all given out
        self._given = 0
        self.stopped: str | None = None  # the stop string that ended the text

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became final with these tokens; empty after a stop string."""
        if self.stopped is not None:
            return ""
        # One by one: where characters are spelt in bytes, one half would hide the whole ones decoded along with it.
        first, others = token_ids[: self._num_unstoppable], token_ids[self._num_unstoppable :]
        self._num_unstoppable -= len(first)
        return self._text(first) + self._release(self._text(others))

    def _text(self, token_ids: Sequence[int]) -> str:
        return "".join([self._decode(token_id) for token_id in token_ids if self._is_text(token_id)])

    def finish(self) -> str:
        """The rest: no tokens will come. Half a character becomes the replacement character."""
        if self.stopped is not None:
            return ""
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)[self._given :]
        self._window, self._num_old, self._given = [], 0, 0
        text = self._release(text)
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _is_text(self, token_id: int) -> bool:
        """A model's head may have more rows than the tokenizer has tokens."""
        return token_id not in self._skipped and self._tokenizer.id_to_token(token_id) is not None

    def _decode(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        whole = text.rstrip(_HALF)
        if whole != text and self._spells_whole(self._window[self._num_old :]):
            whole = text
        fresh = whole[self._given :]
        if len(whole) == len(text):
            if fresh:
                self._window = self._window[self._num_old :]
                self._num_old = len(self._window)
                self._given = len(self._tokenizer.decode(self._window, skip_special_tokens=False))
        elif len(self._window) - self._num_old > 2 * _MAX_CHAR_TOKENS:
            fresh = self._give_up_halves(text)
        else:
            self._given = max(self._given, len(whole))
        return fresh

    def _spells_whole(self, token_ids: list[int]) -> bool:
        """Whether the last are byte tokens that make whole characters, be it the replacement character itself."""
        spelt: list[int] = []
        for token_id in reversed(token_ids):
            byte = spelt_byte(self._tokenizer.id_to_token(token_id) or "")
            if byte is None:
                break
            spelt.insert(0, byte)
        try:
            return bytes(spelt).decode() != ""
        except UnicodeDecodeError:
            return False

    def _give_up_halves(self, text: str) -> str:
        """So many tokens cannot be one character: only the last few may still become one."""
        window = self._window[-_MAX_CHAR_TOKENS:]
        window_text = self._tokenizer.decode(window, skip_special_tokens=False)
        open_halves = min(_num_halves(window_text), _num_halves(text))
        fresh = text[self._given : len(text) - open_halves]
        self._window, self._num_old, self._given = window, 0, len(window_text) - open_halves
        return fresh

    def _release(self, text: str) -> str:
        """Take in text that is final, give out what cannot belong to a stop string any more."""
        if not self._stops:
            return text
        start = len(self._held)
        self._held += text
        for end in range(start, len(self._held)):
            matched = [stop for stop in self._stops if stop.feed(self._held[end])]
            if matched:  # at the first character that completes one, so that borders of tokens do not matter
                longest = max((stop.text for stop in matched), key=len)
                self.stopped = longest
                kept = end + 1 if self._include_stop_str else end + 1 - len(longest)
                return self._held[:kept]
        final = len(self._held) - max(stop.num_matched for stop in self._stops)
        released, self._held = self._held[:final], self._held[final:]
        return released


class StopString:
    """Knuth, Morris and Pratt: how much of `text` the characters so far end with, one look at each."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = _fallback_of(text)

    def feed(self, character: str) -> bool:
        """Whether this character completes it; after that, feed no more."""
        while self.num_matched and character != self.text[self.num_matched]:
            self.num_matched = self._fallback[self.num_matched - 1]
        self.num_matched += character == self.text[self.num_matched]
        return self.num_matched == len(self.text)


@lru_cache(maxsize=64)
def _fallback_of(text: str) -> tuple[int, ...]:
    """For each place the longest beginning of `text` that ends there. Cached, for all choices of a request ask."""
    fallback = [0] * len(text)
    size = 0
    for k in range(1, len(text)):
        while size and text[k] != text[size]:
            size = fallback[size - 1]
        size += text[k] == text[size]
        fallback[k] = size
    return tuple(fallback)


@lru_cache(maxsize=8)
def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Cached, for some tokenizers have thousands and every request asks."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def _num_halves(text: str) -> int:
    return len(text) - len(text.rstrip(_HALF))
