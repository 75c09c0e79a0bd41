"""GuideLLM against a server: drawn pages with their questions, and pictures that it makes itself.

`python -m tests.clients.guidellm.run URL MODEL --tokenizer DIR`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.clients.script import RELIABLE, Server, data_url, questions, run, run_program, server_from_arguments

REQUESTS = 12
OUTPUT_TOKENS = 8


def benchmark(server: Server, data: dict[str, Any]) -> dict[str, Any]:
    """The one benchmark of the tool's own report. The program ends with 0 even when every request failed."""
    backend = {
        "kind": "openai_http",
        "target": server.url,
        "model": server.model,
        "api_key": server.api_key,
        "extras": {"body": {"temperature": 0}},
    }
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        run_program(
            "guidellm", "run",
            "--backend", json.dumps(backend),
            "--tokenizer", json.dumps({"kind": "hf_auto", "model": server.tokenizer}),
            "--data", json.dumps(data),
            "--profile", "kind=concurrent,streams=3",
            "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--output", f"kind=json,path={report}",
            "--disable-console-interactive",
        )  # fmt: skip
        (found,) = json.loads(report.read_text())["benchmarks"]
    assert isinstance(found, dict)
    return found


def check(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests that completed: all of them, each with a picture."""
    errors = {request["info"]["error"] for request in found["requests"]["errored"]}
    totals = found["metrics"]["request_totals"]
    assert totals == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}, (totals, errors)
    completed: list[dict[str, Any]] = found["requests"]["successful"]
    assert len(completed) == REQUESTS
    for request in completed:
        assert request["input_metrics"]["image_bytes"] > 0, request["input_metrics"]
        assert request["output_metrics"]["text_tokens"] == OUTPUT_TOKENS, request["output_metrics"]
    print(f"       {totals['successful']} requests completed, each with a picture, no errors")
    return completed


def questions_about_pages(server: Server) -> None:
    """Text and picture in each request. The tool waits for ever when the file has fewer rows than it is to ask."""
    asked = [question for question in questions(200, RELIABLE[:3]) if len(question.images) == 1][:REQUESTS]
    rows = [
        {"prompt": question.text, "image": data_url(question.images[0]), "output_tokens_count": OUTPUT_TOKENS}
        for question in asked
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
        file.flush()
        completed = check(benchmark(server, {"kind": "json_file", "path": file.name}))
    answers = [request["output"] for request in completed]
    right = [any(answer.startswith(question.answer) for answer in answers) for question in asked]
    assert all(right), ([question.answer for question in asked], answers)


def pictures_of_its_own(server: Server) -> None:
    data = {"kind": "synthetic_image", "width": 96, "height": 64, "content": "noise", "output_tokens": OUTPUT_TOKENS}
    check(benchmark(server, data))


if __name__ == "__main__":
    run(server_from_arguments(__doc__), (questions_about_pages, pictures_of_its_own))
