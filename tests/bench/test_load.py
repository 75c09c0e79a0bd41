"""Loops offer what they say, and every request of a session leaves a record."""

from __future__ import annotations

from itertools import pairwise

from triptych.bench.client import Target
from triptych.bench.load import Driver
from triptych.bench.requests import RequestFactory
from triptych.bench.workload import Load, Workload

from .mock_server import MockServer

TEXT = Workload(name="text", output_tokens=4)
CHAT = Workload(name="chat", output_tokens=4, turns=3)


def driver(server: MockServer, model: str) -> Driver:
    return Driver(Target.parse(server.url, model), timeout_s=20.0)


async def test_a_closed_loop_keeps_so_many_in_flight(server: MockServer) -> None:
    sessions = RequestFactory(TEXT, 0).sessions(12)
    records = await driver(server, "slow").run(sessions, Load(concurrency=3), 0)
    assert [record.index for record in records] == list(range(12))
    assert not any(record.failure for record in records)
    assert server.most_at_once == 3


async def test_one_at_a_time(server: MockServer) -> None:
    records = await driver(server, "plain").run(RequestFactory(TEXT, 0).sessions(4), Load(concurrency=1), 0)
    for earlier, later in pairwise(records):
        assert earlier.end_s <= later.sent_s


async def test_an_open_loop_does_not_wait_for_answers(server: MockServer) -> None:
    sessions = RequestFactory(TEXT, 0).sessions(12)
    records = await driver(server, "slow").run(sessions, Load(rate_per_s=1000.0), 7)
    assert server.most_at_once > 3
    due_s = [record.due_s for record in records]
    assert due_s == sorted(due_s)
    assert all(record.sent_s >= record.due_s for record in records)


async def test_arrivals_follow_the_seed(server: MockServer) -> None:
    gaps = []
    for seed in (1, 1, 2):
        sessions = RequestFactory(TEXT, 0).sessions(5)
        records = await driver(server, "plain").run(sessions, Load(rate_per_s=200.0), seed)
        gaps.append([round(record.due_s - records[0].due_s, 6) for record in records])
    assert gaps[0] == gaps[1] != gaps[2]


async def test_a_session_sends_the_answers_it_got(server: MockServer) -> None:
    records = await driver(server, "plain").run(RequestFactory(CHAT, 0).sessions(3), Load(concurrency=2), 0)
    assert [record.failure for record in records] == ["", "", ""]
    assert [len(body["messages"]) for body in server.bodies] == [1, 3, 5]
    assert server.bodies[2]["messages"][1]["content"] == " w0 w1 w2 w3"


async def test_turns_after_a_failed_one_are_counted_as_failed(server: MockServer) -> None:
    records = await driver(server, "refused").run(RequestFactory(CHAT, 0).sessions(3), Load(concurrency=1), 0)
    assert [record.failure for record in records] == ["http_503", "earlier_turn", "earlier_turn"]
    assert len(server.bodies) == 1
