"""API keys: from the file of `api.api_keys_file` and the variable TRIPTYCH_API_KEYS, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from triptych.errors import AuthenticationError, ConfigError

VARIABLE = "TRIPTYCH_API_KEYS"


class Keys:
    """Only digests are kept: equally long, so that comparing tells nothing of a key, its length included."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    @classmethod
    def load(cls, file: str) -> Keys:
        """Raises ConfigError for a file that cannot be read or has no key."""
        keys = os.environ.get(VARIABLE, "").replace(",", " ").split()
        if file:
            try:
                lines = [line.strip() for line in Path(file).read_text().splitlines()]
            except (OSError, UnicodeError) as error:
                raise ConfigError(f"api.api_keys_file: {error}") from error
            found = [line for line in lines if line and not line.startswith("#")]
            if not found:
                raise ConfigError(f"api.api_keys_file: {file} has no key")
            keys += found
        return cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def client_of(self, authorization: str) -> str:
        """Who the key stands for: a name that does not tell the key. Raises AuthenticationError."""
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip())
        known = [hmac.compare_digest(digest, each) for each in self._digests]  # all of them, whichever is right
        if scheme.lower() != "bearer" or not any(known):
            raise AuthenticationError("This server needs an API key: `Authorization: Bearer KEY`.")
        return digest.hex()[:16]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
