"""A deployment in one process, with a model that is a formula, and questions to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from triptych.config import Config, EngineConfig, MediaConfig, ModelConfig, RouterConfig
from triptych.models.registry import ModelSpec, open_model
from triptych.testing import Cluster, fake_feature, fake_output
from triptych.testing_checkpoints import make_checkpoint
from triptych.types import (
    ChoiceFinished,
    Event,
    Finished,
    ImageInput,
    ImageSize,
    MediaItem,
    Modality,
    Request,
    SamplingParams,
    Started,
    TextDelta,
)

NUM_PICTURES = 4


class Answer(NamedTuple):
    started: Started
    deltas: list[TextDelta]
    ended: ChoiceFinished
    finished: Finished

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]


class World:
    """The model and pictures on disk."""

    def __init__(self, directory: Path) -> None:
        make_checkpoint("qwen3_vl", directory)
        self.spec: ModelSpec = open_model(str(directory), ModelConfig())
        self.media = directory / "media"
        self.media.mkdir()
        self.items: list[MediaItem] = []
        self.features: dict[str, float] = {}
        for k in range(NUM_PICTURES):
            image = Image.new("RGB", (60 + 20 * k, 90 - 15 * k), (60 * k, 250 - 50 * k, 10))
            image.save(self.media / f"{k}.png")
            metadata = self.spec.family.image_metadata(ImageSize(*image.size))
            self.items.append(MediaItem(Modality.IMAGE, f"{k}", b"", metadata))
            self.features[f"{k}"] = fake_feature(self.spec.family.preprocess(image, metadata))
        content = (self.media / "0.png").read_bytes()
        (self.media / "bad.png").write_bytes(content[: len(content) // 2])  # the header tells its size, no more

    def config(self, router: RouterConfig | None = None, **engine: int) -> Config:
        kv: dict[str, Any] = {"num_kv_blocks": 200, "block_size": 8} | engine
        return Config(
            engine=EngineConfig(**kv),
            media=MediaConfig(allowed_local_media_path=str(self.media), max_images=3),
            router=router or RouterConfig(),
        )

    def cluster(self, placement: str, router: RouterConfig | None = None, **engine: int) -> Cluster:
        return Cluster(self.spec, self.config(router, **engine), placement, fake=True, seed=5)

    def request(
        self,
        request_id: str,
        pictures: list[int | str] | None = None,
        text: str = "what is it",
        max_tokens: int | None = 6,
        stop: list[str] | None = None,
    ) -> Request:
        pictures = pictures or []
        return Request(
            request_id,
            self.messages(len(pictures), text),
            [ImageInput((self.media / f"{picture}.png").as_uri()) for picture in pictures],
            SamplingParams(temperature=0.0, ignore_eos=True),
            max_tokens=max_tokens,
            stop=stop or [],
        )

    def messages(self, num_pictures: int, text: str) -> list[dict[str, object]]:
        parts = [*({"type": "image"} for _ in range(num_pictures)), {"type": "text", "text": text}]
        return [{"role": "user", "content": parts}]

    def expected(
        self, cluster: Cluster, pictures: list[int], num_tokens: int = 6, text: str = "what is it"
    ) -> list[int]:
        prompt = cluster.builder.build(self.messages(len(pictures), text), [self.items[k] for k in pictures])
        return fake_output(prompt, self.features, num_tokens, self.spec.family.text.vocab)


async def answer(cluster: Cluster, request: Request) -> Answer:
    events: AsyncGenerator[Event, None] = cluster.router.handle(request)
    started: list[Started] = []
    deltas: list[TextDelta] = []
    ended: list[ChoiceFinished] = []
    finished: list[Finished] = []
    async for event in events:
        assert not finished, "an event after the end"
        match event:
            case Started():
                assert not deltas, "the beginning comes first"
                started.append(event)
            case TextDelta():
                deltas.append(event)
            case ChoiceFinished():
                ended.append(event)
            case Finished():
                finished.append(event)
            case _:
                pytest.fail(f"unexpected: {event}")
    assert (len(started), len(ended), len(finished)) == (1, 1, 1)
    return Answer(started[0], deltas, ended[0], finished[0])


async def settle(cluster: Cluster) -> None:
    """Idle, and nothing held or charged by anyone."""
    await cluster.until_idle()
    cluster.check()
    assert cluster.router.num_running == 0
    for worker in cluster.router.registry.workers():
        assert (worker.num_inflight_requests, worker.num_inflight_tokens) == (0, 0), worker.name
        assert worker.num_kv_tokens == 0, worker.name
        assert (worker.num_inflight_items, worker.num_inflight_embeds) == (0, 0), worker.name
    cluster.router.encodes.check()
    cluster.router.prefixes.check()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("router"))


def total(cluster: Cluster, counter: str) -> float:
    return sum(local.counter(counter) for local in cluster.workers.values())
