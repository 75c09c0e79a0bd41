"""A request's media, from the URLs that the client gave to items with size and identity. Called by `router.py`.

Only headers are read: no pixel is decoded in this process.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from triptych.config import MediaConfig
from triptych.errors import BadRequestError, ConfigError, MediaTimeoutError
from triptych.media.fetch import MediaFetcher
from triptych.media.hash import mm_hash
from triptych.media.options import background_of, read_colour
from triptych.media.probe import probe_image
from triptych.media.staging import Staged, Staging
from triptych.media.uuid_cache import UuidCache, UuidKey
from triptych.prompt.layout import MediaLayout
from triptych.types import ImageDecoding, ImageInput, MediaItem, Modality, PixelLimits, Request, Rgb


class _Options(NamedTuple):
    """How this request wants its images."""

    limits: PixelLimits
    background: Rgb


class MediaReader:
    """`fingerprint` covers the model's weights, processor and dtype; it is part of every identity."""

    def __init__(self, config: MediaConfig, layout: MediaLayout, fingerprint: str) -> None:
        self._config = config
        self._layout = layout
        self._fingerprint = fingerprint
        self.staging = Staging(config.max_staged_bytes)
        self._fetcher = MediaFetcher(config, self.staging)
        self._named = UuidCache(config.uuid_cache_bytes)
        try:
            self._background = read_colour(config.background)
        except ValueError as error:
            raise ConfigError(f"media.background = {config.background!r}: {error}", param="media.background") from error

    async def close(self) -> None:
        await self._fetcher.close()

    async def read(self, request: Request, staged: Staged) -> list[MediaItem]:
        """All images of the request in their order, fetched at once. Raises what a client must know of them.

        `staged` counts their bytes until the caller closes it, which is when the request ends.
        """
        options = _Options(
            self._layout.pixel_limits(request.processor_options),
            background_of(request.media_options, self._background),
        )
        images, limit = request.images, self._config.max_images
        if len(images) > limit:
            why = f"the request has {len(images)} images, the limit is {limit}"
            raise BadRequestError(why, param=request.messages_param)
        if not images:
            return []
        contents = await self._contents(request, staged)
        # On a thread: hashing tens of megabytes would hold up every other request's tokens.
        pairs = list(zip(images, contents, strict=True))
        items = await asyncio.to_thread(lambda: [self._item(*pair, options) for pair in pairs])
        for image, content in pairs:  # only now: one that is refused must not take the place of a good one
            if image.uuid and _has_content(image):
                self._named.put(_key(request, image), content)
        return items

    async def _contents(self, request: Request, staged: Staged) -> list[bytes]:
        tasks = [asyncio.create_task(self._fetch(image, staged)) for image in request.images if _has_content(image)]
        try:
            fetched = iter(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
        contents = []
        sent: dict[UuidKey, bytes] = {}  # with this request, by the names that it gives
        for image in request.images:
            if _has_content(image):
                content = sent[_key(request, image)] = next(fetched)
            else:
                content = sent.get(_key(request, image)) or self._kept(_key(request, image), image, staged)
            contents.append(content)
        return contents

    async def _fetch(self, image: ImageInput, staged: Staged) -> bytes:
        try:
            return await self._fetcher.fetch(image.url, staged)
        except (BadRequestError, MediaTimeoutError) as error:
            error.param = error.param or image.param
            raise

    def _kept(self, key: UuidKey, image: ImageInput, staged: Staged) -> bytes:
        content = self._named.get(key)
        if content is None:
            raise BadRequestError(
                f"no image is kept with the uuid {key.uuid[:80]!r}: send it with its content", param=image.param
            )
        staged.add(len(content))
        return content

    def _item(self, image: ImageInput, content: bytes, options: _Options) -> MediaItem:
        try:
            size = probe_image(content, self._config)
            metadata = self._layout.image_metadata(size, options.limits)
        except BadRequestError as error:
            error.param = image.param
            raise
        # Of the processor's options only the grid that follows from them changes the embedding.
        chosen = f"background={tuple(options.background)} grid={tuple(metadata.grid)}"
        identity = mm_hash(content, Modality.IMAGE, chosen, self._fingerprint, image.uuid)
        decoding = ImageDecoding(size, options.background)
        return MediaItem(Modality.IMAGE, identity, content, metadata, decoding, image.param)


def _key(request: Request, image: ImageInput) -> UuidKey:
    return UuidKey(request.client, request.cache_salt, image.uuid)


def _has_content(image: ImageInput) -> bool:
    return bool(image.url) or not image.uuid
