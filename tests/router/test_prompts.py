"""Requests whose prompt is text, tokens, or cut; and what a request forbids, in tokens."""

from __future__ import annotations

import msgspec
import pytest

from tests.router.conftest import World, answer, settle
from triptych.errors import BadRequestError
from triptych.testing import fake_output
from triptych.types import Request, SamplingParams


def plain(prompt: str | list[int], **fields: object) -> Request:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    return msgspec.structs.replace(Request("r", [], [], sampling, max_tokens=4, prompt=prompt), **fields)


async def test_a_prompt_of_text_and_the_same_in_tokens(world: World) -> None:
    async with world.cluster("1E/1P/1D") as cluster:
        prompt = cluster.builder.build_plain("what is it")
        expected = fake_output(prompt, {}, 4, world.spec.family.text.vocab)
        for given in ("what is it", prompt.token_ids):
            found = await answer(cluster, plain(given))
            assert (found.started.prompt_token_ids, found.token_ids) == (prompt.token_ids, expected)
        await settle(cluster)


async def test_a_cut_prompt_encodes_only_the_images_that_it_kept(world: World) -> None:
    async with world.cluster("1E/1P/1D") as cluster:
        request = world.request("r", [0, 1])
        whole = await cluster.router.lay_out(request)
        first, second = whole.items
        num_kept = len(whole.token_ids) - first.placeholder.end
        found = await answer(cluster, msgspec.structs.replace(request, truncate_prompt_tokens=num_kept))
        assert found.started.num_image_tokens == second.placeholder.length
        assert found.finished.usage.prompt_tokens == num_kept
        kept = await cluster.router.lay_out(msgspec.structs.replace(request, truncate_prompt_tokens=num_kept))
        features = {second.mm_hash: world.features["1"]}
        assert found.token_ids == fake_output(kept, features, 6, world.spec.family.text.vocab)
        with pytest.raises(BadRequestError, match="in two"):
            await answer(cluster, msgspec.structs.replace(request, truncate_prompt_tokens=num_kept + 1))
        await settle(cluster)


@pytest.mark.parametrize("prompt", ["", "a" * 100_000, [3] * 5000])
async def test_a_prompt_that_cannot_be_served_names_itself(world: World, prompt: str | list[int]) -> None:
    async with world.cluster("EPD") as cluster:
        with pytest.raises(BadRequestError) as caught:
            await answer(cluster, plain(prompt))
        assert caught.value.param == "prompt"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
async def test_a_limit_that_leaves_no_room_is_called_as_the_client_called_it(world: World, field: str) -> None:
    async with world.cluster("EPD") as cluster:
        limit = cluster.router.max_model_len
        with pytest.raises(BadRequestError, match=f"{field}={limit}") as caught:
            await answer(cluster, plain("what is it", max_tokens=limit, max_tokens_param=field))
        assert caught.value.param == field
