"""How near a result comes to what the processor can do: operations that were asked for, over the run's own GEMM rate.

For `triptych bench bound`. Knows the layout of Qwen3-VL's config.json. A product of [m, k] and [k, n] counts 2 m k n
operations; attention is causal in the language model and full in the tower.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from triptych.bench.metrics import median
from triptych.bench.results import Cell, Results
from triptych.errors import ConfigError

MARKERS = 2  # tokens around the embeds of an image
WEIGHT_BYTES = 2  # of a bfloat16


class ModelShape(NamedTuple):
    """The sizes of config.json that decide how much there is to compute."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    blocks: int  # of the vision tower
    vision_hidden: int
    vision_intermediate: int
    out_hidden: int
    patches_an_embed: int
    patch_inputs: int
    mergers: int

    @classmethod
    def read(cls, checkpoint: Path) -> ModelShape:
        """Raises ConfigError."""
        try:
            config = json.loads((checkpoint / "config.json").read_text())
            return cls._of(config["text_config"], config["vision_config"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{checkpoint}: not the shape of a Qwen3-VL checkpoint: {error!r}") from error

    @classmethod
    def _of(cls, text: dict[str, Any], vision: dict[str, Any]) -> ModelShape:
        return cls(
            layers=text["num_hidden_layers"],
            hidden=text["hidden_size"],
            heads=text["num_attention_heads"],
            kv_heads=text["num_key_value_heads"],
            head_dim=text["head_dim"],
            intermediate=text["intermediate_size"],
            vocab=text["vocab_size"],
            blocks=vision["depth"],
            vision_hidden=vision["hidden_size"],
            vision_intermediate=vision["intermediate_size"],
            out_hidden=vision["out_hidden_size"],
            patches_an_embed=vision["spatial_merge_size"] ** 2,
            patch_inputs=3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2,
            mergers=1 + len(vision["deepstack_visual_indexes"]),
        )

    @property
    def layer_weights(self) -> int:
        """Of one decoder layer's linear maps."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        return self.hidden * (attention + 3 * self.intermediate)

    @property
    def weights_a_token(self) -> int:
        """That a decode step reads: all layers and the head."""
        return self.layers * self.layer_weights + self.hidden * self.vocab

    def prompt_flops(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Every token but the last output passes through the layers, each output through the head."""
        n = num_prompt_tokens + num_output_tokens - 1
        attention = 4 * self.heads * self.head_dim * n * (n + 1) / 2
        head = 2 * num_output_tokens * self.hidden * self.vocab
        return self.layers * (2 * n * self.layer_weights + attention) + head

    def image_flops(self, num_embeds: int) -> float:
        n, hidden = num_embeds * self.patches_an_embed, self.vision_hidden
        block = 2 * n * hidden * (4 * hidden + 2 * self.vision_intermediate) + 4 * n * n * hidden
        wide = hidden * self.patches_an_embed
        merger = 2 * num_embeds * wide * (wide + self.out_hidden)
        return self.blocks * block + self.mergers * merger + 2 * n * self.patch_inputs * hidden


def cell_flops(shape: ModelShape, cell: Cell, text_tokens: int) -> float:
    """`text_tokens`: of a request with images, those around the images included, about; it tells embeds from text."""
    total = 0.0
    for record in cell.records:
        prompt, output = record.num_prompt_tokens or 0, record.num_output_tokens or 0
        if output:
            total += shape.prompt_flops(prompt, output)
        if record.num_images:
            num_embeds = round((prompt - text_tokens) / record.num_images) - MARKERS
            total += record.num_images * shape.image_flops(num_embeds)
    return total


def bounds(shape: ModelShape, results: Results, text_tokens: int) -> Iterator[str]:
    """A line each: the ceilings, and for every cell how much of the core-seconds the operations alone would take."""
    if not results.ceilings:
        raise ConfigError("the result has no ceilings: run it without --no-ceilings")
    gflops = median([ceiling.bf16_gflops for ceiling in results.ceilings])
    gb_per_s = median([ceiling.read_gb_per_s for ceiling in results.ceilings])
    yield f"a core: {gflops:.0f} GFLOP/s bf16, {gb_per_s:.1f} GB/s read; medians over the run"
    token_ms = shape.weights_a_token * WEIGHT_BYTES / gb_per_s / 1e6
    yield f"decode of one stream: at least {token_ms:.2f} ms a token"
    cells: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in results.cells:
        if cell.cpu_s and cell.records:
            cells.setdefault((cell.workload, cell.load.label, cell.system), []).append(cell)
    for (workload, load, system), rounds in cells.items():
        bound_s = median([cell_flops(shape, cell, text_tokens) / gflops / 1e9 / len(cell.records) for cell in rounds])
        spent_s = median([(cell.cpu_s or 0.0) / len(cell.records) for cell in rounds])
        share = f"{bound_s:.3f} of {spent_s:.3f} core-s a request: {bound_s / spent_s:.1%}"
        yield f"{workload:10} {load:6} {system:16} {share}"
