"""The HTTP API in front of a deployment in this process, with a model that is a formula: what is right is known."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from PIL import Image

from triptych.api.app import create_app
from triptych.config import Config, EngineConfig, MediaConfig, RouterConfig
from triptych.models.registry import ModelSpec
from triptych.testing import Cluster, fake_feature, fake_output
from triptych.types import ImageSize, MediaItem, Modality

Json = Mapping[str, Any]

NUM_TOKENS = 4
TEXT = "what is it"
PLAIN = {"type": "text", "text": TEXT}


def data_url(content: bytes, label: str = "image/png") -> str:
    return f"data:{label};base64,{base64.b64encode(content).decode()}"


def image_part(url: str, **fields: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}, **fields}


class Served:
    def __init__(self, cluster: Cluster, http: httpx.AsyncClient) -> None:
        self.cluster = cluster
        self.http = http

    async def chat(self, *parts: Json, **fields: object) -> httpx.Response:
        return await self.converse([{"role": "user", "content": [*parts, PLAIN]}], **fields)

    async def converse(self, messages: Sequence[Json], **fields: object) -> httpx.Response:
        body = {"messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    def expected(self, *images: Image.Image, messages: Sequence[Json] | None = None) -> str:
        """The answer about these pixels, upright, opaque and RGB, in this order."""
        spec, builder = self.cluster.spec, self.cluster.builder
        items: list[MediaItem] = []
        features: dict[str, float] = {}
        for k, image in enumerate(images):
            metadata = spec.family.image_metadata(ImageSize(*image.size))
            items.append(MediaItem(Modality.IMAGE, f"{k}", b"", metadata))
            features[f"{k}"] = fake_feature(spec.family.preprocess(image, metadata))
        parts = [*({"type": "image"} for _ in images), PLAIN]
        told: list[dict[str, Any]] = [dict(message) for message in messages or [{"role": "user", "content": parts}]]
        prompt = builder.build(told, items)
        token_ids = fake_output(prompt, features, NUM_TOKENS, spec.family.text.vocab)
        return builder.tokenizer.decode(token_ids)

    @property
    def num_forwards(self) -> int:
        return sum(local.tower.num_forwards for local in self.cluster.workers.values() if local.tower)

    async def settle(self) -> None:
        """Nothing is held by anybody."""
        await self.cluster.until_idle()
        self.cluster.check()
        self.cluster.router.encodes.check()
        assert self.cluster.router._media.staging.used_bytes == 0


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text[:500]
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def error_of(response: httpx.Response, status: int = 400) -> tuple[str, str | None]:
    """Message and param of an error, whose text repeats no media."""
    assert response.status_code == status, response.text[:500]
    error = response.json()["error"]
    assert error["code"] == status
    assert error["message"]
    assert len(response.text) < 1000
    return error["message"], error["param"]


@asynccontextmanager
async def serving(
    spec: ModelSpec, media: MediaConfig | None = None, placement: str = "1E/1P/1D", **engine: Any
) -> AsyncIterator[Served]:
    config = Config(
        media=media or MediaConfig(),
        engine=EngineConfig(**{"num_kv_blocks": 300, "block_size": 8} | engine),
        router=RouterConfig(heartbeat_ttl_s=1e6),
    )
    async with Cluster(spec, config, placement, fake=True, seed=3) as cluster:
        app = create_app(cluster.router, config, cluster.metrics)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
            yield Served(cluster, http)
