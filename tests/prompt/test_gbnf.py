"""GBNF means the same after it was rewritten: as a regular expression where there is no recursion."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from triptych.errors import BadRequestError
from triptych.prompt.gbnf import gbnf_to_lark

BYTES = LLTokenizer("byte")


def takes(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, '%llguidance {"no_forcing": true}\n' + gbnf_to_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    content = text.encode()
    return matcher.try_consume_tokens(list(content)) == len(content) and matcher.is_accepting()


# A GBNF expression and the same for `re`.
PIECES = st.sampled_from(
    [('"a"', "a"), ('"ab"', "ab"), ('""', ""), ("[ab]", "[ab]"), ("[^a]", "[^a]"), ('"é"', "é"), ("[a-c]", "[a-c]")]
)
EXPRESSIONS = st.recursive(
    PIECES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: (" ".join(f"({g})" for g, _ in parts), "".join(f"(?:{r})" for _, r in parts))
        ),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda parts: (f"({' | '.join(g for g, _ in parts)})", f"(?:{'|'.join(r for _, r in parts)})")
        ),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}"])).map(
            lambda pair: (f"({pair[0][0]}){pair[1]}", f"(?:{pair[0][1]}){pair[1]}")
        ),
    ),
    max_leaves=8,
)
TEXTS = st.text("abcé", max_size=6)


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS, st.lists(TEXTS, min_size=1, max_size=8))
def test_without_recursion_it_is_the_regular_expression(pair: tuple[str, str], texts: list[str]) -> None:
    grammar, expression = pair
    for text in texts:
        assert takes(f"root ::= x\nx ::= {grammar}\n", text) == bool(re.fullmatch(expression, text)), text


@settings(max_examples=100, deadline=None)
@given(EXPRESSIONS, st.lists(TEXTS, min_size=1, max_size=6), st.integers(0, 3))
def test_in_a_recursive_rule_too(pair: tuple[str, str], texts: list[str], depth: int) -> None:
    grammar, expression = pair
    for text in texts:
        nested = "<" * depth + text + ">" * depth
        readings = [nested[k : len(nested) - k] for k in range(depth + 1)]  # `[^a]` may be a bracket
        expected = any(re.fullmatch(expression, reading) for reading in readings)
        assert takes(f'root ::= "<" root ">" | ({grammar})', nested) == expected, nested


JSON = r"""
# as llama.cpp has it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] ws term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
SQL = """root ::= select
  | select " UNION " select
select ::= "SELECT " column (", " column)* " FROM " name
column ::= name | "COUNT(" name ")"
name ::= [a-z_]+
"""


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (JSON, ["{}", '{"a": 1,\n  "b": [1, 2.5e3, "x\\n\\u00e9 é", {"c": null}]}'], ["[1]", '{"a" 1}', '{"a": 01}']),
        (ARITHMETIC, ["1=2\n", "(a + b1) * 3 =\t7\n4=4\n"], ["1=2", "1+=2\n", "(a=2\n"]),  # `ws` takes the line break
        (SQL, ["SELECT a, COUNT(b) FROM t", "SELECT a FROM t UNION SELECT b FROM t"], ["SELECT FROM t", "SELECT a"]),
        ('root ::= [a-z ]+ " is " [0-9]+', ["the door is 3", "is is is 4"], ["the door 3", " is 3"]),
        ('root ::= word " is " root | "."\nword ::= [a-z ]+', ["a is b c is ."], ["a b is"]),
        ('root ::= "(" root ")" root | ""', ["", "(())()"], ["(()", ")"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["a", ""]),
        ('root ::= "\\x41" [\\u00e9-\\u00eb] "\\U0001F600" "/" [/\\]\\-^]', ["Aê😀/]", "Aé😀/^"], ["Ae😀/]"]),
        ('my-Rule ::= "x"\nroot ::= my-Rule myRule\nmyRule ::= "y"', ["xy"], ["x"]),
    ],
)  # fmt: skip
def test_grammars_of_the_field(grammar: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not takes(grammar, text)] == []
    assert [text for text in wrong if takes(grammar, text)] == []


def test_no_piece_swallows_what_must_follow() -> None:
    """After each beginning of a right text there is a way to the end: the longest match is not always the one."""
    for grammar, text in [(ARITHMETIC, "a + 1 =\n 2\n"), ('root ::= "(" root ")" | x "bc"\nx ::= [a-z]+', "((abcbc))")]:
        matcher = LLMatcher(BYTES, '%llguidance {"no_forcing": true}\n' + gbnf_to_lark(grammar), log_level=0)
        for byte in text.encode():
            assert byte in allowed(matcher)
            assert matcher.try_consume_tokens([byte]) == 1
        assert matcher.is_accepting()


def allowed(matcher: LLMatcher) -> set[int]:
    mask = matcher.compute_bitmask()
    return {k for k in range(256) if mask[k // 8] >> k % 8 & 1}


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('root ::= "a', "line 1"),
        ('root ::= "a"\nb ::= (c', "line 2: a parenthesis"),
        ("root ::= x", "'x', which is not defined"),
        ('a ::= "b"', "'root'"),
        ("root ::= [z-a]", "range"),
        ('root ::= "\\q"', "\\q is no character"),
        ('root ::= "\\ud800"', "no character"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ("root ::= )", "where a rule should begin"),
        ("root ::= []", "no characters"),
        ('root ::= "a" = "b"', "'='"),
        ("root ::= " + "(" * 100, "nested"),
    ],
)
def test_what_is_no_gbnf_is_refused_with_its_line(grammar: str, words: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        gbnf_to_lark(grammar)
    assert words in caught.value.message
