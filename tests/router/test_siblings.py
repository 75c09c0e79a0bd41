"""Choices of one request share one encode, one transfer and one prefill; each further one computes a block."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
import pytest

from tests.router.conftest import World, settle, total
from triptych.config import EncodeConfig
from triptych.testing import Cluster
from triptych.types import ChoiceFinished, Event, Finished, FinishReason, Started, TextDelta

NUM_CHOICES = 3
PLACEMENTS = ["EPD", "1E/1PD", "1EP/1D", "1E/1P/1D", "2E/1P/2D"]


def text_for(world: World, cluster: Cluster, num_tokens: int) -> str:
    """A question that makes the prompt with one picture so long."""
    text = ""
    while len(cluster.builder.build(world.messages(1, text), [world.items[0]]).token_ids) < num_tokens:
        text += "?"
    return text


def without_caches(world: World, placement: str, block_size: int, **engine: int) -> Cluster:
    """Embeddings are kept for those alone who need them."""
    config = world.config(None, block_size=block_size, embedding_cache_bytes=0, **engine)
    config = msgspec.structs.replace(config, encode=EncodeConfig(cache_bytes=0))
    return Cluster(world.spec, config, placement, fake=True, seed=5)


async def answers(events: AsyncGenerator[Event, None]) -> tuple[list[list[int]], list[FinishReason], int]:
    """Tokens and end of each choice, and how many tokens were cached for the first one."""
    token_ids: list[list[int]] = [[] for _ in range(NUM_CHOICES)]
    ended: dict[int, FinishReason] = {}
    num_cached_tokens = -1
    async for event in events:
        match event:
            case Started():
                assert not any(token_ids)
                num_cached_tokens = event.num_cached_tokens
            case TextDelta():
                token_ids[event.choice] += event.token_ids
            case ChoiceFinished():
                ended[event.choice] = event.finish_reason
            case Finished():
                assert event.usage.completion_tokens == sum(map(len, token_ids))
    return token_ids, [ended[k] for k in range(NUM_CHOICES)], num_cached_tokens


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("block_size", "over"),
    [(8, 0), (8, 1), (8, 5), (64, 0), (64, 1), (256, 7)],
    ids=["multiple", "one_over", "partial", "image_in_last_block", "image_before_it", "one_block"],
)
@pytest.mark.parametrize("max_tokens", [1, 6])
async def test_choices_share_one_encode_and_one_prefill(
    world: World, placement: str, block_size: int, over: int, max_tokens: int
) -> None:
    async with without_caches(world, placement, block_size) as cluster:
        shortest = len(cluster.builder.build(world.messages(1, ""), [world.items[0]]).token_ids)
        num_tokens = -(-shortest // block_size) * block_size + over
        text = text_for(world, cluster, num_tokens)
        request = world.request("r", [0], text=text, max_tokens=max_tokens)
        request = msgspec.structs.replace(request, n=NUM_CHOICES)
        token_ids, ended, num_cached_tokens = await answers(cluster.router.handle(request))
        await settle(cluster)
        assert token_ids == [world.expected(cluster, [0], max_tokens, text)] * NUM_CHOICES
        assert (ended, num_cached_tokens) == ([FinishReason.LENGTH] * NUM_CHOICES, 0)
        assert total(cluster, "encode_items_total") == 1
        assert total(cluster, "embed_transfer_items_total") == 1
        shared = (num_tokens - 1) // block_size
        tail = num_tokens - shared * block_size
        assert total(cluster, "prompt_tokens_computed_total") == num_tokens + (NUM_CHOICES - 1) * tail
        if cluster.placed[-1].name == "decode-0" and max_tokens > 1:
            assert total(cluster, "kv_transfer_blocks_total") == shared + NUM_CHOICES
            assert total(cluster, "kv_transfer_blocks_avoided_total") == shared * (NUM_CHOICES - 1)


@pytest.mark.parametrize("placement", ["EPD", "1E/1PD", "1E/1P/1D"])
async def test_a_running_first_choice_keeps_what_its_siblings_need(world: World, placement: str) -> None:
    """Other requests come and go meanwhile, whose embeddings would push it out."""
    async with without_caches(world, placement, 64, num_kv_blocks=100) as cluster:
        request = msgspec.structs.replace(world.request("r", [0], text="", max_tokens=30), n=NUM_CHOICES)
        events = cluster.router.handle(request)
        started = await anext(events)
        assert isinstance(started, Started)
        others = [world.request(f"o{k}", [k], max_tokens=1) for k in (1, 2, 3)]
        for other in others:
            async for _ in cluster.router.handle(other):
                pass
        token_ids, _, _ = await answers(events)
        await settle(cluster)
        assert token_ids == [world.expected(cluster, [0], 30, "")] * NUM_CHOICES
        assert total(cluster, "encode_items_total") == 1 + len(others)


async def test_nothing_is_kept_when_the_client_goes(world: World) -> None:
    async with without_caches(world, "1E/1P/1D", 64) as cluster:
        request = msgspec.structs.replace(world.request("r", [0], text="", max_tokens=30), n=NUM_CHOICES)
        events = cluster.router.handle(request)
        await anext(events)
        await events.aclose()
        await settle(cluster)
