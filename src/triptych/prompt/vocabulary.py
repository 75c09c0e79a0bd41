"""A model's tokens as the API shows them: how many there are, how each is spelt, and what several say."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from triptych.prompt.token_bytes import TokenBytes


class Vocabulary:
    """`size` is rows of the model's head, which may be more than the tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.size = size
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Special tokens included. What is no token of the tokenizer has no text."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def name(self, token_id: int) -> str:
        """As the tokenizer's file spells it."""
        return self._tokenizer.id_to_token(token_id) or ""
