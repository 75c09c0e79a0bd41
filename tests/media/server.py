"""A real HTTP server on loopback that behaves as badly as the internet does; one thread, any number of clients."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from .pictures import encoded, red_left_edge

PICTURE = encoded(red_left_edge(), "PNG")
CERTIFICATE = Path(__file__).with_name("media_test.pem")  # of media.test, for a hundred years


class MediaServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.over = threading.Event()
        self.seen: list[tuple[str, str, str | None]] = []  # path, Host, Cookie
        self.server_names: list[str] = []  # of TLS handshakes

    @property
    def port(self) -> int:
        return self.server_address[1]

    def use_tls(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)
        context.sni_callback = lambda _, name, __: self.server_names.append(name)
        self.socket = context.wrap_socket(self.socket, server_side=True)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are what the tests are about."""


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: MediaServer

    def do_GET(self) -> None:
        self.server.seen.append((self.path, self.headers["Host"], self.headers["Cookie"]))
        path, _, argument = self.path.partition("?")
        getattr(self, "answer_" + path.strip("/").replace("-", "_"))(argument)

    def answer_picture(self, _: str) -> None:
        self._send(200, PICTURE, {"Set-Cookie": "who=someone; Path=/"})

    def answer_slow_picture(self, _: str) -> None:
        self.server.over.wait(0.3)
        self._send(200, PICTURE)

    def answer_status(self, status: str) -> None:
        self._send(int(status), b"a secret of the server")

    def answer_redirect(self, location: str) -> None:
        self._send(302, b"", {"Location": location})

    def answer_long_header(self, length: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", length)
        self.end_headers()
        self.server.over.wait(20)

    def answer_gzip(self, _: str) -> None:
        self._send(200, b"\x1f\x8b", {"Content-Encoding": "gzip"})

    def answer_cut(self, _: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b"short")
        self.close_connection = True

    def answer_hang(self, _: str) -> None:
        self.server.over.wait(20)

    def answer_drip(self, _: str) -> None:
        """Never silent for long, never done: only a limit on the whole time ends it."""
        self._start_chunks()
        while not self.server.over.wait(0.05):
            self.wfile.write(b"1\r\nx\r\n")

    def answer_endless(self, _: str) -> None:
        self._start_chunks()
        while not self.server.over.is_set():
            self.wfile.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")

    def _start_chunks(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def serving(*, tls: bool = False) -> Iterator[MediaServer]:
    server = MediaServer()
    if tls:
        server.use_tls()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
