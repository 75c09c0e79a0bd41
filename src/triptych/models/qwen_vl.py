"""What the Qwen vision-language families share: image layout, three-axis rotary positions, names of weights.

A family sets its classes and the few sizes that its config.json may leave out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ConfigError
from triptych.models.checkpoint import Checkpoint, Json
from triptych.models.family import Family, Located, Part, PromptPositions, Resizing, TextDims, VisionDims
from triptych.models.image_patches import ImagePatches
from triptych.types import Grid, ImageSize, ItemMetadata, PixelLimits, PromptItem

if TYPE_CHECKING:
    import torch

# Prefixes of weights on disk, longest first: as transformers 5 saves them, and as older checkpoints have them.
_PREFIXES = (
    ("model.language_model.", Part.LANGUAGE, "model."),
    ("language_model.model.", Part.LANGUAGE, "model."),
    ("model.visual.", Part.VISION, ""),
    ("visual.", Part.VISION, ""),
    ("model.", Part.LANGUAGE, "model."),
)


class QwenVL(Family):
    """Base of the Qwen vision-language families."""

    placeholder_text = "<|image_pad|>"
    default_head_dim: ClassVar[int | None] = None  # of a config.json without head_dim; None: hidden / heads

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        config = checkpoint.config
        try:
            self.text = self._text_dims(config.get("text_config") or config)
            self.vision = self._vision_dims(config["vision_config"])
            self.placeholder_token_id = int(config["image_token_id"])
        except (KeyError, TypeError, ValueError) as error:
            self._refuse(f"config.json: {type(error).__name__}: {error}", error)
        self._images = ImagePatches(checkpoint.preprocessor_config)
        self._check_agreement()

    def _refuse(self, reason: str, cause: Exception | None = None) -> NoReturn:
        raise ConfigError(f"checkpoint {self.checkpoint.path}: {reason}", param="model.path") from cause

    def _text_dims(self, text: Json) -> TextDims:
        hidden, num_heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        num_kv_heads: int = text.get("num_key_value_heads") or num_heads
        head_dim: int = text.get("head_dim") or self.default_head_dim or hidden // num_heads
        return TextDims(
            num_layers=int(text["num_hidden_layers"]),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden=hidden,
            vocab=int(text["vocab_size"]),
            max_positions=int(text["max_position_embeddings"]),
            eos_token_ids=self._eos_token_ids(text),
            tied=any(settings.get("tie_word_embeddings") for settings in (self.checkpoint.config, text)),
        )

    def _eos_token_ids(self, text: Json) -> tuple[int, ...]:
        """The generation config's ids, which may be several; else the model's."""
        for settings in (self.checkpoint.generation_config, text, self.checkpoint.config):
            ids = settings.get("eos_token_id")
            if ids is not None:
                return (ids,) if isinstance(ids, int) else tuple(ids)
        return ()

    def _vision_dims(self, vision: Json) -> VisionDims:
        return VisionDims(
            num_layers=int(vision["depth"]),
            hidden=int(vision["hidden_size"]),
            out_hidden=int(vision["out_hidden_size"]),
            in_channels=int(vision.get("in_channels", 3)),
            patch_size=int(vision["patch_size"]),
            temporal_patch_size=int(vision.get("temporal_patch_size", 2)),
            merge_size=int(vision.get("spatial_merge_size", 2)),
            num_deepstack=self._num_deepstack(vision),
        )

    def _num_deepstack(self, vision: Json) -> int:
        return 0

    def _check_agreement(self) -> None:
        images, vision = self._images, self.vision
        for name in ("patch_size", "temporal_patch_size", "merge_size"):
            ours, theirs = getattr(images, name), getattr(vision, name)
            if ours != theirs:
                self._refuse(f"{name} is {theirs} in config.json and {ours} in preprocessor_config.json")
        if vision.out_hidden != self.text.hidden:
            self._refuse(f"the tower's out_hidden_size {vision.out_hidden} is not the text's {self.text.hidden}")

    # -- layout of a prompt --------------------------------------------------------------------------------------------

    def pixel_limits(self, options: Mapping[str, object]) -> PixelLimits:
        return self._images.limits_for(options)

    def image_metadata(self, size: ImageSize, limits: PixelLimits | None = None) -> ItemMetadata:
        grid = self._images.grid(size, limits or self._images.limits)
        count = grid.t * grid.h * grid.w // self.vision.merge_size**2
        return ItemMetadata(grid=grid, num_embeds=count, num_tokens=count)

    def expansion(self, metadata: ItemMetadata) -> list[int]:
        return [self.placeholder_token_id] * metadata.num_tokens

    def positions(self, token_ids: Sequence[int], items: Sequence[PromptItem]) -> PromptPositions:
        """As transformers' `get_rope_index`: text counts on; an image spans its grid and then counts for its longer
        edge."""
        positions = np.empty((3, len(token_ids)), dtype=np.int64)
        index = position = 0
        for item in items:
            offset, end = item.placeholder.offset, item.placeholder.end
            positions[:, index:offset] = np.arange(position, position + offset - index)
            position += offset - index
            grid = item.metadata.grid
            positions[:, offset:end] = self._grid_positions(grid) + position
            position += max(grid.h, grid.w) // self.vision.merge_size
            index = end
        positions[:, index:] = np.arange(position, position + len(token_ids) - index)
        delta = int(positions.max()) + 1 - len(token_ids) if len(token_ids) else 0
        return PromptPositions(positions, delta)

    def _grid_positions(self, grid: Grid) -> NDArray[np.int64]:
        """[3, embeds] of one image at position 0: time stands still, height and width count merged patches."""
        height, width = grid.h // self.vision.merge_size, grid.w // self.vision.merge_size
        return np.indices((grid.t, height, width), dtype=np.int64).reshape(3, -1)

    # -- weights and encoding ------------------------------------------------------------------------------------------

    def locate(self, name: str) -> Located | None:
        if name.endswith(".inv_freq"):  # a buffer that old versions of transformers saved
            return None
        if name in ("lm_head.weight", "language_model.lm_head.weight"):
            return None if self.text.tied else Located(Part.LANGUAGE, "head.weight")
        for prefix, part, module_prefix in _PREFIXES:
            if name.startswith(prefix):
                return Located(part, module_prefix + name.removeprefix(prefix))
        return self._refuse(f"{name} is not a weight of {self.model_type}")

    def resizing(self, metadata: ItemMetadata) -> Resizing:
        return Resizing(self._images.resized(metadata.grid), self._images.resample)

    def patches(self, pixels: NDArray[np.uint8], metadata: ItemMetadata) -> NDArray[np.float32]:
        return self._images.patches(pixels, metadata.grid)

    def encode(self, tower: torch.nn.Module, patches: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
        output = tower(patches, grid_thw=grids, return_dict=True)
        columns = [output.pooler_output, *self._deepstack_rows(output)]
        hidden = self.vision.out_hidden
        joined = patches.new_empty((columns[0].shape[0], self.embed_width), dtype=columns[0].dtype)
        for i, rows in enumerate(columns):
            joined[:, i * hidden : (i + 1) * hidden] = rows
        counts = (grids.prod(-1) // self.vision.merge_size**2).tolist()
        return list(joined.split_with_sizes(counts))

    def _deepstack_rows(self, output: object) -> list[torch.Tensor]:
        return []
