"""Which tokens may come next where the output has to match a grammar. Runs in workers that decode; imports no torch.

`prompt/grammar.py` in the router makes the grammars. A mask costs microseconds where few texts are possible and up to
some milliseconds in free text of an odd grammar, on the compute thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from triptych.byte_spelling import byte_level_bytes, sentencepiece_bytes
from triptych.errors import ConfigError, EngineError, GrammarError

_WORD_BITS = 32
# By the first line of a grammar: how many items the parser may have at one place of the text.
_MAX_ITEMS = {"// schema": 20_000, "// grammar": 1000}


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int]


class _Decoder(msgspec.Struct):
    type: str
    decoders: list[_Decoder] = []


class _TokenizerFile(msgspec.Struct):
    model: _Model
    decoder: _Decoder
    added_tokens: list[_AddedToken] = []


class GrammarVocabulary:
    """The tokens of one tokenizer as bytes, for all matchers of a worker.

    `tokenizer_file` is Hugging Face's tokenizer.json: byte-level BPE, or BPE that has bytes for what it lacks.
    `vocab_size` counts the rows of the model's head. Rows without a token and special tokens are never allowed, but for
    `eos_token_ids` where the grammar may end. Reading 150,000 tokens takes 0.6 s and 76 MB, 1,500 take 5 ms, so it is
    done at the first use; `load` does it before, on any thread.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
        self._file = tokenizer_file

    def load(self) -> None:
        """Raises ConfigError for a tokenizer that cannot be read so."""
        _ = self.tokenizer

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """What each row of the head writes; empty for special tokens, ends, and rows without a token."""
        try:
            content = msgspec.json.decode(self._file.read_bytes(), type=_TokenizerFile)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{self._file}: {error}") from error
        decoders = {decoder.type for decoder in (content.decoder, *content.decoder.decoders)}
        is_byte_level = "ByteLevel" in decoders
        if not is_byte_level and "ByteFallback" not in decoders:
            raise ConfigError(f"{self._file}: structured output needs a tokenizer of bytes")
        spell = byte_level_bytes if is_byte_level else sentencepiece_bytes
        tokens = [b""] * self.vocab_size
        for text, token_id in content.model.vocab.items():
            if token_id < self.vocab_size:
                tokens[token_id] = spell(text)
        for token in content.added_tokens:
            if token.id < self.vocab_size:
                tokens[token.id] = b"" if token.special else token.content.encode()
        for token_id in self.eos_token_ids:
            tokens[token_id] = b""
        return tokens

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """The library's, with one token more: its own end of text, so that it knows of none of the model's."""
        return LLTokenizer(TokenizerWrapper(_Tokens([*self.token_bytes, b""])))

    @cached_property
    def plain(self) -> NDArray[np.int32]:
        """Tokens that write something, as `GrammarMatcher.allowed` has them."""
        writes = np.array([len(token) > 0 for token in self.token_bytes])
        return _pack(writes, self.vocab_size)

    @cached_property
    def eos(self) -> NDArray[np.int32]:
        ends = np.zeros(self.vocab_size, bool)
        ends[list(self.eos_token_ids)] = True
        return _pack(ends, self.vocab_size)


class GrammarMatcher:
    """How far one output has come in its grammar. The prompt is no part of it.

    How it goes with other parameters of a request: stop strings and stop tokens end the output as they always do, so it
    may be cut before it is complete. `min_tokens` keeps the end away by `may_end`, and gives way where nothing else may
    follow. `ignore_eos` gives way too: a request ends when `is_finished`. What forbids tokens in other ways (bad words,
    a bias of -100) can forbid all that the grammar allows; the grammar's mask is applied last, to know it.
    """

    def __init__(self, vocabulary: GrammarVocabulary, grammar: str) -> None:
        """Raises GrammarError for one that is too complex for this vocabulary; EngineError where it is of no kind."""
        self._vocabulary = vocabulary
        self._matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=_limits(grammar))
        self._mask = np.zeros((vocabulary.vocab_size + _WORD_BITS) // _WORD_BITS, np.int32)  # with the library's end
        self._is_ended = False
        self._check()

    @classmethod
    def at(cls, vocabulary: GrammarVocabulary, grammar: str, output_token_ids: Sequence[int]) -> GrammarMatcher:
        """As after `accept` of each of these: a request goes on at another worker, or after it was preempted.

        About a microsecond a token. Raises ValueError for a token that is not allowed.
        """
        matcher = cls(vocabulary, grammar)
        for token_id in output_token_ids[matcher._take(output_token_ids) :]:  # none, or the end
            matcher.accept(token_id)
        return matcher

    @property
    def is_finished(self) -> bool:
        """The grammar is complete and nothing but the end may follow."""
        return self._is_ended or self._matcher.is_stopped()

    @property
    def may_end(self) -> bool:
        return self._is_ended or self._matcher.is_accepting()

    def allowed(self, *, may_end: bool = True) -> NDArray[np.int32]:
        """Bits of the tokens that may come next: token `i` is bit `i % 32`, from the lowest, of word `i // 32`.

        [ceil(vocab_size / 32)] of int32; bits beyond the vocabulary are 0. Valid until the next call. With `may_end`
        False the ends are left out, unless nothing else may follow.

        Raises GrammarError where the grammar has become too complex, or where no token leads on.
        """
        vocabulary = self._vocabulary
        mask = self._mask[: len(vocabulary.plain)]
        if self.is_finished:
            mask[:] = vocabulary.eos
            return mask
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        self._check()
        mask &= vocabulary.plain
        can_go_on = mask.any()
        if self._matcher.is_accepting() and (may_end or not can_go_on):
            mask |= vocabulary.eos
        elif not can_go_on:
            raise GrammarError("no token of the vocabulary continues the output as its grammar asks")
        return mask

    def accept(self, token_id: int) -> None:
        """The output goes on with this token. Raises ValueError, and changes nothing, for one that is not allowed."""
        if token_id in self._vocabulary.eos_token_ids:
            if not self.may_end:
                raise ValueError(f"token {token_id} ends the output before its grammar is complete")
            self._is_ended = True
        elif self._is_ended or not self._take([token_id]):
            raise ValueError(f"token {token_id} does not match the grammar")

    def _take(self, token_ids: Sequence[int]) -> int:
        """How many were accepted, from the first on."""
        tokens = self._vocabulary.token_bytes
        plain = list(itertools.takewhile(lambda token_id: 0 <= token_id < len(tokens) and tokens[token_id], token_ids))
        num_taken = self._matcher.try_consume_tokens(plain)
        self._check()
        return num_taken

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().split("\n")[0]
            raise GrammarError(f"the grammar of the output cannot be followed: {reason}")


class _Tokens:
    """What the library asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.special_token_ids = [token_id for token_id, token in enumerate(tokens) if not token]

    def __call__(self, text: str | bytes) -> list[int]:
        return []  # only forced text would be tokenized, and grammars force none


def _limits(grammar: str) -> LLParserLimits:
    kind = grammar.partition("\n")[0]
    if kind not in _MAX_ITEMS:
        raise EngineError("the grammar does not say of which kind it is")
    return LLParserLimits(
        max_items_in_row=_MAX_ITEMS[kind],
        max_lexer_states=20_000,  # one or two kilobytes each
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _pack(bits: NDArray[np.bool_], vocab_size: int) -> NDArray[np.int32]:
    padded = np.zeros(-(-vocab_size // _WORD_BITS) * _WORD_BITS, bool)
    padded[:vocab_size] = bits
    words: NDArray[np.int32] = np.packbits(padded, bitorder="little").view("<i4").astype(np.int32)
    return words
