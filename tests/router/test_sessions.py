"""Sessions that resend their history: only what is new is encoded, however small the caches of embeddings are."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from tests.router.conftest import World, answer, settle, total
from triptych.config import Config, EncodeConfig, EngineConfig, MediaConfig
from triptych.testing import Cluster
from triptych.types import ImageInput, Request, SamplingParams

NUM_TURNS = 8
IMAGES_A_TURN = 2
ONE_ITEM_BYTES = 4096


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pictures")
    for k in range(2 * NUM_TURNS * IMAGES_A_TURN):
        Image.new("RGB", (60 + 3 * k, 64), (7 * k, 255 - 7 * k, 30)).save(directory / f"{k}.png")
    return directory


class Session:
    """One client: each turn adds two pictures and a question, and resends all before."""

    def __init__(self, name: str, first_picture: int, pictures: Path) -> None:
        self.name = name
        self._next_picture = first_picture
        self._pictures = pictures
        self._messages: list[dict[str, object]] = []
        self._images: list[ImageInput] = []

    async def turn(self, cluster: Cluster) -> int:
        """The tokens of this turn's prompt that were cached."""
        for _ in range(IMAGES_A_TURN):
            self._images.append(ImageInput((self._pictures / f"{self._next_picture}.png").as_uri()))
            self._next_picture += 1
        parts = [*({"type": "image"} for _ in range(IMAGES_A_TURN)), {"type": "text", "text": f"{self.name}?"}]
        self._messages.append({"role": "user", "content": parts})
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        request = Request(f"{self.name}-{len(self._messages)}", self._messages, self._images, sampling, max_tokens=6)
        got = await answer(cluster, request)
        self._messages.append({"role": "assistant", "content": got.text})
        await cluster.until_idle()
        return got.started.num_cached_tokens


@pytest.mark.parametrize("placement", ["EPD", "1E/1PD", "2E/2P/2D", "1E/1EPD"])
async def test_sessions_encode_new_images_only(world: World, pictures: Path, placement: str) -> None:
    config = Config(
        engine=EngineConfig(num_kv_blocks=400, block_size=4, embedding_cache_bytes=ONE_ITEM_BYTES),
        encode=EncodeConfig(cache_bytes=ONE_ITEM_BYTES),
        media=MediaConfig(allowed_local_media_path=str(pictures)),
    )
    async with Cluster(world.spec, config, placement, fake=True, seed=3) as cluster:
        sessions = [Session("a", 0, pictures), Session("b", NUM_TURNS * IMAGES_A_TURN, pictures)]
        for turn in range(NUM_TURNS):
            for session in sessions:
                assert (await session.turn(cluster) > 16) == (turn > 0)
            assert total(cluster, "encode_items_total") == len(sessions) * (turn + 1) * IMAGES_A_TURN
        await settle(cluster)
