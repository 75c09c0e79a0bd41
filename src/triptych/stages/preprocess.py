"""Media bytes to patches, on threads beside the vision tower, so that decoding and resizing never wait for a forward.

The encode stage submits and polls; the threads wait for processes that decode (`media/decode_process.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from triptych.errors import MediaError, TriptychError
from triptych.media.header import reason_of
from triptych.messages import ItemToEncode

logger = logging.getLogger(__name__)

ToPatches = Callable[[ItemToEncode], "NDArray[np.float32]"]


class Preprocessed(NamedTuple):
    """Patches of one item [num_patches, patch_dim], or why there are none."""

    mm_hash: str
    patches: NDArray[np.float32] | None
    error: str = ""
    bad_media: bool = False  # the error is the item's own fault


def preprocess(item: ItemToEncode, to_patches: ToPatches) -> Preprocessed:
    """Never raises: a bad item must fail only its own request."""
    try:
        return Preprocessed(item.mm_hash, to_patches(item))
    except MediaError as error:
        return Preprocessed(item.mm_hash, None, error.message, bad_media=True)
    except TriptychError as error:
        return Preprocessed(item.mm_hash, None, error.message)
    except Exception as error:  # a decoder's own bug, on a thread where nobody would see it
        logger.exception("an image cannot be decoded")
        return Preprocessed(item.mm_hash, None, f"the image cannot be decoded: {reason_of(error)}", bad_media=True)


class Preprocessor(Protocol):
    def submit(self, item: ItemToEncode) -> None: ...

    def poll(self) -> list[Preprocessed]:
        """What was finished since the last call, in order of completion."""
        ...

    def close(self) -> None: ...


class ThreadedPreprocessor:
    """`wake` is called from a thread of the pool whenever something is ready, `on_close` when the last one is done."""

    def __init__(
        self, to_patches: ToPatches, num_threads: int, wake: Callable[[], None], on_close: Callable[[], None]
    ) -> None:
        self._to_patches = to_patches
        self._wake = wake
        self._on_close = on_close
        self._done: SimpleQueue[Preprocessed] = SimpleQueue()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="preprocess")

    def submit(self, item: ItemToEncode) -> None:
        self._pool.submit(self._run, item)

    def _run(self, item: ItemToEncode) -> None:
        self._done.put(preprocess(item, self._to_patches))
        self._wake()

    def poll(self) -> list[Preprocessed]:
        done = []
        while True:
            try:
                done.append(self._done.get_nowait())
            except Empty:
                return done

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._on_close()


class InlinePreprocessor:
    """Runs each item when it is polled, in the caller's thread: the deterministic twin for tests and one core."""

    def __init__(self, to_patches: ToPatches) -> None:
        self._to_patches = to_patches
        self._submitted: list[ItemToEncode] = []

    def submit(self, item: ItemToEncode) -> None:
        self._submitted.append(item)

    def poll(self) -> list[Preprocessed]:
        submitted, self._submitted = self._submitted, []
        return [preprocess(item, self._to_patches) for item in submitted]

    def close(self) -> None:
        self._submitted.clear()
