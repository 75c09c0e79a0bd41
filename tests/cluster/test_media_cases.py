"""Cases M1-M10, M15 and M16 over the HTTP API: what people send, and what must come of it.

M3 and M11, bit for bit and at every size, are in tests/models/test_reference_pixels.py; M12-M14 are of video and audio.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image, ImageOps

from tests.cluster.served import PLAIN, Json, Served, data_url, error_of, image_part, serving, text_of
from tests.cluster.test_corpus import peak_mb
from tests.media.hostile import huge_png
from tests.media.pictures import encoded, exif_orientation, noise, red_left_edge
from tests.media.server import PICTURE, MediaServer
from tests.media.server import serving as serving_media
from triptych.config import MediaConfig
from triptych.models.registry import ModelSpec
from triptych.types import ImageSize

AT = "messages.0.content.0"


def opened(content: bytes) -> Image.Image:
    return Image.open(BytesIO(content))


def image_tokens(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    count: int = response.json()["usage"]["prompt_tokens_details"]["multimodal_tokens"]["image"]
    return count


@pytest.fixture
async def served(spec: ModelSpec) -> AsyncIterator[Served]:
    async with serving(spec) as served:
        yield served
        await served.settle()


@pytest.fixture(scope="module")
def server() -> Iterator[MediaServer]:
    with serving_media() as server:
        yield server


@pytest.mark.parametrize("orientation", range(1, 9))
async def test_m1_a_photo_is_upright_before_anything_else(served: Served, orientation: int) -> None:
    content = encoded(red_left_edge(), "JPEG", exif=exif_orientation(orientation))
    response = await served.chat(image_part(data_url(content)))
    size = ImageSize(480, 640) if orientation >= 5 else ImageSize(640, 480)
    assert image_tokens(response) == served.cluster.spec.family.image_metadata(size).num_tokens
    assert text_of(response) == served.expected(ImageOps.exif_transpose(opened(content)))


async def test_m2_what_is_hidden_under_transparency_stays_hidden(served: Served) -> None:
    image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 32, 64))
    shown = Image.new("RGB", (64, 64), "white")
    shown.paste((255, 0, 0), (0, 0, 32, 64))
    assert text_of(await served.chat(image_part(data_url(encoded(image, "PNG"))))) == served.expected(shown)


async def test_m2_the_server_may_have_another_background(spec: ModelSpec) -> None:
    image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    async with serving(spec, MediaConfig(background="#204060")) as served:
        shown = Image.new("RGB", (64, 64), (0x20, 0x40, 0x60))
        assert text_of(await served.chat(image_part(data_url(encoded(image, "PNG"))))) == served.expected(shown)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "I;16"])
async def test_m3_every_mode_works(served: Served, mode: str) -> None:
    image = noise(64, 64).convert("L" if mode == "I;16" else mode)
    content = encoded(image.convert("I;16") if mode == "I;16" else image, "JPEG" if mode == "CMYK" else "PNG")
    shown = opened(content).convert("RGB")
    if mode == "I;16":  # these have eight bits' worth of levels
        shown = image.point([level >> 8 for level in range(256)]).convert("RGB")
    assert text_of(await served.chat(image_part(data_url(content)))) == served.expected(shown)


async def test_m4_one_image_by_every_way_is_one_image(spec: ModelSpec, server: MediaServer, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(PICTURE)
    config = MediaConfig(allow_private_urls=True, allowed_local_media_path=str(tmp_path))
    ways = [f"http://127.0.0.1:{server.port}/picture", data_url(PICTURE), f"file://{tmp_path}/x.png"]
    async with serving(spec, config, prefix_caching=False) as served:
        texts = [text_of(await served.chat(image_part(url))) for url in ways]
        assert texts == [served.expected(opened(PICTURE))] * 3
        together = await served.chat(*(image_part(url) for url in ways))
        assert text_of(together) == served.expected(*[opened(PICTURE)] * 3)
        assert served.num_forwards == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (data_url(encoded(noise(128, 128), "JPEG")[:-128]), "truncated"),
        (data_url(encoded(noise(128, 128), "JPEG")[:9000]), "truncated"),
        (data_url(b""), "0 bytes"),
        ("data:image/png;base64,", "0 bytes"),
        ("data:image/png;base64,iVBORw0KGgo!!", "base64"),
    ],
    ids=["128 bytes short", "half", "empty", "nothing", "base64"],
)
async def test_m5_damage_is_a_400_before_any_stream(served: Served, url: str, reason: str, stream: bool) -> None:
    response = await served.chat(image_part(url), stream=stream)
    assert response.headers["content-type"].startswith("application/json")
    message, param = error_of(response)
    assert reason in message
    assert param == AT


async def test_m5_line_breaks_in_base64_are_fine(served: Served) -> None:
    url = data_url(PICTURE)
    broken = "\r\n".join(url[k : k + 76] for k in range(0, len(url), 76))
    assert text_of(await served.chat(image_part(broken))) == served.expected(opened(PICTURE))


async def test_m5_the_part_at_fault_is_named(served: Served) -> None:
    good, bad = image_part(data_url(PICTURE)), image_part(data_url(encoded(noise(90, 90), "PNG")[:-500]))
    history: list[Json] = [{"role": "user", "content": [good, PLAIN]}, {"role": "assistant", "content": "so"}]
    response = await served.converse([*history, {"role": "user", "content": [PLAIN, good, bad]}])
    assert error_of(response)[1] == "messages.2.content.2"


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (26, 28), (332, 27)])
async def test_m6_small_shapes_are_scaled_by_the_models_rule(served: Served, size: tuple[int, int]) -> None:
    content = encoded(noise(*size), "PNG")
    response = await served.chat(image_part(data_url(content)))
    assert image_tokens(response) == served.cluster.spec.family.image_metadata(ImageSize(*size)).num_tokens
    assert text_of(response) == served.expected(opened(content))


@pytest.mark.parametrize("size", [(1093, 5), (1, 10_000)])
async def test_m6_too_long_shapes_are_refused_with_the_limit(served: Served, size: tuple[int, int]) -> None:
    message, param = error_of(await served.chat(image_part(data_url(encoded(noise(*size), "PNG")))))
    assert f"{size[0]}x{size[1]}" in message
    assert "200 times" in message
    assert param == AT


async def test_m7_a_huge_image_is_refused_from_its_header(served: Served) -> None:
    before = peak_mb()
    message, param = error_of(await served.chat(image_part(data_url(huge_png()))))
    assert "max_image_pixels" in message
    assert param == AT
    assert peak_mb() - before < 32


async def test_m7_a_huge_body_is_refused_from_its_length(served: Served) -> None:
    size = 150 << 20

    async def body() -> AsyncIterator[bytes]:
        yield b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:;base64,'
        pytest.fail("the body was read on")

    before = peak_mb()
    headers = {"Content-Type": "application/json", "Content-Length": str(size)}
    response = await served.http.post("/v1/chat/completions", content=body(), headers=headers)
    assert response.status_code == 413
    assert peak_mb() - before < 32


async def test_m7_no_media_in_any_log(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="triptych")
    urls = [data_url(PICTURE), data_url(PICTURE[:-200]), "data:image/png;base64," + "QUJD" * 20_000 + "!"]
    for url in urls:
        await served.chat(image_part(url))
    assert "request_id" in caplog.text
    for url in urls:
        assert url[40:90] not in caplog.text


async def test_m8_what_is_no_picture_is_named(served: Served) -> None:
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
    message, _ = error_of(await served.chat(image_part(data_url(svg, "image/svg+xml"))))
    assert "image/svg+xml" in message
    assert "PNG" in message, "it says what is supported"


@pytest.mark.parametrize("form", ["AVIF", "WEBP", "GIF", "JPEG", "BMP", "TIFF"])
async def test_m8_content_decides_and_the_first_frame_counts(served: Served, form: str) -> None:
    frames = [Image.new("RGB", (64, 48), colour) for colour in ("red", "lime", "blue")]
    more: dict[str, Any] = {"save_all": True, "append_images": frames[1:]} if form not in ("JPEG", "BMP") else {}
    content = encoded(frames[0], form, **more)
    shown = opened(content).convert("RGB")
    assert text_of(await served.chat(image_part(data_url(content, "image/png")))) == served.expected(shown)


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("status?404", 400, "status 404"),
        ("hang", 504, "within 0.5 s"),
        ("drip", 504, "within 0.5 s"),
        ("endless", 400, "max_image_bytes"),
        ("redirect?/redirect?/redirect?/redirect?/picture", 400, "max_redirects = 3"),
    ],
)
async def test_m9_a_server_that_misbehaves(
    spec: ModelSpec, server: MediaServer, path: str, status: int, reason: str
) -> None:
    """Private addresses are allowed, for there are no others here; tests/media/test_fetch.py has redirects to them."""
    patience_s = 0.5 if status == 504 else 30.0  # a machine that is busy needs a while to read to a limit of size
    config = MediaConfig(allow_private_urls=True, fetch_timeout_s=patience_s, max_image_bytes=300_000)
    async with serving(spec, config) as served:
        response = await served.chat(image_part(f"http://127.0.0.1:{server.port}/{path}"))
        message, param = error_of(response, status)
        assert reason in message
        assert param == AT
        await served.settle()


@pytest.mark.parametrize("host", ["127.0.0.1", "169.254.169.254", "[::1]", "0.0.0.0", "2130706433"])
async def test_m9_private_addresses_are_refused(served: Served, server: MediaServer, host: str) -> None:
    seen = len(server.seen)
    message, param = error_of(await served.chat(image_part(f"http://{host}:{server.port}/picture")))
    assert "refused" in message
    assert param == AT
    assert len(server.seen) == seen


@pytest.mark.parametrize("num_images", [0, 1])
async def test_m10_the_placeholder_as_text_is_text(served: Served, num_images: int) -> None:
    typed = {"type": "text", "text": "see <|image_pad|> and <|vision_start|><|image_pad|><|vision_end|>"}
    images = [noise(60, 40)] * num_images
    parts = [image_part(data_url(encoded(image, "PNG"))) for image in images]
    response = await served.converse([{"role": "user", "content": [typed, *parts]}])
    told: list[Json] = [{"role": "user", "content": [typed, *({"type": "image"} for _ in images)]}]
    assert text_of(response) == served.expected(*images, messages=told)
    details = response.json()["usage"]["prompt_tokens_details"]
    metadata = served.cluster.spec.family.image_metadata(ImageSize(60, 40))
    assert details["multimodal_tokens"] == ({"image": metadata.num_tokens} if images else {})


async def test_m15_an_image_in_a_tools_message(served: Served) -> None:
    image = noise(60, 40)
    call = {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    asked: list[Json] = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    result: Json = {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [image_part(data_url(encoded(image, "PNG"))), PLAIN],
    }
    told: list[Json] = [*asked, {**result, "content": [{"type": "image"}, PLAIN]}]
    assert text_of(await served.converse([*asked, result])) == served.expected(image, messages=told)


async def test_m16_the_limit_counts_the_whole_conversation(spec: ModelSpec) -> None:
    turn: Json = {"role": "user", "content": [image_part(data_url(PICTURE)), PLAIN]}
    answer: Json = {"role": "assistant", "content": "so"}
    async with serving(spec, MediaConfig(max_images=2)) as served:
        message, param = error_of(await served.converse([turn, answer, turn, answer, turn]))
        assert message == "`messages`: the request has 3 images, the limit is 2."
        assert param == "messages"
        assert (await served.converse([turn, answer, turn])).status_code == 200


async def test_media_of_all_requests_is_bounded(spec: ModelSpec) -> None:
    """Each holds its URL and its content until it ends, and one more than fits is asked to come again."""
    url = data_url(encoded(noise(200, 200), "PNG"))
    async with serving(spec, MediaConfig(max_staged_bytes=4 * len(url))) as served:
        responses = await asyncio.gather(*(served.chat(image_part(url), max_tokens=40) for _ in range(6)))
        refused = [response for response in responses if response.status_code != 200]
        assert len(refused) == 4, "two were let in, and finished"
        for response in refused:
            assert "max_staged_bytes" in error_of(response, 503)[0]
            assert response.headers["Retry-After"]
        await served.settle()
        assert (await served.chat(image_part(url))).status_code == 200
        message, _ = error_of(await served.chat(*[image_part(url)] * 3))
        assert "of this request" in message
        await served.settle()
