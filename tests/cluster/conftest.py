"""A tiny checkpoint, for deployments in one process."""

from __future__ import annotations

import pytest

from triptych.config import ModelConfig
from triptych.models.registry import ModelSpec, open_model
from triptych.testing_checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("cluster")
    make_checkpoint("qwen3_vl", path)
    return open_model(str(path), ModelConfig())
