"""Prefill and decode, alone and together: what each message leads to, and that a hand-off frees what it held."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest
import torch

from tests.stages.nodes import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    TTL_S,
    VOCAB,
    LanguageNode,
    Node,
    decode,
    deliver,
    prefill,
    prompt_item,
)
from triptych.clock import ManualClock
from triptych.handoff.embedding import EmbeddingPool
from triptych.messages import (
    Accepted,
    AttemptFailed,
    Body,
    Cancel,
    EmbeddingPublished,
    EmbeddingsNeeded,
    FetchKV,
    ItemHeld,
    KVPublished,
    KVRefused,
    LeaseReleased,
    Refusal,
    Refused,
    StepOutput,
    TokenOutput,
)
from triptych.testing import fake_output
from triptych.types import FinishReason, Prompt, SamplingParams, Stage, WorkerAddress

PROMPT = list(range(10, 28))  # 18 tokens: four full blocks and a half
CONSUMER = WorkerAddress("decode-9", "e9", "", "")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def p(clock: ManualClock) -> Iterator[LanguageNode]:
    node = LanguageNode("prefill-0", [Stage.PREFILL], clock, max_num_batched_tokens=8)
    yield node
    node.close()


@pytest.fixture
def d(clock: ManualClock) -> Iterator[LanguageNode]:
    node = LanguageNode("decode-0", [Stage.DECODE], clock)
    yield node
    node.close()


@pytest.fixture
def pd(clock: ManualClock) -> Iterator[LanguageNode]:
    node = LanguageNode("worker-0", [Stage.PREFILL, Stage.DECODE], clock)
    yield node
    node.close()


class Encoder(Node):
    """Publishes embeddings as an encode worker does."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__("encode-0", 1 << 16, clock)
        self.pool = EmbeddingPool(self.transport, self.leases, self.address)

    def publish(self, mm_hash: str, num_embeds: int, value: float, to: LanguageNode, request_id: str) -> Body:
        stored = self.pool.store(torch.full((num_embeds, 16), value))
        handle = self.pool.publish(stored, to.address, (request_id, 0))
        return EmbeddingPublished(request_id, 0, mm_hash, handle)


@pytest.fixture
def encoder(clock: ManualClock) -> Iterator[Encoder]:
    encoder = Encoder(clock)
    yield encoder
    encoder.close()


def tokens(bodies: list[Body], request_id: str = "r") -> list[TokenOutput]:
    outputs = [output for body in bodies if isinstance(body, StepOutput) for output in body.outputs]
    return [output for output in outputs if output.request_id == request_id]


