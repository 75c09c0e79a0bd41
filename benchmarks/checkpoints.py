"""Random-weight Qwen3-VL checkpoints for comparisons: `python benchmarks/checkpoints.py mid|2b OUT_DIR`.

Standard Hugging Face layout in bf16, complete enough for Triptych and for peers that load a whole processor. Weights
come from a fixed seed, one tensor after the other, so that the 2B one needs no more memory than its largest shard. The
vocabulary is trained on the standard library of the Python that runs this: another Python gives slightly other merges.
Rows of the tied head that are not visible ASCII text are zero, so each greedy token is text that a client sees.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from triptych.testing_checkpoints import _CHAT_TEMPLATE as CHAT_TEMPLATE
from triptych.testing_checkpoints import _PATTERN as QWEN2_PATTERN

TOKENS = 32_768  # of the tokenizer, special ones included; the last ids
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
EMBEDDING = "model.language_model.embed_tokens.weight"
QK_NORM = 1.5  # around 1, attention is a plain mean and every picture gives the same token; at 2, bf16 noise shows
EMBEDDING_STD = 0.05  # small: with a tied head a token's own embedding votes for that token again

# `mid` is ours; `2b` has the published shape of Qwen3-VL-2B-Instruct.
SHAPES: dict[str, dict[str, Any]] = {
    "mid": {
        "shards": 9,
        "text": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16, "vocab_size": TOKENS},
        "vision": {"hidden_size": 768, "intermediate_size": 3072, "depth": 12, "num_heads": 12},
        "deepstack": [3, 6, 9],
        "positions": 32_768,
    },
    "2b": {
        "shards": 12,
        "text": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151_936},
        "vision": {"hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "num_heads": 16},
        "deepstack": [5, 11, 17],
        "positions": 262_144,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    count = write_checkpoint(args.shape, args.out_dir, seed=args.seed)
    print(f"{args.out_dir}: {count / 1e6:.1f} M parameters in {time.monotonic() - started:.0f} s")


def write_checkpoint(shape: str, path: Path, *, seed: int = 0) -> int:
    """Write a checkpoint of one of SHAPES to the folder `path`; return how many parameters it has."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    config = model_config(shape, tokenizer)
    config.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_settings(path, tokenizer, config)
    return _write_weights(path, config, tokenizer, SHAPES[shape]["shards"], seed)


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE of TOKENS entries with Qwen2's pre-tokenizer, trained on the standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_standard_library(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if tokenizer.get_vocab_size() != TOKENS:
        raise SystemExit(f"the standard library gave {tokenizer.get_vocab_size()} tokens, not {TOKENS}")
    return tokenizer


def _standard_library() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if not {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(file.parts):
            yield file.read_text(errors="ignore")


def model_config(shape: str, tokenizer: Tokenizer) -> Any:
    sizes = SHAPES[shape]
    ids: dict[str, Any] = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    text = sizes["text"] | {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": sizes["positions"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5_000_000,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "dtype": "bfloat16",
    }
    vision = sizes["vision"] | {
        "out_hidden_size": sizes["text"]["hidden_size"],
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": sizes["deepstack"],
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        architectures=["Qwen3VLForConditionalGeneration"],
        dtype="bfloat16",
    )


def _write_settings(path: Path, tokenizer: Tokenizer, config: Any) -> None:
    """What processors and servers read beside the weights.

    The pixel limits allow 2048 embeds an image: the published ones allow 16384, and vLLM would try an image of that
    size at its start, for many minutes on a core.
    """
    patches: dict[str, Any] = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    patches |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    image = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor"}
    video = {"video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor"}
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    files: dict[str, dict[str, Any]] = {
        "preprocessor_config.json": image | patches | {"size": {"shortest_edge": 65_536, "longest_edge": 2_097_152}},
        "video_preprocessor_config.json": video
        | patches
        | {"size": {"shortest_edge": 4_096, "longest_edge": 25_165_824}},
        "generation_config.json": {"eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "processor_class": "Qwen3VLProcessor",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": SPECIAL_TOKENS[1:],
            "model_max_length": config.text_config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n")


def _write_weights(path: Path, config: Any, tokenizer: Tokenizer, shards: int, seed: int) -> int:
    """Write the shards, the vision tower alone in the first, and the index; return the number of parameters."""
    with torch.device("meta"):  # names and shapes only
        shapes = {name: tensor.shape for name, tensor in Qwen3VLForConditionalGeneration(config).state_dict().items()}
    del shapes["lm_head.weight"]  # tied
    tower = [name for name in shapes if ".visual." in name]
    language = [name for name in shapes if ".visual." not in name]
    groups = [tower, *_split(language, shapes, shards - 1)]
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {name: _random_tensor(name, shapes[name], generator) for name in names}
        if EMBEDDING in tensors:
            tensors[EMBEDDING][~_visible(tokenizer, len(tensors[EMBEDDING]))] = 0.0
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    count = sum(int(shape.numel()) for shape in shapes.values())
    index = {"metadata": {"total_size": 2 * count}, "weight_map": dict(sorted(weight_map.items()))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return count


def _split(names: list[str], shapes: dict[str, torch.Size], count: int) -> list[list[str]]:
    """`names` in their order as `count` groups of about equal size in bytes."""
    total = sum(shapes[name].numel() for name in names)
    groups: list[list[str]] = [[] for _ in range(count)]
    before = 0
    for name in names:
        groups[before * count // total].append(name)
        before += shapes[name].numel()
    return [group for group in groups if group]


def _random_tensor(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Norms around 1, biases around 0; a matrix's outputs have about the size of its inputs, whatever their number."""
    values = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        values *= EMBEDDING_STD if name == EMBEDDING else 1.3 * shape[1:].numel() ** -0.5
    elif name.endswith(".bias"):
        values *= 0.1
    else:
        values = (values * 0.1 + 1.0) * (QK_NORM if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0)
    return values.to(torch.bfloat16)


def _visible(tokenizer: Tokenizer, rows: int) -> torch.Tensor:
    """For each of `rows` ids: does the token alone decode to visible ASCII text?"""
    visible = torch.zeros(rows, dtype=torch.bool)
    for token_id in range(TOKENS - len(SPECIAL_TOKENS)):
        text = tokenizer.decode([token_id])
        visible[token_id] = text.isascii() and text.strip(" ").isprintable() and bool(text.strip())
    return visible


if __name__ == "__main__":
    main()
