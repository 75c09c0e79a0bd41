"""What Triptych must know of a model family, in one interface: sizes, layout of media in a prompt, weights, encoding.

A family is one file that imports neither torch nor transformers: the router uses it for the layout of prompts, the
workers for everything else. Classes of transformers are named as "module:Class" and imported by `models/weights.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling

from triptych.models.checkpoint import Checkpoint
from triptych.types import ImageSize, ItemMetadata, PixelLimits, PromptItem

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


class Part(StrEnum):
    """The parts of a model that are loaded apart from each other."""

    VISION = "vision"  # the vision tower with its projector: encode workers
    LANGUAGE = "language"  # token embedding, decoder layers, final norm and head: prefill and decode workers


class TextDims(NamedTuple):
    """Sizes of the language model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    max_positions: int  # longest sequence, in tokens
    eos_token_ids: tuple[int, ...]  # tokens that end a turn
    tied: bool  # the head is the token embedding


class VisionDims(NamedTuple):
    """Sizes of the vision tower."""

    num_layers: int
    hidden: int
    out_hidden: int  # width of one embedding, equal to `TextDims.hidden`
    in_channels: int
    patch_size: int  # pixels
    temporal_patch_size: int  # frames
    merge_size: int  # patches along an edge that become one embedding
    num_deepstack: int  # further rows of `out_hidden` that travel with each embedding

    @property
    def patch_dim(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


class PromptPositions(NamedTuple):
    """Rotary positions of a prompt: int64 [3, n] for time, height, width; the token at index i >= n has i + delta."""

    positions: NDArray[np.int64]
    delta: int


class Resizing(NamedTuple):
    """How an image is scaled before it is cut into patches."""

    size: ImageSize
    resample: int  # Pillow's number of the filter


class Located(NamedTuple):
    """Where a checkpoint's tensor goes."""

    part: Part
    name: str  # in the part's module


class Family(ABC):
    """One model family, bound to one checkpoint. Raises ConfigError for settings that it cannot serve."""

    model_type: ClassVar[str]  # of config.json
    config_class: ClassVar[str]  # "module:Class"
    vision_class: ClassVar[str]
    language_class: ClassVar[str]
    placeholder_text: ClassVar[str]  # what a chat template leaves for one image: the text of one token

    text: TextDims
    vision: VisionDims
    placeholder_token_id: int  # the token of `placeholder_text`; `expansion` takes its place

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    @property
    def embed_width(self) -> int:
        """Columns of an embedding as it travels: hidden * (1 + deepstack layers)."""
        return self.vision.out_hidden * (1 + self.vision.num_deepstack)

    @abstractmethod
    def pixel_limits(self, options: Mapping[str, object]) -> PixelLimits:
        """Under a request's `mm_processor_kwargs`. Raises BadRequestError naming an option that cannot be served."""

    @abstractmethod
    def image_metadata(self, size: ImageSize, limits: PixelLimits | None = None) -> ItemMetadata:
        """Grid and counts of an image of this size. Raises BadRequestError for one that the model cannot read.

        `limits`: None for the checkpoint's own.
        """

    @abstractmethod
    def expansion(self, metadata: ItemMetadata) -> list[int]:
        """Token ids that stand for the item in the prompt, `num_tokens` of them."""

    @abstractmethod
    def resizing(self, metadata: ItemMetadata) -> Resizing:
        """What is done to an image before `patches`."""

    @abstractmethod
    def patches(self, pixels: NDArray[np.uint8], metadata: ItemMetadata) -> NDArray[np.float32]:
        """Patches [num_patches, patch_dim] of RGB pixels [height, width, 3] that have the size of `resizing`."""

    def preprocess(self, image: Image, metadata: ItemMetadata) -> NDArray[np.float32]:
        """Patches of an RGB image that is decoded already."""
        if image.mode != "RGB":
            raise ValueError(f"preprocess takes RGB images, got {image.mode}")
        size, resample = self.resizing(metadata)
        return self.patches(np.asarray(image.resize(size, resample=Resampling(resample))), metadata)

    @abstractmethod
    def positions(self, token_ids: Sequence[int], items: Sequence[PromptItem]) -> PromptPositions:
        """Rotary positions of a whole prompt, from the grids of its items."""

    @abstractmethod
    def locate(self, name: str) -> Located | None:
        """Part and module name of a checkpoint's tensor; None for one that is not needed. Raises ConfigError."""

    @abstractmethod
    def encode(self, tower: torch.nn.Module, patches: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
        """One forward. `patches` [all patches, patch_dim] of the images in order, `grids` int64 [images, 3].

        Returns for each image its embedding, contiguous [num_embeds, embed_width]: the rows that replace its
        placeholders, then those that deepstack adds after the first decoder layers.
        """
