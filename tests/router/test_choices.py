"""Several choices of one request: each is complete and right, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable

import msgspec
import pytest

from tests.router.conftest import World, settle, total
from triptych.testing import Cluster
from triptych.types import ChoiceFinished, Finished, Request, SamplingParams, Started, TextDelta

NUM_CHOICES = 3
NUM_TOKENS = 25
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=77, ignore_eos=True)


def asked(world: World, sampling: SamplingParams) -> Request:
    request = world.request("r", [0, 1], max_tokens=NUM_TOKENS)
    return msgspec.structs.replace(request, n=NUM_CHOICES, sampling=sampling)


async def choices_of(cluster: Cluster, request: Request, at: Callable[[int], None] = lambda _: None) -> list[list[int]]:
    """Tokens by choice; `at` is called with the number of tokens so far, before each of them and after the last."""
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    ends: list[int] = []
    num_started = num_finished = 0
    async for event in cluster.router.handle(request):
        match event:
            case Started():
                num_started += 1
            case TextDelta():
                assert event.choice not in ends, "a token after its choice's end"
                tokens[event.choice] += event.token_ids
                at(sum(map(len, tokens.values())))
            case ChoiceFinished():
                ends.append(event.choice)
            case Finished():
                num_finished += 1
    assert (num_started, num_finished) == (1, 1)
    assert sorted(ends) == sorted(tokens) == list(range(request.n))
    return [tokens[k] for k in range(request.n)]


async def undisturbed(world: World, sampling: SamplingParams) -> list[list[int]]:
    async with world.cluster("1E/1P/1D") as cluster:
        choices = await choices_of(cluster, asked(world, sampling))
        assert total(cluster, "encode_items_total") == 2, "each image once"
        await settle(cluster)
    assert [len(tokens) for tokens in choices] == [NUM_TOKENS] * NUM_CHOICES
    return choices


def busy(cluster: Cluster, stage: str) -> list[str]:
    workers = cluster.router.registry.workers()
    return [w.name for w in workers if w.num_inflight_requests and w.name.startswith(stage)]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("num_tokens", [1, 2, 12])
async def test_three_choices_go_on_when_a_worker_of_theirs_is_lost(
    world: World, sampling: SamplingParams, stage: str, num_tokens: int
) -> None:
    expected = await undisturbed(world, sampling)
    async with world.cluster("1E/2P/2D") as cluster:
        killed: list[str] = []

        def kill_one(so_far: int) -> None:
            if so_far == num_tokens and not killed:
                killed.extend(busy(cluster, stage)[:1])
                for name in killed:
                    cluster.kill(name)

        assert await choices_of(cluster, asked(world, sampling), kill_one) == expected
        assert killed
        await settle(cluster)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_three_choices_come_when_prefill_is_lost_before_the_first_token(
    world: World, sampling: SamplingParams
) -> None:
    expected = await undisturbed(world, sampling)
    async with world.cluster("1E/2P/2D") as cluster:
        task = asyncio.create_task(choices_of(cluster, asked(world, sampling)))
        while not cluster.network.num_sent["Accepted"]:
            await asyncio.sleep(0)
        cluster.kill(busy(cluster, "prefill")[0])
        assert await task == expected
        await settle(cluster)


async def test_seeded_choices_differ(world: World) -> None:
    choices = await undisturbed(world, SEEDED)
    assert len({tuple(tokens) for tokens in choices}) == NUM_CHOICES
