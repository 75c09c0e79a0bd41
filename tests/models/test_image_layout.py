"""What is known of an image before its pixels, and its pixels as patches, against transformers' own processor."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from triptych.errors import BadRequestError, ConfigError, MediaError
from triptych.models.image_patches import ImagePatches
from triptych.models.registry import ModelSpec
from triptych.types import Grid, ImageSize

EXTREMES = [(1, 1), (1, 200), (200, 1), (3, 599), (4032, 3024), (37, 2000), (10_000, 60), (28, 28), (33, 31)]
SIZES = [(w, h) for w in range(20, 300, 21) for h in range(20, 300, 14)] + EXTREMES


def _noise(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width * 10_000 + height)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_counts_equal_the_processors(spec: ModelSpec, processor: Any) -> None:
    for width, height in SIZES:
        metadata = spec.family.image_metadata(ImageSize(width, height))
        num_patches = processor.get_number_of_image_patches(height, width)
        assert metadata.num_tokens == metadata.num_embeds == num_patches // 4, (width, height)
        assert metadata.grid.h * metadata.grid.w == num_patches
        assert spec.family.expansion(metadata) == [spec.family.placeholder_token_id] * metadata.num_tokens


@pytest.mark.parametrize(("width", "height"), [(20, 20), (97, 41), (300, 20), (224, 224), (1, 150), (640, 480)])
def test_patches_equal_the_processors_bit_for_bit(spec: ModelSpec, processor: Any, width: int, height: int) -> None:
    image = _noise(width, height)
    expected = processor(image, return_tensors="np")
    metadata = spec.family.image_metadata(ImageSize(width, height))
    patches = spec.family.preprocess(image, metadata)
    assert metadata.grid == Grid(*expected["image_grid_thw"][0].tolist())
    assert patches.dtype == np.float32
    assert patches.shape == (metadata.grid.h * metadata.grid.w, spec.family.vision.patch_dim)
    np.testing.assert_array_equal(patches, expected["pixel_values"])


@pytest.mark.parametrize("size", [(1, 201), (402, 2)])
def test_refuses_extreme_shapes(spec: ModelSpec, processor: Any, size: tuple[int, int]) -> None:
    with pytest.raises(BadRequestError, match="200 times"):
        spec.family.image_metadata(ImageSize(*size))
    with pytest.raises(ValueError, match="aspect ratio"):
        processor.get_number_of_image_patches(size[1], size[0])


def test_refuses_an_empty_image(spec: ModelSpec) -> None:
    with pytest.raises(BadRequestError, match="empty"):
        spec.family.image_metadata(ImageSize(0, 10))


def test_an_image_that_belies_its_header_is_refused(spec: ModelSpec) -> None:
    metadata = spec.family.image_metadata(ImageSize(300, 100))
    for size in ((100, 300), (1000, 1)):
        with pytest.raises(MediaError, match=r"header says|200 times"):
            spec.family.preprocess(Image.new("RGB", size), metadata)


def test_preprocess_takes_rgb_only(spec: ModelSpec) -> None:
    metadata = spec.family.image_metadata(ImageSize(100, 100))
    with pytest.raises(ValueError, match="RGB"):
        spec.family.preprocess(Image.new("L", (100, 100)), metadata)


def test_defaults_are_the_processors_own() -> None:
    from transformers import Qwen2VLImageProcessorPil

    image, ours, theirs = _noise(90, 70), ImagePatches({}), Qwen2VLImageProcessorPil()
    grid = ours.grid(ImageSize(90, 70))
    np.testing.assert_array_equal(ours.patches(image, grid), theirs(image, return_tensors="np")["pixel_values"])


@pytest.mark.parametrize("settings", [{"do_resize": False}, {"do_normalize": False}, {"size": {"height": 3}}])
def test_settings_that_are_not_supported(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        ImagePatches(settings)
