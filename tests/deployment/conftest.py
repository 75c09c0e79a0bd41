"""Real processes: a deployment of a tiny random checkpoint, and what a client needs to ask it."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.equivalence.reference import picture
from triptych.config import ApiConfig, Config, EngineConfig, ModelConfig, RouterConfig
from triptych.testing_checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny"
    make_checkpoint("qwen3_vl", path)
    return path


@pytest.fixture
def config(tiny_model: Path) -> Config:
    return Config(
        model=ModelConfig(path=str(tiny_model)),
        engine=EngineConfig(num_kv_blocks=400),
        router=RouterConfig(drain_s=20.0),
        api=ApiConfig(port=0),
    )


def image_part(seed: int, width: int = 90, height: int = 60) -> dict[str, object]:
    content = base64.b64encode(picture(seed, width, height)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}


def chat(*parts: dict[str, object] | str, max_tokens: int = 8, **fields: object) -> dict[str, object]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": max_tokens,
        **fields,
    }
