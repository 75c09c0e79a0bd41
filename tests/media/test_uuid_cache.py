"""Images that clients named: the last content of a name, one client's apart from another's, within the limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from triptych.media.uuid_cache import UuidCache, UuidKey

X = UuidKey("me", "salt", "x")


def test_the_last_content_counts() -> None:
    cache = UuidCache(1000)
    cache.put(X, b"red")
    cache.put(X, b"blue!")
    assert cache.get(X) == b"blue!"
    assert cache.used_bytes == X.num_bytes + 5


def test_nobody_elses() -> None:
    cache = UuidCache(1000)
    cache.put(X, b"red")
    for other in (X._replace(client="you"), X._replace(cache_salt=""), X._replace(uuid="y")):
        assert cache.get(other) is None


def test_the_least_recently_used_goes_first() -> None:
    cache = UuidCache(3 * (X.num_bytes + 10))
    a, b, c, d = (X._replace(uuid=name) for name in "abcd")
    for key in (a, b, c):
        cache.put(key, bytes(10))
    assert cache.get(a) is not None
    cache.put(d, bytes(10))
    assert [cache.get(key) is not None for key in (a, b, c, d)] == [True, False, True, True]


def test_too_large_a_content_is_not_kept_and_ends_its_name() -> None:
    cache = UuidCache(100)
    cache.put(X, b"red")
    cache.put(X, bytes(200))
    assert cache.get(X) is None
    assert cache.used_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60))))
def test_it_never_holds_more_than_its_limit(puts: list[tuple[str, int]]) -> None:
    cache = UuidCache(150)
    for name, size in puts:
        cache.put(X._replace(uuid=name), bytes(size))
        assert cache.used_bytes <= 150
        kept = [X._replace(uuid=name) for name in "abcdef"]
        contents = [(key, cache.get(key)) for key in kept]
        assert cache.used_bytes == sum(key.num_bytes + len(c) for key, c in contents if c is not None)