def ids(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def run(*nodes: LanguageNode) -> list[Body]:
    """Deliver and step until nothing moves; what the router got."""
    to_router: list[Body] = []
    idle = 0
    while idle < 2:
        to_router += deliver(*nodes)
        worked = [node.stage.step() for node in nodes]
        idle = 0 if any(worked) or any(node.mail.sent for node in nodes) else idle + 1
    return to_router


def steps(node: LanguageNode, count: int) -> None:
    for _ in range(count):
        node.stage.step()


def expected(count: int, prompt: list[int] = PROMPT) -> list[int]:
    return fake_output(Prompt(prompt), {}, count, VOCAB)


# -- one worker --------------------------------------------------------------------------------------------------------


def test_a_request_is_accepted_computed_and_ended(pd: LanguageNode) -> None:
    pd.receive(prefill("r", PROMPT))
    assert pd.mail.of(Accepted) == [Accepted("r", 0, 0, [])]
    outputs = tokens(run(pd))
    assert ids(outputs) == expected(5)
    assert [o.index for o in outputs] == [0, 1, 2, 3, 4]
    assert [o.finish_reason for o in outputs] == [None] * 4 + [FinishReason.LENGTH]
    pd.assert_nothing_held()


def test_only_the_first_token_carries_the_time_to_it(pd: LanguageNode, clock: ManualClock) -> None:
    pd.receive(prefill("r", PROMPT))
    clock.advance(3.0)
    outputs = tokens(run(pd))
    assert outputs[0].prefill is not None
    assert outputs[0].prefill.queue_s == 3.0
    assert [o.prefill for o in outputs[1:]] == [None] * 4
    assert [o.decode for o in outputs] == [None] * 5


def test_tokens_of_an_earlier_attempt_go_on_where_it_stopped(pd: LanguageNode) -> None:
    so_far = expected(2)
    pd.receive(prefill("r", PROMPT + so_far, num_output_tokens=2))
    outputs = tokens(run(pd))
    assert ids(outputs) == expected(5)[2:]
    assert outputs[0].index == 2


def test_accepted_names_what_is_cached_and_what_is_needed(pd: LanguageNode, encoder: Encoder) -> None:
    items = [prompt_item("x", 2, 4), prompt_item("y", 9, 3)]
    pd.receive(prefill("a", PROMPT, items))
    assert pd.mail.of(Accepted) == [Accepted("a", 0, 0, ["x", "y"])]
    pd.receive(encoder.publish("x", 4, 3.0, pd, "a"))
    pd.receive(encoder.publish("y", 3, 5.0, pd, "a"))
    run(pd)
    pd.receive(prefill("b", PROMPT, items))
    assert pd.mail.of(Accepted) == [Accepted("b", 0, 16, [])]
    run(pd)


@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1])
def test_a_prompt_that_leaves_no_room_is_refused_for_good(pd: LanguageNode, length: int) -> None:
    pd.receive(prefill("r", [1] * length))
    pd.receive(decode("r", [1] * length, CONSUMER))
    assert [m.reason for m in pd.mail.of(Refused)] == [Refusal.TOO_LONG] * 2
    pd.assert_nothing_held()


def test_a_step_that_fails_ends_its_requests_and_the_worker_goes_on(pd: LanguageNode) -> None:
    pd.receive(prefill("a", PROMPT))
    pd.runner.error = RuntimeError("out of memory")
    steps(pd, 1)
    (failed,) = pd.mail.of(AttemptFailed)
    assert (failed.request_id, failed.retryable) == ("a", False)
    assert "out of memory" in failed.message
    pd.assert_nothing_held()
    pd.runner.error = None
    pd.receive(prefill("b", PROMPT))
    assert ids(tokens(run(pd), "b")) == expected(5)


def test_a_grammar_that_cannot_be_followed_fails_its_own_request(p: LanguageNode) -> None:
    message = prefill("bad", PROMPT, decode_elsewhere=True)
    p.receive(msgspec.structs.replace(message, sampling=SamplingParams(grammar="nonsense")))
    p.receive(prefill("good", PROMPT, decode_elsewhere=True))
    p.receive(fetch("bad"))
    for _ in range(200):
        if p.mail.of(AttemptFailed):
            break
        steps(p, 1)
        time.sleep(0.01)  # the vocabulary is read on a thread
    (failed,) = p.mail.of(AttemptFailed)
    assert (failed.request_id, failed.retryable) == ("bad", False)
    assert "the answer cannot go on" in failed.message
    assert ids(tokens([body for _, body in p.mail.sent], "good")) == expected(1)
    p.receive(Cancel("good", 0))
    for published_kv in p.mail.of(KVPublished):
        p.receive(LeaseReleased(published_kv.handle.lease_id))
    p.assert_nothing_held()


def test_a_step_that_fails_leaves_those_that_were_not_in_it(clock: ManualClock) -> None:
    node = LanguageNode("worker-0", [Stage.PREFILL, Stage.DECODE], clock)
    node.receive(prefill("waits", PROMPT, IMAGE))
    steps(node, 2)
    node.receive(prefill("runs", [1, 2, 3]))
    node.runner.error = RuntimeError("out of memory")
    steps(node, 1)
    assert [m.request_id for m in node.mail.of(AttemptFailed)] == ["runs"]
    node.close()


