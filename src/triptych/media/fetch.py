"""Media URLs to bytes: `data:`, `http(s):`, and `file:` under an allowed directory. Called by `router/media.py`.

Everything a client's URL can do to us ends here: each read is bounded in bytes and time, every hop's address is
checked and then connected to as it was checked, and no error repeats the media or the whole URL.
"""

from __future__ import annotations

import asyncio
import ssl

from triptych.config import MediaConfig
from triptych.errors import MediaError
from triptych.media.address import Resolve, SystemResolver
from triptych.media.data_url import read_data_url
from triptych.media.http_fetch import HttpFetcher
from triptych.media.local_file import read_file_url
from triptych.media.single_flight import SingleFlight
from triptych.media.staging import Staged, Staging
from triptych.media.url import refuse

_INLINE_CHARS = 64 << 10  # a longer data URL is decoded in a thread, so that the event loop goes on


class MediaFetcher:
    """One for the router's life. `resolve` and `tls` stand for the system's DNS and the usual authorities."""

    def __init__(
        self,
        config: MediaConfig,
        staging: Staging,
        *,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._config = config
        self._staging = staging
        self._resolver = SystemResolver()
        self._http = HttpFetcher(config, resolve or self._resolver, tls)
        self._flights: SingleFlight[bytes] = SingleFlight()

    async def close(self) -> None:
        await self._http.close()
        self._resolver.close()

    async def fetch(self, url: str, staged: Staged) -> bytes:
        """The bytes behind a URL, added to `staged`. Raises MediaError, MediaTimeoutError after `fetch_timeout_s`,
        and what `staged` raises."""
        if not url:
            raise MediaError("the URL of the image is empty")
        scheme = url.partition(":")[0].lower()
        if scheme == "data":
            staged.add(2 * len(url))  # the URL and what it says, at once: who is let in can finish
            if len(url) <= _INLINE_CHARS:
                return read_data_url(url, self._config.max_image_bytes)
            return await asyncio.to_thread(read_data_url, url, self._config.max_image_bytes)
        if scheme in ("http", "https"):
            # We send no credentials of anybody, so whoever asks for a URL gets the same.
            content = await self._flights.run(url, lambda: self._download(url))
        elif scheme == "file":
            content = await asyncio.to_thread(read_file_url, url, self._config)
        else:
            raise refuse(url, "must begin with data:, http:, https: or file:")
        staged.add(len(url) + len(content))
        return content

    async def _download(self, url: str) -> bytes:
        with self._staging.open() as staged:
            return await self._http.fetch(url, staged)
