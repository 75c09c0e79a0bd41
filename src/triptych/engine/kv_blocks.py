"""The KV block pool: who refers to which block, and which full blocks can be found again by their hash.

Pure bookkeeping, no memory: block numbers index the tensor that `handoff/kv.py` owns. Called by the scheduler, and by
the stages when they lease blocks to another worker.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from triptych.block_hash import BlockHash

SCRATCH_BLOCK = 0  # written by padding and probes, never handed out


class BlockChanges(NamedTuple):
    """Which blocks can be found by their hash since the last look, and which cannot any more."""

    stored: list[BlockHash]
    removed: list[BlockHash]


class KVBlockPool:
    """Reference counts of `num_blocks` blocks; block 0 is scratch.

    A block with no reference is free. A free block that was committed under a hash keeps its content until it is
    allocated anew, oldest first, after the free blocks that hold nothing.
    """

    def __init__(self, num_blocks: int, prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs two blocks or more, got {num_blocks}")
        self.num_blocks = num_blocks - 1  # usable ones
        self._prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._empty = deque(range(1, num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self.num_evictions = 0
        self._changes: dict[BlockHash, bool] = {}  # stored or removed, since `take_changes`

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._evictable)

    def find_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Blocks of the longest cached prefix. They may be evicted until `acquire`d."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_without(self, blocks: Sequence[int]) -> int:
        """Free blocks that would be left if `blocks` were acquired."""
        return self.num_free - sum(1 for block in blocks if self._references[block] == 0)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; each must be referenced or cached."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._evictable:
                    raise ValueError(f"block {block} holds nothing to refer to")
                del self._evictable[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. The caller has checked `num_free`."""
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._empty:
            block = self._empty.popleft()
        else:
            block, _ = self._evictable.popitem(last=False)
            block_hash = self._hash_of[block]
            assert block_hash is not None
            del self._block_of[block_hash]
            self._hash_of[block] = None
            self._changed(block_hash, stored=False)
            self.num_evictions += 1
        self._references[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each. The end of a sequence becomes evictable before its beginning."""
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise ValueError(f"block {block} is free already")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hash_of[block] is None:
                    self._empty.append(block)
                else:
                    self._evictable[block] = None

    def commit(self, block: int, block_hash: BlockHash) -> None:
        """The block is full and computed: it can be found under its hash from now on.

        A second block of equal content stays private to its request and is freed with it.
        """
        if self._prefix_caching and block_hash not in self._block_of and self._hash_of[block] is None:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            self._changed(block_hash, stored=True)

    def _changed(self, block_hash: BlockHash, *, stored: bool) -> None:
        if self._changes.pop(block_hash, stored) == stored:  # a change and its opposite are none
            self._changes[block_hash] = stored

    def take_changes(self) -> BlockChanges:
        """What a reader of the earlier ones has to know."""
        changes, self._changes = self._changes, {}
        return BlockChanges([h for h, stored in changes.items() if stored], [h for h, s in changes.items() if not s])

    def cached_hashes(self) -> list[BlockHash]:
        """Every hash under which a block can be found, those of `take_changes` included."""
        self._changes.clear()
        return list(self._block_of)

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one state."""
        empty, evictable = set(self._empty), set(self._evictable)
        assert len(empty) == len(self._empty), "a block is twice in the free list"
        for block in range(1, self.num_blocks + 1):
            states = (self._references[block] > 0, block in empty, block in evictable)
            assert sum(states) == 1, f"block {block} is in states {states}"
            block_hash = self._hash_of[block]
            assert block_hash is None or self._block_of[block_hash] == block, f"block {block} lost its hash"
            assert block not in empty or block_hash is None, f"empty block {block} has a hash"
        assert len(self._block_of) == sum(h is not None for h in self._hash_of), "a hash points at no block"
