"""Measures what one core can do at most, with torch alone; run as a script, by path, by `ceilings.py`.

Prints one JSON object: the best GEMM rate in bfloat16 and float32 over shapes and over `F.linear` and oneDNN's packed
weights, and the best streaming read over several reductions of 256 MiB.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

SHAPES = ((512, 1024, 3072), (576, 768, 3072), (1024, 2048, 2048))  # rows, inputs, outputs
REPEATS = 7
READ_FLOATS = 64 << 20


def best_s(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few runs, after one unmeasured."""
    work()
    times = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_s)
    return min(times)


def gflops(dtype: torch.dtype) -> float:
    best = 0.0
    for rows, inputs, outputs in SHAPES:
        x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
        amount = 2 * rows * inputs * outputs / 1e9

        def plain(x: torch.Tensor = x, weight: torch.Tensor = weight) -> object:
            return F.linear(x, weight)

        best = max(best, amount / best_s(plain))
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

            def prepacked(x: torch.Tensor = x, packed: torch.Tensor = packed) -> object:
                return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

            best = max(best, amount / best_s(prepacked))
        except (AttributeError, NotImplementedError, RuntimeError):  # a torch without oneDNN, or another signature
            continue
    return best


def read_gb_per_s() -> float:
    floats = torch.ones(READ_FLOATS)
    words = floats.view(torch.int64)
    fastest = min(best_s(floats.sum), best_s(words.sum), best_s(floats.amax))
    return floats.numel() * floats.element_size() / fastest / 1e9


def main() -> None:
    torch.set_num_threads(1)
    with torch.inference_mode():
        found = {
            "bf16_gflops": gflops(torch.bfloat16),
            "fp32_gflops": gflops(torch.float32),
            "read_gb_per_s": read_gb_per_s(),
            "torch": torch.__version__,
        }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
