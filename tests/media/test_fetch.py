"""M4, M5, M7, M9: what a client's URL can and cannot make the router read, over real sockets."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from triptych.config import MediaConfig
from triptych.errors import BadRequestError, MediaError, MediaTimeoutError, OverloadedError
from triptych.media import address
from triptych.media.address import Resolve, checked_address
from triptych.media.fetch import MediaFetcher
from triptych.media.staging import Staging
from triptych.media.url import shorten_url

from .server import CERTIFICATE, PICTURE, MediaServer, serving


@pytest.fixture(scope="module")
def server() -> Iterator[MediaServer]:
    with serving() as server:
        yield server


class Fetcher(MediaFetcher):
    """With a request of its own for each URL."""

    async def get(self, url: str) -> bytes:
        with self._staging.open() as staged:
            return await self.fetch(url, staged)


@asynccontextmanager
async def fetcher(*, resolve: Any = None, tls: ssl.SSLContext | None = None, **settings: Any) -> AsyncIterator[Fetcher]:
    options = {} if resolve is None else {"resolve": resolve}
    made = Fetcher(MediaConfig(**settings), Staging(1 << 30), tls=tls, **options)
    try:
        yield made
    finally:
        await made.close()


async def fetch(url: str, **settings: Any) -> bytes:
    async with fetcher(**settings) as made:
        return await made.get(url)


def resolving(*answers: str) -> Resolve:
    """Answers one look-up after the other; the last one again and again."""
    left = list(answers)

    async def resolve(host: str, port: int) -> list[str]:
        return [left.pop(0) if len(left) > 1 else left[0]]

    return resolve


# -- data --------------------------------------------------------------------------------------------------------------


async def test_the_same_bytes_by_every_way(server: MediaServer, tmp_path: Path) -> None:
    (tmp_path / "a picture.png").write_bytes(PICTURE)
    coded = base64.b64encode(PICTURE).decode()
    urls = [
        f"http://127.0.0.1:{server.port}/picture",
        f"data:image/png;base64,{coded}",
        f"DATA:image/jpeg;charset=x;BASE64,{coded.rstrip('=')}",
        f"data:;base64,{quote(coded)}",
        "data:image/png;base64," + "\r\n".join(coded[k : k + 76] for k in range(0, len(coded), 76)),
        f"data:image/png,{quote(PICTURE)}",
        f"file://{tmp_path}/a%20picture.png",
        f"file://localhost{tmp_path}/a%20picture.png",
    ]
    async with fetcher(allow_private_urls=True, allowed_local_media_path=str(tmp_path)) as made:
        assert [await made.get(url) for url in urls] == [PICTURE] * len(urls)


@pytest.mark.parametrize("payload", ["!!", "QUJD!!", "QUJ", "Q=JD", "A" * 100_001])
async def test_invalid_base64(payload: str) -> None:
    if payload == "QUJ":  # lacks its padding, which is harmless
        assert await fetch(f"data:;base64,{payload}") == b"AB"
        return
    with pytest.raises(MediaError, match="invalid base64") as caught:
        await fetch(f"data:image/png;base64,{payload}")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("url", ["data:image/png;base64", "data:"])
async def test_data_without_data(url: str) -> None:
    with pytest.raises(MediaError, match="no comma"):
        await fetch(url)


@pytest.mark.parametrize("form", ["data:;base64,{}", "data:,{}"])
@pytest.mark.parametrize("size", [1001, 100_000])
async def test_data_over_the_limit_is_refused_and_not_repeated(form: str, size: int) -> None:
    with pytest.raises(MediaError, match="max_image_bytes = 1000 ") as caught:
        await fetch(form.format(base64.b64encode(b"x" * size).decode()), max_image_bytes=1000)
    assert len(str(caught.value)) < 200


async def test_escapes_are_undone_whatever_their_number_and_place() -> None:
    content = bytes(range(256)) * 3000  # some of them lie across the slices that are undone at once
    every = "".join(f"%{byte:02x}" for byte in range(256)) * 3000
    for padding in range(3):
        assert await fetch(f"data:,{'x' * padding}{every}") == b"x" * padding + content
    assert await fetch("data:,%zz%4") == b"%zz%4"
    assert await fetch("data:,\ud800") == b"\xed\xa0\x80"  # the API's JSON has none of these, but so much for that


# -- file --------------------------------------------------------------------------------------------------------------


async def test_file_stays_under_its_directory(tmp_path: Path) -> None:
    root, outside = tmp_path / "media", tmp_path / "media-secret"
    root.mkdir()
    outside.write_bytes(b"secret")
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    (root / "inside").write_bytes(b"ok")
    (root / "good-link").symlink_to(root / "inside")
    os.mkfifo(root / "pipe")
    async with fetcher(allowed_local_media_path=str(root), max_image_bytes=100) as made:
        assert await made.get(f"file://{root}/good-link") == b"ok"
        for path, reason in {
            f"{root}/link": "not under",
            f"{outside}": "not under",
            f"{root}/../media-secret": "not under",
            f"{root}/%2e%2e/media-secret": "not under",
            f"{root}/loop": "loop|levels of symbolic",
            f"{root}/pipe": "regular file",
            f"{root}": "regular file|directory",
            f"{root}/none": "No such file",
            f"{root}/a%00b": "path on the server",
            "otherhost/etc/passwd": "path on the server",
        }.items():
            with pytest.raises(MediaError, match=reason):
                await made.get(f"file://{path}")
        (root / "inside").write_bytes(b"x" * 101)
        with pytest.raises(MediaError, match="max_image_bytes"):
            await made.get(f"file://{root}/inside")


async def test_several_directories(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(name.encode())
    (tmp_path / "a" / "to-b").symlink_to(tmp_path / "b" / "x")
    (tmp_path / "a" / "to-c").symlink_to(tmp_path / "c" / "x")
    async with fetcher(allowed_local_media_path=f"{tmp_path}/a:{tmp_path}/b:") as made:
        assert await made.get(f"file://{tmp_path}/a/x") == b"a"
        assert await made.get(f"file://{tmp_path}/b/x") == await made.get(f"file://{tmp_path}/a/to-b") == b"b"
        for path in ("c/x", "a/to-c", "x"):
            with pytest.raises(MediaError, match="not under"):
                await made.get(f"file://{tmp_path}/{path}")


@pytest.mark.parametrize("url", ["file://[", "file:///" + "x" * 5000, "file:///\ud800", "file:x", "file:"])
async def test_what_no_file_is_called(url: str, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="media URL 'file"):
        await fetch(url, allowed_local_media_path=str(tmp_path))


async def test_file_is_refused_by_default(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="allowed_local_media_path"):
        await fetch(f"file://{tmp_path}/x")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/x", "media URL 'ftp://host/x' must begin with data:, http:, https: or file:"),
        ("picture.png", "media URL 'picture.png' must begin with data:, http:, https: or file:"),
        ("javascript:alert(1)", r"media URL 'javascript:alert\(1\)' must begin with data:"),
        ("iVBORw0KGgo" * 100, r"media URL 'iVBORw0K.{52}\.\.\.' must begin with data:"),
        ("", "the URL of the image is empty"),
    ],
)
async def test_other_schemes(url: str, message: str) -> None:
    with pytest.raises(MediaError, match=f"^{message}"):
        await fetch(url)


# -- http --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [404, 403, 410, 500, 503, 204, 304])
async def test_other_status(server: MediaServer, status: int) -> None:
    with pytest.raises(MediaError, match=f"status {status}") as caught:
        await fetch(f"http://127.0.0.1:{server.port}/status?{status}", allow_private_urls=True)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("behaviour", ["hang", "drip", "long-header?100"])
async def test_one_that_never_ends_is_a_timeout(server: MediaServer, behaviour: str) -> None:
    start = time.monotonic()
    with pytest.raises(MediaTimeoutError, match=r"within 0\.4 s"):
        await fetch(f"http://127.0.0.1:{server.port}/{behaviour}", allow_private_urls=True, fetch_timeout_s=0.4)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("behaviour", ["endless", "long-header?1000000"])
async def test_too_long_a_body(server: MediaServer, behaviour: str) -> None:
    with pytest.raises(MediaError, match="max_image_bytes = 200000 "):
        await fetch(f"http://127.0.0.1:{server.port}/{behaviour}", allow_private_urls=True, max_image_bytes=200_000)


@pytest.mark.parametrize(("behaviour", "reason"), [("gzip", "Content-Encoding"), ("cut", "broke the connection off")])
async def test_bad_body(server: MediaServer, behaviour: str, reason: str) -> None:
    with pytest.raises(MediaError, match=reason):
        await fetch(f"http://127.0.0.1:{server.port}/{behaviour}", allow_private_urls=True)


async def test_cancel_ends_the_fetch(server: MediaServer) -> None:
    async with fetcher(allow_private_urls=True) as made:
        task = asyncio.create_task(made.get(f"http://127.0.0.1:{server.port}/hang"))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_redirects_are_followed_up_to_the_limit(server: MediaServer) -> None:
    base = f"http://127.0.0.1:{server.port}"
    once, twice = f"{base}/redirect?/picture", f"{base}/redirect?/redirect?/picture"
    assert await fetch(twice, allow_private_urls=True, max_redirects=2) == PICTURE
    assert await fetch(once, allow_private_urls=True, max_redirects=1) == PICTURE
    with pytest.raises(MediaError, match="max_redirects = 1"):
        await fetch(twice, allow_private_urls=True, max_redirects=1)
    with pytest.raises(MediaError, match="max_redirects = 0"):
        await fetch(once, allow_private_urls=True, max_redirects=0)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "data:,x", "ftp://h/x", "http:///x"])
async def test_redirect_to_another_scheme(server: MediaServer, target: str) -> None:
    with pytest.raises(MediaError, match=r"leads to|names no host|broke the connection off|not a valid URL"):
        await fetch(f"http://127.0.0.1:{server.port}/redirect?{target}", allow_private_urls=True)


async def test_no_cookies_from_one_client_to_the_next(server: MediaServer) -> None:
    async with fetcher(allow_private_urls=True) as made:
        for _ in range(2):
            await made.get(f"http://127.0.0.1:{server.port}/picture?cookies")
    assert [cookie for path, _, cookie in server.seen if path.endswith("?cookies")] == [None, None]


async def test_one_fetch_for_one_url_in_flight(server: MediaServer) -> None:
    url = f"http://127.0.0.1:{server.port}/slow-picture?together"
    async with fetcher(allow_private_urls=True) as made:
        first = asyncio.create_task(made.get(url))
        others = [asyncio.create_task(made.get(url)) for _ in range(7)]
        await asyncio.sleep(0.05)
        first.cancel()  # it began the fetch, and takes nobody with it
        assert await asyncio.gather(*others) == [PICTURE] * 7
        assert sum(path.endswith("?together") for path, _, _ in server.seen) == 1
        await made.get(url)
        assert sum(path.endswith("?together") for path, _, _ in server.seen) == 2
        assert made._staging.used_bytes == 0


async def test_one_failure_for_all_who_wait_for_it(server: MediaServer) -> None:
    async with fetcher(allow_private_urls=True, fetch_timeout_s=0.3) as made:
        url = f"http://127.0.0.1:{server.port}/hang?shared"
        errors = await asyncio.gather(*(made.get(url) for _ in range(4)), return_exceptions=True)
        assert [type(error) for error in errors] == [MediaTimeoutError] * 4
        assert sum(path == "/hang?shared" for path, _, _ in server.seen) == 1


async def test_what_all_requests_hold_is_bounded(server: MediaServer) -> None:
    url = f"http://127.0.0.1:{server.port}/picture"
    staging = Staging(2 * len(PICTURE) + 2012)
    made = MediaFetcher(MediaConfig(allow_private_urls=True), staging)
    held = [staging.open() for _ in range(3)]
    try:
        await made.fetch(url, held[0])
        assert staging.used_bytes == len(url) + len(PICTURE)
        await made.fetch("data:," + "x" * 1000, held[1])  # the URL is held as well as what it says
        assert staging.used_bytes == len(url) + len(PICTURE) + 2012
        with pytest.raises(OverloadedError, match="max_staged_bytes"):
            await made.fetch(url, held[2])
        with pytest.raises(BadRequestError, match="of this request are more than max_staged_bytes"):
            await made.fetch(f"http://127.0.0.1:{server.port}/endless", held[2])
        for one in held:
            one.close()
        assert staging.used_bytes == 0
    finally:
        await made.close()


@pytest.mark.parametrize(
    ("domains", "host", "allowed"),
    [
        ("media.test", "media.test", True),
        ("other.test, MEDIA.test", "media.test", True),
        ("media.test", "MEDIA.TEST.", True),
        (".media.test", "a.media.test", True),
        ("media.test", "a.media.test", False),
        (".media.test", "media.test", False),
        ("media.test", "notmedia.test", False),
        (".media.test", "media.test.evil.test", False),
    ],
)
async def test_allowed_domains(server: MediaServer, domains: str, host: str, allowed: bool) -> None:
    url = f"http://{host}:{server.port}/picture"
    async with fetcher(resolve=resolving("127.0.0.1"), allow_private_urls=True, allowed_domains=domains) as made:
        if allowed:
            assert await made.get(url) == PICTURE
        else:
            with pytest.raises(MediaError, match="allowed_domains"):
                await made.get(url)


async def test_a_redirect_out_of_the_allowed_domains(server: MediaServer) -> None:
    url = f"http://media.test:{server.port}/redirect?http://evil.test:{server.port}/picture"
    before = len(server.seen)
    with pytest.raises(MediaError, match=r"'evil\.test' is not one of"):
        await fetch(url, resolve=resolving("127.0.0.1"), allow_private_urls=True, allowed_domains="media.test")
    assert len(server.seen) == before + 1


# -- addresses ---------------------------------------------------------------------------------------------------------

REFUSED = [
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1",
    "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "2001:db8::1",
    "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:0:0:0:0:80ff:fffe",
    "64:ff9b:1::7f00:1", "::127.0.0.1", "::ffff:0:127.0.0.1", "fec0::1", "5f00::1", "192.0.0.9", "192.88.99.1",
]  # fmt: skip


@pytest.mark.parametrize("ip", REFUSED)
async def test_private_addresses_are_refused(ip: str) -> None:
    with pytest.raises(MediaError, match="refused"):
        await checked_address("media.test", 80, False, resolving(ip))
    assert await checked_address("media.test", 80, True, resolving(ip))


@pytest.mark.parametrize("ip", ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "64:ff9b::5db8:d822"])
async def test_public_addresses_pass(ip: str) -> None:
    assert await checked_address("media.test", 80, False, resolving(ip)) == ip


async def test_one_private_address_among_several_refuses_the_host() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["93.184.216.34", "127.0.0.1"]

    with pytest.raises(MediaError, match="refused"):
        await checked_address("media.test", 80, False, resolve)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "2130706433",
        "0x7f.1",
        "0177.0.0.1",
        "127.1",
        "0",
        "[::ffff:127.0.0.1]",
        "169.254.169.254",
        "localhost.",
        "me@127.0.0.1",
        "\u2460\u2461\u2466.0.0.1",
        "[::ffff:7f00:1]",
        "[fe80::1%25lo]",
    ],
)
async def test_private_urls_are_refused_by_default(server: MediaServer, host: str) -> None:
    before = len(server.seen)
    with pytest.raises(MediaError, match=r"refused|cannot be resolved|not a valid URL"):
        await fetch(f"http://{host}:{server.port}/picture")
    assert len(server.seen) == before


async def test_names_that_resolve_late_hold_nobody_up(server: MediaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: go_on.wait(20) and [])
    async with fetcher(fetch_timeout_s=15.0) as made:
        waiting = [asyncio.create_task(made.get(f"http://{k}.late.test/x")) for k in range(100)]
        await asyncio.sleep(0.05)
        long = base64.b64encode(PICTURE * 1000).decode()  # on a thread, for its length
        assert await asyncio.wait_for(made.get(f"data:;base64,{long}"), 10) == PICTURE * 1000
        go_on.set()
        errors = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(error) for error in errors} == {MediaError}


async def test_unknown_host() -> None:
    with pytest.raises(MediaError, match="cannot be resolved"):
        await fetch("http://no-such-host.invalid/x")


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_nobody_listens(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    url = f"{scheme}://127.0.0.1:{port}/x"
    message = f"media URL '{url}' cannot be read: no connection to its host could be made"
    with pytest.raises(MediaError, match=f"^{message}$"):
        await fetch(url, allow_private_urls=True)


async def test_a_host_that_speaks_no_tls(server: MediaServer) -> None:
    with pytest.raises(MediaError, match="no TLS connection to its host"):
        await fetch(f"https://127.0.0.1:{server.port}/picture", allow_private_urls=True)


@pytest.mark.parametrize("url", ["http://[", "http://a b/", "http://h:port/", "http://\u2100..x/", "https://:80/"])
async def test_what_is_no_url(url: str) -> None:
    with pytest.raises(MediaError, match=r"is not a valid URL|names no host|cannot be resolved"):
        await fetch(url)


async def test_a_redirect_to_a_private_address_is_refused(server: MediaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first hop counts as public, for there is no public server here; the second is checked as it is."""
    really_public = address._is_public
    answers = iter([True])
    monkeypatch.setattr(address, "_is_public", lambda ip: next(answers, False) or really_public(ip))
    before = len(server.seen)
    async with fetcher() as made:
        location = f"http://127.0.0.1:{server.port}/picture"
        with pytest.raises(MediaError, match=r"'127\.0\.0\.1' is at a private"):
            await made.get(f"http://127.0.0.1:{server.port}/redirect?{location}")
    assert [path for path, _, _ in server.seen[before:]] == [f"/redirect?{location}"]


