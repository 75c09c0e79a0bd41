"""The threaded preprocessor and its inline twin give the same; neither lets a bad item through or hangs at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.stages.nodes import item_to_encode
from triptych.errors import MediaError
from triptych.messages import ItemToEncode
from triptych.stages.preprocess import InlinePreprocessor, Preprocessed, ThreadedPreprocessor

ERRORS: dict[bytes, Exception] = {
    b"media": MediaError("the image is broken"),
    b"os": OSError("truncated"),
    b"value": ValueError("odd"),
    b"memory": MemoryError("too large"),
}


def to_patches(item: ItemToEncode) -> NDArray[np.float32]:
    if item.content in ERRORS:
        raise ERRORS[item.content]
    return np.full((4, 2), item.content[0], dtype=np.float32)


def inline(items: list[ItemToEncode]) -> list[Preprocessed]:
    preprocessor = InlinePreprocessor(to_patches)
    for item in items:
        preprocessor.submit(item)
    done = preprocessor.poll()
    assert preprocessor.poll() == []
    preprocessor.close()
    return done


def threaded(items: list[ItemToEncode]) -> list[Preprocessed]:
    wakes: SimpleQueue[None] = SimpleQueue()
    preprocessor = ThreadedPreprocessor(to_patches, 1, lambda: wakes.put(None), lambda: None)
    for item in items:
        preprocessor.submit(item)
    done = []
    for _ in items:
        wakes.get(timeout=20)
        done += preprocessor.poll()
    assert preprocessor.poll() == []
    preprocessor.close()
    return done


Run = Callable[[list[ItemToEncode]], list[Preprocessed]]


@pytest.mark.parametrize("run", [inline, threaded])
def test_good_and_bad_items_come_back_in_order(run: Run) -> None:
    contents = [b"\x01", *ERRORS, b"\x02"]
    done = run([item_to_encode(f"{k}", content=content) for k, content in enumerate(contents)])
    assert [d.mm_hash for d in done] == [f"{k}" for k in range(len(contents))]
    assert [d.patches is None for d in done] == [False, True, True, True, True, False]
    assert [d.error for d in done] == [
        "",
        "the image is broken",
        "the image cannot be decoded: it is truncated",
        "the image cannot be decoded: its data is damaged, or of a kind that is not supported",
        "the image cannot be decoded: it needs more memory than there is for one image",
        "",
    ]
    assert done[0].patches is not None
    assert done[0].patches[0, 0] == 1.0


def test_closing_waits_for_the_item_in_hand_and_drops_the_rest() -> None:
    started, go_on = threading.Event(), threading.Event()
    seen: list[str] = []

    def slow(item: ItemToEncode) -> NDArray[np.float32]:
        seen.append(item.mm_hash)
        started.set()
        assert go_on.wait(20)
        return np.zeros((1, 1), dtype=np.float32)

    closed: list[bool] = []
    preprocessor = ThreadedPreprocessor(slow, 1, lambda: None, lambda: closed.append(go_on.is_set()))
    for name in "abc":
        preprocessor.submit(item_to_encode(name))
    assert started.wait(20)
    closer = threading.Thread(target=preprocessor.close)
    closer.start()
    go_on.set()
    closer.join(20)
    assert not closer.is_alive()
    assert closed == [True]  # after the item in hand
    assert "c" not in seen or seen == ["a", "b", "c"]
    assert not [t for t in threading.enumerate() if t.name.startswith("preprocess")]


def test_what_was_submitted_is_dropped_when_the_inline_twin_closes() -> None:
    preprocessor = InlinePreprocessor(to_patches)
    preprocessor.submit(item_to_encode("a"))
    preprocessor.close()
    assert preprocessor.poll() == []
