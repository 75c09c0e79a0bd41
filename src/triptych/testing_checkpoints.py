"""Tiny random checkpoints of each family, on disk in the standard layout, for tests and for trying things out.

Their weights are larger than a fresh model's, so that outputs depend on images and positions and do not collapse into
one token. Made in less than a second; not part of a running server.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

FamilyName = Literal["qwen3_vl", "qwen2_5_vl"]

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
VOCAB = 320  # 256 bytes, merges, special tokens last

_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEXT = ["What is in the picture? Describe the image, then say what the user wants.", "system user assistant image"]
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or part.type == 'image_url' or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
_TEXT_CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
}
_PATCH_SIZE = {"qwen3_vl": 16, "qwen2_5_vl": 14}
_LEGACY_NAMES = (  # as the published Qwen2.5-VL checkpoints have them
    (re.compile(r"^model\.language_model\."), "model."),
    (re.compile(r"^model\.visual\."), "visual."),
)


def make_checkpoint(
    family: FamilyName,
    path: Path,
    *,
    shards: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool = False,
    legacy_names: bool | None = None,
) -> Path:
    """Write a checkpoint to the folder `path` and return it.

    With several shards the first holds the vision tower alone; one shard is a single file without an index. With a
    `tied` head the outputs repeat themselves more. Qwen2.5-VL's weights have their published, older names unless told
    otherwise.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    model = _model(family, tokenizer, seed, dtype, tied)
    model.config.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    _write_settings(family, path, tokenizer)
    legacy = family == "qwen2_5_vl" if legacy_names is None else legacy_names
    weights = {_on_disk(name, legacy): tensor.contiguous() for name, tensor in model.state_dict().items()}
    if tied:
        del weights["lm_head.weight"]
    _write_weights(path, weights, shards)
    return path


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _model(family: FamilyName, tokenizer: Tokenizer, seed: int, dtype: torch.dtype, tied: bool) -> Any:
    config_class, model_class = _classes(family)
    ids = {token: int(tokenizer.token_to_id(token) or 0) for token in SPECIAL_TOKENS}
    config = config_class(
        text_config=_text_config(family, ids),
        vision_config=_vision_config(family),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=tied,
        architectures=[model_class.__name__],
        dtype=str(dtype).removeprefix("torch."),
    )
    model = model_class(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # each output has about the size of an input, whatever their number
            std = 1.3 * parameter[0].numel() ** -0.5
            parameter.data.normal_(0.0, std, generator=generator)
        else:  # norms around 1, biases around 0
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    std = 0.05 if tied else 1.0  # of a tied one small: a token's own embedding would vote for that token again
    model.get_input_embeddings().weight.data.normal_(0.0, std, generator=generator)
    return model.to(dtype).eval()


def _classes(family: FamilyName) -> tuple[Any, Any]:
    if family == "qwen3_vl":
        from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

        return Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration


def _text_config(family: FamilyName, ids: dict[str, int]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    if family == "qwen3_vl":
        rope["mrope_interleaved"] = True
    text = {**_TEXT_CONFIG, "rope_parameters": rope}
    text |= {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    return text | ({"head_dim": 16} if family == "qwen3_vl" else {})


def _vision_config(family: FamilyName) -> dict[str, Any]:
    vision: dict[str, Any] = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "depth": 3}
    vision |= {"out_hidden_size": 64, "patch_size": _PATCH_SIZE[family]}
    if family == "qwen3_vl":
        return vision | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return vision | {"window_size": 4 * _PATCH_SIZE[family], "fullatt_block_indexes": [1]}


def _write_settings(family: FamilyName, path: Path, tokenizer: Tokenizer) -> None:
    factor = 2 * _PATCH_SIZE[family]
    preprocessor: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": _PATCH_SIZE[family],
        "temporal_patch_size": 2,
        "merge_size": 2,
    }
    if family == "qwen3_vl":
        preprocessor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        preprocessor["size"] = {"shortest_edge": 4 * factor**2, "longest_edge": 64 * factor**2}
    else:
        preprocessor |= {"min_pixels": 4 * factor**2, "max_pixels": 64 * factor**2}
    end = tokenizer.token_to_id("<|im_end|>")
    pad = tokenizer.token_to_id("<|endoftext|>")
    files = {
        "preprocessor_config.json": preprocessor,
        "generation_config.json": {"eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 2048,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n")


def _on_disk(name: str, legacy: bool) -> str:
    for pattern, prefix in _LEGACY_NAMES if legacy else ():
        name = pattern.sub(prefix, name)
    return name


def _write_weights(path: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    tower = [name for name in weights if "visual." in name]
    rest = [name for name in weights if "visual." not in name]
    count = shards - 1
    groups = [tower, *(rest[len(rest) * i // count : len(rest) * (i + 1) // count] for i in range(count))]
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_file({name: weights[name] for name in names}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
