"""Calls in a model's text: found however the text is cut, and text that only looks like one is not lost."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from triptych.prompt.tool_calls import Piece, TextPiece, ToolCallParser
from triptych.prompt.tools import ToolFormat
from triptych.types import ToolCallDelta

JSON, XML = ToolFormat.JSON, ToolFormat.XML
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"}, "n": {"type": "number"}, "i": {"type": "integer"},
                    "b": {"type": "boolean"}, "o": {"type": "object"}, "l": {"$ref": "#/$defs/list"},
                    "u": {"type": ["string", "null"]},
                    "v": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "any": {}, "e": {"enum": ["a", "b"]},
                },
                "$defs": {"list": {"type": "array"}},
            },
        },
    }
    for name in ("f", "get_weather")
]  # fmt: skip
CALL = '<tool_call>\n{"name": "f", "arguments": {"s": "x"}}\n</tool_call>'
WEATHER = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"s": "}\\"{</tool_call>", "o": {"l": [1, {}]}}}\n</tool_call>'
)
XML_CALL = "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>"


def parsed(format: ToolFormat, parts: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and name and arguments of each call. Checks the order of what comes."""
    parser = ToolCallParser(format, TOOLS, choice=3)
    pieces: list[Piece] = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    text = ""
    calls: list[tuple[str, str]] = []
    ids = set()
    for piece in pieces:
        if isinstance(piece, TextPiece):
            assert piece.text
            text += piece.text
            continue
        assert piece.choice == 3
        if piece.name:
            assert piece.index == len(calls)
            assert re.fullmatch("call_[0-9a-f]{24}", piece.id)
            assert not piece.arguments
            ids.add(piece.id)
            calls.append((piece.name, ""))
        else:
            assert piece.index == len(calls) - 1
            assert piece.arguments
            assert not piece.id
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    assert len(ids) == len(calls)
    return text, calls


def test_a_call_of_the_json_form() -> None:
    text, calls = parsed(JSON, [CALL])
    assert text == ""
    assert calls == [("f", '{"s": "x"}')]


def test_arguments_are_the_text_that_the_model_wrote() -> None:
    text, calls = parsed(JSON, ["Let me see.\n\n", WEATHER, "\n", CALL])
    assert text == "Let me see."
    assert calls == [("get_weather", '{"s": "}\\"{</tool_call>", "o": {"l": [1, {}]}}'), ("f", '{"s": "x"}')]


def test_arguments_come_as_they_are_written() -> None:
    parser = ToolCallParser(JSON, TOOLS)
    assert parser.push('Hello <tool_call>\n{"name": "f", "argum') == [TextPiece("Hello")]
    first = parser.push('ents": {"s": "ab')
    assert [piece.arguments for piece in first if isinstance(piece, ToolCallDelta)] == ["", '{"s": "ab']
    assert [piece[:] if isinstance(piece, TextPiece) else piece.arguments for piece in parser.push("cd")] == ["cd"]


@pytest.mark.parametrize(
    "body",
    [
        '{"name":"f","arguments":{}}',
        ' {\n  "name" : "f" ,\n "arguments" :\n{} } ',
        '{"name": "f", "parameters": {}}',
        '{"arguments": {}, "name": "f"}',
        '{"name": "f", "arguments": {}, "id": 7}',
        '{"name": "\\u0066", "arguments": {}}',
    ],
)
def test_ways_to_write_a_call(body: str) -> None:
    text, calls = parsed(JSON, [f"<tool_call>{body}</tool_call>"])
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", {})]
    assert text in ("", ', "id": 7}</tool_call>')


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        "plain text\n",
        "a <tool_call",
        "a <tool_call> is a tag",
        "<tool_call>",
        "\n<tool_call>\n</tool_call>\n",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "unknown", "argu',
        '<tool_call>{"name": "f", "other": ',
        '<tool_call>{"name": "f", "argu :',
        '<tool_call>{"name": "f"}',
        '<tool_call>{"name": "f',
        '<tool_call>["f"]</tool_call> and more ',
        "<tool_call>\n<function=f>\n</function>\n</tool_call>",
    ],
)
def test_what_is_no_call_of_the_json_form_stays_text(text: str) -> None:
    assert parsed(JSON, [text]) == (text, [])


def test_a_call_that_was_handed_on_before_it_turned_bad_ends_there() -> None:
    text, calls = parsed(JSON, ['<tool_call>{"name": "f", "arguments": {"s": tru}}</tool_call>'])
    assert (text, calls) == ("", [("f", '{"s": tru}')])
    text, calls = parsed(JSON, ['<tool_call>{"name": "f", "arguments": {"i": 1} no </tool_call>', CALL])
    assert (text, calls) == (" no </tool_call>", [("f", '{"i": 1}'), ("f", '{"s": "x"}')])


@pytest.mark.parametrize(
    ("format", "written", "arguments"),
    [
        (JSON, '{"name": "f"', ""),
        (JSON, '\n{"name": "f", ', ""),
        (JSON, '{"name": "f", "argu', ""),
        (JSON, '{"name": "f", "parameters" : ', ""),
        (JSON, '{"name": "f", "arguments": {', "{"),
        (JSON, '{"name": "f", "arguments": {"s": "cut by', '{"s": "cut by'),
        (XML, "\n<function=f>", "{"),
        (XML, "<function=f>\n<para", "{"),
        (XML, "<function=f>\n<parameter=s>\nx\n</parameter>\n", '{"s": "x"'),
        (XML, "<function=f>\n<parameter=s>\nx\n</parameter>\n<parameter=i>\n1", '{"s": "x"'),
        (XML, "<function=f>\n<parameter=s>\nx\n</parameter>\n</func", '{"s": "x"'),
    ],
)
def test_a_call_that_is_cut_has_its_arguments_so_far(format: ToolFormat, written: str, arguments: str) -> None:
    for parts in (["a <tool_call>", written], list("a <tool_call>" + written)):
        assert parsed(format, parts) == ("a", [("f", arguments)])
    parser = ToolCallParser(format, TOOLS)
    parser.push((CALL if format is JSON else XML_CALL) + "<tool_call>" + written)
    assert parser.cut is None
    parser.finish()
    assert parser.cut == 1


