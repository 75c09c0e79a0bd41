"""The block pool against a model that is too simple to be wrong; what block hashes tell apart; order of eviction."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine.requests import BLOCK_SIZE, IMAGE_TOKEN, distinct_tokens, item, make_request
from triptych.block_hash import BlockHash, hash_block, root_hash
from triptych.engine.kv_blocks import SCRATCH_BLOCK, KVBlockPool
from triptych.types import PromptItem

HASHES = [bytes([k]) * 16 for k in range(6)]


class PoolAgainstModel(RuleBasedStateMachine):
    """The model: how often each block is referenced, and what each hash found last."""

    @initialize(num_blocks=st.integers(2, 9), caching=st.booleans())
    def make(self, num_blocks: int, caching: bool) -> None:
        self.pool = KVBlockPool(num_blocks, caching)
        self.caching = caching
        self.tables: list[list[int]] = []  # one a holder
        self.cached: dict[BlockHash, int] = {}
        self.told: set[BlockHash] = set()  # what a reader of the changes believes

    def references(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    def num_free(self) -> int:
        return sum(self.references(block) == 0 for block in range(1, self.pool.num_blocks + 1))

    @rule(count=st.integers(0, 9))
    def allocate(self, count: int) -> None:
        if count > self.num_free():
            with pytest.raises(ValueError, match="free"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert SCRATCH_BLOCK not in blocks
        assert all(self.references(block) == 0 for block in blocks)
        self.cached = {h: b for h, b in self.cached.items() if b not in blocks}
        if blocks:
            self.tables.append(blocks)

    @rule(hashes=st.lists(st.sampled_from(HASHES), max_size=4, unique=True))
    def find_and_acquire(self, hashes: list[BlockHash]) -> None:
        expected = []
        for block_hash in hashes:
            if block_hash not in self.cached:
                break
            expected.append(self.cached[block_hash])
        found = self.pool.find_prefix(hashes)
        assert found == expected
        left = self.pool.num_free_without(found)
        self.pool.acquire(found)
        if found:
            self.tables.append(found)
        assert self.pool.num_free == left

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def commit(self, data: st.DataObject, block_hash: BlockHash) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        self.pool.commit(block, block_hash)
        if self.caching and block_hash not in self.cached and block not in self.cached.values():
            self.cached[block_hash] = block

    @rule(everything=st.booleans())
    def tell(self, everything: bool) -> None:
        if everything:
            self.told = set(self.pool.cached_hashes())
        stored, removed = self.pool.take_changes()
        assert not set(stored) & self.told
        assert set(removed) <= self.told
        self.told = (self.told - set(removed)) | set(stored)
        assert self.told == set(self.cached)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            assert self.pool.num_free == self.num_free()
            for block_hash in HASHES:
                assert self.pool.find_prefix([block_hash]) == [self.cached[h] for h in [block_hash] if h in self.cached]


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestPoolAgainstModel.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


# -- order of eviction -------------------------------------------------------------------------------------------------


def committed(pool: KVBlockPool, name: str, count: int) -> list[int]:
    blocks = pool.allocate(count)
    for k, block in enumerate(blocks):
        pool.commit(block, f"{name}{k}".encode())
    return blocks


def test_blocks_that_hold_nothing_are_taken_before_cached_ones() -> None:
    pool = KVBlockPool(1 + 4)
    kept = committed(pool, "a", 2)
    pool.release(kept)
    pool.release(pool.allocate(2))
    assert not set(pool.allocate(2)) & set(kept)
    assert pool.num_evictions == 0


def test_the_least_recently_freed_is_evicted_first() -> None:
    pool = KVBlockPool(1 + 2)
    (first,), (second,) = committed(pool, "a", 1), committed(pool, "b", 1)
    pool.release([second])
    pool.release([first])
    assert pool.allocate(1) == [second]
    assert pool.num_evictions == 1
    assert pool.find_prefix([b"b0"]) == []
    assert pool.find_prefix([b"a0"]) == [first]


def test_a_block_that_is_used_again_is_evicted_later() -> None:
    pool = KVBlockPool(1 + 2)
    (first,), (second,) = committed(pool, "a", 1), committed(pool, "b", 1)
    pool.release([first])
    pool.release([second])
    pool.acquire([first])
    pool.release([first])
    assert pool.allocate(2) == [second, first]


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = KVBlockPool(1 + 3)
    blocks = committed(pool, "a", 3)
    pool.release(blocks)
    assert [pool.allocate(1)[0] for _ in range(3)] == blocks[::-1]


def test_a_referenced_block_is_never_evicted() -> None:
    pool = KVBlockPool(1 + 2)
    (kept,) = committed(pool, "a", 1)
    pool.release(committed(pool, "b", 1))
    pool.allocate(1)
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="1 blocks asked for, 0 free"):
        pool.allocate(1)
    assert pool.find_prefix([b"a0"]) == [kept]


def test_a_second_block_of_equal_content_stays_private() -> None:
    pool = KVBlockPool(1 + 3)
    first, second = pool.allocate(2)
    pool.commit(first, b"h")
    pool.commit(second, b"h")
    assert pool.find_prefix([b"h"]) == [first]
    pool.release([second])
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="holds nothing"):
        pool.acquire([second])


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = KVBlockPool(1 + 2, prefix_caching=False)
    blocks = committed(pool, "a", 2)
    pool.release(blocks)
    assert pool.find_prefix([b"a0"]) == []
    pool.check()


def test_a_free_block_is_not_released_twice() -> None:
    pool = KVBlockPool(1 + 2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="is free already"):
        pool.release(blocks)


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_pool_of_scratch_alone_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match="two blocks or more"):
        KVBlockPool(num_blocks)


# -- hashes ------------------------------------------------------------------------------------------------------------


def hashes(token_ids: list[int], items: list[PromptItem] | None = None, cache_salt: str = "") -> list[BlockHash]:
    return make_request("r", token_ids, items, cache_salt=cache_salt).block_hashes()


PROMPT = [1, 2, *[IMAGE_TOKEN] * 6, 3, 4, 5, 6]  # three blocks, the image in the first two


def test_equal_content_has_equal_hashes() -> None:
    assert hashes(PROMPT, [item("x", 2, 6)], "s") == hashes(PROMPT, [item("x", 2, 6)], "s")


def test_another_image_at_the_same_place_shares_no_block_that_sees_it() -> None:
    ours, other = hashes(PROMPT, [item("x", 2, 6)]), hashes(PROMPT, [item("y", 2, 6)])
    assert not set(ours) & set(other)


def test_blocks_before_an_image_are_shared() -> None:
    prompt = [*range(100, 104), *PROMPT]
    ours, other = hashes(prompt, [item("x", 6, 6)]), hashes(prompt, [item("y", 6, 6)])
    assert [a == b for a, b in zip(ours, other, strict=True)] == [True, False, False, False]


def test_another_offset_of_the_same_image_is_told_apart() -> None:
    """Tokens alike, and the image's rows lie elsewhere: two images of three tokens, cut at another place."""
    tokens = [IMAGE_TOKEN] * 8
    assert hashes(tokens, [item("x", 0, 8)])[0] != hashes(tokens, [item("x", 1, 7)])[0]
    assert hashes(tokens, [item("x", 0, 8)])[1] != hash_block(hashes(tokens, [item("x", 0, 8)])[0], tokens[:4], 0, [])


