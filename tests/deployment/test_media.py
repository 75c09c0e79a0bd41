"""The corpus of media through real processes: what decodes it is killed by it now and then, and nothing else is."""

from __future__ import annotations

import os
from collections import Counter

import httpx
import msgspec
import psutil
import pytest

from tests.cluster.served import data_url, image_part
from tests.deployment.conftest import chat
from tests.deployment.conftest import image_part as picture
from tests.media.corpus import Right, corpus
from tests.media.hostile import rle_bmp
from triptych.config import Config
from triptych.launch import Deployment, Placement

MORE_BYTES = 700 << 20  # of router, workers and what decodes for them, over the whole corpus


def resident_bytes() -> int:
    processes = [psutil.Process(os.getpid()), *psutil.Process(os.getpid()).children(recursive=True)]
    return sum(int(process.memory_info().rss) for process in processes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about damaged files, in the router
async def test_every_file_of_the_corpus(config: Config) -> None:
    async with (
        Deployment(config, Placement.parse("1E/1PD")) as deployment,
        httpx.AsyncClient(base_url=deployment.url, timeout=60, trust_env=False) as client,
    ):
        good = chat(picture(1), "what is it", max_tokens=2)
        expected = (await client.post("/v1/chat/completions", json=good)).json()["choices"]
        before, statuses = resident_bytes(), Counter[int]()
        for sample in corpus():
            body = chat(image_part(data_url(sample.content, sample.label)), "what is it", max_tokens=2)
            response = await client.post("/v1/chat/completions", json=body)
            statuses[response.status_code] += 1
            allowed = {Right.IMAGE: (200,), Right.REFUSED: (400,), Right.EITHER: (200, 400)}[sample.right]
            assert response.status_code in allowed, f"{sample.name}: {response.text[:300]}"
            if response.status_code == 400:
                assert (await client.post("/v1/chat/completions", json=good)).json()["choices"] == expected
        assert statuses[200] > 150
        assert statuses[400] > 100
        assert resident_bytes() - before < MORE_BYTES


async def test_an_image_that_takes_too_long_to_decode_is_a_400_and_the_worker_lives(config: Config) -> None:
    encode = msgspec.structs.replace(config.encode, decode_timeout_s=0.5)
    config = msgspec.structs.replace(config, encode=encode)
    async with (
        Deployment(config, Placement.parse("1E/1PD")) as deployment,
        httpx.AsyncClient(base_url=deployment.url, timeout=60, trust_env=False) as client,
    ):
        worker = deployment.pid("encode-0")
        body = chat(image_part(data_url(rle_bmp(7000, 7000))), max_tokens=2)
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert "decode_timeout_s" in error["message"]
        assert error["param"] == "messages.0.content.0"
        good = chat(picture(1), "what is it", max_tokens=2)
        assert (await client.post("/v1/chat/completions", json=good)).status_code == 200
        assert deployment.pid("encode-0") == worker
