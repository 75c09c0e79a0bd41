"""Cases I1-I8: what an image is follows from its content and the options it is read with, in every cache on the way.

The model is a formula of every pixel's mean, so an answer about another picture is another text.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
from PIL import Image

from tests.cluster.served import PLAIN, Served, data_url, error_of, image_part, serving, text_of
from tests.media.pictures import encoded, noise
from triptych.config import Config, EncodeConfig, EngineConfig, RouterConfig
from triptych.errors import BadRequestError
from triptych.models.registry import ModelSpec
from triptych.router.router import Router
from triptych.testing import Cluster, LocalRouterMailbox, fake_feature, fake_output
from triptych.types import ImageInput, ImageSize, MediaItem, Modality, Request, SamplingParams, TextDelta

RED = Image.new("RGB", (64, 64), "red")
BLUE = Image.new("RGB", (64, 64), "blue")
WIDE_BLUE = Image.new("RGB", (128, 64), "blue")


def png(image: Image.Image) -> str:
    return data_url(encoded(image, "PNG"))


@pytest.fixture
async def served(spec: ModelSpec) -> AsyncIterator[Served]:
    async with serving(spec) as served:
        yield served
        await served.settle()


async def test_i1_content_decides_whatever_the_uuid(served: Served) -> None:
    for image in (RED, WIDE_BLUE, BLUE, RED):
        assert text_of(await served.chat(image_part(png(image), uuid="x"))) == served.expected(image)


async def test_i2_two_shapes_of_one_grey(served: Served) -> None:
    for size in ((30, 150), (150, 30)):
        image = Image.new("L", size, 128)
        assert text_of(await served.chat(image_part(png(image)))) == served.expected(image.convert("RGB"))
    assert served.num_forwards == 2


async def test_i4_equal_beginnings_and_different_ends(served: Served) -> None:
    """Large enough for the ends to be far from each other's headers."""
    one = noise(256, 256)
    other = one.copy()
    other.paste((255, 255, 255), (0, 192, 256, 256))
    contents = [encoded(image, "JPEG", quality=90) for image in (one, other)]
    assert contents[0][:4000] == contents[1][:4000]
    texts = [text_of(await served.chat(image_part(data_url(content)))) for content in contents]
    assert served.num_forwards == 2
    assert len(set(texts)) == 2


async def test_i5_the_prefix_cache_tells_images_of_one_size_apart(served: Served) -> None:
    cached = []
    for image in (RED, BLUE, BLUE):
        response = await served.chat(PLAIN, image_part(png(image)))
        told: list[dict[str, Any]] = [{"role": "user", "content": [PLAIN, {"type": "image"}, PLAIN]}]
        assert text_of(response) == served.expected(image, messages=told)
        cached.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        before_image = served.cluster.builder.build(told, [_item(served, image)]).items[0].placeholder.offset
    assert cached[0] == 0
    assert cached[1] <= before_image, "what they share is the text before the image"
    assert cached[2] > before_image, "the cache works at all"


def _item(served: Served, image: Image.Image) -> MediaItem:
    metadata = served.cluster.spec.family.image_metadata(ImageSize(*image.size))
    return MediaItem(Modality.IMAGE, "", b"", metadata)


async def test_i6_one_image_twice_is_one_encode_at_two_places(served: Served) -> None:
    part = image_part(png(RED))
    assert text_of(await served.chat(part, part)) == served.expected(RED, RED)
    assert served.num_forwards == 1


@pytest.mark.parametrize(
    ("prefix_caching", "embedding_cache", "encoder_cache"), list(itertools.product([False, True], repeat=3))
)
@pytest.mark.parametrize("placement", ["EPD", "1E/1PD", "1E/1P/1D"])
async def test_i7_whichever_caches_are_off(
    spec: ModelSpec, placement: str, prefix_caching: bool, embedding_cache: bool, encoder_cache: bool
) -> None:
    """Both sides go by the router's identity, and neither makes one up for want of a cache."""
    config = Config(
        encode=EncodeConfig(cache_bytes=(1 << 20) * encoder_cache),
        engine=EngineConfig(
            num_kv_blocks=200,
            block_size=8,
            prefix_caching=prefix_caching,
            embedding_cache_bytes=(1 << 20) * embedding_cache,
        ),
        router=RouterConfig(heartbeat_ttl_s=1e6),
    )
    async with Cluster(spec, config, placement, fake=True, seed=7) as cluster:
        for k, image in enumerate([RED, BLUE, RED, WIDE_BLUE, BLUE, BLUE]):
            request = request_of(f"r{k}", ImageInput(png(image), "x"))
            assert await answer(cluster, request) == expected(cluster, image)
        await cluster.until_idle()
        cluster.check()


