"""Media URLs to bytes: `data:`, `http(s):`, and `file:` under an allowed directory. Called by the router.

Everything a client's URL can do to us ends here: each read is bounded in bytes and time, every hop's address is
checked and then connected to as it was checked, and no error repeats the media or the whole URL.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import ssl
import stat
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import httpx

from triptych.config import MediaConfig
from triptych.errors import MediaError, MediaTimeoutError
from triptych.media.address import Resolve, checked_address, resolve_host

_SHOWN_CHARS = 60
_INLINE_CHARS = 64 << 10  # a longer data URL is decoded in a thread, so that the event loop goes on


def shorten_url(url: str) -> str:
    """A URL as messages and logs may show it: no media, no query, no credentials."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() == "data":
        head, comma, payload = rest.partition(",")
        return f"data:{head[:_SHOWN_CHARS]},... ({len(payload)} characters)" if comma else "data:..."
    place = rest.partition("?")[0].partition("#")[0]
    authority, slash, path = place.removeprefix("//").partition("/")
    shown = f"{scheme[:_SHOWN_CHARS]}://{authority.rpartition('@')[2]}{slash}{path}"
    return shown if len(shown) <= _SHOWN_CHARS else shown[:_SHOWN_CHARS] + "..."


class MediaFetcher:
    """One for the router's life. `resolve` and `tls` stand for the system's DNS and the usual authorities."""

    def __init__(
        self, config: MediaConfig, *, resolve: Resolve = resolve_host, tls: ssl.SSLContext | None = None
    ) -> None:
        self._config = config
        self._resolve = resolve
        # No environment: a proxy would resolve names behind our check. No kept connections: one to an address that
        # two hosts share would carry the second host's request under the first host's certificate.
        self._client = httpx.AsyncClient(
            verify=tls if tls is not None else True,
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(config.fetch_timeout_s),
            limits=httpx.Limits(max_keepalive_connections=0),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            headers={"Accept": "image/*,*/*;q=0.5", "Accept-Encoding": "identity", "User-Agent": "triptych"},
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def fetch(self, url: str) -> bytes:
        """The bytes behind a URL. Raises MediaError, or MediaTimeoutError after `fetch_timeout_s`."""
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            if len(url) <= _INLINE_CHARS:
                return self._read_data(url)
            return await asyncio.to_thread(self._read_data, url)
        if scheme in ("http", "https"):
            return await self._read_http(url)
        if scheme == "file":
            return await asyncio.to_thread(self._read_file, url)
        raise MediaError(f"media URL {shorten_url(url)!r}: only data:, http:, https: and file: are supported")

    def _too_large(self, url: str) -> MediaError:
        limit = self._config.max_image_bytes
        return MediaError(f"media URL {shorten_url(url)!r}: more than max_image_bytes = {limit} bytes")

    # -- data ----------------------------------------------------------------------------------------------------------

    def _read_data(self, url: str) -> bytes:
        head, comma, payload = url[len("data:") :].partition(",")
        if not comma:
            raise MediaError("the data URL has no comma between its type and its data")
        is_base64 = head.rpartition(";")[2].strip().lower() == "base64"
        if len(payload) > 4 * self._config.max_image_bytes + 1024:
            raise self._too_large(url)  # even if it is base64 with every character escaped
        raw = unquote_to_bytes(payload) if "%" in payload else payload.encode("utf-8", "surrogatepass")
        content = self._decode_base64(url, raw) if is_base64 else raw
        if len(content) > self._config.max_image_bytes:
            raise self._too_large(url)
        return content

    @staticmethod
    def _decode_base64(url: str, raw: bytes) -> bytes:
        text = raw.translate(None, b" \t\r\n\f")
        try:
            return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
        except binascii.Error as error:
            raise MediaError(f"media URL {shorten_url(url)!r}: invalid base64: {error}") from error

    # -- file ----------------------------------------------------------------------------------------------------------

    def _read_file(self, url: str) -> bytes:
        parts = urlsplit(url)
        if not self._config.allowed_local_media_path:
            raise MediaError("file: URLs are refused: the server has no allowed_local_media_path")
        if parts.netloc not in ("", "localhost") or "\0" in (path := unquote(parts.path)):
            raise MediaError(f"media URL {shorten_url(url)!r}: a file: URL names a path on the server")
        root = Path(self._config.allowed_local_media_path).resolve()
        try:
            resolved = Path(path).resolve()
            if not resolved.is_relative_to(root):
                raise MediaError(f"media URL {shorten_url(url)!r}: not under the server's allowed_local_media_path")
            return self._read_regular(url, resolved, root)
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
            reason = error.strerror if isinstance(error, OSError) else "a loop of symbolic links"
            raise MediaError(f"media URL {shorten_url(url)!r}: {reason}") from error

    def _read_regular(self, url: str, path: Path, root: Path) -> bytes:
        """Read what was opened, not what the name leads to later: the name may be swapped meanwhile."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            opened = Path(f"/proc/self/fd/{descriptor}")
            if opened.exists() and not opened.resolve().is_relative_to(root):
                raise MediaError(f"media URL {shorten_url(url)!r}: not under the server's allowed_local_media_path")
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise MediaError(f"media URL {shorten_url(url)!r}: not a regular file")
            content = file.read(self._config.max_image_bytes + 1)
        if len(content) > self._config.max_image_bytes:
            raise self._too_large(url)
        return content

    # -- http ----------------------------------------------------------------------------------------------------------

    async def _read_http(self, url: str) -> bytes:
        limit_s = self._config.fetch_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._follow(url)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise MediaTimeoutError(f"media URL {shorten_url(url)!r}: no answer within {limit_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, ssl.SSLError) as error:
            raise MediaError(f"media URL {shorten_url(url)!r}: {type(error).__name__}") from error

    async def _follow(self, url: str) -> bytes:
        target = httpx.URL(url)
        for _ in range(self._config.max_redirects + 1):
            if target.scheme not in ("http", "https") or not target.host:
                raise MediaError(f"media URL {shorten_url(url)!r}: leads to {shorten_url(str(target))!r}")
            response = await self._open(target)
            try:
                if response.has_redirect_location:
                    target = target.join(response.headers["Location"])
                    continue
                return await self._read_body(url, response)
            finally:
                await response.aclose()
        raise MediaError(f"media URL {shorten_url(url)!r}: more than max_redirects = {self._config.max_redirects}")

    async def _open(self, target: httpx.URL) -> httpx.Response:
        """Send to the very address that was checked: a second look-up of the name could give another one."""
        port = target.port or (443 if target.scheme == "https" else 80)
        address = await checked_address(target.host, port, self._config.allow_private_urls, self._resolve)
        request = self._client.build_request(
            "GET",
            target.copy_with(host=address, fragment=None),
            headers={"Host": target.netloc.decode("ascii")},
            extensions={"sni_hostname": target.raw_host.decode("ascii")},  # TLS checks the certificate against it too
        )
        return await self._client.send(request, stream=True)

    async def _read_body(self, url: str, response: httpx.Response) -> bytes:
        if response.status_code != httpx.codes.OK:
            raise MediaError(f"media URL {shorten_url(url)!r}: answered with status {response.status_code}")
        if response.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
            raise MediaError(f"media URL {shorten_url(url)!r}: answered with a Content-Encoding that was not asked for")
        declared = response.headers.get("Content-Length", "0")
        if declared.isdecimal() and int(declared) > self._config.max_image_bytes:
            raise self._too_large(url)
        content = bytearray()
        async for chunk in response.aiter_raw():
            content += chunk
            if len(content) > self._config.max_image_bytes:
                raise self._too_large(url)
        return bytes(content)
