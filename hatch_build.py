"""Build hook: compiles `src/triptych/kernels/csrc` with the machine's C++ compiler, for wheels and editable installs.

No header of Python or torch is needed. Without a compiler, or on another processor family, the package is built
without kernels and runs its layers in torch.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("src/triptych/kernels")
LIBRARY = KERNELS / "_kernels.so"
# AVX-512 with bf16 products: checked again when the library is loaded.
FLAGS = (
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-fopenmp"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
)


class KernelBuildHook(BuildHookInterface[Any]):  # type: ignore[misc]
    """Adds the library to what is built, or says why there is none."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        reason = compile_kernels(Path(self.root))
        if reason:
            self.app.display_warning(f"triptych is built without its kernels: {reason}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(f"/{LIBRARY}")


def compile_kernels(root: Path) -> str:
    """Empty, or why there is no library afterwards."""
    library = root / LIBRARY
    library.unlink(missing_ok=True)
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux":
        return f"they are for Linux on x86-64, this is {platform.system()} on {platform.machine()}"
    unfinished = library.with_suffix(".tmp")
    command = [os.environ.get("CXX", "g++"), *FLAGS, str(root / KERNELS / "csrc/library.cpp"), "-o", str(unfinished)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        return f"there is no compiler {command[0]}"
    except subprocess.CalledProcessError as error:
        return f"{command[0]} failed: {error.stderr.strip()[:2000]}"
    unfinished.replace(library)
    return ""
