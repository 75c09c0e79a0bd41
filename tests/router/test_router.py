"""A request's whole way, over the real router and stages: its ends, its errors, and what happens when a worker dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
import pytest

from tests.router.conftest import World, answer, settle, total
from triptych import messages
from triptych.config import EncodeConfig, RouterConfig
from triptych.engine.engine import Engine
from triptych.errors import (
    BadRequestError,
    DeadlineExceededError,
    EngineError,
    MediaError,
    NoCapacityError,
    OverloadedError,
    TriptychError,
    WorkerLostError,
)
from triptych.router.attempt import FromWorker
from triptych.router.encode_queue import EncodeQueue
from triptych.testing import Cluster, FakeTower, LocalWorker
from triptych.types import Event, Finished, FinishReason, Load, Request, Stage, Structure, TextDelta

PLACEMENTS = ["EPD", "1E/1PD", "2E/1P/1D"]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


# -- ends --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_an_answer_is_right_whoever_computes_it(world: World, placement: str) -> None:
    async with world.cluster(placement) as cluster:
        got = await answer(cluster, world.request("r", [0, 2]))
        assert got.token_ids == world.expected(cluster, [0, 2])
        assert got.ended.finish_reason is FinishReason.LENGTH
        await settle(cluster)


async def test_usage_counts_prompt_output_image_and_cached_tokens(world: World) -> None:
    async with world.cluster("1E/1PD") as cluster:
        first = (await answer(cluster, world.request("a", [0, 1]))).finished.usage
        again = (await answer(cluster, world.request("b", [0, 1]))).finished.usage
        num_image_tokens = sum(world.items[k].metadata.num_tokens for k in (0, 1))
        assert first.image_tokens == again.image_tokens == num_image_tokens
        assert first.prompt_tokens > num_image_tokens
        assert (first.completion_tokens, first.cached_tokens) == (6, 0)
        assert again.cached_tokens == (first.prompt_tokens - 1) // 8 * 8
        await settle(cluster)


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_a_stop_string_cuts_the_text_and_cancels_the_rest(world: World, placement: str) -> None:
    async with world.cluster(placement) as cluster:
        text = (await answer(cluster, world.request("whole", max_tokens=40))).text
        stop = text[5:8]
        got = await answer(cluster, world.request("cut", max_tokens=40, stop=[stop]))
        assert got.text == text[: text.index(stop)]
        assert (got.ended.finish_reason, got.ended.stop_reason) == (FinishReason.STOP, stop)
        assert got.finished.usage.completion_tokens < 40
        assert cluster.network.num_sent["Cancel"] > 0
        await settle(cluster)


async def test_without_a_limit_the_output_fills_the_room(world: World) -> None:
    async with world.cluster("EPD", num_kv_blocks=21, block_size=4) as cluster:
        got = await answer(cluster, world.request("r", max_tokens=None))
        usage = got.finished.usage
        assert usage.prompt_tokens + usage.completion_tokens == cluster.router.max_model_len == 80


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_s10_a_client_that_goes_away_frees_every_stage(world: World, placement: str) -> None:
    async with world.cluster(placement) as cluster:
        async with aclosing(cluster.router.handle(world.request("r", [0], max_tokens=500))) as events:
            async for _ in events:
                break
        await settle(cluster)


async def test_s10_a_cancel_before_the_first_token_frees_every_stage(world: World) -> None:
    async with world.cluster("1E/1P/1D") as cluster:
        task = asyncio.create_task(answer(cluster, world.request("r", [0, 1], max_tokens=500)))
        await until(lambda: cluster.network.num_sent["Accepted"] > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await settle(cluster)


@pytest.mark.parametrize("num_turns", range(6))
async def test_a_cancel_that_comes_together_with_a_message_is_not_lost(world: World, num_turns: int) -> None:
    async with world.cluster("EPD") as cluster:
        cluster.network.on_envelope = None  # the router hears nothing but what follows
        task = asyncio.create_task(answer(cluster, world.request("r")))
        await until(lambda: cluster.network.num_sent["Accepted"] > 0)
        held = messages.EmbeddingsNeeded("r", 0, mm_hashes=[])
        cluster.router._attempts["r", 0].deliver(FromWorker("epd-0", held))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(20):
            await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await settle(cluster)


# -- refusals ----------------------------------------------------------------------------------------------------------


async def refusal(cluster: Cluster, request: Request) -> tuple[TriptychError, int]:
    """The error, and how many events came before it."""
    events: list[Event] = []
    try:
        async for event in cluster.router.handle(request):
            events.append(event)
    except TriptychError as error:
        await settle(cluster)
        return error, len(events)
    raise AssertionError("the request was answered")


async def test_max_tokens_that_cannot_fit_is_a_400_before_any_work(world: World) -> None:
    async with world.cluster("EPD") as cluster:
        error, num_events = await refusal(cluster, world.request("r", [0], max_tokens=100_000))
        assert isinstance(error, BadRequestError)
        assert (error.status, error.param, num_events) == (400, "max_tokens", 0)
        assert not {"Prefill", "PrepareItems", "EncodeItems"} & set(cluster.network.num_sent)


async def test_a_prompt_that_leaves_no_room_is_a_400(world: World) -> None:
    async with world.cluster("EPD", num_kv_blocks=5, block_size=4) as cluster:
        request = world.request("r", text="what " * 50, max_tokens=1)
        with_input = msgspec.structs.replace(request, messages_param="input")
        for asked, param in ((request, "messages"), (with_input, "input")):
            error, _ = await refusal(cluster, asked)
            assert (error.status, error.param) == (400, param)


async def test_too_many_images_are_a_400(world: World) -> None:
    async with world.cluster("EPD") as cluster:
        request = world.request("r", [0, 1, 2, 3])
        with_input = msgspec.structs.replace(request, messages_param="input")
        for asked, param in ((request, "messages"), (with_input, "input")):
            error, _ = await refusal(cluster, asked)
            assert (error.status, error.param) == (400, param)
            assert "4 images, the limit is 3" in error.message


async def test_s14_one_request_too_many_is_a_503_and_the_next_is_taken(world: World) -> None:
    async with world.cluster("EPD", RouterConfig(max_num_requests=1)) as cluster:
        async with aclosing(cluster.router.handle(world.request("a", max_tokens=400))) as events:
            await anext(events)
            with pytest.raises(OverloadedError) as caught:
                await answer(cluster, world.request("b"))
            assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
        assert (await answer(cluster, world.request("c"))).token_ids


async def test_a_backlog_beyond_the_limit_is_a_503_that_says_when_to_come_back(world: World) -> None:
    async with world.cluster("1E/2P/1D", RouterConfig(max_backlog_s=10.0)) as cluster:
        prefill = cluster.router.registry.live(Stage.PREFILL)
        for worker, num_tokens in zip(prefill, (20_000, 30_000), strict=True):
            worker.load = Load(prompt_token_s=0.001)
            worker.num_inflight_tokens = num_tokens
        with pytest.raises(OverloadedError) as caught:
            await answer(cluster, world.request("r", [0]))
        assert (caught.value.status, caught.value.retry_after_s) == (503, 10)
        assert not cluster.network.num_sent["Prefill"]
        prefill[1].num_inflight_tokens = 9_000  # one that is free soon is enough
        cluster.router.admit()
        with pytest.raises(OverloadedError, match="limit is 5 s"):
            cluster.router.admit(deadline_s=5)
        for worker in prefill:
            worker.num_inflight_tokens = 0


@pytest.mark.parametrize(("placement", "stage"), [("1E/1P", Stage.DECODE), ("1E/1D", Stage.PREFILL)])
async def test_a_deployment_that_lacks_a_stage_is_a_503_that_names_it(
    world: World, placement: str, stage: Stage
) -> None:
    async with world.cluster("1E/1P/1D") as cluster:
        cluster.kill(f"{stage.value}-0")
        error, _ = await refusal(cluster, world.request("r"))
        assert isinstance(error, NoCapacityError)
        assert stage.value in error.message
        assert not cluster.router.ready()


async def test_while_shutting_down_nothing_is_admitted(world: World) -> None:
    async with world.cluster("EPD") as cluster:
        cluster.router.closing = True
        error, _ = await refusal(cluster, world.request("r"))
        assert error.status == 503


async def test_a_request_may_ask_for_less_time_than_the_server_gives(world: World) -> None:
    async with world.cluster("EPD") as cluster:
        request = msgspec.structs.replace(world.request("r", max_tokens=1200), deadline_s=0.05)
        error, _ = await refusal(cluster, request)
        assert isinstance(error, DeadlineExceededError)
        await settle(cluster)


async def test_the_deadline_ends_a_request(world: World) -> None:
    async with world.cluster("EPD", RouterConfig(deadline_s=0.001), max_num_batched_tokens=1) as cluster:
        error, _ = await refusal(cluster, world.request("r", [0], max_tokens=None))
        assert isinstance(error, DeadlineExceededError)
        assert error.status == 504


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["2EPD", "1E/2PD", "2E/2P/2D"])
async def test_a_conversation_goes_back_to_the_worker_that_holds_its_prefix(world: World, placement: str) -> None:
    async with world.cluster(placement) as cluster:
        talks: list[tuple[str, list[int | str]]] = [("what is it " * 5, [0, 1]), ("how many are there " * 4, [2, 3])]
        for turn in range(1, 5):
            for text, pictures in talks:
                got = await answer(cluster, world.request(f"{turn}", pictures, text=text + "and now? " * turn))
                assert (got.started.num_cached_tokens > 24) == (turn > 1), (text, turn)
                await cluster.until_idle()
        assert total(cluster, "encode_items_total") == 4
        await settle(cluster)


def engine_of(local: LocalWorker) -> Engine:
    assert local.worker.stages.language is not None
    return local.worker.stages.language._engine


async def test_a_worker_that_joins_tells_what_it_has_cached(world: World) -> None:
    async with world.cluster("2EPD") as cluster:
        await answer(cluster, world.request("r", [0, 1], text="what is it " * 5))
        await cluster.until_idle()
        epochs = [local.address.epoch for local in cluster.workers.values()]
        cached = [set(engine_of(local).pool.cached_hashes()) for local in cluster.workers.values()]
        assert any(cached)
        for local in cluster.workers.values():
            cluster.router.prefixes.forget(local.address.epoch)
            cluster.router._mailbox.send(local.address, messages.ListBlocks())

        def told() -> list[set[bytes]]:
            return [set(cluster.router.prefixes._held.get(epoch, set())) for epoch in epochs]

        assert not any(told())
        await until(lambda: told() == cached)


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_s4_an_image_that_cannot_be_decoded_fails_only_its_own_request(world: World, placement: str) -> None:
    async with world.cluster(placement) as cluster:
        good = asyncio.create_task(answer(cluster, world.request("good", [1])))
        with pytest.raises(MediaError) as caught:
            await answer(cluster, world.request("bad", [0, "bad"]))
        assert (caught.value.status, caught.value.param) == (400, "messages")
        assert (await good).token_ids == world.expected(cluster, [1])
        await settle(cluster)


async def test_an_image_that_repeats_is_encoded_once(world: World) -> None:
    async with world.cluster("2E/1P/1D") as cluster:
        got = await answer(cluster, world.request("r", [0, 1, 0]))
        assert got.token_ids == world.expected(cluster, [0, 1, 0])
        assert total(cluster, "encode_items_total") == 2


async def test_many_cold_requests_for_one_image_encode_it_once(world: World) -> None:
    async with world.cluster("1E/1P/1D") as cluster:
        requests = [world.request(f"{k}", [2], text=f"{k} what is it") for k in range(5)]
        await asyncio.gather(*(answer(cluster, request) for request in requests))
        assert total(cluster, "encode_items_total") == 1
        await settle(cluster)


async def test_an_encode_worker_has_room_again_when_the_consumer_holds_the_item(world: World) -> None:
    """Its own `ItemEncoded` may come later, or here never."""
    async with world.cluster("1E/1PD") as cluster:
        cluster.router.encodes = EncodeQueue(cluster.router.registry, EncodeConfig(window_embeds=1))
        post = cluster.network.post

        def but_item_encoded(epoch: str, body: messages.Body, sender: str, sender_epoch: str) -> None:
            if not isinstance(body, messages.ItemEncoded):
                post(epoch, body, sender, sender_epoch)

        cluster.network.post = but_item_encoded  # type: ignore[method-assign]
        got = await answer(cluster, world.request("r", [0, 1, 2]))
        assert got.token_ids == world.expected(cluster, [0, 1, 2])
        await settle(cluster)


async def test_eager_encoding_encodes_what_nobody_needs(world: World) -> None:
    async with world.cluster("1E/1PD") as cluster:
        cluster.router._parts = cluster.router._parts._replace(eager_encode=True)
        for name in ("a", "b"):
            assert (await answer(cluster, world.request(name, [0, 1]))).token_ids == world.expected(cluster, [0, 1])
        await settle(cluster)
        assert cluster.network.num_sent["EncodeItems"] == 4  # needed alone: 2


async def test_images_that_the_prefix_cache_covers_are_not_encoded_again(world: World) -> None:
    async with world.cluster("1E/1PD", embedding_cache_bytes=0) as cluster:
        for name in "ab":
            await answer(cluster, world.request(name, [0, 1]))
        assert total(cluster, "encode_items_total") == 2


async def test_an_encode_worker_that_fails_an_item_is_replaced_by_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.cluster("2E/1PD") as cluster:
        failed = fail_first(monkeypatch, times=1)
        assert (await answer(cluster, world.request("r", [0]))).token_ids == world.expected(cluster, [0])
        assert failed == [1]
        await settle(cluster)


def fail_first(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """The next forwards of all towers fail; returns their numbers, as they come."""
    failed: list[int] = []
    encode = FakeTower.encode

    def fail(self: FakeTower, items: object) -> object:
        if len(failed) < times:
            failed.append(len(failed) + 1)
            raise RuntimeError("the tower is broken")
        return encode(self, items)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeTower, "encode", fail)
    return failed


async def test_an_item_that_no_encode_worker_can_do_fails_its_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.cluster("2E/1PD") as cluster:
        fail_first(monkeypatch, times=1000)
        error, _ = await refusal(cluster, world.request("r", [0]))
        assert isinstance(error, EngineError)
        assert error.status == 500


async def test_a_failure_that_passes_is_tried_again_on_the_only_encode_worker(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.cluster("1E/1PD") as cluster:
        fail_first(monkeypatch, times=1)
        assert (await answer(cluster, world.request("r", [0]))).token_ids == world.expected(cluster, [0])


# -- losses ------------------------------------------------------------------------------------------------------------


def hold_back(cluster: Cluster, kind: type[messages.Message], name: str = "") -> Callable[[], bool]:
    """Messages of this kind to the router (from worker `name`) vanish; tells whether one has."""
    seen: list[str] = []
    on_envelope = cluster.network.on_envelope
    assert on_envelope is not None

    def filtered(envelope: messages.Envelope) -> None:
        if isinstance(envelope.body, kind) and (not name or envelope.sender == name):
            seen.append(envelope.sender)
        else:
            on_envelope(envelope)

    cluster.network.on_envelope = filtered
    return lambda: bool(seen)


class Stuck:
    """An encode worker whose tower never gets to run."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        stage = cluster.workers[name].worker.stages.encode
        assert stage is not None
        self.stage = stage
        stage._next_batch = list  # type: ignore[method-assign]

    def is_asked(self) -> bool:
        return bool(self.stage.num_live())


