"""Which values an enumerated field of a request may have, read from the struct itself. Used where one was wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

from msgspec import inspect

_type_info = cache(inspect.type_info)


def enumerated(struct: type, path: Sequence[str]) -> list[str]:
    """`path` is names of fields and indices of lists. Empty where the field there is of another kind.

    Where it may also be an object, that is the last one.
    """
    options = [_type_info(struct)]
    for part in path:
        options = [inner for option in options for inner in _inside(option, part)]
    values = [str(value) for option in options for value in _values(option)]
    has_object = any(isinstance(option, inspect.StructType) for option in options)
    return [*values, "an object"] if values and has_object else values


def _inside(option: inspect.Type, part: str) -> Iterator[inspect.Type]:
    if isinstance(option, inspect.StructType):
        for field in option.fields:
            if field.encode_name == part:
                yield from _options(field.type)
    elif isinstance(option, inspect.ListType):
        yield from _options(option.item_type)


def _options(kind: inspect.Type) -> Sequence[inspect.Type]:
    return kind.types if isinstance(kind, inspect.UnionType) else [kind]


def _values(option: inspect.Type) -> Sequence[object]:
    if isinstance(option, inspect.LiteralType):
        return option.values
    return [member.value for member in option.cls] if isinstance(option, inspect.EnumType) else []
