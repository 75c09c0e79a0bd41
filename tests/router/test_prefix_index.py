"""What the router believes of the workers' prefix caches."""

from __future__ import annotations

import pytest

from triptych.messages import BlocksChanged
from triptych.router.prefix_index import PrefixIndex
from triptych.types import Prompt

PROMPT = Prompt(list(range(18)))


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(4)


def test_the_last_token_is_never_covered(index: PrefixIndex) -> None:
    assert [len(index.hashes(Prompt(list(range(n))), "")) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_stored_removed_and_all(index: PrefixIndex) -> None:
    hashes = index.hashes(PROMPT, "")
    index.changed("p0", BlocksChanged(hashes, []))
    assert index.num_cached_tokens("p0", hashes) == 16
    assert index.num_cached_tokens("p1", hashes) == 0
    index.changed("p0", BlocksChanged([], hashes[2:3]))
    assert index.num_cached_tokens("p0", hashes) == 8
    index.changed("p0", BlocksChanged(hashes[:1], [], is_all=True))
    assert index.num_cached_tokens("p0", hashes) == 4
    index.forget("p0")
    assert index.num_cached_tokens("p0", hashes) == 0


def test_what_is_on_its_way_counts_until_it_is_settled(index: PrefixIndex) -> None:
    hashes = index.hashes(PROMPT, "")
    index.expect("p0", hashes)
    index.expect("p0", hashes[:2])
    index.changed("p0", BlocksChanged(hashes[:1], []))
    assert index.num_cached_tokens("p0", hashes) == 16
    index.settle("p0", hashes)
    assert index.num_cached_tokens("p0", hashes) == 8
    with pytest.raises(AssertionError, match="nobody sends"):
        index.check()
    index.settle("p0", hashes[:2])
    assert index.num_cached_tokens("p0", hashes) == 4
    index.check()
