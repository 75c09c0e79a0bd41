"""The files of a Hugging Face checkpoint, read without torch: settings, where each weight lies, a fingerprint.

Used in every process: the router needs the settings, a worker the weights.
"""

from __future__ import annotations

import json
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from triptych.errors import ConfigError

Json = dict[str, Any]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_SAMPLE_BYTES = 64 << 10  # read from both ends of each shard for the fingerprint


class Checkpoint:
    """A checkpoint folder. Raises ConfigError for a file that is missing or cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise ConfigError(f"checkpoint {path}: no such directory", param="model.path")
        self.config = self._json("config.json")
        self.preprocessor_config = self._json("preprocessor_config.json")

    def _json(self, name: str, *, required: bool = True) -> Json:
        file = self.path / name
        if not required and not file.exists():
            return {}
        try:
            content = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"checkpoint {self.path}: {name}: {error}", param="model.path") from error
        if not isinstance(content, dict):
            raise ConfigError(f"checkpoint {self.path}: {name} is not a JSON object", param="model.path")
        return content

    @cached_property
    def generation_config(self) -> Json:
        return self._json("generation_config.json", required=False)

    @cached_property
    def _index(self) -> Json:
        return self._json(INDEX_FILE, required=False)

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor name to shard file, for sharded and single-file checkpoints alike."""
        if self._index:
            try:
                return {str(name): str(file) for name, file in self._index["weight_map"].items()}
            except (KeyError, AttributeError) as error:
                raise ConfigError(f"checkpoint {self.path}: {INDEX_FILE} has no weight_map") from error
        names = self._header(SINGLE_FILE)
        return {name: SINGLE_FILE for name in names if name != "__metadata__"}

    def _header(self, name: str) -> Json:
        """The JSON header of a safetensors file: eight bytes of length, little-endian, then the JSON."""
        try:
            with (self.path / name).open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except (OSError, ValueError) as error:
            raise ConfigError(f"checkpoint {self.path}: {name}: {error}", param="model.path") from error
        if not isinstance(header, dict):
            raise ConfigError(f"checkpoint {self.path}: {name} has no safetensors header", param="model.path")
        return header

    @cached_property
    def shards(self) -> list[str]:
        """Shard files in order of their names. Raises ConfigError if one that the index names is missing."""
        shards = sorted(set(self.weight_map.values()))
        missing = [shard for shard in shards if not (self.path / shard).is_file()]
        if missing:
            raise ConfigError(f"checkpoint {self.path}: missing {', '.join(missing)}", param="model.path")
        return shards

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of all weights, as the index says; else the sizes of the files."""
        total = self._index.get("metadata", {}).get("total_size")
        return int(total) if total else sum((self.path / shard).stat().st_size for shard in self.shards)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the settings, the index, and each shard's size and both its ends: 64 hex digits.

        Reading whole shards would take minutes for a large model. Both ends hold the header and the last weights, so
        a fine-tuned copy differs.
        """
        state = sha256()
        for name in ("config.json", "preprocessor_config.json", INDEX_FILE):
            file = self.path / name
            state.update(sha256(file.read_bytes() if file.exists() else b"").digest())
        for shard in self.shards:
            file = self.path / shard
            size = file.stat().st_size
            state.update(f"{shard}:{size}:".encode())
            with file.open("rb") as content:
                state.update(content.read(_SAMPLE_BYTES))
                content.seek(max(0, size - _SAMPLE_BYTES))
                state.update(content.read())
        return state.hexdigest()
