"""What clients want the output to match: which texts the grammar takes, and what is refused with which words."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from triptych.engine import grammar as worker
from triptych.errors import BadRequestError
from triptych.prompt.grammar import MAX_ITEMS, compile_structure
from triptych.types import Structure

BYTES = LLTokenizer("byte")
STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}


def compiled(kind: str, source: object) -> str:
    text = source if isinstance(source, str) else json.dumps(source)
    return compile_structure(Structure(kind, text))  # type: ignore[arg-type]


def takes(grammar: str, text: str) -> bool:
    """Whether the whole text is one that the grammar may end with."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    content = text.encode()
    return matcher.try_consume_tokens(list(content)) == len(content) and matcher.is_accepting()


def refusal(kind: str, source: object) -> str:
    with pytest.raises(BadRequestError) as caught:
        compiled(kind, source)
    return caught.value.message


def properties(count: int) -> dict[str, Any]:
    return {f"p{k}": STRING for k in range(count)}


def chain(count: int, link: Any) -> dict[str, Any]:
    """Definitions of which each refers to the next: `link` makes one of the reference."""
    links = {f"d{k}": link({"$ref": f"#/$defs/d{k + 1}"}) for k in range(count)}
    return {"$defs": {**links, f"d{count}": INTEGER}, "$ref": "#/$defs/d0"}


# -- JSON --------------------------------------------------------------------------------------------------------------

TEXTS = [
    "1", "12", "13", "1.5", "1.3", "-0", "007", "true", "null", '"a"', '"ab"', '"abc"', '"aab"', '"\\u00e9"',
    '"\\ud83d\\ude00"', '"é"', '"a\nb"', "[]", "[1]", "[1,2]", "[1,2,3]", '["a"]', "{}", '{"a":1}', '{ "a" : 1 }',
    '{"a":1,"b":2}', '{"a":"x","b":2}', '{"b":2}', '{"a":{"a":{"a":null}}}', '{"x1":"a"}', '"2024-02-29"',
    '"256.1.1.1"', '"127.0.0.1"', '{"kind":"cat","lives":9}', '{"kind":"dog","lives":9}',
]  # fmt: skip
SCHEMAS: list[dict[str, Any]] = [
    {},
    INTEGER,
    {"type": "integer", "minimum": 3, "maximum": 12},
    {"type": "number", "multipleOf": 0.5},
    {"type": "string", "maxLength": 2},
    {"type": "string", "pattern": "^a+$"},
    {"type": "string", "pattern": "b"},
    {"type": ["string", "null"]},
    {"enum": ["a", None, 12, [1], {"a": 1}]},
    {"const": {"a": 1}},
    {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2},
    {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": True},
    {"type": "object", "additionalProperties": INTEGER},
    {"type": "object", "patternProperties": {"^x": INTEGER}, "additionalProperties": False},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]},
    {"allOf": [{"properties": {"a": INTEGER}, "type": "object"}, {"properties": {"b": INTEGER}, "type": "object"}]},
    {"type": "string", "format": "ipv4"},
    {"$defs": {"t": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/o"}]},
               "o": {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}, "additionalProperties": False}},
     "$ref": "#/$defs/o"},
    {"oneOf": [{"type": "object", "properties": {"kind": {"const": "cat"}, "lives": INTEGER}, "required": ["kind"]},
               {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"],
                "additionalProperties": False}]},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=[json.dumps(schema)[:60] for schema in SCHEMAS])