async def test_s17_a_lost_encode_worker_re_encodes_only_its_own_items(world: World) -> None:
    async with world.cluster("2E/1P/1D") as cluster:
        stuck = Stuck(cluster, "encode-0")
        task = asyncio.create_task(answer(cluster, world.request("r", [0, 1, 2])))
        await until(stuck.is_asked)
        mine = {demand.mm_hash for demand in stuck.stage._demands}
        await until(lambda: total(cluster, "encode_items_total") == 3 - len(mine))
        cluster.kill("encode-0")
        assert (await task).token_ids == world.expected(cluster, [0, 1, 2])
        assert total(cluster, "encode_items_total") == 3  # on encode-1, each once
        assert cluster.network.num_sent["Prefill"] == 1
        await settle(cluster)


async def test_a_lost_encode_worker_does_not_matter_once_its_items_are_held(world: World) -> None:
    async with world.cluster("1E/1PD") as cluster:
        async with aclosing(cluster.router.handle(world.request("r", [0], max_tokens=30))) as events:
            await anext(events)
            cluster.kill("encode-0")
            rest = [event async for event in events]
        assert isinstance(rest[-1], Finished)


async def test_the_only_encode_worker_may_be_started_again_in_the_time_for_that(world: World) -> None:
    async with world.cluster("1E/1PD") as cluster:
        stuck = Stuck(cluster, "encode-0")
        task = asyncio.create_task(answer(cluster, world.request("r", [0])))
        await until(stuck.is_asked)
        cluster.kill("encode-0")
        for _ in range(20):  # the request hears of it
            await asyncio.sleep(0)
        cluster.add("encode-0", [Stage.ENCODE])
        assert (await task).token_ids == world.expected(cluster, [0])


