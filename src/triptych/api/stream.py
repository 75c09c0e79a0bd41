"""From the router's events to one HTTP answer: whole or as server-sent events, ending as soon as the client is gone.

Runs in the router process, called by `api/app.py`. The status is decided by the first event, before any byte is sent;
an error after that is one `data: {"error": ...}` and the end of the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych.api.answer import AnswerForm, Completion
from triptych.api.openai import error_body
from triptych.errors import EngineError, TriptychError
from triptych.types import ChoiceFinished, Event, Finished, TextDelta

T = TypeVar("T")

log = logging.getLogger(__name__)


class ClientGoneError(Exception):
    """The client closed the connection before the answer was complete."""


@asynccontextmanager
async def closing(events: AsyncIterator[Event]) -> AsyncIterator[AsyncIterator[Event]]:
    """Closes the router's iterator on the way out, which cancels the request in every stage."""
    try:
        yield events
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()


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


async def complete(events: AsyncIterator[Event], form: AnswerForm) -> Completion:
    """The whole answer. Raises what the router raises. Reads on after `Finished`, so that the router ends in peace."""
    text: list[str] = []
    ended: ChoiceFinished | None = None
    end: Finished | None = None
    async for event in events:
        match event:
            case TextDelta():
                text.append(event.text)
            case ChoiceFinished():
                ended = event
            case Finished():
                end = event
    if end is None or ended is None:
        raise EngineError("the request ended without a terminal event")
    return form.completion("".join(text), ended, end)


async def first_event(events: AsyncIterator[Event]) -> Event:
    try:
        return await anext(events)
    except StopAsyncIteration:
        raise EngineError("the request ended without a terminal event") from None


class EventStream(Response):
    """The answer as server-sent events. Owns `events` from here on and closes it in every case."""

    media_type = "text/event-stream"

    def __init__(self, first: Event, events: AsyncIterator[Event], form: AnswerForm) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with closing(self._events):
            try:
                await while_connected(receive, self._send_all(send))
            except (ClientGoneError, OSError):
                log.debug("client gone during stream id=%s", self._form.response_id)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._data():
            await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _data(self) -> AsyncIterator[bytes]:
        """The payload of each server-sent event in order."""
        encode = msgspec.json.Encoder().encode
        yield encode(self._form.opening())
        ended = False
        try:
            async for event in self._all_events():
                match event:
                    case TextDelta() if event.text:
                        yield encode(self._form.delta(event.text))
                    case ChoiceFinished():
                        yield encode(self._form.choice_end(event))
                    case Finished():
                        ended = True
                        if last := self._form.ending(event):
                            yield encode(last)
                        yield b"[DONE]"
            if not ended:
                raise EngineError("the request ended without a terminal event")
        except TriptychError as error:
            yield encode(error_body(error))
        except Exception as error:
            log.exception("stream failed id=%s", self._form.response_id)
            yield encode(error_body(error))

    async def _all_events(self) -> AsyncIterator[Event]:
        yield self._first
        async for event in self._events:
            yield event
