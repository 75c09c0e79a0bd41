"""I1-I4: identity goes by content and all that changes an embedding; a client's uuid only adds."""

from __future__ import annotations

import re

from PIL import Image

from triptych.media.hash import mm_hash
from triptych.types import Modality

from .pictures import encoded, noise

RED = encoded(Image.new("RGB", (32, 32), "red"), "PNG")
BLUE = encoded(Image.new("RGB", (32, 32), "blue"), "PNG")


def identity(content: bytes, options: str = "background=#ffffff", fingerprint: str = "model", uuid: str = "") -> str:
    return mm_hash(content, Modality.IMAGE, options, fingerprint, uuid)


def test_form() -> None:
    assert re.fullmatch(r"[0-9a-f]{64}", identity(RED))
    assert identity(RED) == identity(bytes(bytearray(RED)))


def test_content_decides_whatever_the_uuid() -> None:
    assert identity(RED, uuid="x") != identity(BLUE, uuid="x")
    assert identity(RED, uuid="x") != identity(RED, uuid="y")


def test_size_is_part_of_it() -> None:
    tall, wide = (encoded(Image.new("L", size, 128), "PNG") for size in ((30, 150), (150, 30)))
    assert identity(tall) != identity(wide)


def test_options_model_and_modality_are_part_of_it() -> None:
    others = {
        identity(RED),
        identity(RED, options="background=#000000"),
        identity(RED, fingerprint="other"),
        mm_hash(RED, Modality.VIDEO, "background=#ffffff", "model"),
    }
    assert len(others) == 4


def test_the_end_of_the_content_is_part_of_it() -> None:
    content = encoded(noise(64, 64), "JPEG")
    assert identity(content) != identity(content[:-3] + b"\0" + content[-2:])


def test_fields_do_not_run_over() -> None:
    assert identity(b"", options="ab", fingerprint="c") != identity(b"", options="a", fingerprint="bc")
    assert identity(b"cd", fingerprint="a", uuid="b") != identity(b"d", fingerprint="a", uuid="bc")