def test_the_load_counts_requests_tokens_and_blocks(p: LanguageNode) -> None:
    p.receive(prefill("a", PROMPT))
    p.receive(prefill("b", list(range(50, 60))))
    steps(p, 1)
    load = p.stage.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (1, 1, 10 + 10)
    assert (load.num_free_blocks, load.num_total_blocks) == (38, 40)


# -- embeddings --------------------------------------------------------------------------------------------------------

IMAGE = [prompt_item("x", 4, 6)]


def test_an_embedding_is_copied_held_and_its_lease_released(pd: LanguageNode, encoder: Encoder) -> None:
    pd.receive(prefill("r", PROMPT, IMAGE))
    published = encoder.publish("x", 6, 3.0, pd, "r")
    assert isinstance(published, EmbeddingPublished)
    pd.receive(published)
    assert pd.mail.of(ItemHeld) == [ItemHeld("r", 0, "x", 0.0)]
    assert ("encode-0", LeaseReleased(published.handle.lease_id)) in pd.mail.sent
    encoder.transport.memory(next(iter(encoder.pool._references)).slot)[:] = b"\xff" * 6 * 64  # ours is a copy
    assert ids(tokens(run(pd))) == fake_output(Prompt(PROMPT, IMAGE), {"x": 3.0}, 5, VOCAB)


def test_an_embedding_that_nobody_waits_for_is_released_and_not_kept(pd: LanguageNode, encoder: Encoder) -> None:
    published = encoder.publish("x", 6, 3.0, pd, "gone")
    pd.receive(published)
    assert "x" not in pd.engine.embeddings
    assert len(pd.mail.of(LeaseReleased)) == 1


def test_an_embedding_that_is_lost_on_the_way_is_asked_for_again(pd: LanguageNode, encoder: Encoder) -> None:
    pd.receive(prefill("r", PROMPT, IMAGE))
    published = encoder.publish("x", 6, 3.0, pd, "r")
    encoder.transport.memory(next(iter(encoder.pool._references)).slot)[:1] = b"\xff"
    pd.receive(published)
    assert pd.mail.of(ItemHeld) == []
    assert len(pd.mail.of(LeaseReleased)) == 1
    steps(pd, 2)
    assert pd.mail.of(EmbeddingsNeeded) == [EmbeddingsNeeded("r", 0, ["x"])]
    assert pd.stage.counters["embed_transfer_failures_total"] == 1
    pd.receive(encoder.publish("x", 6, 4.0, pd, "r"))
    assert ids(tokens(run(pd))) == fake_output(Prompt(PROMPT, IMAGE), {"x": 4.0}, 5, VOCAB)


# -- prefill: the KV that leaves ---------------------------------------------------------------------------------------


def fetch(request_id: str = "r") -> FetchKV:
    return FetchKV(request_id, 0, CONSUMER)


def published(node: LanguageNode) -> list[tuple[int, int, int, bool]]:
    """First block, number of blocks, tokens covered, and whether it is the last."""
    return [
        (m.handle.first_block, len(m.handle.blocks), m.num_tokens, m.first_token_id is not None)
        for m in node.mail.of(KVPublished)
    ]


def test_kv_goes_out_chunk_by_chunk_and_the_last_carries_the_first_token(p: LanguageNode) -> None:
    p.receive(prefill("r", PROMPT, decode_elsewhere=True))
    p.receive(fetch())
    steps(p, 3)
    assert published(p) == [(0, 2, 8, False), (2, 2, 16, False), (4, 1, 18, True)]
    assert p.mail.of(KVPublished)[-1].first_token_id == expected(1)[0]
    assert ids(tokens([body for _, body in p.mail.sent])) == expected(1)
    assert p.stage.num_live() == 0


def test_without_overlap_kv_goes_out_at_the_end(clock: ManualClock) -> None:
    node = LanguageNode("p", [Stage.PREFILL], clock, max_num_batched_tokens=8, overlap=False)
    node.receive(prefill("r", PROMPT, decode_elsewhere=True))
    node.receive(fetch())
    steps(node, 2)
    assert published(node) == []
    steps(node, 1)
    assert published(node) == [(0, 5, 18, True)]
    node.close()


