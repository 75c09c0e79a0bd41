"""The tools of this folder: what they accept as an end, what they call growth; and small forms of their runs."""

from __future__ import annotations

import asyncio
import io
import json
import random
import signal
from pathlib import Path

import pytest
from PIL import Image

from tests.chaos import cancels
from tests.chaos.asking import Answer, BrokenError, End, read_events
from tests.chaos.faults import Injection, table
from tests.chaos.load import Flight, undisturbed
from tests.chaos.questions import make_questions, with_comment
from tests.chaos.resources import SLACK_BYTES, Process, Snapshot, grown
from tests.chaos.run import verdict
from tests.chaos.server import Server, send_signal

TEXT = json.dumps({"choices": [{"delta": {"content": "yes"}, "finish_reason": None}]})
LAST = json.dumps({"choices": [{"delta": {}, "finish_reason": "length"}]})
USAGE = json.dumps({"choices": [], "usage": {"completion_tokens": 3}})
ERROR = json.dumps({"error": {"message": "gone", "code": 503}})


def test_a_stream_has_exactly_one_end() -> None:
    assert read_events([TEXT, LAST, USAGE, "[DONE]"]) == End(Answer("yes", 3, "length"))
    assert read_events([TEXT, ERROR]) == End(error="gone", status=503)


@pytest.mark.parametrize(
    "events",
    [[], [TEXT], [TEXT, LAST], [TEXT, "[DONE]"], [LAST, TEXT, "[DONE]"], [LAST, "[DONE]", TEXT], [ERROR, "[DONE]"]],
)
def test_a_stream_with_another_end_is_broken(events: list[str]) -> None:
    with pytest.raises(BrokenError):
        read_events(events)


def test_a_comment_makes_a_picture_new_and_changes_no_pixel() -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (9, 7), (1, 2, 3)).save(buffer, "PNG")
    png = buffer.getvalue()
    other = with_comment(png, "abc")
    assert other != png
    image = Image.open(io.BytesIO(other))
    image.verify()
    assert Image.open(io.BytesIO(other)).tobytes() == Image.open(io.BytesIO(png)).tobytes()


def test_the_questions_are_text_one_picture_and_several_greedy_and_sampled() -> None:
    questions = make_questions(24, 0)
    assert {min(len(asked.pictures), 2) for asked in questions} == {0, 1, 2}
    assert {asked.seed is None for asked in questions} == {True, False}
    asked = next(asked for asked in questions if asked.pictures)
    assert asked.body() == asked.body()
    assert asked.body(random.Random(1)) != asked.body(random.Random(2))


def a_snapshot(private_bytes: int = 0, num_fds: int = 9, leases: int = 0) -> Snapshot:
    return Snapshot({"router": Process(1, private_bytes, num_fds, 2)}, leases, 0, 0, 1, 0, ["lock"])


def test_what_has_grown_is_named() -> None:
    assert grown(a_snapshot(), a_snapshot(SLACK_BYTES)) == []
    assert "private memory of router" in grown(a_snapshot(), a_snapshot(SLACK_BYTES + 1))[0]
    assert "descriptors of router: 9 -> 90" in grown(a_snapshot(), a_snapshot(num_fds=90))[0]
    assert grown(a_snapshot(), a_snapshot(leases=2)) == ["num_leases: 0 -> 2"]


def test_the_table_counts_what_was_in_flight_and_what_failed() -> None:
    flights = [Flight(0, 0, 0.0, 5.0, "answered"), Flight(1, 0, 0.0, 9.0, "failed"), Flight(2, 0, 0.0, 1.0, "answered")]
    (row,) = table([Injection("kill -9", "encode-0", 2.0, frozenset({0, 1}), 3.5)], flights)
    assert (row["injected"], row["in_flight"], row["failed"]) == (1, 2, 1)
    assert (row["slowest_recovery_s"], row["slowest_request_s"]) == (3.5, 7.0)


def test_a_run_with_a_failure_in_a_hundred_and_one_keeps_its_promises_and_with_two_does_not() -> None:
    found = {
        "requests": {"started": 101, "answered": 100, "failed": 1}, "success": 100 / 101, "faults": [1, 2],
        "unlike_the_reference": [], "failures_while_undisturbed": [], "unrecovered": [], "unjust": [], "grown": [],
        "ended_alone": False,
    }  # fmt: skip
    assert verdict(found) == []
    worse = found | {"requests": {"started": 102, "answered": 100, "failed": 2}, "success": 100 / 102}
    assert verdict(worse) == ["success 0.9804 is below 0.99"]
    assert verdict(found | {"requests": {"started": 102, "answered": 100, "failed": 1}}) == ["1 requests did not end"]


@pytest.mark.slow
async def test_a_router_that_was_stopped_for_longer_than_the_ttl_loses_no_worker(tmp_path: Path) -> None:
    async with Server("1E/1P/1D", ["--heartbeat-ttl-s", "2", "--heartbeat-s", "0.2"], tmp_path / "log") as server:
        epochs = {worker.epoch for worker in await server.workers()}
        (asked,) = make_questions(1, 3)
        (expected,) = await undisturbed(server.url, [asked])
        send_signal(server.pid, signal.SIGSTOP)
        await asyncio.sleep(6.0)
        send_signal(server.pid, signal.SIGCONT)
        assert await undisturbed(server.url, [asked]) == [expected]
        await asyncio.sleep(1.0)  # some sweeps
        assert {worker.epoch for worker in await server.workers()} == epochs


@pytest.mark.slow
def test_s10_a_thousand_clients_that_go_away_leave_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "cancels.json"
    assert cancels.main(["--count", "1000", "--placement", "1E/1P/1D", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["ends"]["cancelled"] >= 1000
    assert min(found["work_done"].values()) > 0, "a stage was never reached"
