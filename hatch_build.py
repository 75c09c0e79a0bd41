"""Build hook: adds the compiled kernels to wheels and editable installs, or says why there are none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent / "src"))

from triptych.kernels.build import LIBRARY, compile_kernels


class KernelBuildHook(BuildHookInterface[Any]):  # type: ignore[misc]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        reason = compile_kernels()
        if reason:
            self.app.display_warning(f"triptych is built without its kernels: {reason}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(f"/{LIBRARY.relative_to(self.root)}")
