"""What a client wants the output to match, to the one kind of grammar that workers take. Called by the router.

A call takes a few milliseconds for what people send and up to some 50 for the worst that the limits let pass, most of
it without the interpreter's lock: call it on a thread. `engine/grammar.py` is the other end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from triptych.errors import BadRequestError
from triptych.prompt.gbnf import MAX_RULES, gbnf_to_lark
from triptych.prompt.gbnf_syntax import IS_GBNF, character
from triptych.prompt.json_schema import Schema, dump, prepare, read_schema
from triptych.types import Structure

# The first line of a grammar says which limits hold for it in a worker: a schema is never ambiguous, and an object with
# many optional properties needs as many items at once as an ambiguous grammar that would stall the worker.
SCHEMA = "// schema"
GRAMMAR = "// grammar"
MAX_ITEMS = {SCHEMA: 20_000, GRAMMAR: 1000}  # of the parser at one place of the text

MAX_CHARACTERS = 32 << 10  # of an expression, a list of choices or a grammar
_MAX_NESTED_RULES = 1500  # rules of a grammar times how deep their parentheses are: the library recurses on the C stack
_MAX_INTERSECTIONS = 8  # each may double the memory
_ERROR_CHARACTERS = 300

# At each place where JSON allows it: a line's end with its indent, or a space or two. With more, a weak model may write
# little else until its tokens are used up.
_WHITESPACE = r"\r?\n[ \t]{0,20}| {1,2}"
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as vLLM's xgrammar has it
_OPTIONS = {
    "coerce_one_of": True,  # `oneOf` is read as `anyOf`, as xgrammar does; most schemas mean no more
    "json_allow_general_unicode_escapes": True,  # a model that begins one must be able to end it
}
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\\n]|\\.)+/')
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): |\n +\d+ \| .*", re.DOTALL)  # in lines that the client did not write
_LIBRARY_OPTIONS = re.compile(r"%llguidance(?!\s*\{\s*\})")
_HALF = re.compile("[\ud800-\udfff]")
_UNQUOTED = re.compile(r"\\.|[/\n]", re.DOTALL)
_ANCHORS = re.compile(r"^(?:\^|\\A)|(?<!\\)((?:\\\\)*)(?:\$|\\[zZ])$")


def compile_structure(structure: Structure) -> str:
    """The grammar for workers. It describes the whole output, from its first token to its end.

    Raises BadRequestError, which names the structure's field and what is wrong, for what is not valid, not supported,
    too large, or matches nothing at all.
    """
    try:
        return _COMPILERS[structure.kind](structure.source, structure.whitespace)
    except BadRequestError as error:
        raise BadRequestError(error.message, param=structure.param) from error


def json_rule(schema: Schema, whitespace: str | None) -> str:
    """The right side of a rule in Lark's syntax for JSON that matches `schema`, with `Structure.whitespace`.

    Raises BadRequestError.
    """
    spaces = _COMPACT if whitespace == "" else {"whitespace_pattern": whitespace or _WHITESPACE}
    return f"%json {dump({'x-guidance': {**_OPTIONS, **spaces}, **prepare(schema)})}"


def literal(text: str) -> str:
    """A regular expression that matches just this text."""
    _require_characters(text)
    return "".join(character(ord(one)) for one in text)


def checked(kind: str, lark: str) -> str:
    """The grammar for workers, compiled once to see that it works. Raises BadRequestError."""
    _require_characters(lark)
    # Without forcing, the library would make a token of its own choice certain wherever the text is, by tokenizing all
    # of the text that must come: a second for /x{1000000}/ at every token.
    grammar = f'{kind}\n%llguidance {{"no_forcing": true}}\n{lark}'
    matcher = LLMatcher(_every_byte(), grammar, log_level=0, limits=_limits(kind))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise BadRequestError(_reason(matcher.get_error()))
    return grammar


def _require_characters(text: str) -> None:
    """JSON as text may have `\\ud800`, which Python's reader takes for a character."""
    if found := _HALF.search(text):
        raise BadRequestError(f"U+{ord(found[0]):04X} is half of a surrogate pair and no character: no text has it")


@cache
def _every_byte() -> LLTokenizer:
    """A vocabulary of single bytes: what compiles for it compiles for every tokenizer."""
    return LLTokenizer("byte")


@cache
def _limits(kind: str) -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=100_000,
        max_grammar_size=100_000,
        max_items_in_row=MAX_ITEMS[kind],
        max_lexer_states=20_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def _reason(error: str) -> str:
    if error.startswith("NoExtension"):
        return "no text matches it"
    if "unknown special token" in error:
        return "special tokens cannot be named in a grammar"
    text = _PLACE.sub("", error.split("<state>")[0]).strip()
    return text.replace("Unimplemented keys", "keywords that are not supported")[:_ERROR_CHARACTERS]


# -- the kinds ---------------------------------------------------------------------------------------------------------


def _json_schema(source: str, whitespace: str | None) -> str:
    return checked(SCHEMA, f"start: {json_rule(read_schema(source), whitespace)}\n")


