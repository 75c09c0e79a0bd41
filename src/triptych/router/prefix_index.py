"""Which prefill worker holds the KV of which prompt's beginning, as the workers tell.

It decides where a prompt goes and nothing else: what a worker really holds, it says itself in its answer to `Prefill`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import takewhile

from triptych.block_hash import BlockHash, extend_hashes
from triptych.messages import BlocksChanged
from triptych.types import Prompt

Epoch = str


class PrefixIndex:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[Epoch, set[BlockHash]] = {}
        self._expected: dict[Epoch, Counter[BlockHash]] = {}

    def changed(self, epoch: Epoch, message: BlocksChanged) -> None:
        held = self._held.setdefault(epoch, set())
        if message.is_all:
            held.clear()
        held.difference_update(message.removed)
        held.update(message.stored)

    def forget(self, epoch: Epoch) -> None:
        """The worker's life is over."""
        self._held.pop(epoch, None)

    def expect(self, epoch: Epoch, hashes: Sequence[BlockHash]) -> None:
        """A prompt goes there: the next one that begins alike need not wait for the word that its KV is computed."""
        if hashes:
            self._expected.setdefault(epoch, Counter()).update(hashes)

    def settle(self, epoch: Epoch, hashes: Sequence[BlockHash]) -> None:
        """Take `expect` back: the prompt is computed, or will not be."""
        if not hashes:
            return
        expected = self._expected[epoch]
        for block_hash in hashes:
            expected[block_hash] -= 1
            if expected[block_hash] == 0:
                del expected[block_hash]
        if not expected:
            del self._expected[epoch]

    def hashes(self, prompt: Prompt, cache_salt: str) -> list[BlockHash]:
        """Of the blocks that a prefix cache may cover: the last token is always computed."""
        hashes: list[BlockHash] = []
        extend_hashes(hashes, prompt.token_ids[:-1], prompt.items, cache_salt, self._block_size)
        return hashes

    def num_cached_tokens(self, epoch: Epoch, hashes: Sequence[BlockHash]) -> int:
        """Of a prompt with these hashes, as far as the worker has told or will soon."""
        held: Collection[BlockHash] = self._held.get(epoch, ())
        expected: Collection[BlockHash] = self._expected.get(epoch, ())
        covered = takewhile(lambda block_hash: block_hash in held or block_hash in expected, hashes)
        return sum(1 for _ in covered) * self._block_size

    def check(self) -> None:
        """Raise AssertionError if anything is expected; for when no request is."""
        assert not self._expected, "a prompt is expected that nobody sends"
