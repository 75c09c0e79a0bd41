"""Building the kernels, and what is said where that cannot be."""

import ctypes
import os
import shutil
from pathlib import Path

import pytest

from triptych.kernels.build import compile_kernels


def test_it_builds_a_library_with_every_name(tmp_path: Path) -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler here")
    library = tmp_path / "kernels.so"
    assert compile_kernels(library) == ""
    assert [file.name for file in tmp_path.iterdir()] == ["kernels.so"]
    loaded = ctypes.CDLL(str(library))
    for name in ("supported", "decoder_layer_bfloat16", "vision_block_float32", "packed_elements"):
        assert getattr(loaded, f"triptych_{name}")


def test_a_compiler_that_is_not_there(tmp_path: Path) -> None:
    library = tmp_path / "kernels.so"
    library.write_bytes(b"of an earlier version")
    assert "no-such-compiler cannot be run" in compile_kernels(library, {"CXX": "no-such-compiler"})
    assert list(tmp_path.iterdir()) == [], "an old library must not be taken for the new one"


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'no AVX here' >&2\nexit 1\n")
    compiler.chmod(0o755)
    assert "no AVX here" in compile_kernels(tmp_path / "kernels.so", {"CXX": str(compiler)})
