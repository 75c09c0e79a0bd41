"""Batches over a router that only counts: how many run at once, who waits, and when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace

import msgspec
import pytest

from triptych.config import Config, EngineConfig, RouterConfig
from triptych.errors import EngineError, NoCapacityError, OverloadedError, TriptychError, WorkerLostError
from triptych.offline.inputs import Question
from triptych.offline.outputs import RequestOutput
from triptych.offline.runtime import Answering, Runtime
from triptych.types import (
    ChoiceFinished,
    Event,
    Finished,
    FinishReason,
    ImageInput,
    Request,
    SamplingParams,
    Started,
    Timing,
    Usage,
)


class CountingRouter:
    """Answers after a moment; `refuse` may raise instead."""

    model_name = "counting"
    max_model_len = 10
    vocabulary = SimpleNamespace(size=10)

    def __init__(self) -> None:
        self.num_running = 0
        self.most_running = 0
        self.num_handled = 0
        self.refuse: Callable[[Request], None] = lambda request: None

    async def handle(self, request: Request) -> AsyncIterator[Event]:
        self.num_handled += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            self.refuse(request)
            await asyncio.sleep(0.002)
            yield Started([1])
            yield ChoiceFinished(0, FinishReason.STOP, None)
            yield Finished(Usage(1, 1), Timing(0.0, 0.0, [], [], []))
        finally:
            self.num_running -= 1


class CountingService:
    def __init__(self) -> None:
        self.counting = CountingRouter()
        self.router: Answering = self.counting
        self.stopped = 0
        self.died = asyncio.Event()

    async def start(self) -> None:
        return None

    async def stop(self) -> None:
        assert self.counting.num_running == 0, "requests end before the workers"
        self.stopped += 1

    async def failed(self) -> str:
        await self.died.wait()
        return "the worker is gone"


@pytest.fixture
def service() -> CountingService:
    return CountingService()


@pytest.fixture
def runtime(service: CountingService) -> Iterator[Runtime]:
    config = Config(engine=EngineConfig(max_num_seqs=3), router=RouterConfig(max_num_requests=100))
    runtime = Runtime(service, config)
    yield runtime
    runtime.close()
    assert service.stopped == 1


def questions(count: int) -> dict[int, Question]:
    return {number: Question(Request(f"r{number}", [], [], SamplingParams()), {}) for number in range(count)}


def outcomes(runtime: Runtime, count: int) -> dict[int, RequestOutput | TriptychError]:
    with runtime.answers(questions(count)) as answers:
        return {answer.number: answer.outcome for answer in answers}


def test_a_long_batch_runs_a_few_requests_at_a_time(runtime: Runtime, service: CountingService) -> None:
    answered = outcomes(runtime, 50)
    assert sorted(answered) == list(range(50))
    for number, outcome in answered.items():
        assert isinstance(outcome, RequestOutput)
        assert outcome.request_id == f"r{number}"
    assert service.counting.most_running == 6  # two steps of three


def test_the_routers_own_limit_holds_too(service: CountingService) -> None:
    runtime = Runtime(service, Config(router=RouterConfig(max_num_requests=2)))
    assert len(outcomes(runtime, 9)) == 9
    runtime.close()
    assert service.counting.most_running == 2


def test_a_request_that_others_leave_no_room_for_waits(runtime: Runtime, service: CountingService) -> None:
    def refuse(request: Request) -> None:
        if service.counting.num_running > 2:
            raise OverloadedError("the memory for images is full")

    service.counting.refuse = refuse
    answered = outcomes(runtime, 20)
    assert all(isinstance(outcome, RequestOutput) for outcome in answered.values())
    assert service.counting.num_handled > 20


def test_a_dead_worker_is_waited_for_and_not_for_ever(service: CountingService) -> None:
    runtime = Runtime(service, Config(router=RouterConfig(capacity_wait_s=0.3)))
    num_refused = 0

    def refuse(request: Request) -> None:
        nonlocal num_refused
        num_refused += 1
        if request.request_id == "r1" or num_refused < 5:
            raise NoCapacityError("no live worker")

    service.counting.refuse = refuse
    answered = outcomes(runtime, 3)
    runtime.close()
    assert [type(answered[k]) for k in range(3)] == [RequestOutput, NoCapacityError, RequestOutput]
    assert service.counting.num_handled > 5


def test_a_request_that_no_worker_survives_is_not_tried_for_ever(runtime: Runtime, service: CountingService) -> None:
    def refuse(request: Request) -> None:
        raise WorkerLostError("the worker died")

    service.counting.refuse = refuse
    assert [type(outcome) for outcome in outcomes(runtime, 3).values()] == [WorkerLostError] * 3
    assert service.counting.num_handled == 3


def test_the_end_of_the_workers_ends_the_batch(runtime: Runtime, service: CountingService) -> None:
    def refuse(request: Request) -> None:
        service.died.set()

    service.counting.refuse = refuse
    with pytest.raises(EngineError, match="the worker is gone"):
        outcomes(runtime, 3)


def test_a_bug_ends_the_batch_and_not_the_runtime(runtime: Runtime, service: CountingService) -> None:
    def refuse(request: Request) -> None:
        if request.request_id == "r2":
            raise ZeroDivisionError("a bug")

    service.counting.refuse = refuse
    with pytest.raises(ZeroDivisionError):
        outcomes(runtime, 10)
    assert service.counting.num_running == 0
    assert len(outcomes(runtime, 2)) == 2


def test_a_batch_that_is_left_early_is_cancelled(runtime: Runtime, service: CountingService) -> None:
    with runtime.answers(questions(50)) as answers:
        next(answers)
    assert service.counting.num_running == 0
    assert service.counting.num_handled < 50


def test_a_question_completes_on_its_turn(runtime: Runtime) -> None:
    """Its images are read then, and a picture that is missing is its own error."""
    request = msgspec.structs.replace(
        questions(1)[0].request, images=[ImageInput("place", param="messages.0.content.0")]
    )
    question = Question(request, {"place": "missing.png"})
    with runtime.answers({0: question}) as answers:
        (answer,) = answers
    assert isinstance(answer.outcome, TriptychError)
    assert (answer.outcome.param, "missing.png" in answer.outcome.message) == ("messages.0.content.0", True)
