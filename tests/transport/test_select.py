"""Which transport a worker gets."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from triptych.config import HandoffConfig
from triptych.transport.select import select_transport


@pytest.mark.parametrize("name", ["shm", "inproc"])
def test_the_setting_decides(name: Literal["shm", "inproc"], tmp_path: Path) -> None:
    transport = select_transport(HandoffConfig(transport=name), 1 << 20, "w0", "one", tmp_path)
    assert transport.name == name
    assert bool(transport.pool_path) == (name == "shm")
    transport.close()


def test_shared_memory_is_the_default(tmp_path: Path) -> None:
    transport = select_transport(HandoffConfig(), 1 << 20, "w0", "one", tmp_path)
    assert transport.name == "shm"
    transport.close()