def test_a_call_without_its_closing_tag_is_one() -> None:
    for end in ("}", "}\n", "}\n</tool", ""):
        assert parsed(JSON, ['<tool_call>\n{"name": "f", "arguments": {"i": 1}' + end]) == (
            "",
            [("f", '{"i": 1}')],
        )


def test_a_good_call_behind_a_bad_one_is_found() -> None:
    bad = "<tool_call>{not json}\n"
    assert parsed(JSON, [bad, CALL]) == (bad.rstrip(), [("f", '{"s": "x"}')])
    bad = "<tool_call>\n<function=f>\n<parameter=s>\nx\n</tool_call>\n"
    assert parsed(XML, [bad, XML_CALL]) == (bad.rstrip(), [("f", '{"s": "x"}')])


def test_text_between_and_behind_calls() -> None:
    text, calls = parsed(JSON, [f"a \n{CALL}\n b\n{CALL}\n\n{CALL}\nc\n"])
    assert text == "a\n b\nc\n"
    assert len(calls) == 3


# -- the XML form ------------------------------------------------------------------------------------------------------


def xml(**parameters: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("s", "two\nlines ", "two\nlines "),
        ("s", "5", "5"),
        ("s", "\nindented\n", "\nindented\n"),
        ("s", "", ""),
        ("s", "null", "null"),
        ("s", '<b>"&amp;</b>', '<b>"&amp;</b>'),
        ("i", "5", 5),
        ("i", " 5 ", 5),
        ("i", "5.5", "5.5"),
        ("n", "5", 5),
        ("n", "-1.5e3", -1500),
        ("n", "NaN", "NaN"),
        ("b", "true", True),
        ("b", "True", True),
        ("b", "False", False),
        ("b", "yes", "yes"),
        ("o", '{"a":\n [1]}', {"a": [1]}),
        ("o", "{a: 1}", "{a: 1}"),
        ("o", "[1]", "[1]"),
        ("l", "[1, null]", [1, None]),
        ("u", "null", None),
        ("u", "None", None),
        ("u", "5", "5"),
        ("v", "null", None),
        ("v", "7", 7),
        ("any", "7", 7),
        ("any", "seven", "seven"),
        ("any", "null", None),
        ("e", "a", "a"),
        ("unknown", "7", "7"),
    ],
)
def test_parameters_become_what_the_schema_asks_for(key: str, written: str, value: Any) -> None:
    text, calls = parsed(XML, [xml(**{key: written})])
    assert text == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", {key: value})]


def test_a_call_of_the_xml_form_with_several_parameters_or_none() -> None:
    text, calls = parsed(XML, ["Now:\n", xml(s="x", i="1", b="true"), "\n", xml()])
    assert text == "Now:"
    assert calls == [("f", '{"s": "x", "i": 1, "b": true}'), ("f", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        XML_CALL.replace("=f>", "=unknown>"),
        XML_CALL.replace("</parameter>", ""),
        XML_CALL.replace("</function>", ""),
        XML_CALL.replace("<parameter=s>", "stray <parameter=s>"),
        XML_CALL[:20],
        XML_CALL[:-20] + "x",
        CALL,
        "<tool_call>\n<fun",
    ],
)
def test_what_is_no_call_of_the_xml_form_stays_text(text: str) -> None:
    assert parsed(XML, [text]) == (text, [])


# -- however it is cut -------------------------------------------------------------------------------------------------

FRAGMENTS = st.sampled_from(
    [
        CALL, WEATHER, XML_CALL, xml(i="1", s="a\n\nb"), "<tool_call>", "</tool_call>", "<tool_call>\n", "\n", " ",
        "text", '{"name": "f", "arguments": ', '{"name": "f", "arguments": {', '"s": "', '"', "}", "}}", "{", "\\", "<",
        "<function=f>", "</function>", "<parameter=s>", "</parameter>", "\n</parameter>\n", "<tool", "é",
        '{"name": "g", "arguments": {}}',
    ]
)  # fmt: skip
TEXTS = st.one_of(st.lists(FRAGMENTS, max_size=8).map("".join), st.text('<>/{}"\\ntool_call: f', max_size=60))


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(ToolFormat), TEXTS, st.lists(st.integers(0, 300), max_size=12))
@example(JSON, CALL + WEATHER, list(range(300)))
@example(XML, XML_CALL + "a" + XML_CALL, list(range(300)))
def test_text_cut_anywhere_gives_the_same(format: ToolFormat, text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [text[start:end] for start, end in pairwise(edges)]
    expected = parsed(format, [text])
    assert parsed(format, parts) == expected
    assert parsed(format, list(text)) == expected


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(ToolFormat), TEXTS)
def test_nothing_is_lost(format: ToolFormat, text: str) -> None:
    """What is no call is there, in order, but for white space about calls."""
    rest, calls = parsed(format, [text])
    if not calls:
        assert rest == text
    characters = iter(text)
    assert all(character in characters for character in rest)
