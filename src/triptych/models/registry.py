"""From a path and the model settings to a `ModelSpec`: which family, which sizes, which dtype. Imports no torch.

The router and every worker open the model by it; a third family is one more file and one more line here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from triptych import demo
from triptych.config import ModelConfig
from triptych.errors import ConfigError
from triptych.models.checkpoint import Checkpoint
from triptych.models.family import Family, Part
from triptych.models.qwen2_5_vl import Qwen2_5VL
from triptych.models.qwen3_vl import Qwen3VL

FAMILIES: dict[str, type[Family]] = {family.model_type: family for family in (Qwen3VL, Qwen2_5VL)}

_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class ModelSpec:
    """A model that is known and not yet loaded."""

    path: Path
    served_name: str
    family: Family
    dtype: str  # of weights, KV and embeddings: "bfloat16" or "float32"
    device: str  # as configured: 'auto' is resolved by `models/weights.py` in the worker
    max_model_len: int  # prompt + output, in tokens
    kernels: str  # as configured: "auto", "native" or "torch"

    @property
    def fingerprint(self) -> str:
        """64 hex digits: equal for two workers only if their embeddings of an item are interchangeable."""
        return sha256(f"{self.family.checkpoint.fingerprint}:{self.dtype}".encode()).hexdigest()

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def embed_width(self) -> int:
        return self.family.embed_width

    def kv_block_shape(self, block_size: int) -> tuple[int, int, int, int, int]:
        """[layers, keys and values, KV heads, block_size, head_dim]: one KV block, contiguous."""
        text = self.family.text
        return (text.num_layers, 2, text.num_kv_heads, block_size, text.head_dim)

    def kv_block_bytes(self, block_size: int) -> int:
        num_elements = 1
        for size in self.kv_block_shape(block_size):
            num_elements *= size
        return num_elements * self.item_bytes


def open_model(path: str, config: ModelConfig, parts: Collection[Part] = ()) -> ModelSpec:
    """The model at `path`, or the demo's. Raises ConfigError if it cannot be served or lacks one of `parts`."""
    folder = demo.checkpoint_path() if path == "demo" else Path(path).expanduser()
    checkpoint = Checkpoint(folder)
    model_type = checkpoint.config.get("model_type")
    family_class = FAMILIES.get(str(model_type))
    if family_class is None:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"checkpoint {folder}: model_type {model_type!r} is not one of {known}", param="model.path")
    family = family_class(checkpoint)
    _check_parts(family, parts)
    return ModelSpec(
        path=folder,
        served_name=config.served_name or ("demo" if path == "demo" else folder.resolve().name),
        family=family,
        dtype=_dtype(checkpoint) if config.dtype == "auto" else config.dtype,
        device=config.device,
        max_model_len=_max_model_len(config.max_model_len, family),
        kernels=config.kernels,
    )


def _check_parts(family: Family, parts: Collection[Part]) -> None:
    located = [family.locate(name) for name in family.checkpoint.weight_map]
    held = {where.part for where in located if where is not None}
    for part in parts:
        if part not in held:
            raise ConfigError(f"checkpoint {family.checkpoint.path} has no {part} weights", param="model.path")
    _ = family.checkpoint.shards  # all of them must be there


def _dtype(checkpoint: Checkpoint) -> str:
    config = checkpoint.config
    text = config.get("text_config") or {}
    for settings in (config, text):
        dtype = settings.get("dtype") or settings.get("torch_dtype")
        if dtype in _ITEM_BYTES:
            return str(dtype)
        if dtype:
            raise ConfigError(
                f"checkpoint {checkpoint.path} has dtype {dtype}; choose bfloat16 or float32", param="model.dtype"
            )
    return "float32"


def _max_model_len(configured: int, family: Family) -> int:
    limit = family.text.max_positions
    if configured > limit:
        raise ConfigError(f"max_model_len {configured} is more than the model's {limit}", param="model.max_model_len")
    return configured or limit
