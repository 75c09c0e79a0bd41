"""Stage-only loading: which shards are opened, how much is read, and that what is loaded is what transformers loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from triptych.config import ModelConfig
from triptych.errors import ConfigError
from triptych.models import weights
from triptych.models.family import Part
from triptych.models.language import LanguageModel
from triptych.models.registry import ModelSpec, open_model
from triptych.models.weights import load_part, resolve_device
from triptych.testing_checkpoints import FamilyName, make_checkpoint

CPU = torch.device("cpu")
BOTH: list[FamilyName] = ["qwen3_vl", "qwen2_5_vl"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that are opened."""
    names: list[str] = []
    real = safe_open

    def recording(path: Path, **kwargs: Any) -> Any:
        names.append(path.name)
        return real(path, **kwargs)

    monkeypatch.setattr(weights, "safe_open", recording)
    return names


def _part_of(full_model: Any, part: Part) -> dict[str, torch.Tensor]:
    if part is Part.VISION:
        return dict(full_model.model.visual.state_dict())
    state = {f"model.{name}": tensor for name, tensor in full_model.model.language_model.state_dict().items()}
    return state | {"head.weight": full_model.lm_head.weight}


@pytest.mark.parametrize(
    ("part", "shards"),
    [
        (Part.VISION, ["model-00001-of-00003.safetensors"]),
        (Part.LANGUAGE, ["model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]),
    ],
)
def test_reads_only_the_shards_of_the_part(
    spec: ModelSpec, full_model: Any, opened: list[str], part: Part, shards: list[str]
) -> None:
    module, report = load_part(spec, part, CPU)
    expected = _part_of(full_model, part)
    state = module.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert opened == shards
    assert (report.shards_read, report.shards_total) == (len(shards), 3)
    assert report.bytes_read == sum(tensor.nbytes for tensor in expected.values())
    total = json.loads((spec.path / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert report.bytes_total == total
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_buffers_are_real_and_equal(spec: ModelSpec, full_model: Any) -> None:
    for part, whole in ((Part.VISION, full_model.model.visual), (Part.LANGUAGE, full_model.model.language_model)):
        module = load_part(spec, part, CPU).module
        module = module.model if isinstance(module, LanguageModel) else module
        buffers = dict(whole.named_buffers())
        assert buffers
        for name, buffer in module.named_buffers():
            assert torch.equal(buffer, buffers[name]), name


def test_parts_share_nothing_and_make_the_whole(spec: ModelSpec) -> None:
    reports = [load_part(spec, part, CPU).report for part in Part]
    assert sum(report.bytes_read for report in reports) == reports[0].bytes_total


@pytest.mark.parametrize("family", BOTH)
@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("shards", [1, 4])
def test_names_and_shards(tmp_path: Path, family: FamilyName, legacy: bool, shards: int) -> None:
    folder = make_checkpoint(family, tmp_path, shards=shards, legacy_names=legacy)
    spec = open_model(str(folder), ModelConfig(), parts=list(Part))
    reports = [load_part(spec, part, CPU).report for part in Part]
    assert [report.shards_total for report in reports] == [shards, shards]
    assert [report.shards_read for report in reports] == ([1, 1] if shards == 1 else [1, shards - 1])


@pytest.mark.parametrize("family", BOTH)
def test_a_tied_head_is_the_embedding(tmp_path: Path, family: FamilyName) -> None:
    folder = make_checkpoint(family, tmp_path, tied=True)
    language = load_part(open_model(str(folder), ModelConfig()), Part.LANGUAGE, CPU).module
    assert isinstance(language, LanguageModel)
    assert [name for name, _ in language.named_children()] == ["model"]
    hidden = torch.randn(3, 64)
    expected = hidden @ language.embedding.weight.T
    torch.testing.assert_close(language.logits(hidden), expected)
    language.untie_head()
    assert isinstance(language.head, nn.Linear)
    torch.testing.assert_close(language.logits(hidden), expected)


def test_other_dtype_is_converted(folder: Path) -> None:
    spec = open_model(str(folder), ModelConfig(dtype="bfloat16"))
    for part in Part:
        module = load_part(spec, part, CPU).module
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}


def test_progress_ends_at_the_bytes_read(spec: ModelSpec) -> None:
    calls: list[tuple[int, int]] = []
    report = load_part(spec, Part.LANGUAGE, CPU, progress=lambda done, total: calls.append((done, total))).report
    assert calls == sorted(calls)
    assert {total for _, total in calls} == {report.bytes_read}
    assert calls[-1][0] == report.bytes_read


def test_other_modules_are_built_as_ever_afterwards(spec: ModelSpec) -> None:
    load_part(spec, Part.VISION, CPU)
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def _spoilt(folder: Path, old: str, new: str | None, change: Any = None) -> ModelSpec:
    """Rename, drop or change one tensor of the single shard."""
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop(old)
    if new is not None:
        tensors[new] = tensor if change is None else change(tensor)
    save_file(tensors, folder / "model.safetensors")
    return open_model(str(folder), ModelConfig())


@pytest.mark.parametrize("family", BOTH)
def test_missing_unknown_and_misshapen_weights(tmp_path: Path, family: FamilyName) -> None:
    folder = make_checkpoint(family, tmp_path, shards=1, legacy_names=False)
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    spec = _spoilt(folder, name, None)
    with pytest.raises(ConfigError, match=r"lacks 1 weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_part(spec, Part.LANGUAGE, CPU)
    norm = "model.language_model.norm.weight"
    spec = _spoilt(folder, norm, norm, lambda tensor: tensor[:5].clone())
    with pytest.raises(ConfigError, match="size mismatch"):
        load_part(spec, Part.LANGUAGE, CPU)
    bias = "model.visual.blocks.0.attn.qkv.bias"
    spec = _spoilt(folder, bias, bias + "2", lambda tensor: tensor.clone())
    with pytest.raises(ConfigError, match="lacks 1 weights"):
        load_part(spec, Part.VISION, CPU)
    with pytest.raises(ConfigError, match="is not a weight of"):
        _spoilt(folder, norm, "audio.weight")


def test_a_file_that_is_no_safetensors(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_vl", tmp_path)
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ConfigError):
        load_part(open_model(str(folder), ModelConfig()), Part.VISION, CPU)


def test_devices() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for device in ("tpu", "mps", f"cuda:{torch.cuda.device_count() + 1}"):
        with pytest.raises(ConfigError):
            resolve_device(device)
