"""The form of log lines, and the one line that every request ends with."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from triptych.errors import MediaError
from triptych.observe.logging import KeyValueFormatter, canonical_line, quote, set_up
from triptych.types import FinishReason, Span, Timing, Usage


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back as it was."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    quiet = {name: logging.getLogger(name).level for name in ("uvicorn", "httpx", "httpcore", "asyncio", "PIL")}
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)
    for name, was in quiet.items():
        logging.getLogger(name).setLevel(was)


def test_canonical_line_of_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    timing = Timing(0.25, 1.5, [Span("fetch", 0, 0.05)], [], [Span("kv_transfer", 0.25, 0.01)])
    with caplog.at_level(logging.INFO):
        canonical_line(
            request_id="r1", status=200, e2e_s=1.5, finish_reason=FinishReason.STOP, usage=Usage(12, 3, 4),
            timing=timing, images=2, encodes=1, attempts=1, workers=["encode-0", "prefill-0"],
        )  # fmt: skip
    assert [record.getMessage() for record in caplog.records] == [
        "request_id=r1 status=200 finish_reason=stop prompt_tokens=12 cached_tokens=4 output_tokens=3 images=2 "
        "encodes=1 "
        'ttft_s=0.2500 e2e_s=1.5000 fetch_s=0.0500 kv_transfer_s=0.0100 attempts=1 workers="encode-0,prefill-0"'
    ]


def test_canonical_line_of_an_error_has_no_text_of_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        canonical_line(request_id="r2", status=400, e2e_s=0.1, error=MediaError("data:image/png;base64,SECRET"))
    assert "error=MediaError" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(
    ("value", "text"), [("a.b-1", "a.b-1"), ("two words", '"two words"'), ('"\n', r'"\"\n"'), ("", '""'), (3, "3")]
)
def test_quote(value: object, text: str) -> None:
    assert quote(value) == text


def test_format() -> None:
    record = logging.LogRecord("triptych.router", logging.WARNING, "", 0, "worker %s\nlost", ("e",), None)
    record.created, record.msecs = 0.25, 250
    line = KeyValueFormatter().format(record)
    assert line == r'time=1970-01-01T00:00:00.250Z level=warning logger=triptych.router message="worker e\nlost"'


def test_set_up(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    set_up("info")
    logging.getLogger("triptych.x").info("hello")
    logging.getLogger("triptych.x").debug("not this")
    logging.getLogger("httpx").info("nor this")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("level=info logger=triptych.x message=hello")
