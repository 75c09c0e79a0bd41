"""What was asked for and is not here yet: a fetch, and what becomes of its bytes.

Runs on the consumer's compute thread; made by `embedding.py` and `kv.py`, polled by the stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from triptych.transport.base import Fetch

Landed = TypeVar("Landed")


class Arriving(Generic[Landed]):
    """Poll `done`, then `land` once; or `close` to give it up."""

    def __init__(self, fetch: Fetch, take: Callable[[list[memoryview]], Landed]) -> None:
        self._fetch = fetch
        self._take = take

    @property
    def done(self) -> bool:
        return self._fetch.done

    def land(self) -> Landed:
        """Copy the bytes to their place and check them.

        Raises PeerLostError or another TransferError when they did not come, ChecksumError when the lease was over and
        they were overwritten, ValueError when the owner does not have them to give.
        """
        try:
            return self._take(self._fetch.views())
        finally:
            self._fetch.close()

    def close(self) -> None:
        """Harmless after `land`."""
        self._fetch.close()
