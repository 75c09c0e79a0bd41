"""Greedy output of every placement equals transformers' `generate`, token for token, in float32."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from tests.equivalence.reference import Case, generate, make_cases
from triptych.config import Config, EngineConfig, HandoffConfig, MediaConfig, ModelConfig
from triptych.kernels import library
from triptych.models.registry import ModelSpec, open_model
from triptych.prompt.layout import PromptBuilder
from triptych.testing import Cluster
from triptych.testing_checkpoints import FamilyName, make_checkpoint
from triptych.types import ImageSize, MediaItem, Modality, TextDelta

NUM_CASES = 20  # and two that share a prefix with one of them
PLACEMENTS = ("EPD", "1E/1PD", "1E/1P/1D")
# Until requests that come together are decoded together: with workers that share cores not always at once.
MAX_TRIES = 5


class Reference(NamedTuple):
    spec: ModelSpec
    cases: list[Case]
    outputs: list[list[int]]
    media: Path


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    family: FamilyName = request.param
    path = tmp_path_factory.mktemp(family)
    make_checkpoint(family, path)
    spec = open_model(str(path), ModelConfig())
    cases = make_cases(NUM_CASES, seed=7)
    builder = PromptBuilder(path, spec.family)
    prompts = [builder.build(case.messages(), [media_item(spec, content) for content in case.images]) for case in cases]
    outputs = generate(spec, cases, prompts)
    assert len({tuple(output) for output in outputs}) > NUM_CASES // 2, "the model hardly looks at its input"
    return Reference(spec, cases, outputs, tmp_path_factory.mktemp("media"))


def media_item(spec: ModelSpec, content: bytes) -> MediaItem:
    width, height = int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")  # of a PNG
    return MediaItem(Modality.IMAGE, "", content, spec.family.image_metadata(ImageSize(width, height)))


def config_of(media: Path, *, num_kv_blocks: int = 400, block_size: int = 16, chunk: int = 512) -> Config:
    engine = EngineConfig(num_kv_blocks=num_kv_blocks, block_size=block_size, max_num_batched_tokens=chunk)
    return Config(engine=engine, media=MediaConfig(allowed_local_media_path=str(media)))


async def _answer(cluster: Cluster, case: Case, media: Path, request_id: str) -> list[int]:
    token_ids: list[int] = []
    async for event in cluster.router.handle(case.request(media, request_id)):
        if isinstance(event, TextDelta):
            token_ids += event.token_ids
    return token_ids


async def _answer_all(cluster: Cluster, reference: Reference, *, together: bool) -> list[list[int]]:
    answers = [
        _answer(cluster, case, reference.media, f"{'t' if together else 's'}{i}")
        for i, case in enumerate(reference.cases)
    ]
    outputs = await asyncio.gather(*answers) if together else [await answer for answer in answers]
    await cluster.until_idle()
    cluster.check()
    return outputs


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("chunk", [16, 64, 4096])
async def test_batched_equals_the_reference(reference: Reference, placement: str, chunk: int) -> None:
    config = config_of(reference.media, chunk=chunk)
    async with Cluster(reference.spec, config, placement, seed=chunk) as cluster:
        outputs = await _answer_all(cluster, reference, together=True)
        encoders = [worker for name, worker in cluster.workers.items() if name.startswith("encode")]
        language = [worker for name, worker in cluster.workers.items() if not name.startswith("encode")]
    assert outputs == reference.outputs
    if placement != "EPD":  # the encoder's own counters prove that every encode was remote, and ran once an item
        distinct = {content for case in reference.cases for content in case.images}
        assert sum(worker.counter("encode_items_total") for worker in encoders) == len(distinct)
        assert sum(worker.counter("encode_items_total") for worker in language) == 0
        assert sum(worker.counter("embed_transfer_items_total") for worker in language) >= len(distinct)


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_one_by_one_with_prefix_hits_equals_the_reference(reference: Reference, placement: str) -> None:
    """A second round is served from the prefix cache, and encodes nothing."""
    async with Cluster(reference.spec, config_of(reference.media), placement, seed=1) as cluster:
        first = await _answer_all(cluster, reference, together=False)
        encodes = _total(cluster, "encode_items_total")
        hits = _total(cluster, "prefix_cache_hits_total")
        second = await _answer_all(cluster, reference, together=False)
        assert _total(cluster, "prefix_cache_hits_total") > hits
        assert _total(cluster, "encode_items_total") == encodes
    assert first == reference.outputs
    assert second == reference.outputs


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("num_kv_blocks", "block_size"), [(28, 8), (14, 16)])
async def test_forced_preemption_equals_the_reference(
    reference: Reference, placement: str, num_kv_blocks: int, block_size: int
) -> None:
    """KV for about two requests: running ones lose their blocks and are computed again, on whichever worker that is."""
    config = config_of(reference.media, num_kv_blocks=num_kv_blocks, block_size=block_size, chunk=48)
    async with Cluster(reference.spec, config, placement, seed=2) as cluster:
        for _ in range(MAX_TRIES):
            assert await _answer_all(cluster, reference, together=True) == reference.outputs
            if _total(cluster, "num_preemptions_total"):
                break
        assert _total(cluster, "num_preemptions_total") > 0


@pytest.mark.parametrize("placement", ["2E/1P/2D", "1E/2PD", "1EP/1D", "1E/1P/1PD", "1E/1EPD", "2EPD"])
async def test_other_placements_equal_the_reference(reference: Reference, placement: str) -> None:
    async with Cluster(reference.spec, config_of(reference.media), placement, seed=3) as cluster:
        assert await _answer_all(cluster, reference, together=True) == reference.outputs


@pytest.mark.parametrize("placement", ["1E/1P/1D", "2E/2P/2D"])
async def test_over_tcp_equals_the_reference(reference: Reference, placement: str) -> None:
    config = msgspec.structs.replace(config_of(reference.media, chunk=64), handoff=HandoffConfig(transport="tcp"))
    async with Cluster(reference.spec, config, placement, seed=6) as cluster:
        assert await _answer_all(cluster, reference, together=True) == reference.outputs
        fetched = sum(worker.transport.counters["tcp_fetched_bytes_total"] for worker in cluster.workers.values())
        moved = _total(cluster, "embed_transfer_bytes_total") + _total(cluster, "kv_transfer_bytes_total")
    assert fetched == moved > 0


@pytest.mark.parametrize("placement", PLACEMENTS)
async def test_layers_in_torch_equal_the_reference(reference: Reference, placement: str) -> None:
    """What runs where there are no kernels."""
    spec = replace(reference.spec, kernels="torch")
    async with Cluster(spec, config_of(reference.media), placement, seed=4) as cluster:
        assert await _answer_all(cluster, reference, together=True) == reference.outputs


@pytest.mark.skipif(not library.available(), reason="torch's bfloat16 results depend on what shares a step")
async def test_bfloat16_answers_are_equal_whatever_the_placement_the_batch_and_the_chunk(reference: Reference) -> None:
    spec = replace(reference.spec, dtype="bfloat16")
    answers = []
    for placement, chunk, together in [("EPD", 4096, False), ("1E/1P/1D", 16, True), ("2E/2PD", 64, True)]:
        async with Cluster(spec, config_of(reference.media, chunk=chunk), placement, seed=5) as cluster:
            answers.append(await _answer_all(cluster, reference, together=together))
    assert answers[0] == answers[1] == answers[2]
    assert answers[0] != reference.outputs, "bfloat16 rounds nothing: is it float32?"


def _total(cluster: Cluster, counter: str) -> float:
    return sum(worker.counter(counter) for worker in cluster.workers.values())
