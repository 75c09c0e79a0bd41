"""Checkpoint folders with real tokenizers: the demo checkpoint's, a tiny byte-level and a sentencepiece-like one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from triptych.prompt.layout import PromptBuilder
from triptych.types import Grid, ImageSize, ItemMetadata, MediaItem, Modality, PixelLimits

DEMO = Path(__file__).parents[2] / "src" / "triptych" / "demo" / "checkpoint"
CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is on page 3? It's a red circle, isn't it?",
    "im_start im_end image_pad vision_start <| |> user assistant system tool picture text",
    "Grüße aus Zürich, 東京と大阪 привет мир 👩‍👩‍👧 😀 1234567890",
]
SPECIALS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|pad|>",
]  # fmt: skip


def byte_level_tokenizer() -> Tokenizer:
    """Of Qwen's kind; `<|pad|>` swallows the white space about it, `<think>` is added and not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    strip = {"<|pad|>": True}
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False, lstrip=t in strip, rstrip=t in strip) for t in SPECIALS]
    )
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """Of Llama's kind: a leading space that decoding drops, bytes for what the vocabulary lacks."""
    byte_tokens = [f"<0x{k:02X}>" for k in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", "<image>", *byte_tokens], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS[:2], trainer)
    # The trainer makes all of them special; the bytes are ordinary pieces.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:4]
    content["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TEMPLATE = """
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- else -%}{{- part.text | trim -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n<|pad|>\\n ' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

SENTENCEPIECE_TEMPLATE = """
{%- for message in messages -%}
{{- '<s>' + message.role + ': ' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{{- '<image>' if part.type == 'image' else part.text -}}
{%- endfor -%}{%- endif -%}
{{- '</s>' -}}
{%- endfor -%}
"""


class TwoByTwo:
    """A layout that needs no model: an image of w x h pixels is w * h tokens of the placeholder's id."""

    def __init__(self, placeholder_text: str, placeholder_id: int) -> None:
        self.placeholder_text = placeholder_text
        self.placeholder_id = placeholder_id

    def pixel_limits(self, options: Mapping[str, object]) -> PixelLimits:
        return PixelLimits(1, 100)

    def image_metadata(self, size: ImageSize, limits: PixelLimits | None = None) -> ItemMetadata:
        count = size.width * size.height
        return ItemMetadata(Grid(1, size.height, size.width), count, count)

    def expansion(self, metadata: ItemMetadata) -> list[int]:
        return [self.placeholder_id] * metadata.num_tokens


def write_checkpoint(folder: Path, tokenizer: Tokenizer, template: str, config: dict[str, object]) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings: dict[str, object] = {"tokenizer_class": "TokenizersBackend", "eos_token": "<|im_end|>"}
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), byte_level_tokenizer(), TEMPLATE, settings)


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings: dict[str, object] = {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>", "eos_token": "</s>"}
    folder = tmp_path_factory.mktemp("sentencepiece")
    return write_checkpoint(folder, sentencepiece_tokenizer(), SENTENCEPIECE_TEMPLATE, settings)


def make_builder(folder: Path, placeholder: str) -> PromptBuilder:
    placeholder_id = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(placeholder)
    assert placeholder_id is not None
    return PromptBuilder(folder, TwoByTwo(placeholder, placeholder_id))


@pytest.fixture(scope="session")
def demo() -> PromptBuilder:
    return make_builder(DEMO, "<|image_pad|>")


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path) -> PromptBuilder:
    return make_builder(tiny_dir, "<|image_pad|>")


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_dir: Path) -> PromptBuilder:
    return make_builder(sentencepiece_dir, "<image>")


@pytest.fixture(scope="session")
def images(demo: PromptBuilder) -> list[MediaItem]:
    """Three of them, of 1, 2 and 3 tokens."""
    metadata = [demo.layout.image_metadata(ImageSize(width, 1)) for width in (1, 2, 3)]
    return [MediaItem(Modality.IMAGE, f"{k}" * 64, b"", item) for k, item in enumerate(metadata)]
