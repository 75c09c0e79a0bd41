"""Compiles `csrc/` with the machine's C++ compiler: `python -m triptych.kernels.build` does it again.

Called when the package is built (hatch_build.py at the root of the sources). No header of Python or torch is needed.
Without a compiler, or on another processor family, there is no library, and layers run in torch.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE / "_kernels.so"
# AVX-512 with products of bf16 and of 8-bit integers: `library.available` looks whether the processor has them.
FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-fopenmp"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni", "-mfma"),
    *("-mamx-tile", "-mamx-bf16"),
)


def compile_kernels(library: Path = LIBRARY, environ: Mapping[str, str] = os.environ) -> str:
    """Empty, or why there is no `library` now. CXX names the compiler, g++ if it is not set."""
    library.unlink(missing_ok=True)
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        return f"they are for Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    unfinished = library.with_name(f"{library.name}.{os.getpid()}")
    command = [environ.get("CXX", "g++"), *FLAGS, str(HERE / "csrc" / "library.cpp"), "-o", str(unfinished)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}"
    except subprocess.CalledProcessError as error:
        unfinished.unlink(missing_ok=True)
        return f"{command[0]} failed: {error.stderr.strip()[:2000]}"
    unfinished.replace(library)
    return ""


def main() -> int:
    reason = compile_kernels()
    if reason:
        sys.stderr.write(f"the kernels were not built: {reason}\n")
    return 1 if reason else 0


if __name__ == "__main__":
    raise SystemExit(main())
