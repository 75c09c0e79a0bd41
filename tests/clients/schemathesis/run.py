"""Schemathesis against the OpenAPI document that a server serves: right and wrong requests to each of its operations.

`python -m tests.clients.schemathesis.run URL MODEL`. No answer may be a 5xx or one that
the document does not describe.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tests.clients.script import Server, run, run_program, server_from_arguments

CHECKS = (  # all but two: how long an answer takes, and that right types are enough for a request to be taken
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)
GENERATES = ("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses")
EXAMPLES = 40  # of each operation while fuzzing; coverage of the schema makes some hundreds more


def openapi(server: Server) -> None:
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        printed = run_program(
            "schemathesis", "run", f"{server.url}/openapi.json",
            "--header", f"Authorization: Bearer {server.api_key}",
            "--checks", ",".join(CHECKS),
            "--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES), "--generation-deterministic",
            "--continue-on-failure", "--request-timeout", "120",
            "--report", "json", "--report-json-path", str(report), "--no-color",
            directory=directory,
        )  # fmt: skip
        check(json.loads(report.read_text()), printed)


def check(report: dict[str, Any], printed: str) -> None:
    """What the program ended with says that nothing failed; here, that it tried everything and that answers came."""
    assert report["complete"], report["stop_reason"]
    assert report["failures"] == [], report["failures"]
    assert report["errors"] == [], report["errors"]
    operations = report["operations"]
    assert operations["tested"] == operations["total"], operations
    for name in GENERATES:
        rates = report["valid_rates"]
        assert name in rates, f"{name} is not in the document, or no request fitted it: {sorted(rates)}\n{printed}"
        accepted = sum(phase["accepted"] for phase in rates[name].values())
        assert accepted > 0, f"{name} accepted nothing: {rates[name]}"
    generated = report["test_cases"]["generated"]
    print(f"       {generated} requests to {operations['tested']} operations, no failures")


if __name__ == "__main__":
    run(server_from_arguments(__doc__), (openapi,))
