"""Masks with the demo checkpoint's tokenizer: whatever is drawn from them matches, and any worker can take over."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.prompt.conftest import sentencepiece_tokenizer
from triptych.demo import checkpoint_path
from triptych.engine.grammar import GrammarMatcher, GrammarVocabulary
from triptych.errors import ConfigError, EngineError, GrammarError
from triptych.prompt.grammar import compile_structure
from triptych.types import Structure

FILE = checkpoint_path() / "tokenizer.json"
EOS = 1531  # <|im_end|>
VOCABULARY = GrammarVocabulary(FILE, 1536, [EOS])
STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}

SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"name": STRING, "age": INTEGER}, "required": ["name", "age"]},
    {"type": "object"},
    {"type": "object", "properties": {f"p{k}": STRING for k in range(30)}, "required": ["p3", "p20"]},
    {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            "kind": {"enum": ["a", "cafe\u0301", "caf\u00e9", "<|im_end|>", 3, None]},
            "when": {"type": "string", "format": "date"},
            "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1, "maxItems": 3},
        },
        "required": ["id", "kind", "lines"],
        "$defs": {
            "line": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "maxLength": 8},
                    "amount": {"type": "number", "minimum": 0, "maximum": 99.5},
                    "parts": {"type": "array", "items": {"$ref": "#/$defs/line"}, "maxItems": 2},
                },
                "required": ["text"],
            }
        },
    },
    {"anyOf": [{"type": "array", "items": {"type": "boolean"}}, {"type": "integer", "multipleOf": 7}]},
]


def grammar_of(kind: str, source: object) -> str:
    text = source if isinstance(source, str) else json.dumps(source)
    return compile_structure(Structure(kind, text))  # type: ignore[arg-type]


def ids_of(mask: NDArray[np.int32]) -> list[int]:
    assert mask.dtype == np.int32
    return [32 * word + bit for word in range(len(mask)) for bit in range(32) if mask[word] >> bit & 1]


def text_of(token_ids: list[int], vocabulary: GrammarVocabulary = VOCABULARY) -> bytes:
    return b"".join(vocabulary.token_bytes[token_id] for token_id in token_ids)


def walk(grammar: str, seed: int, vocabulary: GrammarVocabulary = VOCABULARY) -> list[int]:
    """Tokens drawn at random from what is allowed, with a liking for what closes something, without the end."""
    draw = random.Random(seed)
    matcher = GrammarMatcher(vocabulary, grammar)
    out: list[int] = []
    while not matcher.is_finished:
        ids = ids_of(matcher.allowed())
        if any(token_id in vocabulary.eos_token_ids for token_id in ids) and draw.random() < 0.5:
            break
        ids = [token_id for token_id in ids if token_id not in vocabulary.eos_token_ids]
        closing = [token_id for token_id in ids if vocabulary.token_bytes[token_id] in (b'"', b"}", b"]", b'"}')]
        token_id = draw.choice(closing if closing and draw.random() < 0.4 else ids)
        matcher.accept(token_id)
        out.append(token_id)
        assert len(out) < 5000
    assert matcher.may_end
    return out


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_whatever_is_drawn_from_a_schema_validates(schema: dict[str, Any]) -> None:
    grammar = grammar_of("json_schema", schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for seed in range(12):
        text = text_of(walk(grammar, seed)).decode()
        validator.validate(json.loads(text))


def test_whatever_is_drawn_from_the_other_kinds_matches() -> None:
    for seed in range(12):
        assert isinstance(json.loads(text_of(walk(grammar_of("json_object", ""), seed))), dict)
        expression = r"(Mr|Ms) [A-Z][a-z]{1,9}, [0-9]{2}"
        assert re.fullmatch(expression, text_of(walk(grammar_of("regex", expression), seed)).decode())
        choices = ["red", "green", "gr\u00fcn", "<|im_end|>", "redder"]
        assert text_of(walk(grammar_of("choice", choices), seed)).decode() in choices
        nested = text_of(walk(grammar_of("grammar", 'root ::= "(" root ")" | [a-z]+'), seed)).decode()
        assert re.fullmatch(r"\(*[a-z]+\)*", nested)
        assert nested.count("(") == nested.count(")")


@pytest.mark.parametrize("schema", SCHEMAS[:4], ids=range(4))
def test_a_request_that_goes_on_elsewhere_is_at_the_same_place(schema: dict[str, Any]) -> None:
    grammar = grammar_of("json_schema", schema)
    for seed in range(3):
        out = walk(grammar, seed)
        here = GrammarMatcher(VOCABULARY, grammar)
        other_worker = GrammarVocabulary(FILE, 1536, [EOS])
        for k in range(0, len(out) + 1, max(1, len(out) // 10)):
            there = GrammarMatcher.at(other_worker, grammar, out[:k])
            assert (there.is_finished, there.may_end) == (here.is_finished, here.may_end)
            assert np.array_equal(there.allowed(), here.allowed())
            for token_id in out[k : k + max(1, len(out) // 10)]:
                here.accept(token_id)
        assert GrammarMatcher.at(other_worker, grammar, [*out, EOS]).is_finished


def test_the_end_is_allowed_just_where_the_grammar_may_end() -> None:
    matcher = GrammarMatcher(VOCABULARY, grammar_of("regex", "ab?c?"))
    ends = []
    for letter in b"abc":
        token_id = VOCABULARY.token_bytes.index(bytes([letter]))
        ids = ids_of(matcher.allowed())
        ends.append((matcher.may_end, EOS in ids, matcher.is_finished))
        assert EOS not in ids_of(matcher.allowed(may_end=False))
        matcher.accept(token_id)
    assert ends == [(False, False, False), (True, True, False), (True, True, False)]
    assert matcher.is_finished
    assert ids_of(matcher.allowed()) == ids_of(matcher.allowed(may_end=False)) == [EOS], "min_tokens gives way"
    matcher.accept(EOS)
    matcher.accept(EOS)  # with ignore_eos
    assert ids_of(matcher.allowed()) == [EOS]


def test_a_token_that_is_not_allowed_is_refused_and_changes_nothing() -> None:
    matcher = GrammarMatcher(VOCABULARY, grammar_of("json_object", ""))
    before = matcher.allowed().copy()
    for token_id in (EOS, 1529, VOCABULARY.token_bytes.index(b"a"), -1, 1536, 10**6):
        with pytest.raises(ValueError, match=str(token_id)):
            matcher.accept(token_id)
    assert np.array_equal(matcher.allowed(), before)
    with pytest.raises(ValueError, match="1529"):
        GrammarMatcher.at(VOCABULARY, grammar_of("json_object", ""), [VOCABULARY.token_bytes.index(b"{"), 1529])


def test_after_the_end_nothing_comes() -> None:
    matcher = GrammarMatcher(VOCABULARY, grammar_of("regex", "a*"))
    matcher.accept(EOS)
    assert matcher.is_finished
    with pytest.raises(ValueError, match="does not match"):
        matcher.accept(VOCABULARY.token_bytes.index(b"a"))


@pytest.mark.parametrize("vocab_size", [1536, 1600, 1601, 1568])
def test_special_tokens_and_rows_without_a_token_are_never_allowed(vocab_size: int) -> None:
    vocabulary = GrammarVocabulary(FILE, vocab_size, [EOS])
    for grammar in (grammar_of("regex", r"(?s:.*)"), "// grammar\nstart: <[*]>*"):
        mask = GrammarMatcher(vocabulary, grammar).allowed()
        assert len(mask) == -(-vocab_size // 32)
        ids = ids_of(mask)
        assert max(ids) == EOS
        assert not {1529, 1530, *range(1532, 1536)} & set(ids)
        assert len(ids) > 1400


def test_a_head_with_fewer_rows_than_the_tokenizer() -> None:
    vocabulary = GrammarVocabulary(FILE, 1000, [EOS, 5])
    assert vocabulary.eos_token_ids == {5}
    for seed in range(5):
        out = walk(grammar_of("json_object", ""), seed, vocabulary)
        assert max(out) < 1000
        json.loads(text_of(out, vocabulary))


def test_several_ends_and_none() -> None:
    grammar = grammar_of("regex", "a")
    a = VOCABULARY.token_bytes.index(b"a")
    several = GrammarMatcher.at(GrammarVocabulary(FILE, 1536, [EOS, 1529]), grammar, [a])
    assert ids_of(several.allowed()) == [1529, EOS]
    none = GrammarMatcher.at(GrammarVocabulary(FILE, 1536, []), grammar, [a])
    assert none.is_finished
    assert ids_of(none.allowed()) == []


def test_a_special_token_in_the_schema_is_written_in_ordinary_tokens() -> None:
    out = walk(grammar_of("json_schema", {"const": "<|im_end|>"}), 0)
    assert text_of(out) == b'"<|im_end|>"'
    assert len(out) > 3


def test_a_token_that_is_added_and_not_special_is_text(tmp_path: Path) -> None:
    """`<tool_call>` of Qwen: a call may begin with this one token."""
    content = json.loads(FILE.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 1536, "content": "<call>", "special": False})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    vocabulary = GrammarVocabulary(tmp_path / "tokenizer.json", 1537, [EOS])
    matcher = GrammarMatcher(vocabulary, grammar_of("regex", "<call>x"))
    assert {1536, vocabulary.token_bytes.index(b"<")} <= set(ids_of(matcher.allowed()))
    matcher.accept(1536)
    assert text_of(ids_of(matcher.allowed()), vocabulary) == b"x"


def test_a_tokenizer_with_bytes_for_what_it_lacks(tmp_path: Path) -> None:
    sentencepiece_tokenizer().save(str(tmp_path / "tokenizer.json"))
    vocabulary = GrammarVocabulary(tmp_path / "tokenizer.json", 700, [2])
    matcher = GrammarMatcher(vocabulary, grammar_of("choice", ["\u6771 fox"]))
    out = []
    while not matcher.is_finished:
        out.append(ids_of(matcher.allowed())[-1])
        matcher.accept(out[-1])
    assert text_of(out, vocabulary).decode() == "\u6771 fox"


def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    for content in (
        '{"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}}',
        '{"model": {"vocab": []}}',
        "{",
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match="tokenizer"):
            GrammarVocabulary(file, 10, []).load()


def test_a_grammar_that_grows_too_complex_ends_its_request_only() -> None:
    matcher = GrammarMatcher(VOCABULARY, grammar_of("grammar", 'start: a\na: "x" | a a | a a a | a a a a'))
    x = VOCABULARY.token_bytes.index(b"x")

    def go_on() -> None:
        for _ in range(1000):
            matcher.allowed()
            matcher.accept(x)

    with pytest.raises(GrammarError, match="cannot be followed"):
        go_on()


def test_a_place_that_no_token_leaves_ends_its_request() -> None:
    special_only = "// grammar\nstart: <[1530]>"
    with pytest.raises(GrammarError, match="no token"):
        GrammarMatcher(VOCABULARY, special_only).allowed()


def test_a_grammar_that_the_router_did_not_make_is_refused() -> None:
    for grammar in ('start: "a"', "// schema\nstart: x"):
        with pytest.raises((EngineError, GrammarError)):
            GrammarMatcher(VOCABULARY, grammar)