def test_a_schema_takes_what_json_schema_takes(schema: dict[str, Any]) -> None:
    grammar = compiled("json_schema", schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for text in TEXTS:
        try:
            expected = validator.is_valid(json.loads(text))
        except ValueError:
            expected = False
        assert takes(grammar, text) == expected, text


def test_an_object_with_listed_properties_has_no_others_unless_it_says_so() -> None:
    """As vLLM's usual library has it; a closed part of a combination would exclude the other part."""
    closed = compiled("json_schema", {"type": "object", "properties": {"a": INTEGER}})
    assert takes(closed, '{"a":1}')
    assert not takes(closed, '{"a":1,"b":2}')
    assert takes(compiled("json_schema", {"type": "object"}), '{"a":1,"b":[2]}')
    assert not takes(compiled("json_schema", {"type": "array", "prefixItems": [INTEGER]}), "[1,2]")
    named = {"type": "object", "properties": {"properties": {"type": "object"}}}
    assert takes(compiled("json_schema", named), '{"properties":{"x":1}}'), "a property of this name is no keyword"


def test_properties_come_in_the_order_of_the_schema() -> None:
    grammar = compiled("json_schema", {"type": "object", "properties": {"b": INTEGER, "a": INTEGER}})
    assert takes(grammar, '{"b":1,"a":2}')
    assert not takes(grammar, '{"a":2,"b":1}')


def test_white_space_is_free_but_has_an_end() -> None:
    grammar = compiled("json_object", "")
    assert takes(grammar, '{\n\t"a" :\r\n  [ 1 , 2 ]\n}')
    for indent in (2, 4, "\t"):
        assert takes(grammar, json.dumps({"a": [1, {"b": [], "c": {"d": 2}}]}, indent=indent))
    assert takes(grammar, "{\n" + " " * 20 + "}")
    for space in ("\n" + " " * 21, " " * 3, "\n\n", " \n"):
        assert not takes(grammar, "{" + space + "}")
    assert not takes(grammar, " {}")
    assert not takes(grammar, "{}\n")


def test_white_space_is_as_the_client_wants_it() -> None:
    value = {"a": [1, 2], "b": {"c": 3}}
    texts = [json.dumps(value), json.dumps(value, separators=(",", ":")), json.dumps(value, indent=30)]
    schema = json.dumps({"type": "object", "properties": {"a": {}, "b": {}}})
    tag = json.dumps({"structures": [{"begin": "<", "schema": {}, "end": ">"}], "triggers": ["<"]})
    for whitespace, expected in {"": [0], " ": [0, 1], "[ ]?": [0, 1], r"[\s]*": [0, 1, 2]}.items():
        grammars = {
            "{}": compile_structure(Structure("json_object", "", whitespace=whitespace)),
            "{} ": compile_structure(Structure("json_schema", schema, whitespace=whitespace)),
            "<{}>": compile_structure(Structure("structural_tag", tag, whitespace=whitespace)),
            "-{}": compile_structure(Structure("grammar", f'start: "-" %json {schema}', whitespace=whitespace)),
        }
        for form, grammar in grammars.items():
            taken = [k for k, text in enumerate(texts) if takes(grammar, form.strip().format(text))]
            assert taken == expected, (whitespace, form)


def test_any_json_object_is_one() -> None:
    grammar = compiled("json_object", "")
    assert takes(grammar, json.dumps({"a": [1, "é\n😀", {"b": None}], "": True}))
    assert not takes(grammar, "[1]")
    assert not takes(grammar, '{"a":1')


def test_a_format_that_nobody_knows_and_other_notes_are_no_rules() -> None:
    schema = {
        **STRING, "format": "int32", "description": "x", "default": 3, "uniqueItems": False, "example": 1,
        "x-guidance": {"lenient": True}, "title": "t", "$schema": "https://json-schema.org/draft/2020-12/schema",
    }  # fmt: skip
    assert takes(compiled("json_schema", schema), '"anything"')
    assert "not" in refusal("json_schema", {**schema, "not": {}}), "a client does not choose how strict we are"


def test_special_tokens_in_a_schema_are_text() -> None:
    grammar = compiled("json_schema", {"enum": ["<|im_end|>", "<|endoftext|>"]})
    assert takes(grammar, '"<|im_end|>"')


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strin"}, "strin"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, '"not"'),
        ({"uniqueItems": True}, '"uniqueItems"'),
        ({"contains": INTEGER}, '"contains"'),
        ({"if": {}, "then": {}}, '"if"'),
        ({"pattern": "("}, "unclosed group"),
        ({"pattern": "(?=a)"}, "look-around"),
        ({"enum": []}, "Unsatisfiable"),
        ({"minimum": 3, "maximum": 2, "type": "integer"}, "minimum"),
        ({"minimum": "a"}, "minimum"),
        ({"$ref": "#/$defs/a"}, "#/$defs/a"),
        ({"$ref": "https://example.com/schema"}, "https://example.com/schema"),
        ({"$ref": "#"}, "no text"),
        ([1], "object"),
        ("{", "not JSON"),
        ('{"minimum": NaN}', "NaN"),
        ("[" * 100_000, "nested"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_by_its_reason(schema: object, words: str) -> None:
    assert words in refusal("json_schema", schema)


HOSTILE: dict[str, tuple[str, object, str]] = {
    "long": ("json_schema", {"enum": ["x" * 40_000]}, "characters"),
    "longer": ("json_schema", {"description": "x" * 300_000}, "characters"),
    "nested": ("json_schema", '{"items":' * 110 + "{}" + "}" * 110, "nested"),
    "chain of references": ("json_schema", chain(600, lambda ref: ref), "levels"),
    "chain of objects": ("json_schema", chain(300, lambda ref: {"properties": {"a": ref}}), "levels"),
    "doubling": (
        "json_schema",
        {"allOf": [{"anyOf": [{"properties": {f"p{k}{i}": STRING}} for i in range(6)]} for k in range(8)]},
        "too large",
    ),
    "wide": ("json_schema", {"properties": properties(800)}, "750"),
    "counted": ("json_schema", {"properties": properties(60), "minProperties": 1}, "50"),
    "names": ("json_schema", {"patternProperties": {f"^x{k}[a-z]*$": {} for k in range(40)}}, "16"),
    "intersections": (
        "json_schema",
        {"allOf": [{"pattern": f"(a|b)*a(a|b){{{k}}}"} for k in range(20)]},
        "20 patterns",
    ),
    "intersections by reference": (
        "json_schema",
        {
            "$defs": {f"d{k}": {"pattern": f"a.{{{k}}}", "$ref": f"#/$defs/d{k + 1}"} for k in range(20)} | {"d20": {}},
            "$ref": "#/$defs/d0",
        },
        "20 patterns",
    ),
    "remainders": ("json_schema", {"multipleOf": 99_991, "type": "integer"}, "multipleOf"),
    "remainders together": ("json_schema", {"allOf": [{"multipleOf": k} for k in (61, 59, 53)]}, "multipleOf"),
    "choices": ("choice", [f"{k:050}" for k in range(800)], "characters"),
    "expression": ("regex", "(" * 20_000, "invalid regex"),
    "rules": ("grammar", "start: r0\n" + "".join(f"r{k}: r{k + 1}\n" for k in range(600)) + 'r600: "a"', "rules"),
    "rules and parentheses": (
        "grammar",
        "start: r0\n" + "".join(f"r{k}: (((r{k + 1})?)+)?\n" for k in range(450)) + 'r450: "a"',
        "rules",
    ),
    "rules and parentheses of GBNF": (
        "grammar",
        "root ::= r0\n" + "".join(f"r{k} ::= {'(' * 40}r{k + 1}{')?' * 40}\n" for k in range(200)) + 'r200 ::= "a"',
        "rules",
    ),
    "parentheses": ("grammar", "start: " + "(" * 10_000 + '"a"' + ")" * 10_000, "deep"),
    "doubling terminals": (
        "grammar",
        "start: T0\n" + "".join(f"T{k}: T{k + 1} T{k + 1}\n" for k in range(40)) + 'T40: "a"',
        "too big",
    ),
    "doubling rules": (
        "grammar",
        "root ::= r0\n" + "".join(f"r{k} ::= r{k + 1} r{k + 1}\n" for k in range(60)) + 'r60 ::= "a"',
        "too big",
    ),
    "both": ("grammar", "start: T\nT: " + " & ".join(f"/(a|b)*a(a|b){{{k}}}/" for k in range(30)), "&"),
    "schema in a grammar": ("grammar", 'start: %json {"multipleOf": 99991, "type": "integer"}', "multipleOf"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_take_seconds_gigabytes_or_the_process_is_refused(name: str) -> None:
    kind, source, words = HOSTILE[name]
    assert words in refusal(kind, source)


def test_sizes_that_people_send_are_taken() -> None:
    wide = {"type": "object", "properties": properties(500), "required": [f"p{k}" for k in range(0, 500, 2)]}
    assert takes(compiled("json_schema", wide), json.dumps({f"p{k}": "x" for k in range(500)}))
    described = {"type": "object", "properties": {f"p{k}": {**STRING, "description": "y" * 400} for k in range(200)}}
    assert takes(compiled("json_schema", described), '{"p7":"x"}')
    assert takes(compiled("json_schema", chain(100, lambda ref: {"properties": {"a": ref}})), '{"a":{"a":{}}}')
    assert takes(compiled("choice", [f"option {k}" for k in range(1000)]), "option 733")


def test_a_large_bound_costs_nothing() -> None:
    """Neither here nor at the first tokens: no state is made before it is reached."""
    for kind, source in [
        ("json_schema", {"type": "string", "minLength": 100_000, "maxLength": 10**9}),
        ("json_schema", {"type": "array", "items": INTEGER, "minItems": 10**6}),
        ("regex", "x{1000000}"),
        ("regex", "((x{1000}){1000}){1000}"),
    ]:
        matcher = LLMatcher(BYTES, compiled(kind, source), log_level=0)
        matcher.compute_bitmask()
        assert not matcher.is_error()


# -- expressions and choices -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "right", "wrong"),
    [
        (r"\d{4}-\d{2}", ["2024-02"], ["2024-2", "x2024-02", "2024-021"]),
        ("^abc$", ["abc"], ["^abc$"]),
        (r"\Aabc\Z", ["abc"], []),
        (r"^(a|b)$", ["a", "b"], ["c"]),
        (r"a\$", ["a$"], ["a"]),
        (r"\\$", ["\\"], []),
        ("a/b", ["a/b"], ["a"]),
        (r"a\/b", ["a/b"], []),
        ("a#b", ["a#b"], []),
        ("a//b", ["a//b"], []),
        ("a\nb", ["a\nb"], []),
        (r"\w+@\w+\.com\n", ["a@b.com\n"], ["a@b.com"]),
        ("(?i)abc", ["AbC"], []),
        ("(?P<word>a)b", ["ab"], []),
        ("a+?b", ["aab"], []),
        ("", [""], ["a"]),
        (".*", ["", "x y"], ["a\nb"]),
        ("é|東", ["é", "東"], ["e"]),
    ],
)
def test_an_expression_matches_the_whole_output(expression: str, right: list[str], wrong: list[str]) -> None:
    grammar = compiled("regex", expression)
    assert [text for text in right if not takes(grammar, text)] == []
    assert [text for text in wrong if takes(grammar, text)] == []


@pytest.mark.parametrize(("expression", "words"), [("(", "unclosed"), (r"(a)\1", "backref"), ("a(?=b)", "look-around")])
def test_a_bad_expression_is_refused_by_its_reason(expression: str, words: str) -> None:
    assert words in refusal("regex", expression)


def test_choices_are_any_texts() -> None:
    choices = ["yes", "no way", '"x"\\', "é\n東", "a|b", "<|im_end|>", "/"]
    grammar = compiled("choice", choices)
    assert all(takes(grammar, choice) for choice in choices)
    assert not any(takes(grammar, text) for text in ("", "y", "yesno way", "a", "b"))
    assert takes(compiled("choice", ["", "a"]), "")


@pytest.mark.parametrize("source", [[], "x", ["a", 1], {"a": 1}, ["\ud800"]])
def test_choices_must_be_texts(source: object) -> None:
    assert refusal("choice", source)


# -- grammars ----------------------------------------------------------------------------------------------------------


def test_lark_grammars() -> None:
    grammar = compiled("grammar", '?start: "a" | pair\npair: "x" pair "y" | "z" // nested\n')
    assert [text for text in ("a", "z", "xzy", "xxzyy", "xz", "b") if takes(grammar, text)] == [
        "a",
        "z",
        "xzy",
        "xxzyy",
    ]
    grammar = compiled("grammar", "start: NAME NUMBER\n%import common.CNAME -> NAME\nNUMBER: /[0-9]+/\n%ignore / +/")
    assert takes(grammar, "foo 12")


def test_schemas_in_lark_are_made_ready_like_others() -> None:
    source = 'start: "<" %json {"type": "object", "description": "x", "properties": {"a": {"type": "integer"}}} ">"'
    grammar = compiled("grammar", source)
    assert takes(grammar, '<{"a":1}>')
    assert not takes(grammar, '<{"a":1,"b":2}>')
    assert "not JSON" in refusal("grammar", 'start: %json {"type": "integer"')


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("start: x", 'unknown name: "x"'),
        ("", "start"),
        ("hello world", "Expected"),
        ("start: start", "no text"),
        ("start: <|im_end|>", "special tokens"),
        ('start: A\nA: "a" A', "circular"),
        ("x" * 40_000, "characters"),
        ('%llguidance {"no_forcing": false}\nstart: /x{1000000}/', "options"),
    ],
)
def test_a_bad_grammar_is_refused_by_its_reason(source: str, words: str) -> None:
    assert words in refusal("grammar", source)


TAG = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<call=add>", "schema": {"type": "object", "properties": {"x": INTEGER}}, "end": "</call>"},
        {"begin": "<call=stop>", "schema": {"type": "object", "properties": {}}, "end": "</call>"},
    ],
    "triggers": ["<call="],
}


