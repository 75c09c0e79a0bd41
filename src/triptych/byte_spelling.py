"""How tokenizers write bytes in the names of their tokens: byte-level ones in letters, sentencepiece's as `<0x0A>`.

The router shows by it what a token is, and workers make grammars' masks of it.
"""

from __future__ import annotations

import re

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # of what sentencepiece's vocabulary lacks
_SENTENCEPIECE_SPACE = "\u2581"


def _letters() -> dict[int, int]:
    """GPT-2's: printable Latin-1 characters are themselves, the other bytes stand from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {0x100 + place: byte for place, byte in enumerate(hidden)}


_LETTERS = _letters()


def byte_level_bytes(token: str) -> bytes:
    """What a token of a byte-level tokenizer stands for. Letters that stand for no byte are left out."""
    return token.translate(_LETTERS).encode("latin-1", "ignore")


def sentencepiece_bytes(token: str) -> bytes:
    """The same for a tokenizer that has a token for each byte that its vocabulary lacks."""
    byte = spelt_byte(token)
    return token.replace(_SENTENCEPIECE_SPACE, " ").encode() if byte is None else bytes([byte])


def spelt_byte(token: str) -> int | None:
    """The byte that sentencepiece's token spells, if it spells one."""
    found = _BYTE.fullmatch(token)
    return int(found[1], 16) if found else None
