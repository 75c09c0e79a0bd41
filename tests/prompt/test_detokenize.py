"""Text that streams is the text that the tokens decode to, cut exactly at stop strings."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from triptych.prompt.detokenize import IncrementalDetokenizer

from .conftest import SPECIALS, byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
PIECES = st.sampled_from(
    ["fox", " the", "\n", "é", "東", "😀", "👩‍👩‍👧", "\ufffd", "ab", "a", "b", "c", " ", "  ", *SPECIALS]
)
TEXT = st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=30).map("".join))
EXAMPLES = settings(max_examples=150, deadline=None)


def chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    """`ids` in runs of the lengths in `cuts`, over and over; a length of 0 is a push of nothing."""
    parts: list[list[int]] = []
    at = 0
    lengths = [*cuts, 1]
    while at < len(ids):
        size = lengths[len(parts) % len(lengths)]
        parts.append(ids[at : at + size])
        at += size
    return parts


def stream(detokenizer: IncrementalDetokenizer, parts: list[list[int]]) -> str:
    return "".join([*map(detokenizer.push, parts), detokenizer.finish()])


CUTS = st.lists(st.integers(0, 7), max_size=6)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False])
@EXAMPLES
@given(text=TEXT, cuts=CUTS)
def test_the_stream_equals_decoding_all_at_once(tokenizer: Tokenizer, skip: bool, text: str, cuts: list[int]) -> None:
    ids = tokenizer.encode(text).ids
    assert stream(IncrementalDetokenizer(tokenizer, skip), chunks(ids, cuts)) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


@EXAMPLES
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 20), max_size=60), cuts=CUTS)
def test_any_tokens_at_all(ids: list[int], cuts: list[int]) -> None:
    """Random weights make bytes that are no text, and ids that the tokenizer does not have."""
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert stream(detokenizer, chunks(ids, cuts)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@EXAMPLES
@given(raw=st.binary(max_size=60), cuts=CUTS)
def test_any_bytes_at_all(raw: bytes, cuts: list[int]) -> None:
    by_byte = [BYTE_LEVEL.token_to_id(symbol) for symbol in byte_symbols(raw)]
    ids = [token_id for token_id in by_byte if token_id is not None]
    assert len(ids) == len(raw)
    assert stream(IncrementalDetokenizer(BYTE_LEVEL), chunks(ids, cuts)) == raw.decode(errors="replace")


def byte_symbols(raw: bytes) -> list[str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(256 + k) for k, byte in enumerate(others)}
    return [symbols[byte] for byte in raw]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_no_half_characters(tokenizer: Tokenizer) -> None:
    text = "a 👩‍👩‍👧 東京 é😀"
    detokenizer = IncrementalDetokenizer(tokenizer)
    deltas = [detokenizer.push([token_id]) for token_id in tokenizer.encode(text).ids]
    assert not any("\ufffd" in delta for delta in deltas)
    assert "".join(deltas) + detokenizer.finish() == text


def test_half_a_character_at_the_end_becomes_a_replacement() -> None:
    ids = [BYTE_LEVEL.token_to_id(symbol) for symbol in byte_symbols("é".encode()[:1])]
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert detokenizer.push([k for k in ids if k is not None]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def expected_cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop string that is complete first; the longest of those that end at one character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("include", [True, False])
@EXAMPLES
@given(
    text=st.one_of(TEXT, st.text("abc", max_size=40)),
    stops=st.lists(st.one_of(st.text("abc", max_size=5), PIECES), max_size=4),
    cuts=CUTS,
)
def test_stop_strings_cut_exactly(include: bool, text: str, stops: list[str], cuts: list[int]) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=True)
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, True, stops, include)
    assert (stream(detokenizer, chunks(ids, cuts)), detokenizer.stopped) == expected_cut(whole, stops, include)


def test_what_may_become_a_stop_string_is_held_and_then_given() -> None:
    ids = {letter: BYTE_LEVEL.encode(letter).ids for letter in "xSTOPa"}
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=["STOP", "TOa"])
    assert [detokenizer.push(ids[letter]) for letter in "xSTOSTOx"] == ["x", "", "", "", "STO", "", "", "STOx"]
    assert [detokenizer.push(ids[letter]) for letter in "STOa"] == ["", "", "", "S"]
    assert detokenizer.stopped == "TOa"
    assert detokenizer.push(ids["x"]) == ""
    assert detokenizer.finish() == ""


def test_a_stop_string_that_does_not_come_is_flushed() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=["STOP"])
    assert detokenizer.push(BYTE_LEVEL.encode("a STO").ids) == "a "
    assert detokenizer.finish() == "STO"
    assert detokenizer.stopped is None


@pytest.mark.parametrize("symbol", ["a", "\ufffd", bytes([0xFF]), bytes([0xE4]), "<|im_end|>", None])
def test_cost_a_token_does_not_grow(symbol: str | bytes | None) -> None:
    """Ordinary text, text that looks like halves, endless halves, special tokens, unknown ids."""
    if symbol is None:
        ids = [5_000_000]
    elif isinstance(symbol, bytes):
        ids = [k for k in map(BYTE_LEVEL.token_to_id, byte_symbols(symbol)) if k is not None]
    else:
        ids = BYTE_LEVEL.encode(symbol).ids
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, skip_special_tokens=True, stop=["aaab"])
    longest = 0
    start = time.process_time()
    for _ in range(3000):
        detokenizer.push(ids)
        longest = max(longest, len(detokenizer._window))
    assert longest <= 16
    assert time.process_time() - start < 2


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 99])
def test_stop_strings_are_looked_for_after_the_first_tokens_only(min_tokens: int) -> None:
    ids = BYTE_LEVEL.encode("ab ab ab ab").ids
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop=["ab"], min_tokens=min_tokens)
    text = "".join(detokenizer.push([token_id]) for token_id in ids) + detokenizer.finish()
    before = BYTE_LEVEL.decode(ids[:min_tokens])
    end = "ab ab ab ab".find("ab", len(before))
    assert text == ("ab ab ab ab"[:end] if end >= 0 else "ab ab ab ab")
    assert (detokenizer.stopped is None) == (end < 0)
