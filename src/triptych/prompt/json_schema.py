"""A client's JSON schema, made ready for the grammar library and small enough to compile in a few milliseconds.

The library compiles in the router and again in a worker, in time and memory that some short schemas make explode. What
is known to do that is measured here, and refused before. Used by `grammar.py` and `tools.py` in the router.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from triptych.errors import BadRequestError

Schema = dict[str, Any]

MAX_CHARACTERS = 32 << 10  # of the schema as workers get it, without its descriptions
MAX_SOURCE_CHARACTERS = 256 << 10
_MAX_NESTING = 100  # of JSON values; the library's reader takes 127
_MAX_LEVELS = 512  # nesting of the schema and of all that it refers to together: the library recurses on the C stack
_MAX_PROPERTIES = 750  # of one object
_MAX_COUNTED_PROPERTIES = 50  # of one object with `minProperties` or `maxProperties`
_MAX_NAME_PATTERNS = 16  # of one object: the library compares each with each
_MAX_INTERSECTED = 8  # patterns and formats that one string may have to match at once
_MAX_MULTIPLE = 4000  # states of the automaton that counts remainders
_MAX_MULTIPLES = 20_000  # of all together

# Keywords whose value holds no schema, and those that only inform.
_VALUES = frozenset({"const", "enum", "required", "type"})
_NOTES = frozenset({
    "$anchor", "$comment", "$id", "$schema", "contentEncoding", "contentMediaType", "contentSchema", "default",
    "deprecated", "description", "discriminator", "example", "examples", "externalDocs", "id", "readOnly", "title",
    "writeOnly", "x-guidance", "xml",
})  # fmt: skip
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_OF_OBJECTS = frozenset({"additionalProperties", "patternProperties", "properties", "required"})
_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array"}
FORMATS = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
})  # fmt: skip


def read_schema(source: str) -> Schema:
    """The JSON object in `source`. Raises BadRequestError for anything else."""
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise BadRequestError(f"the schema has {len(source)} characters, the limit is {MAX_SOURCE_CHARACTERS}")
    try:
        schema = json.loads(source, parse_constant=_refuse_constant)
    except RecursionError:
        raise BadRequestError("the schema is nested too deep") from None
    except ValueError as error:
        raise BadRequestError(f"the schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise BadRequestError("the schema must be a JSON object")
    return schema


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def prepare(schema: Schema) -> Schema:
    """The same schema for the library: without notes, and with what vLLM's users expect where it leaves a choice.

    - An object that lists `properties` and says nothing of others has no others, and `prefixItems` are all items. Left
      open where schemas are combined, because one closed part would exclude the properties of another.
    - A `format` that the library does not know is a note, as JSON Schema has it.

    Raises BadRequestError for a schema that is too large, refers outside itself, or would take too long to compile.
    """
    try:
        depth = _depth(schema)
        if depth > _MAX_NESTING:
            raise BadRequestError(f"the schema is nested {depth} deep, the limit is {_MAX_NESTING}")
        prepared: Schema = _prepare(schema, close=not any(_combines(value, _OF_OBJECTS) for value in _dicts(schema)))
        _check(prepared)
    except RecursionError:
        raise BadRequestError("the schema is nested too deep") from None
    return prepared


def dump(schema: Schema) -> str:
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level := [child for parent in level for child in _children(parent)]:
        depth += 1
    return depth


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _dicts(value: Any) -> Iterator[Schema]:
    """Every object in `value`: schemas, maps of schemas, and values that look like them."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
        pending += _children(value)


def _combines(schema: Schema, own: frozenset[str]) -> bool:
    """Whether one value has to match several schemas at once, of which keywords of `own` in `schema` itself are one."""
    parts = sum(key in schema for key in ("$ref", "anyOf", "oneOf")) + (not own.isdisjoint(schema))
    every = schema.get("allOf")
    return parts + (len(every) if isinstance(every, list) else 0) > 1


def _prepare(value: Any, close: bool) -> Any:
    """A copy without notes."""
    if not isinstance(value, dict):
        return value
    out: Schema = {}
    for key, child in value.items():
        if key in _NOTES or (key == "uniqueItems" and child is False):
            continue
        if key == "format" and isinstance(child, str) and child not in FORMATS:
            continue
        if key in _VALUES:
            out[key] = child
        elif key in _NAMED and isinstance(child, dict):
            out[key] = {name: _prepare(item, close) for name, item in child.items()}
        elif isinstance(child, list):
            out[key] = [_prepare(item, close) for item in child]
        else:
            out[key] = _prepare(child, close)
    if close and "properties" in out and _OPEN.isdisjoint(out):
        out["additionalProperties"] = False
    if close and "prefixItems" in out:
        out.setdefault("items", False)
    return out


def resolved(schema: Any, root: Schema) -> Schema:
    """What `schema` refers to, if it refers to something in `root`; {} for what is no object."""
    for _ in range(_MAX_NESTING):
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(ref, str):
            break
        try:
            schema = _target(root, ref)
        except BadRequestError:
            return {}
    return schema if isinstance(schema, dict) else {}


