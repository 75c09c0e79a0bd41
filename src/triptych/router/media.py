"""A request's media, from the URLs that the client gave to items with size and identity. Called by `router.py`.

Only headers are read: no pixel is decoded in this process.
"""

from __future__ import annotations

import asyncio

from triptych.config import MediaConfig
from triptych.errors import BadRequestError, MediaError
from triptych.media.fetch import MediaFetcher
from triptych.media.hash import mm_hash
from triptych.media.probe import probe_image
from triptych.prompt.layout import MediaLayout
from triptych.types import ImageInput, MediaItem, Modality, Request


class MediaReader:
    """`fingerprint` covers the model's weights, processor and dtype; it is part of every identity."""

    def __init__(self, config: MediaConfig, layout: MediaLayout, fingerprint: str) -> None:
        self._config = config
        self._layout = layout
        self._fingerprint = fingerprint
        self._fetcher = MediaFetcher(config)

    async def close(self) -> None:
        await self._fetcher.close()

    async def read(self, request: Request) -> list[MediaItem]:
        """All images of the request in their order, fetched at once. Raises what a client must know of them."""
        images, limit = request.images, self._config.max_images
        if len(images) > limit:
            raise BadRequestError(f"the request has {len(images)} images, the limit is {limit}", param="messages")
        if not images:
            return []
        tasks = [asyncio.create_task(self._fetch(image)) for image in images]
        try:
            contents = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        # On a thread: hashing tens of megabytes would hold up every other request's tokens.
        return await asyncio.to_thread(lambda: [self._item(*pair) for pair in zip(images, contents, strict=True)])

    async def _fetch(self, image: ImageInput) -> bytes:
        try:
            return await self._fetcher.fetch(image.url)
        except MediaError as error:
            error.param = error.param or image.param
            raise

    def _item(self, image: ImageInput, content: bytes) -> MediaItem:
        try:
            size = probe_image(content, self._config)
        except MediaError as error:
            error.param = error.param or image.param
            raise
        options = f"background={self._config.background}"
        identity = mm_hash(content, Modality.IMAGE, options, self._fingerprint, image.uuid)
        return MediaItem(Modality.IMAGE, identity, content, self._layout.image_metadata(size))
