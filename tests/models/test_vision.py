"""Embeddings of the vision tower loaded alone, against `get_image_features` of transformers' whole model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from triptych.config import ModelConfig
from triptych.errors import EngineError
from triptych.models.registry import ModelSpec, open_model
from triptych.models.vision import VisionInput, VisionRunner
from triptych.testing_checkpoints import make_checkpoint
from triptych.types import ImageSize

SIZES = [(64, 64), (57, 70), (400, 400), (57, 111), (20, 20), (90, 300)]


def _inputs(spec: ModelSpec, sizes: list[tuple[int, int]]) -> list[VisionInput]:
    rng = np.random.default_rng(5)
    inputs = []
    for width, height in sizes:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        metadata = spec.family.image_metadata(ImageSize(width, height))
        inputs.append((spec.family.preprocess(image, metadata), metadata.grid))
    return inputs


def _expected(full_model: Any, inputs: list[VisionInput]) -> list[torch.Tensor]:
    rows = []
    with torch.inference_mode():
        for patches, grid in inputs:
            output = full_model.model.get_image_features(
                torch.from_numpy(patches), torch.tensor([grid]), return_dict=True
            )
            deepstack = [layer[0] for layer in getattr(output, "deepstack_features", [])]
            rows.append(torch.cat([output.pooler_output[0], *deepstack], dim=1))
    return rows


def test_embeddings_equal_the_whole_models(spec: ModelSpec, full_model: Any) -> None:
    inputs = _inputs(spec, SIZES)
    embeddings = VisionRunner.load(spec).encode(inputs)
    for (patches, _), embedding, expected in zip(inputs, embeddings, _expected(full_model, inputs), strict=True):
        assert embedding.shape == (len(patches) // 4, spec.embed_width)
        assert embedding.is_contiguous()
        torch.testing.assert_close(embedding, expected, rtol=1e-5, atol=1e-5)


def test_large_images_run_alone_and_the_order_stays(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = VisionRunner.load(spec)
    forwards: list[int] = []
    encode = spec.family.encode

    def counting(tower: Any, patches: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
        forwards.append(len(grids))
        return encode(tower, patches, grids)

    monkeypatch.setattr(spec.family, "encode", counting)
    monkeypatch.setattr("triptych.models.vision._SHARED_PATCHES", 60)
    inputs = _inputs(spec, SIZES)
    sizes = [len(patches) for patches, _ in inputs]
    embeddings = runner.encode(inputs)
    assert [len(embedding) * 4 for embedding in embeddings] == sizes
    assert sum(forwards) == len(SIZES)
    assert 1 < len(forwards) < len(SIZES)


def test_bfloat16_is_near(folder: Path, full_model: Any) -> None:
    spec = open_model(str(folder), ModelConfig(dtype="bfloat16", device="cpu"))
    inputs = _inputs(spec, SIZES[:2])
    for embedding, expected in zip(VisionRunner.load(spec).encode(inputs), _expected(full_model, inputs), strict=True):
        assert embedding.dtype == torch.bfloat16
        assert (embedding.float() - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_probe(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_vl", tmp_path)
    runner = VisionRunner.load(open_model(str(folder), ModelConfig(device="cpu")))
    runner.probe()
    bias = runner._tower.get_submodule("merger.linear_fc2").bias
    assert isinstance(bias, torch.Tensor)
    bias.data.fill_(torch.nan)
    with pytest.raises(EngineError, match="finite"):
        runner.probe()