def test_a_consumer_that_comes_late_gets_all_at_once(p: LanguageNode) -> None:
    p.receive(prefill("r", PROMPT, decode_elsewhere=True))
    steps(p, 4)
    assert (published(p), p.stage.num_live()) == ([], 1)
    p.receive(fetch())
    assert published(p) == [(0, 5, 18, True)]
    assert p.stage.num_live() == 0


def test_a_consumer_that_comes_midway_gets_what_is_there_then_the_rest(p: LanguageNode) -> None:
    p.receive(prefill("r", PROMPT, decode_elsewhere=True))
    steps(p, 1)
    p.receive(fetch())
    steps(p, 2)
    assert published(p) == [(0, 2, 8, False), (2, 2, 16, False), (4, 1, 18, True)]


def test_kv_of_a_prompt_that_may_not_be_finished_here_is_kept_back(p: LanguageNode, encoder: Encoder) -> None:
    p.receive(prefill("r", PROMPT, [prompt_item("x", 12, 4)], decode_elsewhere=True))
    p.receive(fetch())
    steps(p, 3)
    assert published(p) == []
    p.receive(encoder.publish("x", 4, 3.0, p, "r"))
    steps(p, 2)
    assert published(p) == [(0, 5, 18, True)]


def test_leased_blocks_stay_until_the_consumer_released_them(p: LanguageNode) -> None:
    p.receive(prefill("r", PROMPT, decode_elsewhere=True))
    p.receive(fetch())
    steps(p, 3)
    assert p.num_free_blocks == 40 - 5
    for message in p.mail.of(KVPublished):
        p.receive(LeaseReleased(message.handle.lease_id))
    p.assert_nothing_held()


def test_a_request_that_ends_with_its_first_token_is_not_handed_off(p: LanguageNode) -> None:
    p.receive(prefill("r", PROMPT, decode_elsewhere=True, max_tokens=1))
    steps(p, 3)
    p.receive(fetch())
    assert published(p) == []
    assert p.mail.of(KVRefused) == []  # the decode worker's word of it could reach the router before the token
    p.receive(Cancel("r", 0))
    p.assert_nothing_held()


def test_kv_of_an_unknown_request_is_refused_to_the_one_who_asked(p: LanguageNode) -> None:
    p.receive(fetch("unknown"))
    ((receiver, body),) = p.mail.sent
    assert receiver == CONSUMER.name
    assert isinstance(body, KVRefused)
    assert (body.request_id, body.attempt) == ("unknown", 0)


def test_kv_that_nobody_comes_for_is_freed_after_its_time(p: LanguageNode, clock: ManualClock) -> None:
    p.receive(prefill("r", PROMPT, decode_elsewhere=True))
    steps(p, 3)
    clock.advance(TTL_S)
    p.stage.tick()
    assert p.num_free_blocks == 40 - 5
    clock.advance(0.5)
    p.stage.tick()
    p.assert_nothing_held()
    p.receive(fetch())
    assert len(p.mail.of(KVRefused)) == 1


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_a_cancel_at_any_time_frees_all_but_what_is_leased(p: LanguageNode, num_steps: int) -> None:
    p.receive(prefill("r", PROMPT, decode_elsewhere=True))
    steps(p, num_steps)
    if num_steps == 2:
        p.receive(fetch())
        assert p.num_free_blocks < 40
    p.receive(Cancel("r", 0))
    assert p.num_free_blocks == 40 - sum(num_blocks for _, num_blocks, _, _ in published(p))
    for message in p.mail.of(KVPublished):
        p.receive(LeaseReleased(message.handle.lease_id))
    p.assert_nothing_held()


# -- decode: the KV that comes -----------------------------------------------------------------------------------------


def hand_off(p: LanguageNode, d: LanguageNode, request_id: str = "r", prompt: list[int] = PROMPT) -> None:
    p.receive(prefill(request_id, prompt, decode_elsewhere=True))
    d.receive(decode(request_id, prompt, p.address))


