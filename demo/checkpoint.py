"""The demo checkpoint's files: tokenizer, configuration, chat template, processor settings and weight shards.

The layout is the one of the official Qwen3-VL checkpoints, so that any server that reads those reads this one.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from triptych.demo.drawing import COLOURS, SHAPES, STAMPS, WORDS, draw_page, draw_picture
from triptych.demo.pages import ask, ask_text, tasks_of

VOCABULARY = 1536
SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
_QWEN2_PATTERN = (  # Qwen2's own: one digit a token, a letter run may take one leading sign or blank
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Parts of a message stand on lines of their own, and each image and video carries its number in the conversation.
# Tools and calls have the form that Qwen's models know; this one was not trained on them, but can be made to call.
CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- for tool in tools -%}
{{- tool | tojson ~ '\\n' -}}
{%- endfor -%}
{{- 'Call one:\\n<tool_call>\\n{"name": "", "arguments": {}}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- set seen = namespace(images=0, videos=0) -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' or part.type == 'image_url' or 'image' in part or 'image_url' in part -%}
{%- set seen.images = seen.images + 1 -%}
{{- 'Picture ' ~ seen.images ~ ': <|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type == 'video' or part.type == 'video_url' or 'video' in part -%}
{%- set seen.videos = seen.videos + 1 -%}
{{- 'Video ' ~ seen.videos ~ ': <|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part.text -}}
{%- endif -%}
{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
{{- call.function.arguments | tojson ~ '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def _corpus() -> list[str]:
    """Text for the tokenizer: the demo's questions and answers, and Python's own manual for English at large."""
    rng = random.Random("corpus")
    lines = [*WORDS, *STAMPS, *SHAPES, *COLOURS, "system", "user", "assistant", "Picture", "Video"] * 200
    lines += [" " + word for word in (*WORDS, *STAMPS, *SHAPES, *COLOURS)] * 200
    for _ in range(4000):
        page = draw_page(rng)
        turns = [ask(rng.choice(tasks_of(page)), page, rng.randint(1, 6), rng), ask_text(rng)]
        turns.append(ask("picture", draw_picture(rng), rng.randint(1, 6), rng))
        lines += [part for turn in turns for part in (turn.text, turn.answer)]
    return lines + sorted(pydoc_data.topics.topics.values())


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCABULARY entries, special tokens last, as Qwen's tokenizers are built."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_processor() -> Qwen2VLImageProcessorPil:
    """Qwen3-VL's image processing; a picture becomes 16 to 1,024 embeddings of 32x32 pixels."""
    return Qwen2VLImageProcessorPil(
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        size={"shortest_edge": 128 * 128, "longest_edge": 1024 * 1024},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """About 4.7 million parameters: 2.5 in the vision tower, 2.2 in the language model."""
    ids = {token: int(tokenizer.convert_tokens_to_ids(token)) for token in SPECIAL_TOKENS}
    vision = {
        "depth": 6,
        "hidden_size": 128,
        "num_heads": 4,
        "intermediate_size": 512,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": 192,
        "num_position_embeddings": 256,
        "deepstack_visual_indexes": [2, 4],
    }
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    return Qwen3VLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        architectures=["Qwen3VLForConditionalGeneration"],
        dtype="bfloat16",
    )


def _write_shards(model: Qwen3VLForConditionalGeneration, folder: Path) -> None:
    """Three shards in bfloat16: the vision tower alone, then two halves of the language model."""
    layers = model.config.text_config.num_hidden_layers
    parts = ("norm.", *(f"layers.{k}." for k in range(layers // 2, layers)))
    upper = tuple("model.language_model." + part for part in parts)
    shards: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied to the embedding
            continue
        index = 0 if name.startswith("model.visual.") else 2 if name.startswith(upper) else 1
        shards[index][name] = tensor.to(torch.bfloat16).contiguous()
    weight_map = {}
    for index, shard in enumerate(shards, start=1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors writes for its owner alone
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index_json = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n")


def save_checkpoint(model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write every file of the checkpoint but `accuracy.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    eos, pad = model.config.text_config.eos_token_id, model.config.text_config.pad_token_id
    GenerationConfig(eos_token_id=eos, pad_token_id=pad, do_sample=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    build_processor().save_pretrained(folder)
    _write_shards(model, folder)
