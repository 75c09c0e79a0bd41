"""The half of HTTP/1.1 that a client of streams needs: bytes of one response in, pieces of its body out.

No copies but of partial lines, and one call for all that a socket delivered at once: the client shares its cores with
the servers that it measures.
"""

from __future__ import annotations


class ProtocolError(Exception):
    """What came is not an HTTP response."""


class ResponseParser:
    """Of one response. `feed` until `complete`; `end` when the peer closed."""

    def __init__(self) -> None:
        self.status = 0
        self.complete = False
        self._buffer = b""
        self._in_body = False
        self._chunked = False
        self._left: int | None = None  # bytes of this chunk, or of the whole body; None: until the peer closes

    def feed(self, data: bytes) -> list[bytes]:
        """Pieces of the body, as far as it came. Raises ProtocolError."""
        if self._buffer:
            data, self._buffer = self._buffer + data, b""
        if not self._in_body:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                self._buffer = head
                return []
            self._read_head(head)
            if 100 <= self.status < 200:  # Continue and the like: the answer follows
                self._in_body = False
                return self.feed(data) if data else []
        return self._chunks(data) if self._chunked else self._plain(data)

    def end(self) -> bool:
        """The peer closed. Whether the response is whole."""
        if self._in_body and not self._chunked and self._left is None:
            self.complete = True
        return self.complete

    def _read_head(self, head: bytes) -> None:
        line, *fields = head.split(b"\r\n")
        version, _, rest = line.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise ProtocolError(f"not an HTTP status line: {line[:60]!r}")
        self.status = int(rest[:3])
        self._in_body, self._chunked, self._left = True, False, None
        for field in fields:
            name, _, value = field.partition(b":")
            name, value = name.strip().lower(), value.strip().lower()
            if name == b"transfer-encoding" and b"chunked" in value:
                self._chunked, self._left = True, 0
            elif name == b"content-length" and not self._chunked:
                if not value.isdigit():
                    raise ProtocolError(f"not a length: {value[:60]!r}")
                self._left = int(value)
        self.complete = self._left == 0 and not self._chunked

    def _plain(self, data: bytes) -> list[bytes]:
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
            self.complete = self._left == 0
        return [data] if data else []

    def _chunks(self, data: bytes) -> list[bytes]:
        """`_left` is what the chunk still lacks, its line end included; 0: a size line comes next."""
        pieces = []
        at = 0
        while at < len(data) and not self.complete:
            if not self._left:
                end = data.find(b"\r\n", at)
                if end < 0:
                    self._buffer = data[at:]
                    break
                size = _size(data[at:end])
                at = end + 2
                if size == 0:
                    self.complete = True  # trailers are of no interest
                    break
                self._left = size + 2
            taken = data[at : at + self._left]
            self._left -= len(taken)
            at += len(taken)
            piece = taken[:-2] if self._left == 0 else taken[:-1] if self._left == 1 else taken
            if piece:
                pieces.append(piece)
        return pieces


def _size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise ProtocolError(f"not a chunk size: {line[:60]!r}") from None