def test_a_structural_tag_leaves_text_free_until_its_trigger() -> None:
    grammar = compiled("structural_tag", TAG)
    assert takes(grammar, "any {text} <b>")
    assert takes(grammar, 'first <call=add>{"x": 1}</call> then <call=stop>{}</call>')
    assert not takes(grammar, "first <call=multiply>")
    assert not takes(grammar, 'first <call=add>{"y": 1}')


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({"type": "structural_tag", "format": {"type": "any_text"}}, "structures"),
        ({**TAG, "triggers": ["<tool"]}, "no trigger"),
        ({**TAG, "structures": [{"begin": "<call="}]}, "structures.0"),
        ([], "structures"),
    ],
)
def test_a_bad_structural_tag_is_refused_by_its_reason(tag: object, words: str) -> None:
    assert words in refusal("structural_tag", tag)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", '{"enum": ["\\ud800"]}'),
        ("json_schema", '{"properties": {"\\udfff": {}}}'),
        ("choice", '["a", "\\ud800"]'),
        ("grammar", 'start: %json {"enum": ["\\ud800"]}'),
        ("grammar", 'start: "\ud800"'),
        ("regex", "\ud800"),
        ("structural_tag", json.dumps({**TAG, "structures": [{"begin": "<call=\ud800", "schema": {}, "end": ""}]})),
    ],
)
def test_half_a_surrogate_pair_is_called_what_it_is(kind: Any, source: str) -> None:
    with pytest.raises(BadRequestError, match="half of a surrogate pair") as caught:
        compile_structure(Structure(kind, source, "structured_outputs"))
    assert "start:" not in caught.value.message


def test_the_field_at_fault_is_named() -> None:
    with pytest.raises(BadRequestError) as caught:
        compile_structure(Structure("regex", "(", "guided_regex"))
    assert caught.value.param == "guided_regex"


def test_both_ends_hold_the_same_limits() -> None:
    assert MAX_ITEMS == worker._MAX_ITEMS
