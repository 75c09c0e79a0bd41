"""Tiny checkpoints of both families, made once, and transformers' own models and image processors of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.config import ModelConfig
from triptych.models.registry import ModelSpec, open_model
from triptych.testing_checkpoints import FamilyName, make_checkpoint

FAMILIES: list[FamilyName] = ["qwen3_vl", "qwen2_5_vl"]


@pytest.fixture(scope="session", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param), seed=3)


@pytest.fixture(scope="session")
def spec(folder: Path) -> ModelSpec:
    return open_model(str(folder), ModelConfig(device="cpu"))


@pytest.fixture(scope="session")
def full_model(folder: Path) -> Any:
    """transformers' whole model, both parts, in float32."""
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(1)
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="session")
def processor(folder: Path) -> Any:
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(folder)
