"""The identity of a media item. Called by the router; every cache of embeddings and KV goes by it."""

from __future__ import annotations

from hashlib import sha256

from triptych.types import Modality


def mm_hash(content: bytes, modality: Modality, options: str, fingerprint: str, uuid: str = "") -> str:
    """64 hex digits over all that can change the embedding, and the client's `uuid`, which adds and never replaces.

    `options`: of decoding (background and the like). `fingerprint`: of weights, processor settings and dtype.
    """
    state = sha256(b"triptych media 2")
    for field in (modality.encode(), options.encode(), fingerprint.encode(), uuid.encode(), content):
        state.update(len(field).to_bytes(8, "big"))  # so that no field can run over into the next
        state.update(field)
    return state.hexdigest()
