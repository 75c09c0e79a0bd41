"""Sizes and patches as Qwen's vision towers read them, in numpy: layout in the router, patches on encode workers.

Equal to transformers' `Qwen2VLImageProcessorPil` bit for bit. Rescaling and normalising are one look-up for each
channel, in a table of 256 values that was computed with the processor's own operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling

from triptych.errors import BadRequestError, ConfigError
from triptych.types import Grid, ImageSize, PixelLimits

MAX_ASPECT_RATIO = 200

_DEFAULT_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_EDGES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}  # the newer names, of areas too


def smart_resize(size: ImageSize, factor: int, limits: PixelLimits) -> ImageSize:
    """The size to scale to: edges divisible by `factor`, area within `limits`, aspect ratio about kept.

    The arithmetic of transformers' `smart_resize`. Raises BadRequestError where that refuses the aspect ratio.
    """
    width, height = size
    if min(width, height) < 1:
        raise BadRequestError(f"image of {width}x{height} pixels is empty")
    if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
        raise BadRequestError(
            f"image of {width}x{height} pixels: the longer edge may be at most {MAX_ASPECT_RATIO} times the shorter"
        )
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > limits.max_pixels:
        beta = math.sqrt((height * width) / limits.max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < limits.min_pixels:
        beta = math.sqrt(limits.min_pixels / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return ImageSize(new_width, new_height)


class ImagePatches:
    """The settings of a preprocessor_config.json and what they do to an image."""

    def __init__(self, settings: dict[str, Any]) -> None:
        for name in ("do_resize", "do_rescale", "do_normalize"):
            if settings.get(name, True) is not True:
                raise ConfigError(f"preprocessor_config.json: {name} = {settings[name]!r} is not supported")
        self.patch_size = int(settings.get("patch_size", 14))
        self.temporal_patch_size = int(settings.get("temporal_patch_size", 2))
        self.merge_size = int(settings.get("merge_size", 2))
        self.limits = self._limits(settings)
        self.resample = Resampling(settings.get("resample", Resampling.BICUBIC))
        self._table = self._levels(settings)

    @staticmethod
    def _limits(settings: dict[str, Any]) -> PixelLimits:
        """`min_pixels` and `max_pixels` of older checkpoints win over `size`, as in transformers."""
        size = settings.get("size") or _DEFAULT_SIZE
        shortest, longest = settings.get("min_pixels"), settings.get("max_pixels")
        shortest = size.get("shortest_edge", size.get("min_pixels")) if shortest is None else shortest
        longest = size.get("longest_edge", size.get("max_pixels")) if longest is None else longest
        if not shortest or not longest:
            raise ConfigError("preprocessor_config.json: size needs shortest_edge and longest_edge")
        return PixelLimits(int(shortest), int(longest))

    @staticmethod
    def _levels(settings: dict[str, Any]) -> NDArray[np.float32]:
        """[channels, 256]: what each level of each channel becomes."""
        mean = np.array(settings.get("image_mean") or _CLIP_MEAN, dtype=np.float32)
        std = np.array(settings.get("image_std") or _CLIP_STD, dtype=np.float32)
        levels = (np.arange(256).astype(np.float64) * settings.get("rescale_factor", 1 / 255)).astype(np.float32)
        table: NDArray[np.float32] = (levels[None, :] - mean[:, None]) / std[:, None]
        return table

    def limits_for(self, options: Mapping[str, object]) -> PixelLimits:
        """The checkpoint's limits with a request's `mm_processor_kwargs`, which win as in transformers.

        Raises BadRequestError naming an option that is unknown or asks for more than the checkpoint's own limit.
        """
        chosen = dict(zip(_EDGES, self.limits, strict=True))
        for name, value in options.items():
            if name not in ("size", *_EDGES.values()):
                raise _bad_option(name, "is not known; min_pixels, max_pixels and size are")
            if name == "size" and value is not None:
                if not isinstance(value, Mapping) or not value or not set(value) <= set(_EDGES):
                    raise _bad_option(name, f"must be an object with {' and '.join(_EDGES)}")
                chosen |= {edge: self._area(f"size.{edge}", area) for edge, area in value.items()}
        for edge, name in _EDGES.items():
            if options.get(name) is not None:
                chosen[edge] = self._area(name, options[name])
        limits = PixelLimits(*(chosen[edge] for edge in _EDGES))
        if limits.min_pixels > limits.max_pixels:
            raise BadRequestError(
                f"min_pixels = {limits.min_pixels} is more than max_pixels = {limits.max_pixels}; "
                "set both with `mm_processor_kwargs`",
                param="mm_processor_kwargs",
            )
        return limits

    def _area(self, name: str, value: object) -> int:
        most = self.limits.max_pixels
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise _bad_option(name, f"must be an integer from 1 to {most}, the server's limit")
        return value

    def grid(self, size: ImageSize, limits: PixelLimits) -> Grid:
        """Patches of an image of `size`. Raises BadRequestError for too long a shape."""
        width, height = smart_resize(size, self.patch_size * self.merge_size, limits)
        return Grid(1, height // self.patch_size, width // self.patch_size)

    def resized(self, grid: Grid) -> ImageSize:
        return ImageSize(grid.w * self.patch_size, grid.h * self.patch_size)

    def patches(self, pixels: NDArray[np.uint8], grid: Grid) -> NDArray[np.float32]:
        """float32 [grid.h * grid.w, channels * temporal_patch_size * patch_size ** 2], in merge-block order.

        `pixels` are [height, width, channels] of the size `resized`.
        """
        patch, merge = self.patch_size, self.merge_size
        channels = np.stack([self._table[c][pixels[:, :, c]] for c in range(pixels.shape[2])])
        blocks = channels.reshape(len(channels), grid.h // merge, merge, patch, grid.w // merge, merge, patch)
        ordered = blocks.transpose(1, 4, 2, 5, 0, 3, 6)  # block row, block column, row, column, channel, y, x
        frames = np.broadcast_to(
            ordered[:, :, :, :, :, None], (*ordered.shape[:5], self.temporal_patch_size, patch, patch)
        )
        return np.ascontiguousarray(frames.reshape(grid.h * grid.w, -1))


def _bad_option(name: str, reason: str) -> BadRequestError:
    field = f"mm_processor_kwargs.{name[:80]}"
    return BadRequestError(f"`{field}` {reason}.", param=field)
