"""A deployment on an event loop of its own, and the batches that it answers. Made and owned by `LLM`."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, NamedTuple, Protocol

from triptych.api.seam import VocabularyLike
from triptych.config import Config
from triptych.errors import EngineError, NoCapacityError, OverloadedError, TriptychError, WorkerLostError
from triptych.offline.inputs import Question
from triptych.offline.loop import LoopThread, Stream
from triptych.offline.outputs import Collector, RequestOutput
from triptych.types import Event, Request

RETRY_S = 0.1


class Answering(Protocol):
    """What is used of the router."""

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocabulary(self) -> VocabularyLike: ...

    def handle(self, request: Request) -> AsyncIterator[Event]: ...


class Service(Protocol):
    """`local.LocalDeployment` or `launch.Deployment`. All calls come from one event loop."""

    @property
    def router(self) -> Answering: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def failed(self) -> str: ...


class Answer(NamedTuple):
    """What became of one question of a batch; `number` is its place among those that were asked."""

    number: int
    outcome: RequestOutput | TriptychError


class Runtime:
    """Starts in its constructor. It ends with `close`, and with the interpreter at the latest."""

    def __init__(self, service: Service, config: Config) -> None:
        self._service = service
        # More would wait in the router, each with its images in memory; fewer would let steps run half empty.
        self._window = min(config.router.max_num_requests, 2 * config.engine.max_num_seqs)
        self._room = asyncio.Semaphore(self._window)  # of all batches together
        self._capacity_wait_s = config.router.capacity_wait_s
        self._batches: set[asyncio.Task[Any]] = set()
        self._owner = (os.getpid(), threading.get_ident())
        self._closed = False
        self._loop = LoopThread("triptych-router")
        atexit.register(self.close)
        try:
            self._loop.run(service.start())
        except BaseException:
            self.close()
            raise

    @property
    def router(self) -> Answering:
        return self._service.router

    def answers(self, questions: Mapping[int, Question]) -> Stream[Answer]:
        """As they come, not in their order. Raises EngineError when the workers are gone or this is closed."""
        if self._closed:
            raise EngineError("the LLM is closed")
        if os.getpid() != self._owner[0]:
            raise EngineError("an LLM does not work in a process that was forked from its own: make one there")
        return self._loop.stream(self._answer_all(questions))

    async def _answer_all(self, questions: Mapping[int, Question]) -> AsyncGenerator[Answer, None]:
        batch: asyncio.Task[Any] | None = asyncio.current_task()
        assert batch is not None, "a stream is a task"
        self._batches.add(batch)
        waiting = iter(questions.items())
        failed = asyncio.create_task(self._service.failed())
        running: set[asyncio.Task[Answer]] = set()
        try:
            while True:
                for number, question in itertools.islice(waiting, self._window - len(running)):
                    running.add(asyncio.create_task(self._answer(number, question)))
                if not running:
                    return
                await asyncio.wait({failed, *running}, return_when=asyncio.FIRST_COMPLETED)
                if failed.done():
                    raise EngineError(failed.result())
                for task in [task for task in running if task.done()]:
                    running.remove(task)
                    yield task.result()
        finally:
            for open_task in (failed, *running):
                open_task.cancel()
            await asyncio.gather(failed, *running, return_exceptions=True)
            self._batches.discard(batch)

    async def _answer(self, number: int, question: Question) -> Answer:
        async with self._room:
            try:
                return Answer(number, await self._run_patiently(question))
            except TriptychError as error:
                return Answer(number, error)

    async def _run_patiently(self, question: Question) -> RequestOutput:
        """Again while others hold what it needs, such as memory for images, and while a dead worker is started anew."""
        give_up_s = math.inf
        while True:
            try:
                return await self._run(question)
            except WorkerLostError:
                raise  # several times already: it may be this request that no worker survives
            except NoCapacityError:
                give_up_s = min(give_up_s, time.monotonic() + self._capacity_wait_s)
                if time.monotonic() >= give_up_s:
                    raise
            except OverloadedError:
                give_up_s = math.inf
            await asyncio.sleep(RETRY_S)

    async def _run(self, question: Question) -> RequestOutput:
        request = await asyncio.to_thread(question.complete) if question.images else question.request
        collector = Collector(request.n)
        async for event in self._service.router.handle(request):
            collector.push(event)
        return collector.output(request.request_id, question.prompt)

    def close(self) -> None:
        """Cancel what runs, stop the workers, end the threads. Idempotent."""
        if self._closed or os.getpid() != self._owner[0]:  # threads do not live on in a forked process
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self._loop.run(self._stop())
        finally:
            self._loop.close()

    async def _stop(self) -> None:
        """Requests first: a worker that leaves would be lost to them."""
        for batch in self._batches:
            batch.cancel()
        await asyncio.gather(*self._batches, return_exceptions=True)
        await self._service.stop()

    def abandon(self) -> None:
        """`close` for the garbage collector, which may run on a thread that `close` waits for."""
        if threading.get_ident() == self._owner[1]:
            self.close()
        else:
            threading.Thread(target=self.close, name="triptych-close").start()
