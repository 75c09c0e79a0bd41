"""A mock of an OpenAI-compatible server; the model's name says how it behaves. Also a script: `mock_server.py PORT`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = ("plain", "bundled", "slow", "cut", "refused", "error", "short", "no-usage", "silent", "garbage", "flaky")
BURN = "sum(k * k for k in range(400_000))"


class MockServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int = 0, model: str = "plain", burns: bool = False) -> None:
        super().__init__(("127.0.0.1", port), _Answers)
        self.model = model
        self.burns = burns  # each request costs CPU, in a child
        self.bodies: list[dict[str, Any]] = []
        self.over = threading.Event()
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def enter(self, body: dict[str, Any]) -> None:
        with self._lock:
            self.bodies.append(body)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)

    def leave(self) -> None:
        with self._lock:
            self._now -= 1

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what some tests are about."""


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: MockServer

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._whole(200, f'mock_requests_total{{kind="all"}} {len(self.server.bodies)}\n'.encode())
            return
        models = {"data": [{"id": self.server.model}]}
        self._whole(200, json.dumps(models if self.path == "/v1/models" else {"status": "ok"}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.enter(body)
        try:
            if self.server.burns:
                subprocess.run([sys.executable, "-c", BURN], check=True)
            self._answer(body, body["model"])
        finally:
            self.server.leave()

    def _answer(self, body: dict[str, Any], model: str) -> None:
        if model == "refused" or (model == "flaky" and len(self.server.bodies) % 3 == 0):
            self._whole(503, b'{"error": {"message": "full"}}')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        num = body["max_tokens"] - (model == "short")
        if model == "error":
            self._event({"error": {"message": "lost"}})
        elif model == "garbage":
            self._chunk(b"data: {no json\n\n")
        else:
            self._tokens(num, model)
        if model != "cut":
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def _tokens(self, num: int, model: str) -> None:
        step = 4 if model == "bundled" else 1
        for first in range(0, num, step):
            words = "".join(f" w{k}" for k in range(first, min(first + step, num)))
            if model == "cut" and first >= 1:
                return
            if model == "slow":
                self.server.over.wait(0.02)
            if model != "silent":
                self._event({"choices": [{"index": 0, "delta": {"content": words}, "finish_reason": None}]})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if model != "no-usage":
            usage = {"prompt_tokens": 10, "completion_tokens": num, "prompt_tokens_details": {"cached_tokens": 2}}
            self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _whole(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def serving(model: str = "plain") -> Iterator[MockServer]:
    server = MockServer(model=model)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    if "dies" in sys.argv:
        sys.exit("no such device")
    if "child" in sys.argv:  # outlives its parent unless somebody stops it
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], process_group=0)
    if "deaf" in sys.argv:
        time.sleep(600)
    print("serving", os.getpid(), flush=True)
    MockServer(int(sys.argv[1]), burns="burns" in sys.argv).serve_forever()
