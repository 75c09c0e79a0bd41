"""What each token of a tokenizer spells, in bytes: half a character too, which no decoded text can show."""

from __future__ import annotations

import json

from tokenizers import Tokenizer

from triptych.byte_spelling import byte_level_bytes, sentencepiece_bytes


class TokenBytes:
    """`token_bytes[token_id]`; empty for rows of a model's head that are no token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        kinds = [decoder, *decoder.get("decoders", [])]
        is_byte_level = any(kind.get("type") == "ByteLevel" for kind in kinds)
        self._spell = byte_level_bytes if is_byte_level else sentencepiece_bytes

    def __getitem__(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._spell(token)
