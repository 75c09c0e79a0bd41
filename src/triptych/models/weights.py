"""Loads one part of a checkpoint: only the shards that hold it, memory-mapped, into modules of transformers.

Runs in workers, at start. On a CPU, weights of the checkpoint's dtype stay views of the file: nothing is copied, and
workers of one host share the pages.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from triptych.errors import ConfigError
from triptych.models.family import Part
from triptych.models.language import LanguageModel
from triptych.models.registry import ModelSpec
from triptych.types import WeightsReport

Progress = Callable[[int, int], None]  # bytes done, bytes in all, of this part


class LoadedPart(NamedTuple):
    module: nn.Module
    report: WeightsReport


def resolve_device(device: str) -> torch.device:
    """'auto' is CUDA where there is one. Raises ConfigError for a device that this machine lacks."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r}: {error}", param="model.device") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is neither cpu nor cuda", param="model.device")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {device!r}: this machine has {torch.cuda.device_count()}", param="model.device")
    return resolved


def torch_dtype(spec: ModelSpec) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, spec.dtype))


def load_part(
    spec: ModelSpec,
    part: Part,
    device: torch.device,
    attention: str = "sdpa",
    progress: Progress | None = None,
) -> LoadedPart:
    """The part's module in eval mode on `device`. `attention` is a name that transformers knows.

    Raises ConfigError if a weight is missing, is not one of the module's, or has another shape.
    """
    started_s = time.monotonic()
    module = build_part(spec, part, attention)
    names_of = _names_by_shard(spec, part)
    tensors, bytes_read = _read(spec, names_of, device, progress)
    _assign(spec, module, tensors)
    module.to(device)  # the buffers; the weights are there already
    checkpoint = spec.family.checkpoint
    report = WeightsReport(
        shards_read=len(names_of),
        shards_total=len(checkpoint.shards),
        bytes_read=bytes_read,
        bytes_total=checkpoint.total_bytes,
        load_s=time.monotonic() - started_s,
    )
    return LoadedPart(module.requires_grad_(False).eval(), report)


def build_part(spec: ModelSpec, part: Part, attention: str) -> nn.Module:
    """The part's module with weights on the meta device and real buffers."""
    family = spec.family
    config = _import(family.config_class).from_pretrained(spec.path)
    options = {"attn_implementation": attention, "dtype": torch_dtype(spec)}
    with _weights_on_meta():
        if part is Part.VISION:
            return cast(nn.Module, _import(family.vision_class)._from_config(config.vision_config, **options))
        model = _import(family.language_class)._from_config(config.text_config, **options)
        return LanguageModel(model, tied=family.text.tied)


def _import(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


@contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Parameters that are made inside take no memory and no time; buffers are made as ever."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _names_by_shard(spec: ModelSpec, part: Part) -> dict[str, dict[str, str]]:
    """For each shard that holds some of the part: names on disk to names in the module."""
    names: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for name, shard in spec.family.checkpoint.weight_map.items():
        located = spec.family.locate(name)
        if located is not None and located.part is part:
            names[shard][name] = located.name
    if not names:
        raise ConfigError(f"checkpoint {spec.path} has no {part} weights", param="model.path")
    return dict(sorted(names.items()))


def _read(
    spec: ModelSpec, names_of: dict[str, dict[str, str]], device: torch.device, progress: Progress | None
) -> tuple[dict[str, torch.Tensor], int]:
    """Tensors by module name, and the bytes that they take in the file."""
    dtype, tensors, done = torch_dtype(spec), {}, 0
    try:
        shards: list[Any] = [safe_open(spec.path / name, framework="pt") for name in names_of]
        total = sum(_num_bytes(shard, names) for shard, names in zip(shards, names_of.values(), strict=True))
        for shard, names in zip(shards, names_of.values(), strict=True):
            for name, module_name in names.items():
                tensor = shard.get_tensor(name)
                done += tensor.nbytes
                tensors[module_name] = tensor.to(device=device, dtype=dtype)  # itself where nothing changes
                if progress is not None:
                    progress(done, total)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"checkpoint {spec.path}: {error}", param="model.path") from error
    return tensors, done


_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def _num_bytes(shard: Any, names: dict[str, str]) -> int:
    total = 0
    for name in names:
        tensor = shard.get_slice(name)
        num_bytes = _ELEMENT_BYTES.get(tensor.get_dtype())
        if num_bytes is None:
            raise ConfigError(f"weight {name} has the dtype {tensor.get_dtype()}, which is not supported")
        for size in tensor.get_shape():
            num_bytes *= size
        total += num_bytes
    return total


def _assign(spec: ModelSpec, module: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    try:
        missing, unexpected = module.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:  # shapes that differ
        raise ConfigError(f"checkpoint {spec.path}: {error}", param="model.path") from error
    for what, names in (("lacks", missing), ("has unknown", unexpected)):
        if names:
            listed = ", ".join(sorted(names)[:5])
            raise ConfigError(f"checkpoint {spec.path} {what} {len(names)} weights: {listed}", param="model.path")
