"""Reads GBNF, the EBNF kind of llama.cpp and vLLM, into a tree. Used by `gbnf.py` in the router."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from triptych.errors import BadRequestError

IS_GBNF = re.compile(r"^[ \t]*[A-Za-z_][\w-]*[ \t]*::=", re.MULTILINE)
LAST_CHARACTER = 0x10FFFF

_TOKEN = re.compile(
    r"""
    (?P<skip>\s+|\#[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*")
    |(?P<set>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<repeat>[*+?]|\{\s*\d{1,9}\s*(?:,\s*(?:\d{1,9}\s*)?)?\})
    |(?P<define>[A-Za-z_][\w-]*\s*::=)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<mark>[()|.])
    """,
    re.VERBOSE,
)
_CHARACTER = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{character: character for character in "\\\"'[]-^/"}}
_MAX_NESTING = 60


@dataclass(frozen=True)
class CharacterSet:
    ranges: tuple[tuple[int, int], ...]  # first and last code point
    negated: bool = False

    @property
    def regex(self) -> str:
        if not self.negated and len(self.ranges) == 1 and self.ranges[0][0] == self.ranges[0][1]:
            return character(self.ranges[0][0])
        parts = [character(low) if low == high else f"{character(low)}-{character(high)}" for low, high in self.ranges]
        return f"[{'^' if self.negated else ''}{''.join(parts)}]"


@dataclass(frozen=True)
class Characters:
    """So many characters in a row, none for the empty text."""

    sets: tuple[CharacterSet, ...]


@dataclass(frozen=True)
class Reference:
    name: str


@dataclass(frozen=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    part: Node
    times: str  # as it stands behind the part

    @property
    def is_optional(self) -> bool:
        return self.times in ("*", "?") or bool(re.match(r"\{0+[,}]", self.times))

    @property
    def is_plural(self) -> bool:
        return self.times not in ("?", "{0,1}", "{1}", "{1,1}")


Node = Characters | Reference | Sequence | Choice | Repeat


def character(code: int) -> str:
    """A regular expression for one character, which means nothing else in any syntax around it."""
    return chr(code) if code < 128 and chr(code).isalnum() else f"\\x{{{code:X}}}"


def references(node: Node) -> Iterator[str]:
    match node:
        case Reference(name):
            yield name
        case Sequence(nodes) | Choice(nodes):
            for part in nodes:
                yield from references(part)
        case Repeat(part, _):
            yield from references(part)


class Parser:
    """Recursive descent. A rule goes on until the next definition, whatever the line breaks are.

    Raises BadRequestError that names the line.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens: list[tuple[str, str, int]] = []  # kind, text, offset
        at = 0
        while at < len(source):
            found = _TOKEN.match(source, at)
            if found is None:
                self._fail(at, f"{source[at]!r} has no meaning here")
            if found.lastgroup != "skip":
                self._tokens.append((str(found.lastgroup), found[0], at))
            at = found.end()
        self._tokens.append(("end", "", at))
        self._next = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._kind() != "end":
            kind, text, at = self._take()
            if kind != "define":
                self._fail(at, f"{text!r} where a rule should begin")
            name = text.removesuffix("::=").strip()
            if name in rules:
                self._fail(at, f"rule {name!r} is defined twice")
            rules[name] = self._choice()
        return rules

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._text() == "|":
            self._take()
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._kind() in ("string", "set", "name") or self._text() in ("(", "."):
            part = self._part()
            while self._kind() == "repeat":
                part = Repeat(part, "".join(self._take()[1].split()))
            parts.append(part)
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _part(self) -> Node:
        kind, text, at = self._take()
        if kind == "string":
            return Characters(tuple(CharacterSet(((code, code),)) for code in self._codes(text[1:-1], at)))
        if kind == "set":
            return Characters((self._set(text[1:-1], at),))
        if kind == "name":
            return Reference(text)
        if text == ".":
            return Characters((CharacterSet(((0, LAST_CHARACTER),)),))
        self._depth += 1
        if self._depth > _MAX_NESTING:
            self._fail(at, "parentheses are nested too deep")
        inner = self._choice()
        self._depth -= 1
        if self._take()[1] != ")":
            self._fail(at, "a parenthesis is not closed")
        return inner

    def _set(self, text: str, at: int) -> CharacterSet:
        negated = text.startswith("^")
        body = text[negated:]
        codes = self._codes(body, at)
        written = [found[0] for found in _CHARACTER.finditer(body)]  # tells a range's `-` from an escaped one
        ranges, k = [], 0
        while k < len(codes):
            is_range = k + 2 < len(codes) and written[k + 1] == "-"
            low, high = codes[k], codes[k + 2] if is_range else codes[k]
            if high < low:
                self._fail(at, f"the range from {chr(low)!r} to {chr(high)!r} is empty")
            ranges.append((low, high))
            k += 3 if is_range else 1
        if not ranges:
            self._fail(at, "a set of no characters")
        return CharacterSet(tuple(ranges), negated)

    def _codes(self, text: str, at: int) -> list[int]:
        codes = []
        for found in _CHARACTER.finditer(text):
            digits = found[1] or found[2] or found[3]
            plain = _ESCAPES.get(found[4], "") if found[4] else found[5]
            code = int(digits, 16) if digits else ord(plain or "\ud800")
            if code > LAST_CHARACTER or 0xD800 <= code < 0xE000:
                self._fail(at, f"{found[0]} is no character")
            codes.append(code)
        return codes

    def _kind(self) -> str:
        return self._tokens[self._next][0]

    def _text(self) -> str:
        return self._tokens[self._next][1]

    def _take(self) -> tuple[str, str, int]:
        token = self._tokens[self._next]
        self._next = min(self._next + 1, len(self._tokens) - 1)
        return token

    def _fail(self, at: int, reason: str) -> NoReturn:
        raise BadRequestError(f"grammar, line {self._source.count(chr(10), 0, at) + 1}: {reason}")