def json_types(schema: Any, root: Schema) -> set[str]:
    """Names of the JSON types that `schema` asks for; empty where it does not say."""
    types: set[str] = set()
    pending, seen = [schema], set[int]()
    while pending:
        part = resolved(pending.pop(), root)
        if id(part) in seen:
            continue
        seen.add(id(part))
        named = part.get("type")
        types |= {name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)}
        values = [*_list(part, "enum"), *([part["const"]] if "const" in part else [])]
        types |= set(map(type_name, values))
        pending += [*_list(part, "anyOf"), *_list(part, "oneOf"), *_list(part, "allOf")]
    return types


def type_name(value: object) -> str:
    return _NAMES.get(type(value), "object")


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


# -- limits ------------------------------------------------------------------------------------------------------------


def _check(schema: Schema) -> None:
    size = len(dump(schema))
    if size > MAX_CHARACTERS:
        raise BadRequestError(
            f"the schema has {size} characters without its descriptions, the limit is {MAX_CHARACTERS}"
        )
    targets = {ref: _target(schema, ref) for value in _dicts(schema) if isinstance(ref := value.get("$ref"), str)}
    levels = _depth(schema) + sum(map(_depth, targets.values()))
    if levels > _MAX_LEVELS:
        raise BadRequestError(
            f"the schema and what it refers to have {levels} levels together, the limit is {_MAX_LEVELS}"
        )
    for value in _dicts(schema):
        is_counted = "minProperties" in value or "maxProperties" in value
        _check_count(value, "properties", _MAX_COUNTED_PROPERTIES if is_counted else _MAX_PROPERTIES)
        _check_count(value, "required", _MAX_PROPERTIES)
        _check_count(value, "patternProperties", _MAX_NAME_PATTERNS)
    _check_multiples(schema)
    intersected = _Intersections(targets).most(schema)
    if intersected > _MAX_INTERSECTED:
        raise BadRequestError(
            f"the schema combines {intersected} patterns or formats for one string, the limit is {_MAX_INTERSECTED}"
        )


def _check_count(schema: Schema, key: str, limit: int) -> None:
    value = schema.get(key)
    if isinstance(value, dict | list) and len(value) > limit:
        raise BadRequestError(f"`{key}` of the schema has {len(value)} entries, the limit is {limit}")


def _target(schema: Schema, ref: str) -> Any:
    """What `ref` points at. Raises BadRequestError for a place that is not in `schema`."""
    value: Any = schema
    if ref != "#" and not ref.startswith("#/"):
        raise BadRequestError(f"`$ref` {ref!r}: only references into the schema itself, #/..., are served")
    for part in map(unquote, ref.split("/")[1:]):
        part = part.replace("~1", "/").replace("~0", "~")
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (LookupError, TypeError, ValueError):
            raise BadRequestError(f"`$ref` {ref!r}: the schema has no such place") from None
    return value


def _check_multiples(schema: Schema) -> None:
    """The library builds an automaton of as many states as the divisor has remainders, and of the least common multiple
    where several are combined."""
    divisors = [divisor for value in _dicts(schema) if (divisor := _divisor(value.get("multipleOf")))]
    together = any(_combines(value, frozenset({"multipleOf"})) for value in _dicts(schema))
    largest = math.lcm(*divisors) if together else max(divisors, default=0)
    if largest > _MAX_MULTIPLE or largest * len(divisors) > _MAX_MULTIPLES:
        raise BadRequestError("`multipleOf` of the schema has more remainders than can be counted")


def _divisor(value: object) -> int:
    """A number without its decimal point; 0 for what is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return 0
    number = Decimal(str(abs(value))).normalize()
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)  # it is finite
    return int(number.scaleb(-min(exponent, 0)))


class _Intersections:
    """How many patterns and formats one string may have to match at once, rather too many than too few.

    The library intersects them, in memory that doubles with each.
    """

    def __init__(self, targets: dict[str, Any]) -> None:
        self._targets = targets
        self._known: dict[int, int] = {}  # by id of the object; 0 while it is looked at

    def most(self, value: Any) -> int:
        if isinstance(value, list):
            return max(map(self.most, value), default=0)
        if not isinstance(value, dict):
            return 0
        if id(value) not in self._known:
            self._known[id(value)] = 0
            self._known[id(value)] = sum(self._of(key, child) for key, child in value.items())
        return self._known[id(value)]

    def _of(self, key: str, child: Any) -> int:
        if key in ("pattern", "format"):
            return int(isinstance(child, str)) or self.most(child)  # properties may have these names
        if key == "$ref" and isinstance(child, str):
            return self.most(self._targets[child])
        if key in ("allOf", "patternProperties"):
            return sum(map(self.most, _children(child)))
        if key in _NAMED:
            return max(map(self.most, _children(child)), default=0) if key == "properties" else 0
        return 0 if key in _VALUES else self.most(child)
