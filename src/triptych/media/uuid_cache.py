"""Images by the uuid that a client sent with them, for requests that send the uuid alone. Kept by `router/media.py`.

Contents and not identities are kept: what an image is still follows from its bytes and the request's own options.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple


class UuidKey(NamedTuple):
    """One client's name for an image. Clients cannot see each other's, nor can requests of another `cache_salt`."""

    client: str
    cache_salt: str
    uuid: str

    @property
    def num_bytes(self) -> int:
        return sum(len(text) for text in self)


class UuidCache:
    """Least recently used first out, within `max_bytes` of contents and names."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._contents: OrderedDict[UuidKey, bytes] = OrderedDict()
        self.used_bytes = 0

    def put(self, key: UuidKey, content: bytes) -> None:
        """Replace what the client called so before. Too large an image is not kept, and its name means nothing."""
        old = self._contents.pop(key, None)
        if old is not None:
            self.used_bytes -= key.num_bytes + len(old)
        if key.num_bytes + len(content) > self._max_bytes:
            return
        self._contents[key] = content
        self.used_bytes += key.num_bytes + len(content)
        while self.used_bytes > self._max_bytes:
            evicted, content = self._contents.popitem(last=False)
            self.used_bytes -= evicted.num_bytes + len(content)

    def get(self, key: UuidKey) -> bytes | None:
        content = self._contents.get(key)
        if content is not None:
            self._contents.move_to_end(key)
        return content
