"""Keeps special tokens that a client typed apart from those of the chat template. Used by `layout.py` in the router.

A client's special tokens go through the template as digits that nobody can guess, and come back as ordinary text; the
template's own go through the tokenizer as aliases. So a typed `<|im_end|>` is a string that the model reads, never
the end of a turn, and the text between is tokenized in one piece, exactly as it would be without any of this.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

_INDEX_DIGITS = 6


class ClientText:
    """What one request's strings hid from the template; `hide` before rendering, `restore` after it."""

    def __init__(self, specials: SpecialTokens) -> None:
        self._specials = specials
        self._nonce = f"{secrets.randbelow(10**38):038}"  # digits pass through every filter, `upper` and JSON included
        self._hidden: list[str] = []
        self._sentinel = re.compile(rf"{self._nonce}(\d{{{_INDEX_DIGITS}}})")

    def hide(self, value: Any) -> Any:
        """A copy of messages or template variables, without special tokens in any string."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    @property
    def mark(self) -> str:
        """Digits that no client can have sent, and that are none of the hidden texts."""
        return f"{self._nonce}{'9' * _INDEX_DIGITS}"

    def restore(self, text: str) -> str:
        return self._sentinel.sub(lambda match: self._hidden[int(match[1])], text)

    def _hide_text(self, text: str) -> str:
        text = self._specials.pattern.sub(lambda match: self._hide_one(match[0]), text)
        # Two parts that the template joins must not make a token either: hide a beginning at the end of a part.
        kept = text.rstrip()
        cut = len(kept) - self._specials.begun_at_end(kept)
        return text if cut == len(kept) else text[:cut] + self._hide_one(kept[cut:]) + text[len(kept) :]

    def _hide_one(self, text: str) -> str:
        self._hidden.append(text)
        return f"{self._nonce}{len(self._hidden) - 1:0{_INDEX_DIGITS}}"


class SpecialTokens:
    """The special tokens of one tokenizer, and an encoder that takes them from nobody but the template."""

    def __init__(self, tokenizer: Tokenizer, placeholder: str) -> None:
        added = tokenizer.get_added_tokens_decoder()
        tokens = {token.content: (token_id, token) for token_id, token in added.items() if token.special}
        tokens |= {
            token.content: (token_id, token) for token_id, token in added.items() if token.content == placeholder
        }
        longest_first = sorted(tokens, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {text[:size] for text in tokens for size in range(1, len(text))}
        self._longest = max(map(len, tokens), default=0)
        nonce = secrets.token_hex(16)
        self._aliases = {text: f"\U0010fff0{nonce}{k:04}\U0010fff1" for k, text in enumerate(tokens)}
        self._prompt_aliases = {text: alias for text, alias in self._aliases.items() if text != placeholder}
        self._encoder = self._build_encoder(tokenizer, [token for _, token in tokens.values()], placeholder)
        self._real_ids: dict[int, int] = {}  # by the alias's id
        for text, alias in self._aliases.items():
            alias_id = self._encoder.token_to_id(alias)
            assert alias_id is not None  # `_build_encoder` added it
            self._real_ids[alias_id] = tokens[text][0]

    def _build_encoder(self, tokenizer: Tokenizer, tokens: list[AddedToken], placeholder: str) -> Tokenizer:
        encoder = Tokenizer.from_str(tokenizer.to_str())
        encoder.no_truncation()
        encoder.no_padding()
        encoder.add_special_tokens([AddedToken(placeholder, special=True, normalized=False)])  # if it was not one
        encoder.encode_special_tokens = True  # as text
        encoder.add_tokens(
            [
                AddedToken(
                    self._aliases[token.content],
                    special=False,
                    normalized=False,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    single_word=token.single_word,
                )
                for token in tokens
            ]
        )
        return encoder

    def begun_at_end(self, text: str) -> int:
        """Characters at the end of `text` that could begin a special token; 0 for none."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                return size
        return 0

    def encode_prompt(
        self, text: str, add_special_tokens: bool, *, with_placeholder: bool = False
    ) -> list[tuple[int, bool]]:
        """As `encode`, for a prompt that a client wrote whole: its special tokens are real.

        The placeholder is one of them only where that is asked for.
        """
        aliases = self._aliases if with_placeholder else self._prompt_aliases
        aliased = self.pattern.sub(lambda match: aliases.get(match[0], match[0]), text)
        return self._ids(aliased, add_special_tokens)

    def encode(self, rendered: str, client: ClientText, add_special_tokens: bool) -> list[tuple[int, bool]]:
        """Token ids, each with whether it is a special token that the template wrote."""
        aliased = self.pattern.sub(lambda match: self._aliases[match[0]], rendered)
        return self._ids(client.restore(aliased), add_special_tokens)

    def _ids(self, aliased: str, add_special_tokens: bool) -> list[tuple[int, bool]]:
        encoding = self._encoder.encode(aliased, add_special_tokens=add_special_tokens)
        real = self._real_ids
        return [(real[token_id], True) if token_id in real else (token_id, False) for token_id in encoding.ids]
