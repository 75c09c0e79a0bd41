"""The worker's loop around stages that only record, and the heartbeat against a real HTTP server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any, cast

import msgspec
import pytest

from triptych import messages
from triptych.clock import ManualClock
from triptych.errors import ConfigError, TriptychError
from triptych.handoff.leases import Leases
from triptych.heartbeat import Heart, HttpLine, NoAnswerError
from triptych.lent_cores import LentCores
from triptych.messages import Body, Cancel, Drain, Envelope, FetchKV, LeaseReleased, PeerLost, Probe, Probed
from triptych.models.family import Part
from triptych.stages.base import Routes
from triptych.stages.encode import EncodeStage
from triptych.stages.language import LanguageStage
from triptych.transport.inproc import InProcTransport
from triptych.types import Heartbeat, Load, SamplingParams, Stage, WeightsReport, WorkerAddress, WorkerInfo
from triptych.worker import ENCODE_PATIENCE_S, StageSet, Worker, needed_parts

CONSUMER = WorkerAddress("decode-0", "consumer", "", "")


class RecordingStage:
    """Does `work` steps, then has nothing to do; `live` requests hold something here."""

    def __init__(self, *kinds: type) -> None:
        self.kinds = kinds
        self.received: list[Body] = []
        self.num_steps = 0
        self.work = 0
        self.live = 0
        self.error: Exception | None = None
        self.is_prefilling = False
        self.is_preprocessing = False
        self.forwards: list[bool] = []
        self.counters: dict[str, float] = {"ticks": 0.0}

    def routes(self) -> Routes:
        return dict.fromkeys(self.kinds, self.received.append)

    def step(self, *, forward: bool = True) -> bool:
        self.num_steps += 1
        self.forwards.append(forward)
        self.work -= 1
        return self.work >= 0

    def tick(self) -> None:
        self.counters["ticks"] += 1

    def probe(self) -> None:
        if self.error is not None:
            raise self.error

    def num_live(self) -> int:
        return self.live

    def check(self) -> None:
        return None

    def load(self) -> Load:
        return Load(num_waiting=3, num_free_blocks=7)

    def num_waiting_embeds(self) -> int:
        return 5

    def num_cached_embeds(self) -> int:
        return 6


class ScriptedInbox:
    """Each `receive` returns the next batch; what is sent is kept."""

    def __init__(self) -> None:
        self.batches: list[list[Envelope]] = []
        self.sent: list[Body] = []
        self.forgotten: list[str] = []
        self.timeouts_s: list[float] = []

    def put(self, *bodies: Body, version: int = messages.PROTOCOL_VERSION) -> None:
        self.batches.append([Envelope(version, "router", "", body) for body in bodies])

    def receive(self, timeout_s: float) -> list[Envelope]:
        self.timeouts_s.append(timeout_s)
        return self.batches.pop(0) if self.batches else []

    def forget(self, epoch: str) -> None:
        self.forgotten.append(epoch)

    def to_router(self, body: Body) -> None:
        self.sent.append(body)

    def to_worker(self, address: WorkerAddress, body: Body) -> None:
        self.sent.append(body)


class RecordingCores(LentCores):
    def __init__(self) -> None:
        super().__init__()
        self.is_lent = False

    def take(self) -> None:
        self.is_lent = False

    def lend(self) -> None:
        self.is_lent = True


class Bench:
    def __init__(self) -> None:
        self.cores = RecordingCores()
        self.encode = RecordingStage(Cancel, messages.EncodeItems)
        self.language = RecordingStage(Cancel, FetchKV)
        self.inbox = ScriptedInbox()
        self.clock = ManualClock()
        self.leases = Leases(self.clock, ttl_s=10.0)
        self.transport = InProcTransport("worker-epoch", 4096)
        self.stages = StageSet(cast(EncodeStage, self.encode), cast(LanguageStage, self.language))
        self.worker = Worker(self.stages, self.inbox, self.transport, self.leases, self.cores)
        self.freed: list[str] = []

    def lease(self, name: str) -> int:
        return self.leases.grant("decode-0", "consumer", ("r", 0), lambda: self.freed.append(name))


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.transport.close()


CANCEL = Cancel("r", 0)
FETCH = FetchKV("r", 0, consumer=CONSUMER)


# -- the loop ----------------------------------------------------------------------------------------------------------


def test_a_message_reaches_every_stage_that_asked_for_its_kind(bench: Bench) -> None:
    bench.inbox.put(CANCEL, FETCH)
    bench.worker.turn(0.0)
    assert bench.encode.received == [CANCEL]
    assert bench.language.received == [CANCEL, FETCH]


PROMPT = messages.PromptMessage("r", 2, [1, 2], 0, [], SamplingParams(), "", 0)
FIELDS = {field: getattr(PROMPT, field) for field in PROMPT.__struct_fields__}
EMBEDDING = messages.EmbeddingHandle(7, CONSUMER, messages.Range(0, 0), (0, 0), "float32", 0)


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (messages.Prefill(**FIELDS, decode_elsewhere=False), messages.Refused),
        (messages.Decode(**FIELDS, source=CONSUMER), messages.Refused),
        (messages.EncodeItems("r", 2, ["i"], CONSUMER), messages.ItemFailed),
        (messages.FetchKV("r", 2, CONSUMER), messages.KVRefused),
        (messages.EmbeddingPublished("r", 2, "i", EMBEDDING), messages.LeaseReleased),
        (messages.KVPublished("r", 2, messages.KVHandle(7, CONSUMER, 0, [], []), 0), messages.LeaseReleased),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, messages.Message) else "",
)
def test_s6_what_no_hosted_stage_takes_is_refused_and_the_worker_goes_on(
    bench: Bench, body: Body, answer: type[messages.Message]
) -> None:
    for stage in (bench.encode, bench.language):
        stage.kinds = ()
    worker = Worker(bench.stages, bench.inbox, bench.transport, bench.leases)
    bench.inbox.put(body)
    bench.inbox.put(Probe(1))
    worker.turn(0.0)
    worker.turn(0.0)
    refusal, probed = bench.inbox.sent
    assert isinstance(refusal, answer)
    assert getattr(refusal, "attempt", 2) == 2
    assert probed == Probed(1)


def test_a_message_that_asks_for_no_answer_and_that_no_stage_takes_is_dropped(bench: Bench) -> None:
    bench.inbox.put(messages.KVRefused("r", 0, message=""))
    bench.worker.turn(0.0)
    assert bench.encode.received == bench.language.received == []


def test_a_message_of_another_version_is_dropped(bench: Bench) -> None:
    bench.inbox.put(CANCEL, Probe(1), Drain(), version=messages.PROTOCOL_VERSION + 1)
    bench.worker.turn(0.0)
    assert (bench.language.received, bench.inbox.sent) == ([], [])


def test_each_turn_steps_every_stage_once_and_says_whether_any_worked(bench: Bench) -> None:
    bench.language.work = 1
    assert [bench.worker.turn(0.0), bench.worker.turn(0.0)] == [True, False]
    assert (bench.encode.num_steps, bench.language.num_steps) == (2, 2)


def test_cores_are_lent_by_a_worker_that_has_nothing_to_do(bench: Bench) -> None:
    def is_lent_after_a_turn() -> bool:
        bench.worker.turn(0.0)
        return bench.cores.is_lent

    assert is_lent_after_a_turn()
    bench.language.work = 1
    assert not is_lent_after_a_turn()
    bench.encode.is_preprocessing = True
    assert not is_lent_after_a_turn()
    bench.encode.is_preprocessing = False
    assert is_lent_after_a_turn()


def test_a_prompt_under_way_goes_before_the_tower_for_a_while(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for bench.language.is_prefilling in (False, True, False, True, True):
        bench.worker.turn(0.0)
    now += ENCODE_PATIENCE_S + 0.1
    bench.worker.turn(0.0)
    bench.worker.turn(0.0)
    assert bench.encode.forwards == [True, False, True, False, False, True, False]


def test_a_released_lease_is_freed_once(bench: Bench) -> None:
    lease = bench.lease("kv")
    bench.inbox.put(LeaseReleased(lease), LeaseReleased(lease), LeaseReleased(12345))
    bench.worker.turn(0.0)
    assert bench.freed == ["kv"]


def test_a_lost_peer_ends_its_leases_and_its_mapping(bench: Bench) -> None:
    peer = InProcTransport("consumer", 4096)
    bench.transport.fetch(CONSUMER, [messages.Range(0, 8)])
    bench.lease("kv")
    bench.leases.grant("other", "other", ("r", 0), lambda: bench.freed.append("other"))
    bench.inbox.put(PeerLost("decode-0", "consumer"))
    bench.worker.turn(0.0)
    assert bench.freed == ["kv"]
    assert bench.inbox.forgotten == ["consumer"]
    assert len(bench.leases) == 1
    bench.transport.check()
    peer.close()
    with pytest.raises(TriptychError):  # the mapping is gone with the peer
        bench.transport.fetch(CONSUMER, [messages.Range(0, 8)])


def test_leases_expire_in_the_workers_own_time(bench: Bench) -> None:
    bench.lease("kv")
    bench.clock.advance(11.0)
    bench.worker.turn(0.0)
    assert bench.freed == ["kv"]
    assert bench.worker.counters["leases_expired_total"] == 1.0


def test_a_healthy_worker_answers_a_probe_with_nothing(bench: Bench) -> None:
    bench.inbox.put(Probe(8))
    bench.worker.turn(0.0)
    assert bench.inbox.sent == [Probed(8, "")]


@pytest.mark.parametrize(
    ("error", "answer"),
    [(RuntimeError("CUDA is gone"), "CUDA is gone"), (RuntimeError(), "RuntimeError"), (ConfigError("x"), "x")],
)
def test_a_probe_answers_what_is_wrong_with_a_stage(bench: Bench, error: Exception, answer: str) -> None:
    bench.language.error = error
    bench.inbox.put(Probe(8))
    bench.worker.turn(0.0)
    assert bench.inbox.sent == [Probed(8, answer)]


def test_load_and_counters_are_there_for_the_heartbeat(bench: Bench) -> None:
    bench.lease("kv")
    bench.worker.turn(0.0)
    beat = bench.worker.heartbeat(CONSUMER)()
    assert (beat.name, beat.epoch) == ("decode-0", "consumer")
    assert beat.load == Load(num_waiting=3, num_free_blocks=7, num_waiting_embeds=5, cached_embeds=6, num_leases=1)
    assert beat.counters["ticks"] == 1.0


@pytest.mark.parametrize("kind", [messages.Prefill, messages.Decode])
def test_a_draining_worker_refuses_new_requests_so_that_another_takes_them(bench: Bench, kind: type) -> None:
    where = {"decode_elsewhere": False} if kind is messages.Prefill else {"source": CONSUMER}
    new = kind(**FIELDS, **where)
    bench.inbox.put(Drain(), new, CANCEL)
    bench.worker.turn(0.0)
    (refused,) = bench.inbox.sent
    assert isinstance(refused, messages.Refused)
    assert refused.reason is messages.Refusal.DRAINING
    assert bench.language.received == [CANCEL]
    assert bench.worker.heartbeat(CONSUMER)().draining


def test_drain_ends_an_idle_worker(bench: Bench) -> None:
    bench.inbox.put(Drain())
    bench.worker.run()


def test_drain_waits_for_running_requests_and_leases(bench: Bench) -> None:
    lease = bench.lease("kv")
    bench.language.live = 2
    bench.inbox.put(Drain())
    bench.inbox.put()
    bench.inbox.put(LeaseReleased(lease))
    counts: list[int] = []
    receive = bench.inbox.receive

    def receive_and_finish(timeout_s: float) -> list[Envelope]:
        counts.append(bench.worker.num_live())
        if len(counts) > 3:
            bench.language.live -= 1
        return receive(timeout_s)

    bench.inbox.receive = receive_and_finish  # type: ignore[method-assign]
    bench.worker.run()
    assert counts == [3, 3, 3, 2, 1]
    assert bench.freed == ["kv"]


def test_a_busy_worker_does_not_wait_for_messages(bench: Bench) -> None:
    bench.language.work = 2
    bench.inbox.put()
    bench.inbox.put()
    bench.inbox.put(Drain())
    bench.worker.run()
    idle_s = bench.inbox.timeouts_s[0]
    assert idle_s > 0.0
    assert bench.inbox.timeouts_s == [idle_s, 0.0, 0.0]


@pytest.mark.parametrize(
    ("stages", "parts"),
    [
        ([Stage.ENCODE], [Part.VISION]),
        ([Stage.PREFILL], [Part.LANGUAGE]),
        ([Stage.DECODE], [Part.LANGUAGE]),
        ([Stage.PREFILL, Stage.DECODE], [Part.LANGUAGE]),
        ([Stage.ENCODE, Stage.PREFILL, Stage.DECODE], [Part.VISION, Part.LANGUAGE]),
    ],
)
def test_a_worker_loads_only_the_parts_that_its_stages_need(stages: list[Stage], parts: list[Part]) -> None:
    assert needed_parts(stages) == parts


# -- the heartbeat -----------------------------------------------------------------------------------------------------


class FakeRouter:
    """An HTTP server that answers each path with the next of its scripted statuses, then 200, and tells what came."""

    def __init__(self) -> None:
        self.statuses: dict[str, list[int]] = {}
        self.requests: SimpleQueue[tuple[str, dict[str, Any]]] = SimpleQueue()
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                script = router.statuses.get(self.path, [])
                self.send_response(script.pop(0) if script else 200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"no")
                router.requests.put((self.path, msgspec.json.decode(body)))

            def log_message(self, format: str, *args: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self._server.server_bind()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def listen(self) -> None:
        self._server.server_activate()
        self._thread.start()

    def next(self) -> tuple[str, dict[str, Any]]:
        return self.requests.get(timeout=20)

    def until(self, path: str) -> dict[str, Any]:
        while True:
            got, body = self.next()
            if got == path:
                return body

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    router = FakeRouter()
    yield router
    router.close()


INFO = WorkerInfo(CONSUMER, [Stage.DECODE], "v", "m", 100, WeightsReport(), pid=1)


def heart(router: FakeRouter) -> Heart:
    beat = Heartbeat("decode-0", "consumer", Load(num_running=2), {"x": 1.0})
    return Heart(HttpLine(router.url), INFO, lambda: beat, 0.01)


def test_it_registers_beats_and_leaves(router: FakeRouter) -> None:
    router.listen()
    with heart(router):
        path, body = router.next()
        assert (path, body["address"]["name"]) == ("/workers/register", "decode-0")
        path, body = router.next()
        assert (path, body["load"]["num_running"], body["counters"]) == ("/workers/heartbeat", 2, {"x": 1.0})
    left = router.until("/workers/leave")
    assert (left["name"], left["epoch"]) == ("decode-0", "consumer")
    assert router.requests.empty()


def test_it_registers_until_the_router_answers(router: FakeRouter) -> None:
    with pytest.MonkeyPatch.context() as patch:
        refused = threading.Event()
        ask = HttpLine.ask

        def ask_and_tell(self: HttpLine, question: messages.Register | messages.Beat | messages.Leave) -> Any:
            try:
                return ask(self, question)
            except NoAnswerError:
                refused.set()
                raise

        patch.setattr(HttpLine, "ask", ask_and_tell)

        def listen_later() -> None:
            refused.wait(20)
            router.listen()

        starter = threading.Thread(target=listen_later)
        starter.start()
        with heart(router):
            assert refused.is_set()
            assert router.next()[0] == "/workers/register"
        starter.join()


def test_it_registers_until_the_router_has_no_error(router: FakeRouter) -> None:
    router.statuses["/workers/register"] = [500, 503]
    router.listen()
    with heart(router):
        assert [router.next()[0] for _ in range(4)] == ["/workers/register"] * 3 + ["/workers/heartbeat"]


def test_a_router_that_forgot_it_gets_another_registration(router: FakeRouter) -> None:
    router.statuses["/workers/heartbeat"] = [200, 404]
    router.listen()
    with heart(router):
        assert [router.next()[0].rpartition("/")[2] for _ in range(5)] == [
            "register", "heartbeat", "heartbeat", "register", "heartbeat",
        ]  # fmt: skip


def test_a_router_that_refuses_it_ends_the_start(router: FakeRouter) -> None:
    router.statuses["/workers/register"] = [409]
    router.listen()
    with pytest.raises(ConfigError, match="refused this worker: no"), heart(router):
        raise AssertionError("it was let in")


def test_a_refusal_later_ends_the_heartbeat(router: FakeRouter, caplog: pytest.LogCaptureFixture) -> None:
    router.statuses["/workers/register"] = [200, 409]
    router.statuses["/workers/heartbeat"] = [404]
    router.listen()
    with heart(router) as beating:
        beating._thread.join()
        assert "refused this worker" in caplog.text


def test_a_router_that_is_gone_does_not_keep_a_worker_from_leaving(router: FakeRouter) -> None:
    router.listen()
    with heart(router):
        router.next()
        router.close()
