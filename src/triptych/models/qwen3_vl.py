"""Qwen3-VL: patches of 16 pixels, interleaved rotary axes, deepstack rows that travel with each embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triptych.models.checkpoint import Json
from triptych.models.qwen_vl import QwenVL

if TYPE_CHECKING:
    import torch


class Qwen3VL(QwenVL):
    model_type = "qwen3_vl"
    config_class = "transformers.models.qwen3_vl.configuration_qwen3_vl:Qwen3VLConfig"
    vision_class = "transformers.models.qwen3_vl.modeling_qwen3_vl:Qwen3VLVisionModel"
    language_class = "transformers.models.qwen3_vl.modeling_qwen3_vl:Qwen3VLTextModel"
    default_head_dim = 128

    def _num_deepstack(self, vision: Json) -> int:
        num_deepstack = len(vision["deepstack_visual_indexes"])
        if num_deepstack > self.text.num_layers:
            self._refuse(f"{num_deepstack} deepstack layers for {self.text.num_layers} decoder layers")
        return num_deepstack

    def _deepstack_rows(self, output: Any) -> list[torch.Tensor]:
        rows: list[torch.Tensor] = output.deepstack_features
        return rows
