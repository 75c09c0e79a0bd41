"""Where and with what a run was made: processor, memory, versions, commit. Part of every result."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import msgspec

from triptych import __version__

PACKAGES = ("torch", "transformers", "numpy", "pillow", "msgspec", "uvicorn", "uvloop", "pyzmq", "starlette")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Of the client, which starts the systems on the same machine."""

    started: str  # wall clock, UTC
    cpu: str
    num_cores: int
    client_cores: list[int]  # that this process may use
    memory_bytes: int
    kernel: str
    python: str
    load_average: tuple[float, float, float]  # when the run started: whether others used the machine
    triptych: str
    commit: str  # of the repository that this package lies in; ends with + if files differ from it
    packages: dict[str, str]
    command: list[str]


def describe() -> Machine:
    return Machine(
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        cpu=_cpu(),
        num_cores=os.cpu_count() or 1,
        client_cores=sorted(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
        load_average=os.getloadavg(),
        triptych=__version__,
        commit=_commit(),
        packages={name: found for name in PACKAGES if (found := _version(name))},
        command=["triptych", *sys.argv[1:]],
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    """Empty where there is no git or no repository."""

    def git(*words: str) -> str:
        here = str(Path(__file__).parent)
        try:
            done = subprocess.run(("git", "-C", here, *words), capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "HEAD")
    return commit + "+" if commit and git("status", "--porcelain") else commit