def test_a_hand_off_gives_the_tokens_of_one_worker_and_leaves_nothing(p: LanguageNode, d: LanguageNode) -> None:
    hand_off(p, d)
    outputs = tokens(run(p, d))
    assert ids(sorted(outputs, key=lambda o: o.index)) == expected(5)
    p.assert_nothing_held()
    d.assert_nothing_held()


def test_decode_times_its_first_token_only(p: LanguageNode, d: LanguageNode) -> None:
    hand_off(p, d)
    outputs = sorted(tokens(run(p, d)), key=lambda o: o.index)
    assert [o.prefill is not None for o in outputs] == [True, False, False, False, False]
    assert [o.decode is not None for o in outputs] == [False, True, False, False, False]


def test_decode_copies_from_its_first_uncached_block(p: LanguageNode, d: LanguageNode) -> None:
    for name in ("first", "r"):
        hand_off(p, d, name)
        outputs = tokens(run(p, d), name)
        assert ids(sorted(outputs, key=lambda o: o.index)) == expected(5)
    d.stage.tick()
    counters = d.stage.counters
    assert (counters["kv_transfer_blocks_total"], counters["kv_transfer_blocks_avoided_total"]) == (5 + 1, 4)


def test_decode_asks_at_once_and_sets_blocks_aside_only_for_what_is_published(p: LanguageNode, d: LanguageNode) -> None:
    d.receive(decode("r", PROMPT, p.address))
    assert d.mail.sent == [("prefill-0", FetchKV("r", 0, d.address))]
    steps(d, 2)
    assert (d.num_free_blocks, d.stage.num_live()) == (40, 1)
    p.receive(prefill("r", PROMPT, decode_elsewhere=True))
    steps(p, 1)
    deliver(p, d)
    steps(d, 1)
    assert d.num_free_blocks == 40 - 5
    run(p, d)


def test_without_room_what_is_published_waits_under_its_lease(p: LanguageNode, clock: ManualClock) -> None:
    d = LanguageNode("decode-0", [Stage.DECODE], clock, num_blocks=8)
    for name in ("a", "b"):
        hand_off(p, d, name, list(range(ord(name), ord(name) + 18)))
    for _ in range(8):
        steps(p, 1)
        deliver(p, d)
    steps(d, 1)
    deliver(p, d)
    assert len(p.leases) > 0  # those of b
    d.receive(Cancel("a", 0))
    got = run(p, d)
    assert [o.index for o in tokens(got, "b")] == [1, 2, 3, 4]
    p.assert_nothing_held()
    d.assert_nothing_held()
    d.close()


def start_transfer(p: LanguageNode, d: LanguageNode) -> KVPublished:
    """Up to the one message that carries all KV, which nobody has read yet."""
    p.receive(prefill("r", PROMPT, decode_elsewhere=True))
    steps(p, 3)
    d.receive(decode("r", PROMPT, p.address))
    for message in d.mail.of(FetchKV):
        p.receive(message)
    d.mail.take()
    (kv,) = p.mail.of(KVPublished)
    return kv


def test_a_failed_transfer_fails_the_attempt_and_releases_the_lease(p: LanguageNode, d: LanguageNode) -> None:
    kv = start_transfer(p, d)
    p.memory.tensor[:] += 1  # what was leased is overwritten
    d.receive(kv)
    steps(d, 1)
    (failed,) = d.mail.of(AttemptFailed)
    assert (failed.request_id, failed.retryable) == ("r", True)
    assert d.mail.of(LeaseReleased) == [LeaseReleased(kv.handle.lease_id)]
    assert d.stage.num_live() == 0
    deliver(d, p)
    d.assert_nothing_held()
    p.assert_nothing_held()


def test_a_prefill_worker_that_is_gone_fails_the_attempt(d: LanguageNode, clock: ManualClock) -> None:
    gone = LanguageNode("prefill-0", [Stage.PREFILL], clock)
    kv = start_transfer_of(gone, d)
    gone.close()
    d.receive(kv)
    steps(d, 1)
    assert [m.retryable for m in d.mail.of(AttemptFailed)] == [True]
    d.assert_nothing_held()