@pytest.mark.parametrize(("placement", "name"), [("1E/1P/2D", "decode"), ("1E/2PD", "prefill_decode")])
async def test_a_stream_goes_on_elsewhere_from_the_tokens_that_were_sent(
    world: World, placement: str, name: str
) -> None:
    async with world.cluster(placement) as cluster:
        token_ids: list[int] = []
        killed = ""
        async for event in cluster.router.handle(world.request("r", [0], max_tokens=30)):
            if isinstance(event, TextDelta):
                token_ids += event.token_ids
            if len(token_ids) == 5 and not killed:
                busy = [w for w in cluster.router.registry.workers() if w.num_inflight_requests]
                killed = next(w.name for w in busy if Stage.DECODE in w.info.stages)
                cluster.kill(killed)
        assert killed
        assert token_ids == world.expected(cluster, [0], 30)
        await settle(cluster)


async def test_a_request_whose_worker_was_lost_waits_for_its_next_life(world: World) -> None:
    async with world.cluster("1E/1P/1D") as cluster:
        async with aclosing(cluster.router.handle(world.request("r", [0], max_tokens=30))) as events:
            token_ids = [token for event in [await anext(events)] for token in getattr(event, "token_ids", [])]
            cluster.kill("decode-0")
            rest = asyncio.create_task(collect(events))
            await until(lambda: cluster.network.num_sent["Cancel"] > 0)
            cluster.add("decode-0", [Stage.DECODE])
            token_ids += await rest
        assert token_ids == world.expected(cluster, [0], 30)
        await settle(cluster)


