"""The vision tower of an encode worker: patches of several images in, one embedding an image out.

Called by `stages/encode.py`. Small images share a forward; on a CPU a large one runs alone, where sharing only costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from triptych.errors import EngineError
from triptych.models.family import Part
from triptych.models.native_vision import NativeVisionBlock, swap_vision
from triptych.models.registry import ModelSpec
from triptych.models.swaps import swap_patch_embed, swap_rms_norms
from triptych.models.weights import Progress, load_part, resolve_device, torch_dtype
from triptych.types import Grid, WeightsReport

VisionInput = tuple[NDArray[np.float32], Grid]  # patches [num_patches, patch_dim]

_SHARED_PATCHES = 256  # images of at most so many patches gain from a shared forward on a CPU


class VisionRunner:
    """Runs `tower`, which lies on `device` in the dtype of the spec."""

    def __init__(self, spec: ModelSpec, tower: nn.Module, device: torch.device, report: WeightsReport) -> None:
        self.report = report
        self.is_native = any(isinstance(module, NativeVisionBlock) for module in tower.modules())  # its blocks
        self.num_forwards = 0  # since start, those of probes not counted
        self._family = spec.family
        self._tower = tower
        self._device = device
        self._dtype = torch_dtype(spec)

    @classmethod
    def load(
        cls, spec: ModelSpec, *, device: torch.device | None = None, progress: Progress | None = None
    ) -> VisionRunner:
        """Reads the tower alone. Raises ConfigError if the checkpoint does not fit."""
        device = device or resolve_device(spec.device)
        tower, report = load_part(spec, Part.VISION, device, progress=progress)
        swap_rms_norms(tower)
        swap_patch_embed(tower)
        if spec.kernels != "torch" and device.type == "cpu":
            swap_vision(tower, torch_dtype(spec))
        return cls(spec, tower, device, report)

    @torch.inference_mode()
    def encode(self, items: Sequence[VisionInput]) -> list[torch.Tensor]:
        """For each item, in order, its embedding [num_embeds, hidden * (1 + deepstack layers)], contiguous."""
        embeddings: list[torch.Tensor] = []
        for group in self._forwards(items):
            embeddings += self._encode(group)
            self.num_forwards += 1
        return embeddings

    def _forwards(self, items: Sequence[VisionInput]) -> Iterator[list[VisionInput]]:
        """Neighbours that share a forward."""
        group: list[VisionInput] = []
        for item in items:
            alone = self._device.type == "cpu" and len(item[0]) > _SHARED_PATCHES
            if alone and group:
                yield group
                group = []
            group.append(item)
            if alone:
                yield group
                group = []
        if group:
            yield group

    def _encode(self, items: list[VisionInput]) -> list[torch.Tensor]:
        patches = torch.cat([torch.from_numpy(patches) for patches, _ in items])
        grids = torch.tensor([grid for _, grid in items], dtype=torch.int64, device=self._device)
        return self._family.encode(self._tower, patches.to(self._device, self._dtype), grids)

    @torch.inference_mode()
    def probe(self) -> None:
        """Encode the smallest image there is. Raises EngineError if that fails or is not finite."""
        vision = self._family.vision
        side = vision.merge_size
        patches = np.zeros((side * side, vision.patch_dim), dtype=np.float32)
        (embedding,) = self._encode([(patches, Grid(1, side, side))])
        if not bool(embedding.isfinite().all()):
            raise EngineError("the vision tower returned numbers that are not finite")
