"""Decoding in a process of its own, whose time and memory the system bounds, whatever a file makes a decoder do.

An encode worker keeps as many as it has preprocessing threads. One that is stuck, out of memory or crashed costs the
image that it had; the next image gets a new one. `python -m triptych.media.decode_process` is the process itself.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import IO, NamedTuple

import msgspec
import numpy as np

from triptych.errors import EngineError, MediaError
from triptych.media.decode import DecodeJob, Pixels, decode_pixels
from triptych.media.header import reason_of

logger = logging.getLogger(__name__)

Decode = Callable[[DecodeJob], Pixels]

_READY = b"+"
_LENGTH = struct.Struct("<Q")  # of a job in msgpack
_REPLY = struct.Struct("<?Q")  # whether pixels follow, else the reason; and their length
_PATIENCE_S = 5.0  # for a process that was told to end


class DecodeLimits(NamedTuple):
    """What one image may cost."""

    max_pixels: int
    max_bytes: int  # beyond what the process has when it starts
    timeout_s: float


class DecodeProcess:
    """One process, used by one thread at a time."""

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._process = self._start()
        self._is_ready = False

    def _start(self) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)  # it finds what this process has found
        return subprocess.Popen(
            [sys.executable, "-m", __name__, *(str(limit) for limit in self._limits)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # One thread of BLAS, which is never called: more would only fill the address space.
            env=os.environ | {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"},
        )

    def wait_ready(self) -> None:
        """Raises EngineError where the process cannot start."""
        if self._is_ready:
            return
        assert self._process.stdout is not None
        try:
            _read(self._process.stdout, bytearray(len(_READY)))
        except OSError as error:
            raise EngineError(f"the process that decodes images did not start ({self._restart()})") from error
        self._is_ready = True

    def decode(self, job: DecodeJob) -> Pixels:
        """Raises MediaError, also where the process did not survive the image, and EngineError where there is none."""
        self.wait_ready()
        try:
            return self._ask(job)
        except OSError as error:
            reason = self._restart()
            logger.warning("an image was refused: %s", reason)
            raise MediaError(f"the image cannot be decoded: {reason}") from error

    def _restart(self) -> str:
        """A new process; what became of the old one."""
        status = self.close()
        self._process, self._is_ready = self._start(), False
        if status == -signal.SIGALRM:
            return f"it took longer than decode_timeout_s = {self._limits.timeout_s:g} s"
        return f"its decoder ended with {_status_name(status)}"

    def _ask(self, job: DecodeJob) -> Pixels:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        body = msgspec.msgpack.encode(job)
        for part in (_LENGTH.pack(len(body)), body):
            _write(self._process.stdin, part)
        has_pixels, length = _REPLY.unpack(_read(self._process.stdout, bytearray(_REPLY.size)))
        if not has_pixels:
            raise MediaError(bytes(_read(self._process.stdout, bytearray(length))).decode())
        pixels: Pixels = np.empty((job.resized.height, job.resized.width, 3), dtype=np.uint8)
        _read(self._process.stdout, pixels.data.cast("B"))
        return pixels

    def close(self) -> int:
        """End the process and return its exit status."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            return process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


class DecodeProcesses:
    """A `Decode` for several threads, each with a process while it needs one."""

    def __init__(self, limits: DecodeLimits, num_processes: int) -> None:
        self._idle: SimpleQueue[DecodeProcess] = SimpleQueue()
        self._processes = [DecodeProcess(limits) for _ in range(num_processes)]
        for process in self._processes:
            self._idle.put(process)

    def __call__(self, job: DecodeJob) -> Pixels:
        process = self._idle.get()
        try:
            return process.decode(job)
        finally:
            self._idle.put(process)

    def wait_ready(self) -> None:
        for process in self._processes:
            process.wait_ready()

    def close(self) -> None:
        for process in self._processes:
            process.close()


def _status_name(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"status {status}"


def _write(pipe: IO[bytes], content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[pipe.write(left) :]


def _read(pipe: IO[bytes], into: bytearray | memoryview) -> bytearray | memoryview:
    """Fill `into` and return it. Raises OSError where the pipe ends: the process is dead."""
    left = memoryview(into)
    while left:
        count = pipe.readinto(left)  # type: ignore[attr-defined]  # a FileIO, for bufsize=0
        if not count:
            raise ConnectionResetError("the decoder is gone")
        left = left[count:]
    return into


# -- the process -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer jobs until the worker is gone."""
    limits = DecodeLimits(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the worker's to answer
    jobs, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    sys.stderr = os.fdopen(os.dup(2), "w")  # of Python's own words
    with open(os.devnull, "wb") as nowhere:
        for descriptor in (1, 2):  # libraries print a line for each bad row of an image
            os.dup2(nowhere.fileno(), descriptor)
    _limit_memory(limits.max_bytes)
    replies.write(_READY)
    replies.flush()
    while len(head := jobs.read(_LENGTH.size)) == _LENGTH.size:
        job = msgspec.msgpack.decode(jobs.read(_LENGTH.unpack(head)[0]), type=DecodeJob)
        signal.setitimer(signal.ITIMER_REAL, limits.timeout_s)  # it ends the process, even inside of a library
        has_pixels, reply = _reply(job, limits)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(_REPLY.pack(has_pixels, len(reply)))
        replies.write(reply)
        replies.flush()


def _reply(job: DecodeJob, limits: DecodeLimits) -> tuple[bool, bytes]:
    try:
        return True, decode_pixels(job, limits.max_pixels).tobytes()
    except MediaError as error:
        return False, error.message.encode()
    except Exception as error:  # noqa: BLE001  a decoder's own bug: the image's fault until it is known better
        traceback.print_exc()
        return False, f"the image cannot be decoded: {reason_of(error)}".encode()


def _limit_memory(max_bytes: int) -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = size + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the worker is gone, and nobody is left to be told
        os._exit(0)