def test_the_same_rows_of_an_image_give_the_same_block_at_the_same_relative_place() -> None:
    parent = root_hash("")
    tokens = [IMAGE_TOKEN] * 4
    assert hash_block(parent, tokens, 0, [item("x", 0, 4)]) == hash_block(parent, tokens, 8, [item("x", 8, 4)])
    assert hash_block(parent, tokens, 4, [item("x", 0, 8)]) != hash_block(parent, tokens, 4, [item("x", 4, 4)])


def test_swapped_images_are_told_apart() -> None:
    tokens = [IMAGE_TOKEN] * 4
    ours = hashes(tokens, [item("x", 0, 2), item("y", 2, 2)])
    assert ours != hashes(tokens, [item("y", 0, 2), item("x", 2, 2)])


def test_another_salt_shares_nothing() -> None:
    assert not set(hashes(PROMPT, cache_salt="a")) & set(hashes(PROMPT, cache_salt="b"))


def test_another_parent_shares_nothing() -> None:
    ours = hashes([*distinct_tokens(0, BLOCK_SIZE), *PROMPT])
    other = hashes([*distinct_tokens(1, BLOCK_SIZE), *PROMPT])
    assert not set(ours) & set(other)


def test_an_item_outside_the_block_does_not_matter() -> None:
    tokens = [1, 2, 3, 4]
    assert hash_block(b"p", tokens, 4, [item("x", 0, 4), item("y", 8, 4)]) == hash_block(b"p", tokens, 4, [])
