"""The examples of `docs/offline.md` run as one script and print what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "offline.md"


def test_the_examples_print_what_stands_under_them(tmp_path: Path) -> None:
    fences = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert {language for language, _ in fences} == {"python", "text"}, "every fence is run or compared"
    scripts: list[list[str]] = [["", ""]]  # code and what it prints; one with the guard is a script of its own
    for language, text in fences:
        if "__main__" in text:
            scripts.append(["", ""])
        scripts[-1][int(language == "text")] += text
    assert len(scripts) == 2
    for code, printed in scripts:
        assert _run(code, tmp_path) == printed


def _run(code: str, directory: Path) -> str:
    script = directory / "page.py"
    script.write_text(code)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
