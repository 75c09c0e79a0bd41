"""The page of the API: it has every route and field, and each of its examples runs against a real deployment."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.api.conftest import FakeRouter
from tests.test_docs import REPOSITORY, URL, deployment, fences, run_example
from triptych.api.app import create_app
from triptych.api.chat import ChatRequest
from triptych.api.completions import CompletionRequest
from triptych.api.responses import ResponsesRequest
from triptych.api.tokens import DetokenizeRequest, TokenizeText
from triptych.api.unsupported import CHAT, COMPLETIONS, RESPONSES
from triptych.config import Config
from triptych.errors import TriptychError
from triptych.launch import Deployment
from triptych.observe.metrics import Metrics

__all__ = ["deployment"]

PAGE = REPOSITORY / "docs" / "api.md"
TICKED = set(re.findall(r"`([^`\n]+)`", PAGE.read_text()))


def test_every_route_is_listed_and_nothing_else() -> None:
    listed = {tuple(name.split()) for name in TICKED if re.match(r"(GET|POST) /", name)}
    served = set()
    for route in create_app(FakeRouter(), Config(), Metrics()).routes:
        path = getattr(route, "path", "").replace("{name:path}", "{id}")
        methods = (getattr(route, "methods", None) or {"POST"}) - {"HEAD"}
        served |= {(method, path) for method in methods if not path.startswith("/workers/")}
    assert listed == served


@pytest.mark.parametrize("struct", [ChatRequest, CompletionRequest, ResponsesRequest, TokenizeText, DetokenizeRequest])
def test_every_field_is_told(struct: type[msgspec.Struct]) -> None:
    assert set(struct.__struct_fields__) <= TICKED


def test_every_refused_field_is_told() -> None:
    assert {*CHAT, *COMPLETIONS, *RESPONSES} <= TICKED


def test_every_error_is_told() -> None:
    page = PAGE.read_text()
    rows = {(int(status), kind) for status, kind in re.findall(r"^\| (\d{3}) \| `([^`]+)` \|", page, re.MULTILINE)}
    pending, known = [TriptychError], set()
    while pending:
        error = pending.pop()
        pending += error.__subclasses__()
        known.add((error.status, error.type))
    assert rows == known


def _examples(language: str) -> list[str]:
    return [block for block in fences(PAGE, language) if URL in block]


@pytest.mark.slow
@pytest.mark.parametrize("example", _examples("bash"), ids=lambda text: text.splitlines()[0][:60])
async def test_commands_run(deployment: Deployment, tmp_path: Path, example: str) -> None:
    output = await run_example(deployment, tmp_path, "bash", "-euo", "pipefail", "-c", example)
    assert output.strip()
    failed = '"error":{' in output
    assert failed == example.startswith("# answers 4"), output


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(_examples("python"))))
async def test_programs_run(deployment: Deployment, tmp_path: Path, number: int) -> None:
    output: Any = await run_example(deployment, tmp_path, sys.executable, "-c", _examples("python")[number])
    assert output.strip()
