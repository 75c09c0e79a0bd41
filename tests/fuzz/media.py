"""Media bytes that were pictures once: `python -m tests.fuzz.media --seconds 600 --seed 1`."""

from __future__ import annotations

import base64
import random
from functools import cache
from typing import Any

import httpx

from tests.fuzz.running import main
from tests.media.corpus import Sample, corpus
from triptych.config import ApiConfig, Config, EncodeConfig, EngineConfig

LONG_BYTES = 1 << 20  # few of the requests have more: reading them would be all that a run does
ODD_BYTES = [
    b"\0",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\1",
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\0\0\0\1",
]
MAX_CHANGES = 12

# Full long before a run's first third is over, so that what grows after it is no cache.
SMALL_CACHES = Config(
    api=ApiConfig(port=0),
    encode=EncodeConfig(cache_bytes=4 << 20),
    engine=EngineConfig(embedding_cache_bytes=4 << 20, kv_bytes=16 << 20),
)


@cache
def _samples() -> tuple[list[Sample], list[Sample]]:
    """Short and long ones."""
    samples = [sample for sample in corpus() if sample.content]
    return (
        [sample for sample in samples if len(sample.content) <= LONG_BYTES],
        [sample for sample in samples if len(sample.content) > LONG_BYTES],
    )


def media(rng: random.Random) -> bytes:
    short, long = _samples()
    content = bytearray(rng.choice(long if rng.random() < 0.02 else short).content)
    for _ in range(rng.choice([0, 1, 1, 2, 3, MAX_CHANGES])):
        content = _changed(content, rng) or bytearray(b"\xff")
    return bytes(content)


def _changed(content: bytearray, rng: random.Random) -> bytearray:
    """By one of the ways in which files are damaged, or made to do damage. Most places are near the beginning."""
    at = min(int(rng.paretovariate(0.5)) - 1, len(content) - 1) if rng.random() < 0.5 else rng.randrange(len(content))
    length = min(int(rng.paretovariate(0.7)), len(content) - at)
    match rng.randrange(8):
        case 0:
            content[at] ^= 1 << rng.randrange(8)
        case 1:
            odd = rng.choice(ODD_BYTES)
            content[at : at + len(odd)] = odd
        case 2:
            return content[:at]
        case 3:
            del content[at : at + length]
        case 4:
            content[at:at] = content[at : at + length] * rng.choice([1, 2, 50])
        case 5:
            other = rng.choice(_samples()[0]).content
            start = rng.randrange(len(other))
            content[at:] = other[start:]
        case 6:
            content[at : at + length] = rng.randbytes(length)
        case 7:
            other_at = rng.randrange(len(content))
            piece = content[other_at : other_at + length]
            content[at : at + len(piece)] = piece
    return content


def body(rng: random.Random) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is it?"}]
    for _ in range(rng.choice([1, 1, 1, 2])):
        label = rng.choice(["image/png", "image/jpeg", "image/svg+xml", "", "text/plain"])
        url = f"data:{label};base64,{base64.b64encode(media(rng)).decode()}"
        part = {"type": "image_url", "image_url": {"url": url}}
        parts.append(part | ({"uuid": rng.choice("xyz")} if rng.random() < 0.2 else {}))
    if rng.random() < 0.1:
        parts.append({"type": "image_url", "image_url": None, "uuid": rng.choice("xyz")})
    fields: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "stream": rng.random() < 0.3}
    if rng.random() < 0.2:
        fields["mm_processor_kwargs"] = {"max_pixels": rng.choice([50_000, 100_000, 200_000])}
    if rng.random() < 0.2:
        fields["media_io_kwargs"] = {"image": {"rgba_background_color": rng.choice(["#102030", [0, 255, 0]])}}
    return {"messages": [{"role": "user", "content": parts}], **fields}


async def ask(client: httpx.AsyncClient, rng: random.Random) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=body(rng))


if __name__ == "__main__":
    main(ask, "Fuzz the decoders of a deployment through its API.", SMALL_CACHES)
