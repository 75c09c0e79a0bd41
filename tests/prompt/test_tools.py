"""Tools: what is a tool, which format a template asks for, and calls that must come."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.engine.test_grammar import text_of, walk
from triptych.errors import BadRequestError
from triptych.prompt.template import ChatTemplate
from triptych.prompt.tool_calls import ToolCallParser
from triptych.prompt.tools import ToolFormat, check_parameters, tool_grammar
from triptych.types import ToolCallDelta

BYTES = LLTokenizer("byte")

# What decides in the templates of Qwen3-VL and of Qwen3-Coder, shortened.
JSON_TEMPLATE = """
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\n\\nReturn a json object with function name and arguments within <tool_call></tool_call> XML tags:\\n"
"<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- endif %}{%- for message in messages %}{{- message.content }}{%- endfor %}
"""
XML_TEMPLATE = """
{%- if tools %}{{- "<|im_start|>system\\n<tools>" }}{%- for tool in tools %}{{- tool.function.name }}{%- endfor %}
{{- "</tools>\\n<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>" }}
{%- endif %}{%- for message in messages %}{{- message.content }}{%- endfor %}
"""


def tool(name: str, parameters: object = None, **more: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
        "where": {"$ref": "#/$defs/where"},
    },
    "required": ["city", "days"],
    "$defs": {"where": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = [tool("get_weather", WEATHER, description="Weather"), tool("stop"), tool("log", {"properties": {"line": {}}})]


def takes(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    content = text.encode()
    return matcher.try_consume_tokens(list(content)) == len(content) and matcher.is_accepting()


def test_the_format_is_that_of_the_template() -> None:
    for source in (JSON_TEMPLATE, XML_TEMPLATE):
        ChatTemplate(source)  # it is one
    assert ToolFormat.detect(JSON_TEMPLATE) is ToolFormat.JSON
    assert ToolFormat.detect(XML_TEMPLATE) is ToolFormat.XML
    assert ToolFormat.detect("{%- for message in messages %}{{- message.content }}{%- endfor %}") is None
    assert ToolFormat.detect("{%- if tools %}[TOOL_CALLS]{%- endif %}") is None


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([tool("a"), tool("b", {"type": "string"})], "tools.1.function.parameters"),
        ([tool("a", {"type": "object", "properties": []})], "tools.0.function.parameters.properties"),
        ([tool("a", {"type": "object", "required": "x"})], "tools.0.function.parameters.required"),
        ([tool("a", {"type": "object", "required": [1]})], "tools.0.function.parameters.required"),
    ],
)
def test_what_are_no_parameters_is_refused_by_its_field(tools: list[Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        check_parameters(tools)
    assert caught.value.param == param


def test_parameters_are_taken() -> None:
    check_parameters(TOOLS)
    check_parameters([])


JSON_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn", "days": 3}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\nam Rhein\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("format", "call", "stop"),
    [
        (ToolFormat.JSON, JSON_CALL, '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'),
        (ToolFormat.XML, XML_CALL, "<tool_call>\n<function=stop>\n</function>\n</tool_call>"),
    ],
)
def test_a_call_that_must_come(format: ToolFormat, call: str, stop: str) -> None:
    one = tool_grammar(format, TOOLS, "required", parallel=False)
    assert takes(one, call)
    assert takes(one, stop)
    for wrong in (
        "",
        f"Well. {call}",
        f"{call}\n{stop}",
        call.replace("get_weather", "get_time"),
        call.replace("3", "x"),
    ):
        assert not takes(one, wrong), wrong
    several = tool_grammar(format, TOOLS, "required", parallel=True)
    assert takes(several, f"{call}\n{stop}\n{call}")
    assert not takes(several, f"{call}\n")
    named = tool_grammar(format, TOOLS, "stop", parallel=True)
    assert takes(named, stop)
    assert not takes(named, call)
    assert not takes(named, f"{stop}\n{stop}"), "one that is named is called once"


def test_arguments_match_the_schema() -> None:
    grammar = tool_grammar(ToolFormat.JSON, TOOLS, "get_weather", parallel=False)
    for wrong in ('"city": "Bonn"', '"days": 3', '"city": "Bonn", "days": 15', '"city": "Bonn", "days": 3, "x": 1'):
        assert not takes(grammar, JSON_CALL.replace('"city": "Bonn", "days": 3', wrong))
    assert takes(grammar, JSON_CALL.replace('"days": 3', '"days": 3, "unit": "F", "where": {"x": 1.5}'))
    grammar = tool_grammar(ToolFormat.XML, TOOLS, "get_weather", parallel=False)
    unit = "<parameter=unit>\nF\n</parameter>\n"
    where = '<parameter=where>\n{"x": 1.5}\n</parameter>\n'
    assert takes(grammar, XML_CALL.replace("</function>", f"{unit}{where}</function>"))
    assert not takes(grammar, XML_CALL.replace("</function>", f"{unit.replace('F', 'K')}</function>"))
    assert not takes(grammar, XML_CALL.replace("</function>", f"{where.replace('1.5', 'true')}</function>"))
    assert not takes(grammar, XML_CALL.replace("<parameter=days>\n3\n</parameter>\n", ""))


@pytest.mark.parametrize("format", ToolFormat)
def test_whatever_is_drawn_is_calls_that_the_parser_reads(format: ToolFormat) -> None:
    tools = TOOLS
    if format is ToolFormat.XML:  # chance does not end a free text
        bound = json.dumps(TOOLS).replace('{"type": "string"}', '{"enum": ["Bonn", "a\\nb"]}')
        tools = json.loads(bound.replace('{"line": {}}', '{"line": {"type": ["boolean", "null"]}}'))
    grammar = tool_grammar(format, tools, "required", parallel=True)
    schemas = {one["function"]["name"]: one["function"]["parameters"] or {} for one in tools}
    for seed in range(8):
        text = text_of(walk(grammar, seed)).decode(errors="replace")
        parser = ToolCallParser(format, tools)
        pieces = [*parser.push(text), *parser.finish()]
        calls = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
        assert len(calls) == len(pieces), "nothing but calls"
        names = {piece.index: piece.name for piece in calls if piece.name}
        assert text.count("<tool_call>\n") >= len(names) > 0
        for index, name in names.items():
            arguments = json.loads("".join(piece.arguments for piece in calls if piece.index == index))
            jsonschema.validate(arguments, schemas[name])


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        (TOOLS, "get_time", "tool_choice"),
        ([], "required", "tool_choice"),
        ([TOOLS[0], tool("a", {"properties": {"x": {"not": {}}}})], "required", "tools.1.function.parameters"),
        (
            [tool("a", {"properties": {"x": {"type": "integer", "multipleOf": 99_991}}})],
            "a",
            "tools.0.function.parameters",
        ),
    ],
)
@pytest.mark.parametrize("format", ToolFormat)
def test_a_call_that_cannot_come_is_refused_by_its_field(
    format: ToolFormat, tools: list[Any], choice: str, param: str
) -> None:
    if format is ToolFormat.XML and "not" in json.dumps(tools):
        tools = json.loads(json.dumps(tools).replace('{"not": {}}', '{"type": "integer", "not": {}}'))
    with pytest.raises(BadRequestError) as caught:
        tool_grammar(format, tools, choice, parallel=False)
    assert caught.value.param == param


def test_a_parameter_that_the_xml_form_cannot_write_is_refused() -> None:
    with pytest.raises(BadRequestError, match="call format"):
        tool_grammar(ToolFormat.XML, [tool("a", {"properties": {"x>y": {}}})], "a", parallel=False)
