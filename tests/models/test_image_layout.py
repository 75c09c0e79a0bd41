"""What is known of an image before its pixels, and its pixels as patches, against transformers' own processor."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from triptych.errors import BadRequestError, ConfigError
from triptych.models.image_patches import ImagePatches
from triptych.models.registry import ModelSpec
from triptych.types import Grid, ImageSize, PixelLimits

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


def test_preprocess_takes_rgb_only(spec: ModelSpec) -> None:
    metadata = spec.family.image_metadata(ImageSize(100, 100))
    with pytest.raises(ValueError, match="RGB"):
        spec.family.preprocess(Image.new("L", (100, 100)), metadata)


def test_defaults_are_the_processors_own() -> None:
    from transformers import Qwen2VLImageProcessorPil

    image, ours, theirs = _noise(90, 70), ImagePatches({}), Qwen2VLImageProcessorPil()
    grid = ours.grid(ImageSize(90, 70), ours.limits)
    resized = np.asarray(image.resize(ours.resized(grid), ours.resample))
    np.testing.assert_array_equal(ours.patches(resized, grid), theirs(image, return_tensors="np")["pixel_values"])


@pytest.mark.parametrize("settings", [{"do_resize": False}, {"do_normalize": False}, {"size": {"height": 3}}])
def test_settings_that_are_not_supported(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        ImagePatches(settings)


# -- a request's options -----------------------------------------------------------------------------------------------

SMALLEST, LARGEST = 4, 64  # of the checkpoints of these tests, in merged patches


def _merged(spec: ModelSpec, count: int) -> int:
    """The area of so many merged patches, in pixels."""
    return count * (spec.family.vision.patch_size * spec.family.vision.merge_size) ** 2


def test_options_equal_the_processors_own(spec: ModelSpec, processor: Any) -> None:
    least, most = _merged(spec, 9), _merged(spec, 20)
    by_names = spec.family.pixel_limits({"min_pixels": least, "max_pixels": most})
    by_size = spec.family.pixel_limits({"size": {"shortest_edge": least, "longest_edge": most}})
    assert by_names == by_size == PixelLimits(least, most)
    for width, height in [(20, 20), (97, 41), (640, 480), (300, 30)]:
        image = _noise(width, height)
        expected = processor(image, size={"shortest_edge": least, "longest_edge": most}, return_tensors="np")
        metadata = spec.family.image_metadata(ImageSize(width, height), by_names)
        assert metadata.grid == Grid(*expected["image_grid_thw"][0].tolist())
        np.testing.assert_array_equal(spec.family.preprocess(image, metadata), expected["pixel_values"])


def test_what_is_left_out_stays_the_checkpoints(spec: ModelSpec) -> None:
    own = PixelLimits(_merged(spec, SMALLEST), _merged(spec, LARGEST))
    assert spec.family.pixel_limits({}) == spec.family.pixel_limits({"max_pixels": None, "size": None}) == own
    half = _merged(spec, 32)
    assert spec.family.pixel_limits({"max_pixels": half}) == own._replace(max_pixels=half)
    assert spec.family.pixel_limits({"size": {"longest_edge": half}}) == own._replace(max_pixels=half)
    both = {"max_pixels": half, "size": {"shortest_edge": half, "longest_edge": own.max_pixels}}
    assert spec.family.pixel_limits(both) == PixelLimits(half, half), "the names win over size"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"do_resize": False}, "mm_processor_kwargs.do_resize"),
        ({"x" * 300: 1}, "mm_processor_kwargs." + "x" * 80),
        ({"max_pixels": "many"}, "mm_processor_kwargs.max_pixels"),
        ({"max_pixels": 0}, "mm_processor_kwargs.max_pixels"),
        ({"max_pixels": True}, "mm_processor_kwargs.max_pixels"),
        ({"max_pixels": 1e5}, "mm_processor_kwargs.max_pixels"),
        ({"min_pixels": -1}, "mm_processor_kwargs.min_pixels"),
        ({"min_pixels": 10**9}, "mm_processor_kwargs.min_pixels"),
        ({"max_pixels": 10**9}, "mm_processor_kwargs.max_pixels"),
        ({"size": 448}, "mm_processor_kwargs.size"),
        ({"size": {}}, "mm_processor_kwargs.size"),
        ({"size": {"height": 4}}, "mm_processor_kwargs.size"),
        ({"size": {"longest_edge": 10**9}}, "mm_processor_kwargs.size.longest_edge"),
        ({"max_pixels": 1}, "mm_processor_kwargs"),  # below the checkpoint's least
        ({"min_pixels": 40_000, "max_pixels": 30_000}, "mm_processor_kwargs"),
    ],
)
def test_options_that_cannot_be_served_are_named(spec: ModelSpec, options: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        spec.family.pixel_limits(options)
    assert caught.value.param == param