async def test_i8_a_router_that_starts_again_finds_nothing_stale(spec: ModelSpec) -> None:
    """The workers live on with all that they have cached; names of requests and images come again."""
    config = Config(engine=EngineConfig(num_kv_blocks=200, block_size=8), router=RouterConfig(heartbeat_ttl_s=1e6))
    async with Cluster(spec, config, "1E/1P/1D", fake=True, seed=7) as cluster:
        assert await answer(cluster, request_of("r", ImageInput(png(RED), "x"))) == expected(cluster, RED)
        await cluster.until_idle()
        await _restart_router(cluster)
        assert await answer(cluster, request_of("r", ImageInput(png(BLUE), "x"))) == expected(cluster, BLUE)
        await cluster.until_idle()
        await _restart_router(cluster)
        with pytest.raises(BadRequestError, match="no image is kept with the uuid 'x'"):
            await answer(cluster, request_of("r", ImageInput("", "x")))
        assert await answer(cluster, request_of("r", ImageInput(png(RED), "x"))) == expected(cluster, RED)
        await cluster.until_idle()
        cluster.check()


async def _restart_router(cluster: Cluster) -> None:
    old = cluster.router
    await old.close()
    cluster.router = Router(
        cluster.config, cluster.builder, cluster.spec.fingerprint, cluster.spec.served_name, cluster.spec.max_model_len,
        LocalRouterMailbox(cluster.network), cluster.metrics,
    )  # fmt: skip
    await cluster.router.start()
    for worker in old.registry.workers():
        cluster.router.registry.register(worker.info)


# -- options of one request, and images by their uuid alone ------------------------------------------------------------


def request_of(request_id: str, *images: ImageInput, **fields: Any) -> Request:
    content = [*({"type": "image"} for _ in images), PLAIN]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    messages: list[dict[str, object]] = [{"role": "user", "content": content}]
    return Request(request_id, messages, list(images), sampling, max_tokens=5, **fields)


async def answer(cluster: Cluster, request: Request) -> list[int]:
    return [
        token_id
        async for event in cluster.router.handle(request)
        if isinstance(event, TextDelta)
        for token_id in event.token_ids
    ]


def expected(cluster: Cluster, *images: Image.Image, options: dict[str, object] | None = None) -> list[int]:
    family = cluster.spec.family
    items, features = [], {}
    for k, image in enumerate(images):
        metadata = family.image_metadata(ImageSize(*image.size), family.pixel_limits(options or {}))
        items.append(MediaItem(Modality.IMAGE, f"{k}", b"", metadata))
        features[f"{k}"] = fake_feature(family.preprocess(image, metadata))
    messages: list[dict[str, Any]] = [{"role": "user", "content": [*({"type": "image"} for _ in images), PLAIN]}]
    return fake_output(cluster.builder.build(messages, items), features, 5, family.text.vocab)


async def test_i3_one_file_on_two_backgrounds(served: Served) -> None:
    url, cluster = png(Image.new("RGBA", (64, 64), (0, 0, 0, 0))), served.cluster
    colours: dict[str, Any] = {"#ffffff": (255, 255, 255), "#000000": (0, 0, 0), "#ff8000": [255, 128, 0]}
    for name, colour in colours.items():
        for written in (name, list(colour)):
            options = {"image": {"rgba_background_color": written}}
            shown = Image.new("RGB", (64, 64), tuple(colour))
            assert await answer(cluster, request_of("r", ImageInput(url), media_options=options)) == expected(
                cluster, shown
            )
    assert await answer(cluster, request_of("r", ImageInput(url))) == expected(
        cluster, Image.new("RGB", (64, 64), "white")
    )
    assert served.num_forwards == 3, "one a colour, however it is written"


