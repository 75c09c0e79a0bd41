"""What every client's script is made of: its arguments, questions with one right answer, and a list of named checks.

A script runs in the client's own environment, where Triptych is not installed; only `triptych.demo` is read, for its
drawn pages, which needs Pillow and no more.
"""

from __future__ import annotations

import argparse
import base64
import io
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from triptych.demo.pages import Question, Task, held_out

RELIABLE: Sequence[Task] = ("stamp", "colour", "picture", "text")  # which the packaged model does not miss
MAX_TOKENS = 48  # more than any answer has
JSON_TOKENS = 2000  # the packaged model was not trained on JSON, and writes white space wherever a grammar lets it
PROGRAM_TIMEOUT_S = 240.0
PRINTED = 6000  # characters of a program's last output in a failure
OUTER_FRAMES = 4  # of a failure: the script's own lines, not the client's

Check = Callable[["Server"], None]


class Server(NamedTuple):
    """The server under test, from the command line."""

    url: str  # without /v1
    model: str
    api_key: str
    tokenizer: str  # folder that a load tool reads the tokenizer from

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


def server_from_arguments(description: str | None) -> Server:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("url", help="address of the server, without /v1")
    parser.add_argument("model", help="name of the model")
    parser.add_argument("--api-key", default="unused", help="a key that the server knows")
    parser.add_argument("--tokenizer", default="", help="folder of the tokenizer, for the tools that count tokens")
    args = parser.parse_args()
    return Server(args.url.rstrip("/"), args.model, args.api_key, args.tokenizer)


def run(server: Server, checks: Sequence[Check]) -> None:
    """Runs all of them, whatever fails, and says how each ended. Raises SystemExit(1) when one failed."""
    failed = []
    for check in checks:
        name = check.__name__.strip("_")
        started_s = time.monotonic()
        try:
            check(server)
        except Exception:  # noqa: BLE001
            failed.append(name)
            print(f"FAILED {name}\n{traceback.format_exc(limit=OUTER_FRAMES)}", flush=True)
        else:
            print(f"ok     {name} ({time.monotonic() - started_s:.1f} s)", flush=True)
    if failed:
        raise SystemExit(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")


def questions(n: int, tasks: Sequence[Task] = RELIABLE) -> list[Question]:
    return held_out(n, seed=0, tasks=tasks)


def data_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def chat_content(question: Question) -> list[Any]:
    """The content of the user's message, as chat completions take it."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in question.parts
    ]


def chat_messages(question: Question) -> list[Any]:
    return [{"role": "user", "content": chat_content(question)}]


def run_program(*arguments: str, directory: str | None = None) -> str:
    """Runs a program of this script's environment and gives what it printed. Raises AssertionError where it fails."""
    program = Path(sys.executable).parent / arguments[0]
    done = subprocess.run(
        [str(program), *arguments[1:]],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
    )
    assert done.returncode == 0, f"{arguments[0]} ended with {done.returncode}:\n{done.stdout[-PRINTED:]}"
    return done.stdout
