"""`triptych demo` end to end: real workers, real model, over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_demo_answers_every_question(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "triptych.cli.main", "demo", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    saved = json.loads((tmp_path / "answers.json").read_text())
    assert len(saved["answers"]) == 6
    assert all(record["answer"].strip() for record in saved["answers"])
    pictures = {name for record in saved["answers"] for name in record["pictures"]}
    assert {path.name for path in tmp_path.glob("*.png")} == pictures
    counters = saved["counters"]
    assert counters["encode-0"]["encode_items_total"] >= 6
    assert counters["encode-0"]["encode_forwards_total"] >= 1
    assert not counters["prefill-0"].get("encode_forwards_total")
    assert "first token after" in done.stdout
    assert (tmp_path / "answers.md").read_text().count("## ") == 6
