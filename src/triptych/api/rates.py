"""How often one client may ask: a token bucket each, filled evenly, that holds one minute's requests."""

from __future__ import annotations

import math
from collections.abc import Callable

from triptych.errors import RateLimitError

MAX_BUCKETS = 10_000  # beyond that, those that are full again are forgotten


class Rates:
    """`now` gives seconds of a monotonic clock. `per_minute` 0: no limit."""

    def __init__(self, per_minute: int, now: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._now = now
        self._buckets: dict[str, tuple[float, float]] = {}  # by client: tokens, and when there were so many

    def take(self, client: str) -> None:
        """Raises RateLimitError with the seconds until the next request may come."""
        if not self._per_minute:
            return
        now_s = self._now()
        tokens = self._tokens(client, now_s)
        if tokens < 1:
            wait_s = max(1, math.ceil((1 - tokens) * 60 / self._per_minute))
            raise RateLimitError(f"More than {self._per_minute} requests a minute; ask again in {wait_s} s.", wait_s)
        if len(self._buckets) >= MAX_BUCKETS:
            self._forget_full(now_s)
        self._buckets[client] = tokens - 1, now_s

    def _tokens(self, client: str, now_s: float) -> float:
        tokens, since_s = self._buckets.get(client, (float(self._per_minute), now_s))
        return min(float(self._per_minute), tokens + (now_s - since_s) * self._per_minute / 60)

    def _forget_full(self, now_s: float) -> None:
        full = [client for client in self._buckets if self._tokens(client, now_s) >= self._per_minute]
        for client in full:
            del self._buckets[client]
