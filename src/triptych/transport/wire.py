"""What two workers say to each other on a data connection: fixed structs, bytes, and nothing that could be executed.

The owner greets with its epoch and a nonce. Each request names a ticket and ranges, and is signed with the ticket's
secret, the nonce and a running number, so that it can be neither made up nor replayed. Each answer is a status and
the bytes of all ranges in order. All numbers are little-endian. Called by `tcp_server.py` and `tcp_client.py`.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Sequence
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

from triptych.messages import Range

WIRE_VERSION = 1
MAX_RANGES = 4096  # in one request: what a stranger can make the owner read

NONCE_BYTES = 16
ID_BYTES = 8
SECRET_BYTES = 32
TICKET_BYTES = ID_BYTES + SECRET_BYTES
_MAC_BYTES = 16

_MAGIC = b"TPKV"
_GREETING = struct.Struct(f"<4sH2x64s{NONCE_BYTES}s")  # magic, version, epoch in UTF-8 padded with zeros, nonce
_REQUEST = struct.Struct(f"<4sI{ID_BYTES}s{_MAC_BYTES}s")  # magic, number of ranges, ticket's id, signature
_RANGE = struct.Struct("<QQ")  # offset, bytes
_ANSWER = struct.Struct("<4sB3xQ")  # magic, status, bytes that follow

GREETING_BYTES, REQUEST_BYTES, ANSWER_BYTES, RANGE_BYTES = (s.size for s in (_GREETING, _REQUEST, _ANSWER, _RANGE))


class WireError(Exception):
    """The other end does not speak this protocol, or breaks it."""


class Status(IntEnum):
    OK = 0
    NO_LEASE = 1  # the ticket is unknown, over, or the signature is not of its secret: the owner does not say which
    NOT_OFFERED = 2  # a range that the ticket is not for


class Ticket(NamedTuple):
    """What `EmbeddingHandle.ticket` and `KVHandle.ticket` hold."""

    id: bytes
    secret: bytes

    @classmethod
    def new(cls) -> Ticket:
        return cls(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def parse(cls, data: bytes) -> Ticket:
        """Raises ValueError for what cannot be a ticket."""
        if len(data) != TICKET_BYTES:
            raise ValueError(f"a ticket has {TICKET_BYTES} bytes, not {len(data)}")
        return cls(data[:ID_BYTES], data[ID_BYTES:])

    def pack(self) -> bytes:
        return self.id + self.secret


class Request(NamedTuple):
    """The head of a request; `num_ranges` ranges follow it."""

    num_ranges: int
    ticket_id: bytes
    mac: bytes


def pack_greeting(epoch: str, nonce: bytes) -> bytes:
    return _GREETING.pack(_MAGIC, WIRE_VERSION, epoch.encode(), nonce)


def read_greeting(data: bytes) -> tuple[str, bytes]:
    """Epoch and nonce. Raises WireError."""
    magic, version, epoch, nonce = _GREETING.unpack(data)
    if (magic, version) != (_MAGIC, WIRE_VERSION):
        raise WireError(f"speaks {magic!r} version {version}, not {_MAGIC!r} version {WIRE_VERSION}")
    return epoch.rstrip(b"\0").decode(errors="replace"), nonce


def sign(ticket: Ticket, nonce: bytes, number: int, ranges: bytes) -> bytes:
    """Over one request on one connection: `number` counts from 0 there."""
    body = b"".join((nonce, number.to_bytes(8, "little"), ticket.id, ranges))
    return blake2b(body, key=ticket.secret, digest_size=_MAC_BYTES).digest()


def is_signed(mac: bytes, ticket: Ticket, nonce: bytes, number: int, ranges: bytes) -> bool:
    return hmac.compare_digest(mac, sign(ticket, nonce, number, ranges))


def pack_request(ticket: Ticket, nonce: bytes, number: int, ranges: Sequence[Range]) -> bytes:
    body = b"".join(_RANGE.pack(*each) for each in ranges)
    return _REQUEST.pack(_MAGIC, len(ranges), ticket.id, sign(ticket, nonce, number, body)) + body


def read_request(data: bytes) -> Request:
    """Raises WireError."""
    magic, num_ranges, ticket_id, mac = _REQUEST.unpack(data)
    if magic != _MAGIC or num_ranges > MAX_RANGES:
        raise WireError(f"asks in form {magic!r} for {num_ranges} ranges")
    return Request(num_ranges, ticket_id, mac)


def read_ranges(data: bytes) -> list[Range]:
    return [Range(*pair) for pair in _RANGE.iter_unpack(data)]


def pack_answer(status: Status, num_bytes: int = 0) -> bytes:
    return _ANSWER.pack(_MAGIC, status, num_bytes)


def read_answer(data: bytes) -> tuple[Status, int]:
    """Status and the number of bytes that follow. Raises WireError."""
    magic, status, num_bytes = _ANSWER.unpack(data)
    if magic != _MAGIC or status not in set(Status):
        raise WireError(f"answers in form {magic!r} with status {status}")
    return Status(status), num_bytes