def start_transfer_of(p: LanguageNode, d: LanguageNode) -> KVPublished:
    kv = start_transfer(p, d)
    p.mail.take()
    return kv


def test_a_cancel_releases_what_was_not_fetched_yet(p: LanguageNode, d: LanguageNode) -> None:
    kv = start_transfer(p, d)
    d.receive(kv)
    assert d.mail.sent == []
    d.receive(Cancel("r", 0))
    assert d.mail.sent == [("prefill-0", LeaseReleased(kv.handle.lease_id))]
    d.assert_nothing_held()


def test_kv_of_a_cancelled_request_is_only_released(p: LanguageNode, d: LanguageNode) -> None:
    kv = start_transfer(p, d)
    d.receive(Cancel("r", 0))
    d.receive(kv)
    assert d.mail.sent == [("prefill-0", LeaseReleased(kv.handle.lease_id))]
    d.assert_nothing_held()


def test_kv_that_is_refused_fails_the_attempt_so_that_another_plan_may_succeed(d: LanguageNode) -> None:
    d.receive(decode("r", PROMPT, CONSUMER))
    steps(d, 1)
    d.receive(KVRefused("r", 0, message="gone"))
    assert d.mail.of(AttemptFailed) == [AttemptFailed("r", 0, message="gone", retryable=True)]
    d.assert_nothing_held()


def test_kv_refused_for_a_request_that_is_gone_is_harmless(d: LanguageNode) -> None:
    d.receive(KVRefused("r", 0, message="gone"))
    assert d.mail.sent == []


def test_a_preempted_decode_computes_again_here_and_asks_for_its_embeddings(
    clock: ManualClock, encoder: Encoder
) -> None:
    """Two requests that grow beyond the blocks of their decode worker; the later one starts over."""
    p = LanguageNode("prefill-0", [Stage.PREFILL], clock, max_num_batched_tokens=64)
    d = LanguageNode("decode-0", [Stage.DECODE], clock, num_blocks=10)
    texts = [list(range(40, 58)), list(range(80, 98))]
    p.receive(prefill("a", texts[0], decode_elsewhere=True, max_tokens=20))
    p.receive(prefill("b", texts[1], IMAGE, decode_elsewhere=True, max_tokens=20))
    d.receive(decode("a", texts[0], p.address, max_tokens=20))
    d.receive(decode("b", texts[1], p.address, IMAGE, max_tokens=20))
    p.receive(encoder.publish("x", 6, 3.0, p, "b"))
    got = run(p, d)
    assert d.engine.scheduler.num_preemptions > 0
    needed = [m for m in got if isinstance(m, EmbeddingsNeeded)]
    assert [(m.request_id, m.mm_hashes) for m in needed] == [("b", ["x"])]
    d.receive(encoder.publish("x", 6, 3.0, d, "b"))
    got += run(p, d)
    for name, prompt in (("a", Prompt(texts[0])), ("b", Prompt(texts[1], IMAGE))):
        outputs = sorted(tokens(got, name), key=lambda o: o.index)
        assert ids(outputs) == fake_output(prompt, {"x": 3.0}, 20, VOCAB)
    p.assert_nothing_held()
    d.assert_nothing_held()
    p.close()
    d.close()


def test_kv_arrives_in_the_blocks_that_the_request_has(p: LanguageNode, d: LanguageNode) -> None:
    d.receive(start_transfer(p, d))
    steps(d, 1)
    (request,) = d.engine.scheduler.running
    rows = d.memory.tensor[request.block_table].reshape(-1, BLOCK_SIZE * 2)
    assert rows[:, :BLOCK_SIZE].reshape(-1)[: len(PROMPT)].tolist() == [float(token) for token in PROMPT]
    d.receive(Cancel("r", 0))
    deliver(p, d)
