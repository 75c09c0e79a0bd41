"""How many bytes of media all requests hold together, and the limit on them. Kept by `router/media.py`.

Pure bookkeeping in the event loop's thread: what is added is in memory, or is about to be.
"""

from __future__ import annotations

from types import TracebackType

from triptych.errors import BadRequestError, OverloadedError


class Staging:
    """One for the router's life."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0

    def open(self, param: str = "messages") -> Staged:
        """`param` is the request's field that has its media."""
        return Staged(self, param)


class Staged:
    """What one holder has: a request until its end, or a download. Closing it gives everything back, once."""

    def __init__(self, staging: Staging, param: str) -> None:
        self._staging = staging
        self._param = param
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Raises OverloadedError where others hold too much, BadRequestError where this holder alone does."""
        staging = self._staging
        if self._num_bytes + num_bytes > staging.max_bytes:
            raise BadRequestError(
                f"the media of this request are more than max_staged_bytes = {staging.max_bytes} bytes",
                param=self._param,
            )
        if staging.used_bytes + num_bytes > staging.max_bytes:
            raise OverloadedError(
                f"the media of all requests would be more than max_staged_bytes = {staging.max_bytes} bytes; ask again"
            )
        staging.used_bytes += num_bytes
        self._num_bytes += num_bytes

    def close(self) -> None:
        self._staging.used_bytes -= self._num_bytes
        self._num_bytes = 0

    def __enter__(self) -> Staged:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