async def collect(events: AsyncGenerator[Event, None]) -> list[int]:
    token_ids: list[int] = []
    async for event in events:
        if isinstance(event, TextDelta):
            token_ids += event.token_ids
    return token_ids


@pytest.mark.parametrize(("placement", "name"), [("1E/1P/2D", "decode-0"), ("1E/2P/1D", "prefill-0")])
async def test_a_worker_that_leaves_and_has_not_said_so_yet_is_asked_once(
    world: World, placement: str, name: str
) -> None:
    """As after a SIGTERM, until its next heartbeat."""
    async with world.cluster(placement, RouterConfig(max_attempts=2)) as cluster:
        leaving = cluster.workers[name]
        silent = leaving.worker.heartbeat(leaving.address)()
        leaving.worker.heartbeat = lambda address: lambda: silent  # type: ignore[method-assign]
        leaving.worker._draining = True
        for k in range(8):
            got = await answer(cluster, world.request(f"{k}", [k % 4], text=f"{k}" * 9))
            assert got.token_ids == world.expected(cluster, [k % 4], text=f"{k}" * 9)
        states = {worker.name: worker.state for worker in cluster.router.registry.workers()}
        assert states[name] == "draining"
        assert list(states.values()).count("draining") == 1


async def test_nobody_who_can_take_it_over_in_time_is_a_503(world: World) -> None:
    async with (
        world.cluster("1E/1PD", RouterConfig(capacity_wait_s=0.01)) as cluster,
        aclosing(cluster.router.handle(world.request("r", max_tokens=300))) as events,
    ):
        await anext(events)
        cluster.kill(next(name for name in cluster.workers if not name.startswith("encode")))
        with pytest.raises(NoCapacityError):
            await collect(events)


