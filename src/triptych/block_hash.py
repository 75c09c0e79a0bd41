"""The name of a full KV block: a hash of its tokens and media, chained to the block before it.

Workers find blocks of equal prefixes by it, and the router finds the worker that holds them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from triptych.types import PromptItem

BlockHash = bytes


def hash_block(parent: BlockHash, token_ids: Sequence[int], start: int, items: Iterable[PromptItem]) -> BlockHash:
    """Hash of a full block that begins at token `start`, chained to its parent.

    Placeholders hold the same token ids whatever the media, so each item in the block adds its `mm_hash` and where
    it lies relative to the block.
    """
    state = blake2b(parent, digest_size=16)
    state.update(array("I", token_ids).tobytes())
    end = start + len(token_ids)
    for item in items:
        if item.placeholder.offset < end and item.placeholder.end > start:
            state.update(item.mm_hash.encode())
            state.update((item.placeholder.offset - start).to_bytes(8, "little", signed=True))
    return state.digest()


def root_hash(cache_salt: str) -> BlockHash:
    """Parent of a request's first block: requests of different salts share nothing."""
    return blake2b(cache_salt.encode(), digest_size=16).digest()


def extend_hashes(
    hashes: list[BlockHash], token_ids: Sequence[int], items: Sequence[PromptItem], cache_salt: str, block_size: int
) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` does not have yet."""
    while (len(hashes) + 1) * block_size <= len(token_ids):
        start = len(hashes) * block_size
        parent = hashes[-1] if hashes else root_hash(cache_salt)
        hashes.append(hash_block(parent, token_ids[start : start + block_size], start, items))
