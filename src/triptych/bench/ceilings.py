"""What a core of this machine can do at most, measured in the same run as the systems: GEMM rate and streaming read.

A short subprocess a core, pinned, one thread, while every system is idle; called by `compare.py` before each round and
after the last.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from triptych.bench.metrics import median
from triptych.errors import ConfigError

PROBE = Path(__file__).with_name("ceiling_probe.py")
TIMEOUT_S = 120.0


class Ceiling(msgspec.Struct, frozen=True):
    """Of one core at one time."""

    core: int
    bf16_gflops: float
    fp32_gflops: float
    read_gb_per_s: float
    torch: str = ""


class CeilingSummary(msgspec.Struct, frozen=True):
    """Median and best over cores and times. The best is nearest to the truth on a machine that others use too."""

    bf16_gflops: tuple[float, float]
    fp32_gflops: tuple[float, float]
    read_gb_per_s: tuple[float, float]


async def measure(core: int, python: str = sys.executable) -> Ceiling:
    """Some seconds. `python` is one that has torch. Raises ConfigError with what it said if it cannot."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}
    command = ("taskset", "-c", str(core), python, "-I", str(PROBE))
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*command, env=env, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise ConfigError(f"ceilings: {' '.join(command)}: {error}") from None
    try:
        out, err = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise ConfigError(f"ceilings: {' '.join(command)} failed: {err.decode(errors='replace').strip()[-300:]}")
    try:
        return msgspec.convert({"core": core, **msgspec.json.decode(out)}, Ceiling)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"ceilings: {' '.join(command)}: {error}") from None


def summarize(ceilings: Sequence[Ceiling]) -> CeilingSummary | None:
    if not ceilings:
        return None

    def both(values: list[float]) -> tuple[float, float]:
        return median(values), max(values)

    return CeilingSummary(
        both([ceiling.bf16_gflops for ceiling in ceilings]),
        both([ceiling.fp32_gflops for ceiling in ceilings]),
        both([ceiling.read_gb_per_s for ceiling in ceilings]),
    )
