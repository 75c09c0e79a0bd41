"""Decoding in a process of its own: the same pixels, and an end to every image, however its decoder behaves."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from PIL import Image

from triptych.errors import EngineError, MediaError
from triptych.media import decode_process
from triptych.media.decode import DecodeJob, Pixels, decode_pixels
from triptych.media.decode_process import DecodeLimits, DecodeProcess, DecodeProcesses
from triptych.types import ImageDecoding, ImageSize

from .hostile import COSTLY_HEADERS, lying_avif, rle_bmp
from .pictures import MAX_PIXELS, WHITE, encoded, noise

ROOMY = DecodeLimits(MAX_PIXELS, 1 << 30, 60.0)


def job(content: bytes, size: ImageSize, resized: tuple[int, int] = (56, 28)) -> DecodeJob:
    return DecodeJob(content, ImageDecoding(size, WHITE), ImageSize(*resized), Image.Resampling.BICUBIC)


GOOD = job(encoded(noise(60, 40), "PNG"), ImageSize(60, 40))


def good(process: DecodeProcess) -> None:
    assert np.array_equal(process.decode(GOOD), decode_pixels(GOOD, MAX_PIXELS))


@pytest.fixture
def process() -> Iterator[DecodeProcess]:
    made = DecodeProcess(ROOMY)
    yield made
    made.close()


def test_the_same_pixels_as_in_this_process(process: DecodeProcess) -> None:
    for form in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF", "GIF", "BMP"):
        asked = job(encoded(noise(300, 200), form), ImageSize(300, 200), (224, 140))
        assert np.array_equal(process.decode(asked), decode_pixels(asked, MAX_PIXELS))


def test_a_bad_image_is_an_error_and_the_process_goes_on(process: DecodeProcess) -> None:
    first = psutil.Process(process._process.pid)
    for content, reason in {
        encoded(noise(60, 40), "JPEG")[:-200]: "truncated",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>": "svg",
        b"": "0 bytes",
        encoded(noise(61, 40), "PNG"): "61x40 pixels, which is not what its header says",
        lying_avif(): "which is not what its header says",
    }.items():
        with pytest.raises(MediaError, match=reason):
            process.decode(job(content, ImageSize(60, 40)))
        good(process)
    assert first.is_running()
    assert first.pid == process._process.pid


@pytest.mark.parametrize("name", COSTLY_HEADERS)
def test_costly_headers(process: DecodeProcess, name: str) -> None:
    with pytest.raises(MediaError):
        process.decode(job(COSTLY_HEADERS[name](), ImageSize(64, 48)))
    good(process)


def test_an_image_that_takes_too_long_ends_with_its_process() -> None:
    """This one is fifty megapixels of a decoder that is written in Python."""
    process = DecodeProcess(ROOMY._replace(timeout_s=0.5))
    try:
        with pytest.raises(MediaError, match=r"took longer than decode_timeout_s = 0\.5 s"):
            process.decode(job(rle_bmp(7000, 7000), ImageSize(7000, 7000)))
        good(process)
    finally:
        process.close()


def test_an_image_that_needs_too_much_memory() -> None:
    process = DecodeProcess(ROOMY._replace(max_bytes=16 << 20))
    edge = ImageSize(3000, 3000)
    try:
        for form in ("PNG", "WEBP", "AVIF", "TIFF"):
            content = encoded(Image.new("RGB", edge, "red"), form, **({"speed": 10} if form == "AVIF" else {}))
            with pytest.raises(MediaError, match="cannot be"):
                process.decode(job(content, edge))
            good(process)
    finally:
        process.close()


@pytest.mark.parametrize("kind", [signal.SIGSEGV, signal.SIGKILL])
def test_a_decoder_that_crashes_costs_one_image(process: DecodeProcess, kind: signal.Signals) -> None:
    good(process)
    victim = psutil.Process(process._process.pid)
    slow = job(rle_bmp(7000, 7000), ImageSize(7000, 7000))
    timer = threading.Timer(0.3, victim.send_signal, [kind])
    timer.start()
    with pytest.raises(MediaError, match=f"its decoder ended with {kind.name}"):
        process.decode(slow)
    timer.join()
    good(process)
    assert not victim.is_running() or victim.status() == psutil.STATUS_ZOMBIE


def test_a_process_that_cannot_start_is_not_the_images_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_process, "__name__", "triptych.no_such_module")
    process = DecodeProcess(ROOMY)
    with pytest.raises(EngineError, match="did not start"):
        process.wait_ready()
    with pytest.raises(EngineError, match="did not start"):
        process.decode(GOOD)
    monkeypatch.undo()
    with pytest.raises(EngineError):
        process.decode(GOOD)  # the one that was started before
    good(process)
    process.close()


def test_several_threads_share_several_processes() -> None:
    before = psutil.Process().children()  # other tests may have left their fork server
    processes = DecodeProcesses(ROOMY, 2)
    processes.wait_ready()
    assert len(psutil.Process().children()) == len(before) + 2
    with ThreadPoolExecutor(4) as threads:
        done: list[Pixels] = list(threads.map(processes, [GOOD] * 12))
    assert all(np.array_equal(pixels, done[0]) for pixels in done)
    processes.close()
    assert psutil.Process().children() == before


def test_nothing_is_left_of_a_worker_that_is_killed() -> None:
    """The process sees the end of its pipe."""
    code = """
from triptych.media.decode_process import DecodeLimits, DecodeProcess
process = DecodeProcess(DecodeLimits(1, 1 << 30, 1.0))
process.wait_ready()
print("ready", flush=True)
input()
"""
    worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        [child] = psutil.Process(worker.pid).children()
        worker.kill()
        psutil.wait_procs([child], timeout=20)
        assert not child.is_running()