async def test_processor_options_change_layout_pixels_and_identity(served: Served) -> None:
    image, cluster = noise(200, 150), served.cluster
    factor = (2 * cluster.spec.family.vision.patch_size) ** 2
    small: dict[str, object] = {"max_pixels": 6 * factor}
    same: dict[str, object] = {"size": {"longest_edge": 6 * factor}}
    lengths = {}
    rounded: dict[str, object] = {"max_pixels": 6 * factor + 1}
    for options in (small, {}, same, rounded):
        request = request_of("r", ImageInput(png(image)), processor_options=options)
        assert await answer(cluster, request) == expected(cluster, image, options=options)
        limits = cluster.spec.family.pixel_limits(options)
        lengths[str(options)] = cluster.spec.family.image_metadata(ImageSize(200, 150), limits).num_tokens
    assert lengths[str(small)] < lengths["{}"]
    assert served.num_forwards == 2, "options that lead to one grid are one item"


@pytest.mark.parametrize("images", [[], [ImageInput(png(RED))]])
async def test_options_that_are_not_known_are_refused_with_and_without_an_image(
    served: Served, images: list[ImageInput]
) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "mm_processor_kwargs.fps": {"processor_options": {"fps": 2}},
        "mm_processor_kwargs.max_pixels": {"processor_options": {"max_pixels": 1 << 40}},
        "media_io_kwargs.image.crop": {"media_options": {"image": {"crop": 1}}},
    }
    for field, options in wrong.items():
        with pytest.raises(BadRequestError) as caught:
            await answer(served.cluster, request_of("r", *images, **options))
        assert caught.value.param == field
        assert field in caught.value.message


async def test_a_uuid_alone_means_what_was_last_sent_with_it(served: Served) -> None:
    named = {"type": "image_url", "image_url": None, "uuid": "x"}
    message, param = error_of(await served.chat(PLAIN, named))
    assert message == "`messages.0.content.1`: no image is kept with the uuid 'x': send it with its content."
    assert param == "messages.0.content.1"
    for image in (RED, WIDE_BLUE):
        assert text_of(await served.chat(image_part(png(image), uuid="x"))) == served.expected(image)
        assert text_of(await served.chat(named)) == served.expected(image)
    refused = await served.chat(image_part("data:image/png;base64,AAAA", uuid="x"))
    assert refused.status_code == 400
    assert text_of(await served.chat(named)) == served.expected(WIDE_BLUE)  # what was refused replaced nothing
    both = await served.chat(image_part(png(RED), uuid="y"), {**named, "uuid": "y"}, named)
    assert text_of(both) == served.expected(RED, RED, WIDE_BLUE)


async def test_a_uuid_is_its_clients_and_its_salts_own(served: Served) -> None:
    cluster, named = served.cluster, ImageInput("", "x", "messages.0.content.0")
    red = request_of("r", ImageInput(png(RED), "x"), client="a", cache_salt="s")
    blue = request_of("r", ImageInput(png(BLUE), "x"), client="b", cache_salt="s")
    for request in (red, blue):
        await answer(cluster, request)
    assert await answer(cluster, request_of("r", named, client="a", cache_salt="s")) == expected(cluster, RED)
    assert await answer(cluster, request_of("r", named, client="b", cache_salt="s")) == expected(cluster, BLUE)
    for fields in ({"client": "a"}, {"cache_salt": "s"}, {"client": "c", "cache_salt": "s"}):
        with pytest.raises(BadRequestError, match="no image is kept"):
            await answer(cluster, request_of("r", named, **fields))


async def test_options_apply_to_an_image_that_is_named(served: Served) -> None:
    cluster = served.cluster
    url = png(Image.new("RGBA", (64, 64), (0, 0, 0, 0)))
    await answer(cluster, request_of("r", ImageInput(url, "x")))
    options = {"image": {"rgba_background_color": "#ff0000"}}
    request = request_of("r", ImageInput("", "x"), media_options=options)
    assert await answer(cluster, request) == expected(cluster, RED)