def fail_steps(cluster: Cluster, *, retryable: bool, bad_grammar: bool = False) -> None:
    """Instead of a step's first token the router hears that the attempt failed."""
    on_envelope = cluster.network.on_envelope
    assert on_envelope is not None

    def give_up(envelope: messages.Envelope) -> None:
        body = envelope.body
        if isinstance(body, messages.StepOutput):
            output = body.outputs[0]
            body = messages.AttemptFailed(output.request_id, output.attempt, "no", retryable, bad_grammar=bad_grammar)
        on_envelope(msgspec.structs.replace(envelope, body=body))

    cluster.network.on_envelope = give_up


async def test_a_worker_that_gives_every_attempt_up_ends_the_request_after_the_last(world: World) -> None:
    async with world.cluster("EPD", RouterConfig(max_attempts=2)) as cluster:
        fail_steps(cluster, retryable=True)
        error, _ = await refusal(cluster, world.request("r"))
        assert isinstance(error, WorkerLostError)
        assert cluster.network.num_sent["Prefill"] == 2


async def test_a_structure_that_no_worker_can_follow_is_the_clients_fault(world: World) -> None:
    async with world.cluster("EPD") as cluster:
        fail_steps(cluster, retryable=False, bad_grammar=True)
        request = msgspec.structs.replace(world.request("r"), structure=Structure("regex", "a+", "guided_regex"))
        error, _ = await refusal(cluster, request)
        assert (error.status, error.message, error.param) == (400, "no", "guided_regex")
        assert cluster.network.num_sent["Prefill"] == 1


