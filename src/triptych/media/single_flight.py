"""One run of a job for each key at a time: whoever asks meanwhile waits for the same run. Used by `fetch.py`.

A waiter that is cancelled leaves; the run goes on for the others, whoever began it, and ends with the last of them.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from triptych.errors import TriptychError

T = TypeVar("T")


class _Flight(Generic[T]):
    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.num_waiters = 0


class SingleFlight(Generic[T]):
    def __init__(self) -> None:
        self._flights: dict[str, _Flight[T]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    async def run(self, key: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `start()`, or of the run that another caller began. Its error is each waiter's own copy."""
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(start()))
        flight.num_waiters += 1
        try:
            return await asyncio.shield(flight.task)
        except TriptychError as error:
            raise copy.copy(error) from error  # waiters write their own `param` into it
        finally:
            flight.num_waiters -= 1
            if flight.task.done() or flight.num_waiters == 0:
                flight.task.cancel()  # harmless where it is done
                if self._flights.get(key) is flight:
                    del self._flights[key]
