"""AIPerf against a server, with new pictures in every request. `python -m tests.clients.aiperf.run URL MODEL`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.clients.script import Server, run, run_program, server_from_arguments

REQUESTS = 12
IMAGES = 2  # a request
OUTPUT_TOKENS = 8
# AIPerf counts an answer without text as an error, and eight end tokens can be sampled in a row: shown, they have text.
EXTRA = {"ignore_eos": True, "skip_special_tokens": False}


def profile(server: Server, *arguments: str) -> dict[str, Any]:
    """The tool's own report of one run."""
    with tempfile.TemporaryDirectory() as directory:
        run_program(
            "aiperf", "profile",
            "--url", server.url, "--model", server.model, "--api-key", server.api_key,
            "--tokenizer", server.tokenizer, "--use-server-token-count",
            "--endpoint-type", "chat",
            "--image-batch-size", str(IMAGES), "--image-width-mean", "96", "--image-height-mean", "64",
            "--synthetic-input-tokens-mean", "32",
            "--output-tokens-mean", str(OUTPUT_TOKENS), "--extra-inputs", json.dumps(EXTRA),
            "--request-count", str(REQUESTS), "--num-dataset-entries", str(REQUESTS), "--concurrency", "3",
            "--random-seed", "1", "--ui", "none", "--no-gpu-telemetry", "--output-artifact-dir", directory,
            *arguments,
        )  # fmt: skip
        report: dict[str, Any] = json.loads((Path(directory) / "profile_export_aiperf.json").read_text())
    return report


def check(report: dict[str, Any]) -> None:
    assert report["is_complete"], report["error_summary"]
    assert report["error_summary"] == [], report["error_summary"]
    assert report["request_count"]["avg"] == REQUESTS, report["request_count"]
    assert report["request_error_rate"]["avg"] == 0, report["request_error_rate"]
    assert report["num_images"]["min"] == IMAGES, report["num_images"]
    assert report["usage_completion_tokens"]["min"] == OUTPUT_TOKENS, report["usage_completion_tokens"]
    tokens = report["total_usage_total_tokens"]["avg"]
    print(f"       {REQUESTS} requests completed, {REQUESTS * IMAGES} images, {tokens:.0f} tokens, no errors")


def stream(server: Server) -> None:
    report = profile(server, "--streaming")
    check(report)
    assert report["time_to_first_token"]["avg"] > 0, report["time_to_first_token"]


def whole_answers(server: Server) -> None:
    check(profile(server))


if __name__ == "__main__":
    run(server_from_arguments(__doc__), (stream, whole_answers))
