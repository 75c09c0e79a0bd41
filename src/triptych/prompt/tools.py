"""Schemas of the tools that a client offers, and calls that must come, in the format that the checkpoint knows.

Used by the router. `tool_calls.py` finds calls in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from triptych.errors import BadRequestError
from triptych.prompt.grammar import SCHEMA, checked, json_rule, literal
from triptych.prompt.json_schema import Schema, json_types, resolved

Tool = dict[str, Any]  # as in OpenAI's API: {"type": "function", "function": {"name", "description", "parameters"}}

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_WHITESPACE = " "  # of arguments, at most one at each place: models write {"a": 1, "b": 2}
_MAX_CHARACTERS = 128 << 10  # of the grammar of all tools


class ToolFormat(StrEnum):
    """How a checkpoint writes a call between `<tool_call>` and `</tool_call>`.

    Both must be ordinary text for the tokenizer, or tokens that are not special, as they are in Qwen's: what is special
    is neither part of a text nor allowed by a grammar.
    """

    JSON = "json"  # {"name": ..., "arguments": {...}}: Hermes, Qwen2.5, Qwen3, Qwen3-VL
    XML = "xml"  # <function=name>, <parameter=key>, each on a line: Qwen3-Coder, Qwen3.5

    @classmethod
    def detect(cls, chat_template_source: str) -> ToolFormat | None:
        """By what the template tells the model about calls; None for a template without tools or of another kind."""
        if OPEN not in chat_template_source or "tools" not in chat_template_source:
            return None
        if "<function=" in chat_template_source and "<parameter=" in chat_template_source:
            return cls.XML
        return cls.JSON if "arguments" in chat_template_source else None


# -- what the client sends ---------------------------------------------------------------------------------------------


def check_parameters(tools: list[Tool], function_param: str = "function.") -> None:
    """What grammars and templates read of the tools' schemas; their form and names are `api/tools.py`'s to check.

    Raises BadRequestError that names the field; `function_param` comes before those of a tool's function.
    """
    for k, tool in enumerate(tools):
        parameters, param = tool["function"].get("parameters") or {}, _parameters_param(k, function_param)
        if parameters.get("type", "object") != "object":
            raise BadRequestError(f"`{param}` must be the JSON schema of an object.", param=param)
        if not isinstance(parameters.get("properties", {}), dict):
            raise BadRequestError(f"`{param}.properties` must be an object.", param=f"{param}.properties")
        required = parameters.get("required", [])
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise BadRequestError(f"`{param}.required` must be a list of names.", param=f"{param}.required")


def _parameters_param(k: int, function_param: str) -> str:
    return f"tools.{k}.{function_param}parameters"


def tool_name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def parameters_of(tool: Tool) -> Schema:
    """The schema of the arguments: a tool without one takes none."""
    return {"properties": {}, **(tool["function"].get("parameters") or {}), "type": "object"}


# -- calls that must come ----------------------------------------------------------------------------------------------


def tool_grammar(
    format: ToolFormat, tools: list[Tool], choice: str, parallel: bool, function_param: str = "function."
) -> str:
    """A grammar for workers: the output is one call, or one after the other where `parallel`, and nothing else.

    `choice` is "required" for any of the tools, or the name of one, which is then called once. `tools` are checked.
    Arguments match the tool's schema, in the order of its `properties`; in the XML form a string is any text, of its
    schema only `enum` and `const` hold. Takes milliseconds, as `compile_structure` does.

    Raises BadRequestError for a tool that is not there or a schema that cannot be enforced, named as in
    `check_parameters`.
    """
    chosen = {k: tool for k, tool in enumerate(tools) if choice in ("required", tool_name(tool))}
    if not chosen:
        raise BadRequestError(f"there is no tool {choice!r}", param="tool_choice")
    write = _xml_call if format is ToolFormat.XML else _json_call
    rules = {}
    for k, tool in chosen.items():
        with _fault_of(k, function_param):
            rules[k] = "".join(f"{line}\n" for line in write(f"call{k}", tool))
    every = "".join(rules.values())
    if len(every) > _MAX_CHARACTERS:
        raise BadRequestError(f"the tools' schemas have more than {_MAX_CHARACTERS} characters", param="tools")
    more = " (/\\x{A}/ call)*" if parallel and choice == "required" else ""
    try:
        return checked(SCHEMA, f"start: call{more}\ncall: {' | '.join(f'call{k}' for k in chosen)}\n{every}")
    except BadRequestError:
        for k, rule in rules.items():
            with _fault_of(k, function_param):
                checked(SCHEMA, f"start: call{k}\n{rule}")
        raise


@contextmanager
def _fault_of(k: int, function_param: str) -> Iterator[None]:
    try:
        yield
    except BadRequestError as error:
        raise BadRequestError(error.message, param=_parameters_param(k, function_param)) from error


def _json_call(rule: str, tool: Tool) -> list[str]:
    begin = literal(f'{OPEN}\n{{"name": "{tool_name(tool)}", "arguments": ')
    return [f"{rule}: /{begin}/ {json_rule(parameters_of(tool), _WHITESPACE)} /{literal(f'}}{chr(10)}{CLOSE}')}/"]


def _xml_call(rule: str, tool: Tool) -> list[str]:
    schema = parameters_of(tool)
    properties = dict(schema["properties"])
    required = schema.get("required", [])
    properties |= {key: {} for key in required if key not in properties}
    parts, lines = [], []
    for n, (key, value) in enumerate(properties.items()):
        if re.search(r"[>\n]", key):
            raise BadRequestError(f"the name {key!r} cannot be written in the model's call format")
        parts.append(f"{rule}p{n}" + ("" if key in required else "?"))
        lines.append(f"{rule}p{n}: /{literal(f'<parameter={key}>{chr(10)}')}/ {rule}v{n}")
        lines.append(_xml_value(f"{rule}v{n}", value, schema))
    begin, end = literal(f"{OPEN}\n<function={tool_name(tool)}>\n"), literal(f"</function>\n{CLOSE}")
    return [f"{rule}: /{begin}/ {' '.join(parts)} /{end}/", *lines]


def _xml_value(rule: str, schema: Any, root: Schema) -> str:
    end = literal("\n</parameter>\n")
    schema = resolved(schema, root)
    texts = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        return f"{rule}: /(?:{'|'.join(map(literal, texts))}){end}/"
    if "string" in json_types(schema, root) or not json_types(schema, root):
        return f"{rule}[lazy]: /(?s:.*){end}/"
    definitions: Schema = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"{rule}: {json_rule({**schema, **definitions}, _WHITESPACE)} /{end}/"
