"""Which transport a worker gets."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from triptych.config import HandoffConfig
from triptych.transport.select import select_transport
from triptych.types import Stage

SPLIT = [Stage.PREFILL, Stage.DECODE]


@pytest.mark.parametrize(
    ("setting", "stages", "name"),
    [
        ("auto", list(Stage), "inproc"),
        ("auto", SPLIT, "shm"),
        ("shm", list(Stage), "shm"),
        ("inproc", SPLIT, "inproc"),
    ],
)
def test_auto_shares_memory_only_where_a_stage_is_elsewhere(
    setting: Literal["auto", "shm", "inproc"], stages: list[Stage], name: str, tmp_path: Path
) -> None:
    transport = select_transport(HandoffConfig(transport=setting), stages, 1 << 20, "w0", "one", tmp_path)
    assert transport.name == name
    assert bool(transport.pool_path) == (name == "shm")
    transport.close()
