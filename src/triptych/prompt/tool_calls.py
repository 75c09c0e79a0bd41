"""Finds tool calls in the text that a model writes, while it writes. Used by the router, one for each choice."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable
from typing import Any, NamedTuple

from triptych.prompt.json_schema import json_types, type_name
from triptych.prompt.tools import CLOSE, OPEN, Tool, ToolFormat, parameters_of, tool_name
from triptych.types import ToolCallDelta

_SPACE = " \t\r\n"
# Of the JSON form: the usual beginning, up to where the arguments begin; and what follows them.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
# Its beginning where the output ends behind the name.
_CUT_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*(?:,\s*(?:("[a-z]*)|("[a-z]*")\s*:?\s*)?)?\Z')
_KEYS = ('"arguments"', '"parameters"')
_TAIL = re.compile(rf"\s*\}}\s*{CLOSE}")
# Of the XML form.
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_FUNCTION_END = re.compile(rf"</function>\s*{CLOSE}")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_XML_NEXT = ("<parameter=", "</function>")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # as chat templates write them


class TextPiece(NamedTuple):
    text: str


Piece = TextPiece | ToolCallDelta


class ToolCallParser:
    """Text goes in as it comes, cut anywhere; out come text that is no part of a call, and calls.

    A call of the JSON form is handed on while it comes, as soon as its tool is known. One of the XML form is handed on
    when it is complete, because its arguments are converted by the tool's schema. A call that the output's end cuts,
    and whose tool is known, is one with its arguments so far. What looks like a call and is none (an unknown tool, no
    arguments) comes out as the text that it is. Only what was handed on before that showed stays a call, with arguments
    that are no JSON, and text goes on after.

    White space next to calls belongs to their format and is dropped.
    """

    def __init__(self, format: ToolFormat, tools: list[Tool], *, choice: int = 0) -> None:
        self._choice = choice
        self._format = format
        self._tools = {tool_name(tool): tool for tool in tools}
        self._state: Callable[[], bool] = self._text
        self._buffer = ""  # not yet looked at, or not enough to tell
        self._opening = ""  # of the call that is looked at: its tag, with the white space before
        self._taken = ""  # its text after that
        self._out: list[Piece] = []
        self._has_begun = False  # it was handed on
        self._num_calls = 0
        self.cut: int | None = None  # index of the call that the output's end cut
        self._is_after_call = False
        self._is_over = False

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        while self._state():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[Piece]:
        """The output is over: what was waited for does not come."""
        self._is_over = True
        return self.push("")

    # -- states: each returns whether there may be more to do --------------------------------------------------------

    def _text(self) -> bool:
        found = self._buffer.find(OPEN)
        if found >= 0:
            before = self._buffer[:found].rstrip(_SPACE)
            self._emit_text(before)
            self._opening = self._buffer[len(before) : found + len(OPEN)]
            self._taken = ""
            self._buffer = self._buffer[found + len(OPEN) :]
            self._state = self._xml if self._format is ToolFormat.XML else self._json_head
            return True
        if self._is_over:
            if not (self._is_after_call and not self._buffer.strip(_SPACE)):
                self._emit_text(self._buffer)
            self._buffer = ""
            return False
        begun = next((size for size in range(len(OPEN) - 1, 0, -1) if self._buffer.endswith(OPEN[:size])), 0)
        certain = self._buffer[: len(self._buffer) - begun].rstrip(_SPACE)
        self._emit_text(certain)
        self._buffer = self._buffer[len(certain) :]
        return False

    def _json_head(self) -> bool:
        if head := _HEAD.match(self._buffer):
            if head[1] not in self._tools:
                return self._is_text()
            self._take(head.end())
            self._begin_call(head[1])
            self._depth, self._in_string, self._is_escaped = 0, False, False
            self._state = self._json_arguments
            return True
        if CLOSE in self._buffer:
            return self._other_order()
        if self._is_over:
            return self._cut_head()
        start = self._buffer.lstrip(_SPACE)
        return self._is_text() if start and start[0] != "{" else False

    def _cut_head(self) -> bool:
        cut = _CUT_HEAD.match(self._buffer)
        if cut is None or cut[1] not in self._tools or not any(key.startswith(cut[2] or cut[3] or "") for key in _KEYS):
            return self._is_text()
        return self._cut_call(cut[1], "")

    def _other_order(self) -> bool:
        """A call whose keys come in another order, complete."""
        end = self._buffer.index(CLOSE)
        call = _decoded(self._buffer[:end])
        match call:
            case {"name": str(name), "arguments": dict(arguments)} if name in self._tools:
                self._take(end + len(CLOSE))
                self._begin_call(name)
                self._add_arguments(json.dumps(arguments, ensure_ascii=False))
                return self._end_call()
        return self._is_text()

    def _json_arguments(self) -> bool:
        end = self._end_of_object()
        self._add_arguments(self._take(end))
        if self._depth:
            if self._is_over:
                self.cut = self._num_calls
            return self._end_call() if self._is_over else False
        self._state = self._json_tail
        return True

    def _end_of_object(self) -> int:
        """How much of the buffer belongs to the object; `_depth` is 0 when it is complete."""
        for place, character in enumerate(self._buffer):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return len(self._buffer)

    def _json_tail(self) -> bool:
        if tail := _TAIL.match(self._buffer):
            self._take(tail.end())
            return self._end_call()
        rest = self._buffer.lstrip(_SPACE)
        if rest and not (rest[0] == "}" and CLOSE.startswith(rest[1:].lstrip(_SPACE))):
            return self._is_text()
        if self._is_over:  # a stop token may stand for the closing tag
            self._take(len(self._buffer))
            return self._end_call()
        return False

    def _xml(self) -> bool:
        if end := _FUNCTION_END.search(self._buffer):
            call = self._xml_call(self._buffer[: end.start()])
            if call is None:
                return self._is_text()
            self._take(end.end())
            self._begin_call(call[0])
            self._add_arguments(call[1])
            return self._end_call()
        start = self._buffer.lstrip(_SPACE)
        begins = start.startswith("<function=") or "<function=".startswith(start)
        function = _FUNCTION.match(self._buffer)
        is_known = function is None or function[1] in self._tools
        if begins and is_known and not self._is_over:
            return False
        call = self._xml_call(self._buffer, is_cut=True) if self._is_over else None
        return self._is_text() if call is None else self._cut_call(*call)

    def _xml_call(self, body: str, is_cut: bool = False) -> tuple[str, str] | None:
        """Name and arguments of a call, of a cut one those that are complete; None where it is none."""
        function = _FUNCTION.match(body)
        if function is None or function[1] not in self._tools or OPEN in body:
            return None
        schema = parameters_of(self._tools[function[1]])
        arguments, at = [], function.end()
        while parameter := _PARAMETER.match(body, at):
            key, text = parameter.groups()
            value = _value(text, schema["properties"].get(key), schema)
            arguments.append(f"{json.dumps(key, ensure_ascii=False)}: {value}")
            at = parameter.end()
        rest = body[at:].strip(_SPACE)
        if is_cut and (rest.startswith("<parameter=") or any(end.startswith(rest) for end in _XML_NEXT)):
            return function[1], f"{{{', '.join(arguments)}"
        return None if rest else (function[1], f"{{{', '.join(arguments)}}}")

    # -- what comes out ----------------------------------------------------------------------------------------------

    def _take(self, size: int) -> str:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        self._taken += taken
        return taken

    def _emit_text(self, text: str) -> None:
        if not text:
            return
        self._is_after_call = False
        match self._out:
            case [*_, TextPiece(before)]:
                self._out[-1] = TextPiece(before + text)
            case _:
                self._out.append(TextPiece(text))

    def _begin_call(self, name: str) -> None:
        self._out.append(ToolCallDelta(self._choice, self._num_calls, f"call_{secrets.token_hex(12)}", name, ""))
        self._has_begun = True

    def _add_arguments(self, text: str) -> None:
        if text:
            self._out.append(ToolCallDelta(self._choice, self._num_calls, "", "", text))

    def _cut_call(self, name: str, arguments: str) -> bool:
        self._take(len(self._buffer))
        self._begin_call(name)
        self._add_arguments(arguments)
        self.cut = self._num_calls
        return self._end_call()

    def _end_call(self) -> bool:
        """The call is complete, or as complete as it gets."""
        self._has_begun = False
        self._num_calls += 1
        self._is_after_call = True
        self._state = self._text
        return True

    def _is_text(self) -> bool:
        """What was looked at is no call: its tag is text, and all after it is looked at again."""
        if self._has_begun:
            return self._end_call()
        self._emit_text(self._opening)
        self._buffer = self._taken + self._buffer
        self._state = self._text
        return True


def _decoded(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(name)


def _value(text: str, schema: Any, root: dict[str, Any]) -> str:
    """A parameter's text as JSON of the type that its schema asks for; a string where it is of no such type."""
    types = json_types(schema, root) if schema is not None else {"string"}
    bare = text.strip(_SPACE)
    bare = _PYTHON_WORDS.get(bare, bare)
    if bare == "null" and "null" in types:
        return bare
    if "string" not in types:
        value = _decoded(bare)
        is_json = value is not None or bare == "null"
        found = {type_name(value), "number"} if isinstance(value, int) else {type_name(value)}
        if is_json and (not types or not types.isdisjoint(found)):
            return bare
    return json.dumps(text, ensure_ascii=False)
