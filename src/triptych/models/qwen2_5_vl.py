"""Qwen2.5-VL: patches of 14 pixels, window attention in the tower, rotary axes in sections, no deepstack."""

from __future__ import annotations

from triptych.models.checkpoint import Json
from triptych.models.family import TextDims
from triptych.models.qwen_vl import QwenVL


class Qwen2_5VL(QwenVL):
    model_type = "qwen2_5_vl"
    config_class = "transformers.models.qwen2_5_vl.configuration_qwen2_5_vl:Qwen2_5_VLConfig"
    vision_class = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel"
    language_class = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VLTextModel"

    def _text_dims(self, text: Json) -> TextDims:
        if text.get("use_sliding_window"):
            self._refuse("use_sliding_window is not supported")
        return super()._text_dims(text)
