"""What each token of a tokenizer spells, in bytes: half a character too, which no decoded text can show."""

from __future__ import annotations

import json
import re
from functools import cache

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # how sentencepiece spells what its vocabulary lacks
_SENTENCEPIECE_SPACE = "\u2581"


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 characters are themselves, the others stand from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


class TokenBytes:
    """`token_bytes[token_id]`; empty for rows of a model's head that are no token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        kinds = [decoder, *decoder.get("decoders", [])]
        self._is_byte_level = any(kind.get("type") == "ByteLevel" for kind in kinds)

    def __getitem__(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            table = _byte_of_character()
            return bytes(table[character] for character in token if character in table)
        if spelt := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(spelt[1], 16)])
        return token.replace(_SENTENCEPIECE_SPACE, " ").encode()
