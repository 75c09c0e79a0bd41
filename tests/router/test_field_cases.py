"""Situations between stages that have broken real servers, over the real router and stages in one process.

A test's number is that of its situation. What needs real processes is in `tests/deployment/`.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from PIL import Image

from tests.router.conftest import Answer, World, answer, settle, total
from triptych import messages
from triptych.config import EncodeConfig, RouterConfig
from triptych.errors import DeadlineExceededError, EngineError
from triptych.messages import Body, EmbeddingPublished
from triptych.testing import Cluster, LocalWorker, fake_feature, fake_output
from triptych.types import ImageInput, ImageSize, MediaItem, Modality, Request

NUM_CLIENTS = 16

Deliver = Callable[[Body], None]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


@contextmanager
def intercepted(cluster: Cluster, kind: type[Body], act: Callable[[Body, Deliver], None]) -> Iterator[None]:
    """`act(body, deliver)` decides what of a message of this kind is delivered, and when, if ever."""
    post = cluster.network.post

    def filtered(epoch: str, body: Body, sender: str, sender_epoch: str) -> None:
        if isinstance(body, kind):
            act(body, lambda sent: post(epoch, sent, sender, sender_epoch))
        else:
            post(epoch, body, sender, sender_epoch)

    cluster.network.post = filtered  # type: ignore[method-assign]
    try:
        yield
    finally:
        cluster.network.post = post  # type: ignore[method-assign]


def new_picture(world: World, colour: int) -> tuple[Request, MediaItem, float]:
    """A request for a picture that is nobody else's, all of them of one size."""
    image = Image.new("RGB", (64, 64), (colour, 10, 200 - colour))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    metadata = world.spec.family.image_metadata(ImageSize(64, 64))
    request = msgspec.structs.replace(
        world.request(f"c{colour}", [0]),
        images=[ImageInput("data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode())],
    )
    feature = fake_feature(world.spec.family.preprocess(image, metadata))
    return request, MediaItem(Modality.IMAGE, f"c{colour}", buffer.getvalue(), metadata), feature


def cluster_of(world: World, placement: str, *, cache_bytes: int, router: RouterConfig | None = None) -> Cluster:
    """Every cache of embeddings has so many bytes."""
    config = world.config(router, embedding_cache_bytes=cache_bytes)
    config = msgspec.structs.replace(config, encode=EncodeConfig(cache_bytes=cache_bytes))
    return Cluster(world.spec, config, placement, fake=True, seed=5)


def item_bytes(world: World, picture: int) -> int:
    return world.items[picture].metadata.num_embeds * world.spec.embed_width * 4


# -- S1, S2, S8: an embedding on its way -------------------------------------------------------------------------------


async def test_s1_a_cancelled_requests_bytes_never_reach_the_next_one_in_the_same_memory(world: World) -> None:
    """Red's announcement arrives when blue lies where red lay: it is dropped, and blue is blue."""
    async with cluster_of(world, "1E/1P/1D", cache_bytes=0) as cluster:
        late: list[Callable[[], None]] = []
        where: list[int] = []
        red, _, _ = new_picture(world, 200)
        blue, item, feature = new_picture(world, 20)

        def hold_red(body: Body, deliver: Deliver) -> None:
            assert isinstance(body, EmbeddingPublished)
            where.append(body.handle.range.offset)
            if len(where) == 1:
                late.append(lambda: deliver(body))
            else:
                deliver(body)

        with intercepted(cluster, EmbeddingPublished, hold_red):
            task = asyncio.create_task(answer(cluster, red))
            await until(lambda: bool(late))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            encoder = cluster.workers["encode-0"]
            encoder.leases.drop_consumer("nobody")
            for lease_id in list(encoder.leases._leases):
                encoder.leases.release(lease_id)  # as when its time is over
            answered = asyncio.create_task(answer(cluster, blue))
            await until(lambda: len(where) > 1)
            late[0]()
            prompt = cluster.builder.build(world.messages(1, "what is it"), [item])
            expected = fake_output(prompt, {item.mm_hash: feature}, 6, world.spec.family.text.vocab)
            assert (await answered).token_ids == expected
        assert where[0] == where[1], "blue did not get red's memory: the test shows nothing"
        await settle(cluster)


def too_early(cluster: Cluster, how_often: float) -> Callable[[Body, Deliver], None]:
    """The first `how_often` announcements come before the bytes: what the consumer reads is not what they say."""
    announced = itertools.count()

    def act(body: Body, deliver: Deliver) -> None:
        assert isinstance(body, EmbeddingPublished)
        if next(announced) < how_often:
            handle = msgspec.structs.replace(body.handle, checksum=body.handle.checksum ^ 1)
            body = msgspec.structs.replace(body, handle=handle)
        deliver(body)

    return act


@pytest.mark.parametrize("placement", ["1E/1PD", "2E/1P/1D"])
async def test_s2_an_embedding_that_is_announced_too_early_is_asked_for_again(world: World, placement: str) -> None:
    async with world.cluster(placement) as cluster:
        with intercepted(cluster, EmbeddingPublished, too_early(cluster, 2)):
            got = await answer(cluster, world.request("r", [0]))
        assert got.token_ids == world.expected(cluster, [0])
        assert total(cluster, "embed_transfer_failures_total") == 2
        await settle(cluster)


async def test_s2_an_embedding_that_never_gets_readable_is_one_clean_error(world: World) -> None:
    async with world.cluster("2E/1P/1D") as cluster:
        with (
            intercepted(cluster, EmbeddingPublished, too_early(cluster, math.inf)),
            pytest.raises(EngineError, match="an image could not be encoded"),
        ):
            await answer(cluster, world.request("r", [0]))
        await settle(cluster)
        assert (await answer(cluster, world.request("next", [1]))).token_ids == world.expected(cluster, [1])


async def test_s8_prefill_is_lost_between_publish_and_fetch(world: World) -> None:
    async with world.cluster("1E/2P/1D") as cluster:
        killed: list[str] = []

        def kill_the_consumer(body: Body, deliver: Deliver) -> None:
            assert isinstance(body, EmbeddingPublished)
            if not killed:
                plan = cluster.router._attempts[body.request_id, body.attempt].plan
                killed.append(plan.prefill.name)
                asyncio.get_running_loop().call_soon(cluster.kill, plan.prefill.name)
            deliver(body)

        with intercepted(cluster, EmbeddingPublished, kill_the_consumer):
            got = await answer(cluster, world.request("r", [0, 1], max_tokens=20))
        assert killed
        assert got.token_ids == world.expected(cluster, [0, 1], 20)
        await settle(cluster)


@pytest.mark.parametrize("num_tokens", [1, 10])
async def test_s8_decode_is_lost_after_some_tokens_were_streamed(world: World, num_tokens: int) -> None:
    async with world.cluster("1E/1P/2D") as cluster:
        got: list[int] = []
        async for event in cluster.router.handle(world.request("r", [0], max_tokens=40)):
            got += getattr(event, "token_ids", [])
            if len(got) == num_tokens:
                busy = [w.name for w in cluster.router.registry.workers() if w.num_inflight_requests]
                for name in {name for name in busy if name.startswith("decode")} & cluster.workers.keys():
                    cluster.kill(name)
        assert got == world.expected(cluster, [0], 40)
        await settle(cluster)


# -- S7, S12, S17 and single flight: encode workers --------------------------------------------------------------------


async def test_s7_an_image_that_comes_again_goes_to_the_encode_worker_that_has_it(world: World) -> None:
    async with cluster_of(world, "2E/1P/1D", cache_bytes=1 << 20) as cluster:
        for name in ("a", "b"):
            request = msgspec.structs.replace(world.request(name, [0]), cache_salt=name)
            await answer(cluster, request)
            prefill = cluster.workers["prefill-0"].worker.stages.language
            assert prefill is not None
            while prefill._engine.embeddings.evict_one():
                pass  # so that it asks for the item again
        encoders = [local for local in cluster.workers.values() if local.tower is not None]
        counted = [[e.counter("encode_forwards_total"), e.counter("encoder_cache_hits_total")] for e in encoders]
        assert sorted(counted) == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize("placement", ["EPD", "1E/1PD", "2E/1P/1D"])
@pytest.mark.parametrize("num_items", [1.0, 1.5])
async def test_s12_caches_of_one_item_or_little_more_and_requests_of_two(
    world: World, placement: str, num_items: float
) -> None:
    largest = max(item_bytes(world, k) for k in range(4))
    async with cluster_of(world, placement, cache_bytes=int(num_items * largest)) as cluster:
        pairs = [(0, 1), (1, 2), (2, 3), (3, 0)]
        answers = await asyncio.gather(
            *(answer(cluster, world.request(f"r{k}", list(pair), text=f"{k}")) for k, pair in enumerate(pairs))
        )
        for k, (pair, got) in enumerate(zip(pairs, answers, strict=True)):
            assert got.token_ids == world.expected(cluster, list(pair), text=f"{k}")
        await settle(cluster)


class Held:
    """The towers wait until `go`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.batches = {name: local.worker.stages.encode._next_batch for name, local in self.encoders().items()}  # type: ignore[union-attr]
        for local in self.encoders().values():
            local.worker.stages.encode._next_batch = list  # type: ignore[union-attr,method-assign]

    def encoders(self) -> dict[str, LocalWorker]:
        return {n: w for n, w in self.cluster.workers.items() if w.worker.stages.encode is not None}

    def demanded(self) -> dict[str, int]:
        """Demands by worker."""
        return {n: w.worker.stages.encode.num_live() for n, w in self.encoders().items()}  # type: ignore[union-attr]

    def go(self) -> None:
        for name, local in self.encoders().items():
            local.worker.stages.encode._next_batch = self.batches[name]  # type: ignore[union-attr,method-assign]


async def test_s17_one_of_two_encode_workers_is_lost_with_eight_images_in_flight(world: World) -> None:
    """Only its own items are encoded again."""
    config = msgspec.structs.replace(world.config(), encode=EncodeConfig(window_embeds=10_000))
    async with Cluster(world.spec, config, "2E/1P/1D", fake=True, seed=5) as cluster:
        cluster.router.encodes._config = EncodeConfig(window_embeds=10_000)
        pictures = [new_picture(world, 20 * k) for k in range(8)]
        held = Held(cluster)
        tasks = [asyncio.create_task(answer(cluster, request)) for request, _, _ in pictures]
        await until(lambda: sum(held.demanded().values()) == 8)
        lost = held.demanded()["encode-0"]
        assert 0 < lost < 8
        survivor = cluster.workers["encode-1"]
        held.go()
        victim = cluster.workers["encode-0"].worker.stages.encode
        assert victim is not None
        victim._next_batch = list  # type: ignore[method-assign]
        await until(lambda: survivor.counter("encode_items_total") == 8 - lost)
        cluster.kill("encode-0")
        await asyncio.gather(*tasks)
        assert survivor.counter("encode_items_total") == 8
        assert cluster.network.num_sent["Prefill"] == 8, "an attempt began anew"
        await settle(cluster)


async def in_flight(
    cluster: Cluster, world: World, act: Callable[[Held, list[asyncio.Task[Answer]]], Awaitable[None]]
) -> list[asyncio.Task[Answer]]:
    """16 clients ask about one new image; when all demands are with the encode workers `act` happens."""
    held = Held(cluster)
    requests = [world.request(f"r{k}", [0], text=f"{k} what is it") for k in range(NUM_CLIENTS)]
    tasks = [asyncio.create_task(answer(cluster, request)) for request in requests]
    await until(lambda: sum(held.demanded().values()) == NUM_CLIENTS)
    assert len([count for count in held.demanded().values() if count]) == 1, "two encode workers were asked"
    await act(held, tasks)
    held.go()
    await asyncio.gather(*tasks, return_exceptions=True)
    await settle(cluster)
    return tasks


@pytest.mark.parametrize("num_encoders", [2, 4])
async def test_sixteen_clients_and_one_new_image_are_one_forward(world: World, num_encoders: int) -> None:
    async with world.cluster(f"{num_encoders}E/1P/1D") as cluster:

        async def nothing(held: Held, tasks: list[asyncio.Task[Answer]]) -> None:
            return None

        tasks = await in_flight(cluster, world, nothing)
        assert {task.result().ended.finish_reason.value for task in tasks} == {"length"}
        assert total(cluster, "encode_forwards_total") == total(cluster, "encode_items_total") == 1


@pytest.mark.parametrize("num_encoders", [2, 4])
async def test_the_encode_worker_of_sixteen_clients_is_lost_and_there_is_one_forward_more(
    world: World, num_encoders: int
) -> None:
    async with world.cluster(f"{num_encoders}E/1P/1D") as cluster:

        async def kill(held: Held, tasks: list[asyncio.Task[Answer]]) -> None:
            cluster.kill(next(name for name, count in held.demanded().items() if count))

        tasks = await in_flight(cluster, world, kill)
        for k, task in enumerate(tasks):
            assert task.result().token_ids == world.expected(cluster, [0], text=f"{k} what is it")
        assert total(cluster, "encode_forwards_total") == 1, "of the workers that live"


@pytest.mark.parametrize("num_encoders", [2, 4])
async def test_the_client_that_asked_first_goes_away_and_the_others_share_one_forward(
    world: World, num_encoders: int
) -> None:
    async with world.cluster(f"{num_encoders}E/1P/1D") as cluster:

        async def cancel_the_first(held: Held, tasks: list[asyncio.Task[Answer]]) -> None:
            tasks[0].cancel()
            await until(lambda: sum(held.demanded().values()) == NUM_CLIENTS - 1)

        tasks = await in_flight(cluster, world, cancel_the_first)
        assert [task.cancelled() for task in tasks] == [True] + [False] * (NUM_CLIENTS - 1)
        for k, task in enumerate(tasks[1:], 1):
            assert task.result().token_ids == world.expected(cluster, [0], text=f"{k} what is it")
        assert total(cluster, "encode_forwards_total") == 1


# -- S11: a link is blocked --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [messages.KVPublished, messages.FetchKV, messages.Decode])
async def test_s11_a_blocked_link_to_decode_is_an_error_within_the_deadline(world: World, kind: type[Body]) -> None:
    async with world.cluster("1E/1P/1D", RouterConfig(deadline_s=0.5)) as cluster:
        with (
            intercepted(cluster, kind, lambda body, deliver: None),
            pytest.raises(DeadlineExceededError),
        ):
            await answer(cluster, world.request("r", [0], max_tokens=20))
        cluster.workers["prefill-0"].leases._ttl_s = 0.0
        for lease_id in list(cluster.workers["prefill-0"].leases._leases):
            cluster.workers["prefill-0"].leases.release(lease_id)  # nobody will: their time is over some day
        await settle(cluster)
