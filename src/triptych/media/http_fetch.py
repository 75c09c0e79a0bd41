"""`http:` and `https:` URLs to bytes. Called by `fetch.py` in the router.

Every hop's address is checked and then connected to as it was checked; time, redirects and bytes are bounded.
"""

from __future__ import annotations

import asyncio
import ssl
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from triptych.config import MediaConfig
from triptych.errors import MediaTimeoutError
from triptych.media.address import Resolve, checked_address
from triptych.media.staging import Staged
from triptych.media.url import refuse, shorten_url, too_large

_MAX_CONNECTIONS = 256  # of all requests together; the limit of open files is often 1024


class HttpFetcher:
    """One for the router's life. `tls` stands for the usual authorities."""

    def __init__(self, config: MediaConfig, resolve: Resolve, tls: ssl.SSLContext | None) -> None:
        self._config = config
        self._resolve = resolve
        self._domains = [name.strip().lower() for name in config.allowed_domains.split(",") if name.strip()]
        # No environment: a proxy would resolve names behind our check. No kept connections: one to an address that
        # two hosts share would carry the second host's request under the first host's certificate.
        self._client = httpx.AsyncClient(
            verify=tls if tls is not None else True,
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(config.fetch_timeout_s),
            limits=httpx.Limits(max_connections=_MAX_CONNECTIONS, max_keepalive_connections=0),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
            headers={"Accept": "image/*,*/*;q=0.5", "Accept-Encoding": "identity", "User-Agent": "triptych"},
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def fetch(self, url: str, staged: Staged) -> bytes:
        """Bytes are added to `staged` as they come. Raises MediaError, MediaTimeoutError, and what `staged` raises."""
        limit_s = self._config.fetch_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._follow(url, staged)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise MediaTimeoutError(f"media URL {shorten_url(url)!r} was not read within {limit_s:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, ssl.SSLError) as error:
            raise refuse(url, _reason(error)) from error

    async def _follow(self, url: str, staged: Staged) -> bytes:
        target = httpx.URL(url)
        for _ in range(self._config.max_redirects + 1):
            if target.scheme not in ("http", "https"):
                raise refuse(url, f"leads to {shorten_url(str(target))!r}, which is not an http: or https: URL")
            if not target.host:
                raise refuse(url, "names no host, or leads to a URL that names none")
            response = await self._open(url, target)
            try:
                if response.has_redirect_location:
                    target = target.join(response.headers["Location"])
                    continue
                return await self._read_body(url, response, staged)
            finally:
                await response.aclose()
        raise refuse(url, f"is redirected more often than max_redirects = {self._config.max_redirects} allows")

    async def _open(self, url: str, target: httpx.URL) -> httpx.Response:
        """Send to the very address that was checked: a second look-up of the name could give another one."""
        host = target.raw_host.decode("ascii")
        if self._domains and not self._is_allowed(host):
            raise refuse(url, f"is refused: the host {host[:80]!r} is not one of the server's allowed_domains")
        port = target.port or (443 if target.scheme == "https" else 80)
        address = await checked_address(target.host, port, self._config.allow_private_urls, self._resolve)
        request = self._client.build_request(
            "GET",
            target.copy_with(host=address, fragment=None),
            headers={"Host": target.netloc.decode("ascii")},
            extensions={"sni_hostname": host},  # TLS checks the certificate against it too
        )
        return await self._client.send(request, stream=True)

    def _is_allowed(self, host: str) -> bool:
        host = host.lower().rstrip(".")
        return any(host == name or (name.startswith(".") and host.endswith(name)) for name in self._domains)

    async def _read_body(self, url: str, response: httpx.Response, staged: Staged) -> bytes:
        limit = self._config.max_image_bytes
        if response.status_code != httpx.codes.OK:
            raise refuse(url, f"answered with status {response.status_code}")
        if response.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
            raise refuse(url, "answered with a Content-Encoding that was not asked for")
        declared = response.headers.get("Content-Length", "0")
        if declared.isdecimal() and int(declared) > limit:
            raise too_large(url, limit)
        content = bytearray()
        async for chunk in response.aiter_raw():
            if len(content) + len(chunk) > limit:
                raise too_large(url, limit)
            staged.add(len(chunk))
            content += chunk
        return bytes(content)


def _reason(error: Exception) -> str:
    """What happened, in words: the libraries' own texts are for programmers, or empty."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and isinstance(cause, Exception):
        causes.append(cause)
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return "is refused: the host's certificate is not valid, or not for this host"
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return "cannot be read: no TLS connection to its host could be made"
    if isinstance(error, httpx.ConnectError):
        return "cannot be read: no connection to its host could be made"
    if isinstance(error, httpx.InvalidURL | ValueError):
        return "is not a valid URL, or leads to one that is not"
    return "cannot be read: its host broke the connection off, or does not speak HTTP"
