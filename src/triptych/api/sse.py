"""Server-sent events as bytes."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def data(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def typed(kind: str, body: msgspec.Struct) -> bytes:
    """With an `event` line, as the Responses API has it."""
    return b"event: " + kind.encode() + b"\n" + data(body)
