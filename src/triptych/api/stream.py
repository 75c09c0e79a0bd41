"""From the router's events to one HTTP answer as server-sent events, ending as soon as the client is gone.

Runs in the router process, called by `api/endpoint.py`. The status is decided by the first event, before any byte is
sent; an error after that is one event of the stream and its end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych.api.call import StreamForm
from triptych.api.gather import Numbered
from triptych.errors import EngineError, TriptychError
from triptych.types import Finished

T = TypeVar("T")

log = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """The client closed the connection before the answer was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and ClientGoneError raised, when the client goes first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_event(events: AsyncIterator[Numbered]) -> Numbered:
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise EngineError("the request ended without a terminal event") from None


class EventStream(Response):
    """The answer as server-sent events. Owns `events` from here on and closes it in every case."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Numbered,
        events: AsyncGenerator[Numbered, None],
        form: StreamForm,
        num_prompts: int,
        request_id: str,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._form = form
        self._num_open = num_prompts
        self._request_id = request_id  # for the log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                await while_connected(receive, self._send_all(send))
            except (ClientGoneError, OSError):
                log.debug("client gone during stream id=%s", self._request_id)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for body in self._bodies():
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _bodies(self) -> AsyncIterator[bytes]:
        try:
            async for prompt, event in self._all_events():
                self._num_open -= isinstance(event, Finished)
                for body in self._form.event(prompt, event):
                    yield body
            if self._num_open:
                raise EngineError("the request ended without a terminal event")
            for body in self._form.end():
                yield body
        except TriptychError as error:
            for body in self._form.failed(error):
                yield body
        except Exception as error:
            log.exception("stream failed id=%s", self._request_id)
            for body in self._form.failed(error):
                yield body

    async def _all_events(self) -> AsyncIterator[Numbered]:
        yield self._first
        async for numbered in self._events:
            yield numbered