async def test_the_checked_address_is_the_one_connected_to(server: MediaServer) -> None:
    """A name that changes its address after the check gains nothing; the server still sees the name."""
    async with fetcher(resolve=resolving("127.0.0.1", "203.0.113.9"), allow_private_urls=True) as made:
        assert await made.get(f"http://rebind.test:{server.port}/picture?rebind") == PICTURE
    hosts = [host for path, host, _ in server.seen if path.endswith("?rebind")]
    assert hosts == [f"rebind.test:{server.port}"]


async def test_tls_is_checked_against_the_name_and_not_the_address() -> None:
    trusting = ssl.create_default_context(cafile=str(CERTIFICATE))
    with serving(tls=True) as server:
        async with fetcher(resolve=resolving("127.0.0.1"), tls=trusting, allow_private_urls=True) as made:
            assert await made.get(f"https://media.test:{server.port}/picture") == PICTURE
            with pytest.raises(MediaError, match="certificate is not valid"):
                await made.get(f"https://other.test:{server.port}/picture")
        async with fetcher(resolve=resolving("127.0.0.1"), allow_private_urls=True) as made:
            with pytest.raises(MediaError, match="certificate is not valid"):  # an unknown authority
                await made.get(f"https://media.test:{server.port}/picture")
        assert server.server_names == ["media.test", "other.test", "media.test"]


# -- what messages show ------------------------------------------------------------------------------------------------


def test_shortened_urls_hold_no_media_and_no_secrets() -> None:
    assert shorten_url("data:image/png;base64," + "A" * 1000) == "data:image/png;base64,... (1000 characters)"
    assert shorten_url("data:" + "A" * 1000) == "data:..."
    assert shorten_url("https://me:word@host/path/x.png?token=1#f") == "https://host/path/x.png"
    assert shorten_url("picture.png?token=1#f") == "picture.png"
    assert shorten_url("mailto:me@host") == "mailto:host"
    assert len(shorten_url("https://host/" + "x" * 1000)) < 70
    assert len(shorten_url("x" * 1000)) < 70
