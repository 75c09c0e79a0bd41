"""M3, M11: a file's patches equal those that transformers' image processor makes of it, bit for bit.

The reference opens the file as `transformers.image_utils.load_image` does. Where that is known to lose something it
is mended here, and the two differences are what is tested: transparent pixels are laid over white (the reference
drops alpha), and grey of 16 bits keeps its high byte (the reference clips it).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.media.pictures import MAX_PIXELS, MODES, WHITE, encoded, exif_orientation, noise, png_of, read_plainly
from triptych.config import MediaConfig
from triptych.media.decode import DecodeJob, decode_pixels
from triptych.media.probe import probe_image
from triptych.models.registry import ModelSpec
from triptych.models.vision import VisionRunner
from triptych.types import ImageDecoding, ImageSize, ItemMetadata

CONFIG = MediaConfig()


def ours(spec: ModelSpec, content: bytes) -> tuple[ItemMetadata, NDArray[np.float32]]:
    """As router and encode worker do it together: layout from the header, patches from the pixels."""
    size = probe_image(content, CONFIG)
    metadata = spec.family.image_metadata(size)
    pixels = decode_pixels(DecodeJob(content, ImageDecoding(size, WHITE), *spec.family.resizing(metadata)), MAX_PIXELS)
    return metadata, spec.family.patches(pixels, metadata)


def assert_equal(spec: ModelSpec, processor: Any, content: bytes, reference: Image.Image) -> None:
    expected = processor(reference, return_tensors="np")
    metadata, patches = ours(spec, content)
    assert [*metadata.grid] == expected["image_grid_thw"][0].tolist()
    np.testing.assert_array_equal(patches, expected["pixel_values"])


# The reference reads the same bytes, so that what a form loses is no difference.


@pytest.mark.parametrize(("form", "mode"), [(form, mode) for form, modes in MODES.items() for mode in modes])
def test_m3_every_mode_equals_the_reference(spec: ModelSpec, processor: Any, form: str, mode: str) -> None:
    image = noise(64, 64, mode if mode != "RGBA" else "RGB")
    if mode == "RGBA":
        image.putalpha(Image.linear_gradient("L").resize((64, 64)))
    content = encoded(image, form)
    assert_equal(spec, processor, content, read_plainly(content))


def test_m3_transparent_palette(spec: ModelSpec, processor: Any) -> None:
    content = encoded(noise(64, 64, "P"), "PNG", transparency=7)
    assert_equal(spec, processor, content, read_plainly(content))


def test_m3_grey_of_16_bits(spec: ModelSpec, processor: Any) -> None:
    values = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    high = Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    for form in ("PNG", "TIFF"):
        assert_equal(spec, processor, encoded(Image.fromarray(values), form), high)


def test_m3_colour_of_16_bits(spec: ModelSpec, processor: Any) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (64, 64, 3), dtype=np.uint16)
    content = png_of(values, depth=16)
    assert_equal(spec, processor, content, read_plainly(content))


@pytest.mark.parametrize("options", [{"progressive": True}, {"subsampling": 0}, {"quality": 30}, {"optimize": True}])
def test_kinds_of_jpeg(spec: ModelSpec, processor: Any, options: dict[str, Any]) -> None:
    content = encoded(noise(150, 90), "JPEG", **options)
    assert_equal(spec, processor, content, read_plainly(content))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_m1_every_orientation_equals_the_reference(spec: ModelSpec, processor: Any, orientation: int) -> None:
    content = encoded(noise(150, 90), "JPEG", exif=exif_orientation(orientation))
    assert_equal(spec, processor, content, read_plainly(content))


SIZES = [
    (1, 1), (2, 2), (26, 28), (332, 27), (1, 200), (3, 599), (64, 64), (65, 64), (511, 513), (1093, 6), (1000, 750),
    (37, 2000), (2048, 1536), (28, 28), (57, 900), (319, 320),
]  # fmt: skip


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_every_size_equals_the_reference(spec: ModelSpec, processor: Any, width: int, height: int, form: str) -> None:
    content = encoded(noise(width, height, seed=width + height), form)
    assert_equal(spec, processor, content, read_plainly(content))


def test_m11_predicted_tokens_are_the_encoders_rows_at_every_size(spec: ModelSpec) -> None:
    """w, h in 20, 27, ... 300: from the header alone, and as the tower returns them."""
    edges = range(20, 301, 7)
    tower = VisionRunner.load(spec)
    for width in edges:
        predicted, items = [], []
        for height in edges:
            content = encoded(Image.new("RGB", (width, height), (width % 256, height % 256, 90)), "BMP")
            metadata, patches = ours(spec, content)
            assert metadata == spec.family.image_metadata(ImageSize(width, height))
            predicted.append(metadata.num_embeds)
            items.append((patches, metadata.grid))
        assert [len(rows) for rows in tower.encode(items)] == predicted
