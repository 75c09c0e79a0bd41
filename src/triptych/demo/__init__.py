"""A tiny vision-language model that ships with Triptych, and the questions that it can answer.

The checkpoint has the layout of Hugging Face's Qwen3-VL, so every path of a server runs on it with real weights and
right answers. `demo/train.py` in the repository made it; `pages.py` draws the pages that it reads.
"""

from __future__ import annotations

from pathlib import Path


def checkpoint_path() -> Path:
    """Folder of the shipped checkpoint: configuration, tokenizer, chat template and three safetensors shards."""
    return Path(__file__).parent / "checkpoint"