def _json_object(source: str, whitespace: str | None) -> str:
    return checked(SCHEMA, f"start: {json_rule({'type': 'object'}, whitespace)}\n")


def _regex(source: str, whitespace: str | None) -> str:
    _check_size(source)
    whole = _ANCHORS.sub(r"\1", source)
    quoted = _UNQUOTED.sub(lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), whole)
    return checked(GRAMMAR, f"start: /{quoted}/\n" if quoted else 'start: ""\n')


def _choice(source: str, whitespace: str | None) -> str:
    _check_size(source)
    choices = _json(source)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise BadRequestError("choices must be a list of strings, at least one")
    return checked(SCHEMA, f"start: /(?:{'|'.join(map(literal, choices))})/\n")


def _grammar(source: str, whitespace: str | None) -> str:
    _check_size(source)
    if IS_GBNF.search(source):
        lark = gbnf_to_lark(source)
        _check_nesting(lark)
        return checked(GRAMMAR, lark)
    if _LIBRARY_OPTIONS.search(source):
        raise BadRequestError("options of %llguidance cannot be set")
    lark, plain = _with_prepared_schemas(source, whitespace)
    _check_nesting(plain)
    return checked(GRAMMAR, lark)


def _with_prepared_schemas(source: str, whitespace: str | None) -> tuple[str, str]:
    """Lark with each `%json {...}` made ready, and the same without them."""
    lark, plain, at = "", "", 0
    for found in re.finditer(r"%json\s*(?=\{)", source):
        if found.start() < at:
            continue  # inside of the schema before
        try:
            schema, end = json.JSONDecoder().raw_decode(source, found.end())
        except RecursionError:
            raise BadRequestError("the schema is nested too deep") from None
        except ValueError as error:
            raise BadRequestError(f"the schema after %json is not JSON: {error}") from error
        lark += source[at : found.start()] + json_rule(schema, whitespace)
        plain += source[at : found.start()]
        at = end
    return lark + source[at:], plain + source[at:]


def _check_nesting(lark: str) -> None:
    """Counts rather too much: each colon for a rule, each parenthesis as deep as the deepest."""
    code = _QUOTED.sub("", lark)
    depth = deepest = 0
    for one in code:
        depth += (one in "([{") - (one in ")]}")
        deepest = max(deepest, depth)
    if code.count("&") > _MAX_INTERSECTIONS:
        raise BadRequestError(f"grammar: more than {_MAX_INTERSECTIONS} `&`")
    num_rules = code.count(":")
    if num_rules > MAX_RULES or num_rules * (1 + deepest) > _MAX_NESTED_RULES:
        raise BadRequestError(f"grammar: {num_rules} rules with parentheses {deepest} deep are too many")


def _structural_tag(source: str, whitespace: str | None) -> str:
    """Free text in which each trigger begins one of the tags that start with it: the form of vLLM with `structures`
    and `triggers`."""
    _check_size(source)
    tag = _json(source)
    triggers, structures = (tag.get("triggers"), tag.get("structures")) if isinstance(tag, dict) else (None, None)
    if not isinstance(triggers, list) or not isinstance(structures, list) or not triggers or not structures:
        raise BadRequestError("a structural tag needs `structures` and `triggers`; its other forms are not served")
    options: dict[str, list[str]] = {}
    for k, structure in enumerate(structures):
        match structure:
            case {"begin": str(begin), "schema": dict(schema), "end": str(end)}:
                found = [t for t in triggers if isinstance(t, str) and t and begin.startswith(t)]
            case _:
                raise BadRequestError(f"structures.{k} needs `begin`, `schema` and `end`")
        if not found:
            raise BadRequestError(f"structures.{k}: no trigger is the beginning of {begin!r}")
        trigger = max(found, key=len)
        rest, last = literal(begin[len(trigger) :]), literal(end)
        parts = [f"/{rest}/" if rest else "", json_rule(schema, whitespace), f"/{last}/" if last else ""]
        options.setdefault(trigger, []).append(" ".join(filter(None, parts)))
    lines = [f"start: ({' | '.join(f'tag{k}' for k in range(len(options)))})* TEXT", "TEXT: /(?s:.*)/"]
    for k, (trigger, tags) in enumerate(options.items()):
        alternatives = [f"tag{k}x{n}: {one}" for n, one in enumerate(tags)]
        lines += [f"begin{k}[lazy]: TEXT /{literal(trigger)}/", *alternatives]
        lines.append(f"tag{k}: begin{k} ({' | '.join(f'tag{k}x{n}' for n in range(len(tags)))})")
    return checked(SCHEMA, "\n".join([*lines, ""]))


_COMPILERS: dict[str, Callable[[str, str | None], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}


def _check_size(source: str) -> None:
    if len(source) > MAX_CHARACTERS:
        raise BadRequestError(f"{len(source)} characters, the limit is {MAX_CHARACTERS}")


def _json(source: str) -> Any:
    try:
        return json.loads(source)
    except RecursionError:
        raise BadRequestError("nested too deep") from None
    except ValueError as error:
        raise BadRequestError(f"not JSON: {error}") from error
