"""Log lines of one format, key=value, and the one canonical line that every request ends with.

Runs in every process: `set_up` at its start; `canonical_line` in the router process at the end of each request, from
`router/router.py`, or from `api/app.py` for a request that the router never saw.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Sequence

from triptych.types import FinishReason, Timing, Usage

request_log = logging.getLogger("triptych.request")

_PLAIN = re.compile(r"[\w.:/+@-]+")


class KeyValueFormatter(logging.Formatter):
    """`time=… level=info logger=triptych.router message="…"`; a message that is key=value itself stays as it is."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = f"time={seconds}.{int(record.msecs):03d}Z level={record.levelname.lower()} logger={record.name}"
        message = record.getMessage()
        if record.name != request_log.name:
            message = f"message={quote(message)}"
        if record.exc_info:
            message += f"\n{self.formatException(record.exc_info)}"
        return f"{head} {message}"


def quote(value: object) -> str:
    """A value as one word, in double quotes where it is not a plain one. Never has a line break."""
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def set_up(level: str) -> None:
    """All loggers of this process to stderr in one format; `level` as in `ApiConfig.log_level`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    quiet = max(logging.WARNING, root.level)
    for name in ("uvicorn", "httpx", "httpcore", "asyncio", "PIL"):  # a line a request from each otherwise
        logging.getLogger(name).setLevel(quiet)


def canonical_line(
    *,
    request_id: str,
    status: int,
    e2e_s: float,
    finish_reason: FinishReason | None = None,
    usage: Usage | None = None,
    timing: Timing | None = None,
    images: int = 0,
    encodes: int = 0,
    attempts: int = 0,
    workers: Sequence[str] = (),
    error: Exception | None = None,
) -> None:
    """Exactly one line a request. Never carries text, media or a URL: of an error only its class is named."""
    values: dict[str, object] = {"request_id": request_id or "-", "status": status}
    if finish_reason is not None:
        values["finish_reason"] = finish_reason.value
    if error is not None:
        values["error"] = type(error).__name__
    if usage is not None:
        values["prompt_tokens"] = usage.prompt_tokens
        values["cached_tokens"] = usage.cached_tokens
        values["output_tokens"] = usage.completion_tokens
    values |= {"images": images, "encodes": encodes}
    if timing is not None:
        values["ttft_s"] = f"{timing.ttft_s:.4f}"
    values["e2e_s"] = f"{e2e_s:.4f}"
    if timing is not None:
        for span in (*timing.critical_path, *timing.after_first_token):
            values[f"{span.name}_s"] = f"{span.duration_s:.4f}"
    values |= {"attempts": attempts, "workers": ",".join(workers) or "-"}
    request_log.info(" ".join(f"{key}={quote(value)}" for key, value in values.items()))