async def test_a_structure_is_refused_before_any_media_are_fetched(world: World) -> None:
    async with world.cluster("EPD") as cluster:
        request = world.request("r", ["no such picture"])
        error, _ = await refusal(cluster, request)
        assert isinstance(error, MediaError)
        error, _ = await refusal(
            cluster, msgspec.structs.replace(request, structure=Structure("regex", "(", "guided_regex"))
        )
        assert (error.status, error.param) == (400, "guided_regex")
        assert cluster.network.num_sent["Prefill"] == 0


async def test_an_earlier_life_is_not_listened_to(world: World) -> None:
    async with world.cluster("EPD") as cluster:
        vanished = hold_back(cluster, messages.StepOutput)
        task = asyncio.create_task(answer(cluster, world.request("r", max_tokens=3)))
        await until(vanished)
        on_envelope = cluster.router._on_envelope
        stranger = messages.TokenOutput("r", 0, 0, [65], FinishReason.LENGTH)
        (local,) = cluster.workers.values()
        for sender, epoch in ((local.address.name, "an earlier one"), ("nobody", local.address.epoch)):
            on_envelope(messages.Envelope(messages.PROTOCOL_VERSION, sender, epoch, messages.StepOutput([stranger])))
        late = msgspec.structs.replace(stranger, attempt=7)
        on_envelope(
            messages.Envelope(
                messages.PROTOCOL_VERSION, local.address.name, local.address.epoch, messages.StepOutput([late])
            )
        )
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# -- probes ------------------------------------------------------------------------------------------------------------


async def test_a_healthy_deployment_says_so(world: World) -> None:
    async with world.cluster("1E/1P/1D") as cluster:
        assert cluster.router.ready()
        assert await cluster.router.health() == dict.fromkeys(cluster.workers, "")


async def test_a_worker_that_fails_its_probe_gets_no_work_until_it_passes_one(world: World) -> None:
    async with world.cluster("2E/1PD") as cluster:
        broken = cluster.workers["encode-0"].worker.stages.encode
        assert broken is not None

        def fail() -> None:
            raise RuntimeError("the tower is gone")

        probe, broken.probe = broken.probe, fail  # type: ignore[method-assign]
        assert (await cluster.router.health())["encode-0"] == "the tower is gone"
        assert [w.name for w in cluster.router.registry.live(Stage.ENCODE)] == ["encode-1"]
        assert (await answer(cluster, world.request("r", [0, 1]))).token_ids == world.expected(cluster, [0, 1])
        broken.probe = probe  # type: ignore[method-assign]
        await cluster.router.health()
        assert len(cluster.router.registry.live(Stage.ENCODE)) == 2


async def test_a_worker_that_does_not_answer_its_probe_is_suspect(world: World) -> None:
    async with world.cluster("EPD", RouterConfig(probe_timeout_s=0.01)) as cluster:
        hold_back(cluster, messages.Probed)
        (answered,) = (await cluster.router.health()).values()
        assert "no answer to a probe" in answered
        assert not cluster.router.ready()


async def test_s4_a_worker_that_answers_no_probe_twice_is_lost_and_its_items_are_encoded_elsewhere(
    world: World,
) -> None:
    """Its heartbeats come from another thread and go on."""
    async with world.cluster("2E/1P/1D", RouterConfig(probe_timeout_s=0.2)) as cluster:
        stuck = Stuck(cluster, "encode-0")
        task = asyncio.create_task(answer(cluster, world.request("r", [0, 1, 2])))
        await until(stuck.is_asked)
        hold_back(cluster, messages.Probed, "encode-0")
        for _ in range(2):
            assert "no answer to a probe" in (await cluster.router.health())["encode-0"]
        assert (await task).token_ids == world.expected(cluster, [0, 1, 2])
        assert "encode-0" not in [worker.name for worker in cluster.router.registry.workers()]
