"""One tiny random model, and an `LLM` of it that the tests of a module share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from triptych import LLM
from triptych.testing_checkpoints import make_checkpoint


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C works, here and in scripts that a test starts, also where the test run was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("offline"))


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, num_kv_blocks=300, max_num_seqs=4) as llm:
        yield llm
