"""A random schedule over a whole deployment in one process: requests, cancels and kills, and what must hold after."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import Image

from triptych.config import Config, EncodeConfig, EngineConfig, HandoffConfig, MediaConfig, RouterConfig
from triptych.errors import TriptychError
from triptych.models.registry import ModelSpec
from triptych.testing import Cluster, fake_feature, fake_output
from triptych.types import (
    ChoiceFinished,
    FinishReason,
    ImageInput,
    ImageSize,
    MediaItem,
    Modality,
    Request,
    SamplingParams,
    Started,
    TextDelta,
)

NUM_PICTURES = 5
CLIENT_GONE = "cancelled"


class Schedule(NamedTuple):
    """What happens; all the rest follows from `seed`."""

    placement: str
    seed: int
    num_requests: int
    cancel_share: float
    num_kills: int
    num_kv_blocks: int
    block_size: int
    max_num_batched_tokens: int
    embedding_cache_bytes: int
    window_embeds: int
    transport: Literal["inproc", "tcp"] = "inproc"


class Outcome(NamedTuple):
    """How each accepted request ended: a finish reason, an error's class, or CLIENT_GONE."""

    ends: list[str]
    cluster: Cluster


class Pictures(NamedTuple):
    """Pictures on disk, what they count as in a prompt, and what the fake tower makes of them."""

    directory: Path
    items: list[MediaItem]
    features: list[float]


def make_pictures(spec: ModelSpec, directory: Path) -> Pictures:
    items, features = [], []
    for k in range(NUM_PICTURES):
        image = Image.new("RGB", (40 + 23 * k, 120 - 17 * k), (50 * k, 255 - 40 * k, 10 * k))
        path = directory / f"{k}.png"
        image.save(path)
        metadata = spec.family.image_metadata(ImageSize(*image.size))
        items.append(MediaItem(Modality.IMAGE, str(k), path.read_bytes(), metadata))
        features.append(fake_feature(spec.family.preprocess(image, metadata)))
    return Pictures(directory, items, features)


def config_of(schedule: Schedule, pictures: Pictures) -> Config:
    return Config(
        engine=EngineConfig(
            num_kv_blocks=schedule.num_kv_blocks,
            block_size=schedule.block_size,
            max_num_batched_tokens=schedule.max_num_batched_tokens,
            max_num_seqs=4,
            embedding_cache_bytes=schedule.embedding_cache_bytes,
        ),
        encode=EncodeConfig(
            max_encode_embeds=16,
            cache_bytes=schedule.embedding_cache_bytes,
            window_embeds=schedule.window_embeds,
        ),
        handoff=HandoffConfig(transport=schedule.transport),
        media=MediaConfig(allowed_local_media_path=str(pictures.directory)),
        router=RouterConfig(heartbeat_ttl_s=1e6, max_attempts=20, deadline_s=60.0),
    )


class Chaos:
    """Runs one schedule; `ends` gets exactly one entry a request, or a test fails."""

    def __init__(self, spec: ModelSpec, pictures: Pictures, schedule: Schedule) -> None:
        self._spec = spec
        self._pictures = pictures
        self._schedule = schedule
        self._random = random.Random(schedule.seed)
        self.ends: list[str] = []

    async def run(self) -> Cluster:
        config = config_of(self._schedule, self._pictures)
        cluster = Cluster(self._spec, config, self._schedule.placement, fake=True, seed=self._schedule.seed)
        async with cluster:
            requests = [self._one_request(cluster, i) for i in range(self._schedule.num_requests)]
            await asyncio.gather(*requests, self._kill_some(cluster))
            await cluster.until_idle()
            cluster.check()
            cluster.router.encodes.check()
            assert_nothing_held(cluster)
        return cluster

    async def _kill_some(self, cluster: Cluster) -> None:
        """kill -9 of a random worker, and its next life a little later."""
        for _ in range(self._schedule.num_kills):
            await asyncio.sleep(self._random.random() * 0.02)
            name = self._random.choice(sorted(cluster.workers))
            stages = list(next(p.stages for p in cluster.placed if p.name == name))
            cluster.kill(name)
            await asyncio.sleep(self._random.random() * 0.01)
            cluster.add(name, stages)

    async def _one_request(self, cluster: Cluster, index: int) -> None:
        await asyncio.sleep(self._random.random() * 0.02)
        chosen = [self._random.randrange(NUM_PICTURES) for _ in range(self._random.choice((0, 1, 1, 2, 3)))]
        num_tokens = self._random.randint(1, 12)
        num_choices = self._random.choice((1, 1, 1, 3))
        task = asyncio.create_task(self._ask(cluster, index, chosen, num_tokens, num_choices))
        if self._random.random() < self._schedule.cancel_share:
            await asyncio.sleep(self._random.random() * 0.05)
            task.cancel()
        try:
            self.ends.append(await task)
        except asyncio.CancelledError:
            self.ends.append(CLIENT_GONE)
        except TriptychError as error:
            self.ends.append(type(error).__name__)

    async def _ask(self, cluster: Cluster, index: int, chosen: list[int], num_tokens: int, num_choices: int) -> str:
        text = "what is it? " * (1 + index % 3)
        messages: list[dict[str, object]] = [
            {"role": "user", "content": [*({"type": "image"} for _ in chosen), {"type": "text", "text": text}]}
        ]
        images = [ImageInput((self._pictures.directory / f"{k}.png").as_uri()) for k in chosen]
        num_scored = self._random.choice((None, None, 1))
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, num_prompt_logprobs=num_scored)
        priority = self._random.randint(-1, 1)
        request = Request(
            f"r{index}", messages, images, sampling, max_tokens=num_tokens, priority=priority, n=num_choices
        )
        token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        finished: dict[int, FinishReason] = {}
        async for event in cluster.router.handle(request):
            match event:
                case Started():
                    scored = [entry.chosen.token_id for entry in event.prompt_logprobs if entry is not None]
                    assert scored == (event.prompt_token_ids[1:] if num_scored else [])
                case TextDelta():
                    assert event.choice not in finished, "a token after the end"
                    token_ids[event.choice] += event.token_ids
                case ChoiceFinished():
                    finished[event.choice] = event.finish_reason
        assert finished == dict.fromkeys(range(num_choices), FinishReason.LENGTH)
        assert token_ids == [self._expected(cluster, messages, chosen, num_tokens)] * num_choices
        return finished[0].value

    def _expected(
        self, cluster: Cluster, messages: list[dict[str, object]], chosen: list[int], num_tokens: int
    ) -> list[int]:
        prompt = cluster.builder.build(messages, [self._pictures.items[k] for k in chosen])
        features = {str(k): feature for k, feature in enumerate(self._pictures.features)}
        return fake_output(prompt, features, num_tokens, self._spec.family.text.vocab)


def assert_nothing_held(cluster: Cluster) -> None:
    """Blocks, leases and shared memory are back to what an idle worker holds."""
    for name, local in cluster.workers.items():
        language, encode = local.worker.stages.language, local.worker.stages.encode
        held = 0
        if language is not None:
            load = language.load()
            assert load.num_free_blocks == load.num_total_blocks, f"{name} lost KV blocks"
            held += language.kv_bytes
        if encode is not None:
            assert encode.num_waiting_embeds() == 0, f"{name} still waits for an encode"
            held += encode.cached_bytes
        assert local.transport.used_bytes <= held + 64 * 64, f"{name} holds memory for nobody"
