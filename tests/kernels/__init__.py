"""The kernels. Without a compiler, or on a processor that lacks the instructions, layers run in torch."""

import os
import platform
import shutil
from pathlib import Path

import pytest

NEEDED = {"avx512_bf16", "avx512_vnni", "avx512bw", "avx512vl", "avx512dq"}


def why_no_kernels() -> str:
    """The reason to skip a test of what this machine cannot have. A machine that could have it fails the test."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "there is no C++ compiler here"
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    if platform.machine() != "x86_64" or not set(flags) >= NEEDED:
        return "this processor lacks AVX-512 with products of bf16 and of 8-bit integers"
    pytest.fail("the kernels could be here and are not: python -m triptych.kernels.build")
