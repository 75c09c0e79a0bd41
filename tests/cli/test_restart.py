"""`triptych restart` against a server that only says who its workers are."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from triptych.cli.main import main


class Fleet:
    """Workers that come back with another epoch when they are drained, unless they are stubborn."""

    def __init__(self) -> None:
        self.epochs = {"encode-0": 0, "decode-0": 0, "prefill-0": 0}
        self.drained: list[str] = []
        self.stubborn = ""
        self.by_hand: set[str] = set()
        self.key = ""
        self.keys: list[str | None] = []
        self.url = ""

    def topology(self) -> dict[str, Any]:
        return {
            "workers": [
                {
                    "name": name,
                    "state": "live",
                    "info": {"address": {"epoch": str(epoch)}, "supervised": name not in self.by_hand},
                }
                for name, epoch in self.epochs.items()
            ]
        }

    def drain(self, name: str) -> bool:
        if name in self.epochs:
            self.drained.append(name)
            self.epochs[name] += name != self.stubborn
        return name in self.epochs


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fleet.keys.append(self.headers["Authorization"])
            known = not fleet.key or self.headers["Authorization"] == f"Bearer {fleet.key}"
            self._answer(*(200, fleet.topology()) if known else (401, {}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._answer(200 if fleet.drain(body["name"]) else 404, {})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        fleet.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield fleet
        server.shutdown()
        thread.join()


def test_every_worker_is_drained_once_and_waited_for(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restart", "--url", fleet.url]) == 0
    assert fleet.drained == ["decode-0", "encode-0", "prefill-0"]
    assert [line.split(" after ")[0] for line in capsys.readouterr().out.splitlines()] == [
        line for name in fleet.drained for line in (f"waiting for {name} ...", f"{name} is live again")
    ]


def test_named_workers_are_drained_in_their_order_with_the_key(fleet: Fleet) -> None:
    assert main(["restart", "--url", fleet.url, "--api-key", "k", "prefill-0", "encode-0"]) == 0
    assert fleet.drained == ["prefill-0", "encode-0"]
    assert set(fleet.keys) == {"Bearer k"}


def test_an_unknown_worker_is_an_error(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restart", "--url", fleet.url, "encode-7"]) == 1
    assert "encode-7 cannot be restarted" in capsys.readouterr().err


def test_a_worker_that_nothing_would_start_again_is_not_drained_nor_any_other(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet.by_hand = {"encode-0"}
    assert main(["restart", "--url", fleet.url]) == 1
    assert capsys.readouterr().err.startswith("triptych: encode-0 cannot be restarted: started by hand")
    assert fleet.drained == []
    assert main(["restart", "--url", fleet.url, "decode-0", "prefill-0"]) == 0
    assert fleet.drained == ["decode-0", "prefill-0"]


def test_no_workers_is_an_error(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.epochs.clear()
    assert main(["restart", "--url", fleet.url]) == 1
    assert capsys.readouterr().err == f"triptych: {fleet.url} has no workers\n"


def test_a_missing_and_a_wrong_key_are_told(
    fleet: Fleet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRIPTYCH_API_KEYS", raising=False)
    fleet.key = "k"
    for key, told in (("", "needs an API key"), ("x", "does not know this API key")):
        assert main(["restart", "--url", fleet.url, "--api-key", key]) == 1
        error = capsys.readouterr().err
        assert f"{told}: give one with --api-key or in TRIPTYCH_API_KEYS" in error
    assert fleet.drained == []


def test_a_worker_that_does_not_come_back_ends_the_restart(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.stubborn = "encode-0"
    assert main(["restart", "--url", fleet.url, "--timeout-s", "0.2"]) == 1
    assert fleet.drained == ["decode-0", "encode-0"]
    assert "encode-0 was not live again" in capsys.readouterr().err


def test_no_server_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restart", "--url", "http://127.0.0.1:1"]) == 1
    assert "no answer from http://127.0.0.1:1" in capsys.readouterr().err
