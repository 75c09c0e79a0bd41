"""How near a result comes to what the processor can do: `bound.py CHECKPOINT RESULT.json`.

For each cell of a `triptych bench` result: the floating-point operations that its requests ask for, over the GEMM rate
of one core in the same run (the median of its ceilings), over the core-seconds that the system spent. And for decode of
one stream: the bytes of weights that a token reads, over the measured bandwidth, over the time of a token.
Counts Qwen3-VL checkpoints; a product of [m, k] and [k, n] is 2 m k n operations.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from triptych.bench.results import Cell, Results, read

MARKERS = 2  # tokens around the embeds of an image
BYTES = 2  # of a bfloat16


class Model(NamedTuple):
    text: dict[str, Any]
    vision: dict[str, Any]

    @property
    def layer_weights(self) -> int:
        """Of one decoder layer's linear maps."""
        t = self.text
        heads, kv_heads, dim = t["num_attention_heads"], t["num_key_value_heads"], t["head_dim"]
        hidden: int = t["hidden_size"]
        return hidden * (2 * heads + 2 * kv_heads) * dim + 3 * hidden * int(t["intermediate_size"])

    @property
    def weights_a_token(self) -> int:
        """That decode reads: all layers and the head."""
        return int(self.text["num_hidden_layers"]) * self.layer_weights + self._head

    @property
    def _head(self) -> int:
        return int(self.text["hidden_size"]) * int(self.text["vocab_size"])

    def prompt_flops(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Every token but the last output passes through the layers; each output through the head."""
        t, n = self.text, num_prompt_tokens + num_output_tokens - 1
        attention = 4 * t["num_attention_heads"] * t["head_dim"] * n * (n + 1) / 2
        return float(t["num_hidden_layers"] * (2 * n * self.layer_weights + attention) + 2 * num_output_tokens * self._head)

    def image_flops(self, num_embeds: int) -> float:
        v = self.vision
        merge: int = v["spatial_merge_size"] ** 2
        n, hidden = num_embeds * merge, v["hidden_size"]
        block = 2 * n * (4 * hidden**2 + 2 * hidden * v["intermediate_size"]) + 4 * n * n * hidden
        wide = hidden * merge
        merger = 2 * num_embeds * (wide * wide + wide * v["out_hidden_size"])
        patches = 2 * n * 3 * v["temporal_patch_size"] * v["patch_size"] ** 2 * hidden
        return float(v["depth"] * block + (1 + len(v["deepstack_visual_indexes"])) * merger + patches)


def cell_flops(model: Model, cell: Cell, text_tokens: int) -> float:
    total = 0.0
    for record in cell.records:
        prompt, output = record.num_prompt_tokens or 0, record.num_output_tokens or 0
        total += model.prompt_flops(prompt, output)
        if record.num_images:
            embeds = round((prompt - text_tokens) / record.num_images) - MARKERS
            total += record.num_images * model.image_flops(embeds)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--text-tokens", type=int, default=37, help="of a request with images, the template's included")
    args = parser.parse_args()
    config = json.loads((args.checkpoint / "config.json").read_text())
    model = Model(config["text_config"], config["vision_config"])
    results = read(args.result)
    gflops = median(c.bf16_gflops for c in results.ceilings)
    gb_per_s = median(c.read_gb_per_s for c in results.ceilings)
    print(f"a core: {gflops:.0f} GFLOP/s bf16, {gb_per_s:.1f} GB/s read; medians over the run")
    print(f"decode of one stream: at least {model.weights_a_token * BYTES / gb_per_s / 1e6:.2f} ms a token")
    _print_cells(model, results, gflops, gb_per_s, args.text_tokens)
    return 0


def _print_cells(model: Model, results: Results, gflops: float, gb_per_s: float, text_tokens: int) -> None:
    spent: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for cell in results.cells:
        if cell.cpu_s is not None and cell.records:
            n = len(cell.records)
            bound_s = cell_flops(model, cell, text_tokens) / gflops / 1e9 / n
            spent.setdefault((cell.workload, cell.load.label, cell.system), []).append((bound_s, cell.cpu_s / n))
    for (workload, load_label, system), pairs in spent.items():
        bound_s, cpu_s = median(b for b, _ in pairs), median(c for _, c in pairs)
        share = median(b / c for b, c in pairs)
        print(f"{workload:10} {load_label:6} {system:16} bound {bound_s:.3f} core-s, spent {cpu_s:.3f}: {share:.1%}")


if __name__ == "__main__":
    raise SystemExit(main())
