"""From a folder to a spec, and every way in which a checkpoint may not fit; without torch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triptych.config import ModelConfig
from triptych.errors import ConfigError
from triptych.models.family import Part
from triptych.models.registry import FAMILIES, ModelSpec, open_model
from triptych.testing_checkpoints import FamilyName, make_checkpoint


def _edit(folder: Path, name: str, **changes: Any) -> None:
    content = json.loads((folder / name).read_text())
    content.update(changes)
    (folder / name).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.fixture(params=["qwen3_vl", "qwen2_5_vl"])
def own_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkpoint(request.param, tmp_path / "model")


def test_opens_a_model_and_the_demo_without_torch(folder: Path) -> None:
    program = (
        "import sys; from triptych.config import ModelConfig; from triptych.models.registry import open_model\n"
        f"for path in ('demo', {str(folder)!r}): open_model(path, ModelConfig())\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_sizes(spec: ModelSpec, full_model: Any) -> None:
    text, vision, config = spec.family.text, spec.family.vision, full_model.config
    attention = full_model.model.language_model.layers[0].self_attn
    assert text.num_layers == config.text_config.num_hidden_layers
    assert text.num_kv_heads == config.text_config.num_key_value_heads
    assert text.head_dim == attention.head_dim
    assert (text.hidden, text.vocab) == tuple(reversed(full_model.get_input_embeddings().weight.shape))
    assert text.eos_token_ids == tuple(full_model.generation_config.eos_token_id)
    assert vision.num_layers == config.vision_config.depth
    assert spec.embed_width == text.hidden * (1 + vision.num_deepstack)
    assert spec.kv_block_bytes(16) == text.num_layers * 2 * text.num_kv_heads * 16 * text.head_dim * 4
    assert spec.max_model_len == text.max_positions


def test_placeholder_is_one_token_of_the_tokenizer(spec: ModelSpec) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(spec.path / "tokenizer.json"))
    assert tokenizer.encode(spec.family.placeholder_text).ids == [spec.family.placeholder_token_id]


def test_the_demo() -> None:
    spec = open_model("demo", ModelConfig(), parts=list(Part))
    assert (spec.served_name, spec.dtype, spec.family.model_type) == ("demo", "bfloat16", "qwen3_vl")
    assert open_model("demo", ModelConfig(dtype="float32")).fingerprint != spec.fingerprint


def test_settings_of_the_configuration(folder: Path) -> None:
    assert open_model(str(folder), ModelConfig()).served_name == folder.name
    spec = open_model(str(folder), ModelConfig(served_name="mine", dtype="bfloat16", max_model_len=100))
    assert (spec.served_name, spec.dtype, spec.max_model_len, spec.item_bytes) == ("mine", "bfloat16", 100, 2)
    with pytest.raises(ConfigError, match="more than the model's"):
        open_model(str(folder), ModelConfig(max_model_len=10_000))


def test_fingerprint_follows_settings_and_weights(own_folder: Path) -> None:
    def fingerprint() -> str:
        return open_model(str(own_folder), ModelConfig()).fingerprint

    prints = [fingerprint()]
    assert prints[0] == fingerprint()
    assert len(prints[0]) == 64
    _edit(own_folder, "preprocessor_config.json", image_mean=[0.4, 0.5, 0.5])
    prints.append(fingerprint())
    shard = own_folder / "model-00001-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    prints.append(fingerprint())
    assert len(set(prints)) == 3


def test_missing_folder_and_files(own_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        open_model(str(tmp_path / "nowhere"), ModelConfig())
    (own_folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match="missing model-00002"):
        open_model(str(own_folder), ModelConfig())
    (own_folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_model(str(own_folder), ModelConfig())
    (own_folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_model(str(own_folder), ModelConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, r"'gpt2' is not one of qwen2_5_vl, qwen3_vl"),
        ({"vision_config": None}, "vision_config"),
        ({"dtype": "float16"}, "choose bfloat16 or float32"),
    ],
)
def test_configs_that_cannot_be_served(own_folder: Path, changes: dict[str, Any], message: str) -> None:
    _edit(own_folder, "config.json", **changes)
    with pytest.raises(ConfigError, match=message):
        open_model(str(own_folder), ModelConfig())


def test_processor_and_model_must_agree(own_folder: Path) -> None:
    _edit(own_folder, "preprocessor_config.json", patch_size=8)
    with pytest.raises(ConfigError, match="patch_size is"):
        open_model(str(own_folder), ModelConfig())


def test_a_part_without_weights_is_refused(own_folder: Path) -> None:
    index = own_folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {name: file for name, file in content["weight_map"].items() if "visual" not in name}
    index.write_text(json.dumps(content))
    open_model(str(own_folder), ModelConfig(), parts=[Part.LANGUAGE])
    with pytest.raises(ConfigError, match="no vision weights"):
        open_model(str(own_folder), ModelConfig(), parts=[Part.VISION])


def test_sliding_windows_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2_5_vl", tmp_path)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    _edit(folder, "config.json", text_config=text | {"use_sliding_window": True})
    with pytest.raises(ConfigError, match="use_sliding_window"):
        open_model(str(folder), ModelConfig())


def test_a_flat_config_as_published(tmp_path: Path) -> None:
    """Published Qwen2.5-VL configs hold the text model's settings at the top."""
    folder = make_checkpoint("qwen2_5_vl", tmp_path)
    nested = open_model(str(folder), ModelConfig())
    text = json.loads((folder / "config.json").read_text())["text_config"]
    text.pop("model_type")
    _edit(folder, "config.json", text_config=None, **{k: v for k, v in text.items() if v is not None})
    assert open_model(str(folder), ModelConfig()).family.text == nested.family.text


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_every_family_names_itself(family: FamilyName) -> None:
    assert FAMILIES[family].model_type == family
