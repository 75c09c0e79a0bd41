"""The size of an image from its header, checked against the limits. Called by the router for every image.

No pixel is decoded, so that a picture of any declared size costs the same small memory.
"""

from __future__ import annotations

from triptych.config import MediaConfig
from triptych.errors import MediaError
from triptych.media.header import open_image, orientation_of, size_of
from triptych.media.header_cost import too_many_pixels
from triptych.types import ImageSize


def probe_image(content: bytes, limits: MediaConfig) -> ImageSize:
    """Pixels with the EXIF orientation applied. Raises MediaError naming the limit or the type."""
    if len(content) > limits.max_image_bytes:
        raise MediaError(f"the image has {len(content)} bytes, the limit is max_image_bytes = {limits.max_image_bytes}")
    with open_image(content, limits.max_image_pixels) as image:
        width, height = image.size
        if width < 1 or height < 1:
            raise MediaError(f"the image of {width}x{height} pixels is empty")
        if width * height > limits.max_image_pixels:
            raise too_many_pixels(width, height, limits.max_image_pixels)
        return size_of(image, orientation_of(image, content))
