"""What the output must match: OpenAI's `response_format`, vLLM's `structured_outputs` and the older `guided_*`.

Called by `api/generation.py`. Whether a schema or a grammar can be used at all is the router's question.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from triptych.api.fields import GenerationFields, JsonSchema, ResponseFormat, StructuredOutputs
from triptych.errors import BadRequestError, MalformedRequestError, UnsupportedFieldError
from triptych.types import Structure

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
REFUSED = ("disable_additional_properties",)
_MAX_WHITESPACE_CHARACTERS = 100
# White space of JSON in an expression, with classes, groups and repetitions of it.
_WHITESPACE = re.compile(r"(?:[ \n\r\t()?*+|]|\\[nrts]|\[(?:[ \n\r\t]|\\[nrts])+\]|\(\?:|\{\d{1,3}(?:,\d{0,3})?\})+")


def read_structure(fields: GenerationFields) -> Structure | None:
    """Raises BadRequestError where a request asks for two."""
    found = [
        *_of_response_format(fields.response_format),
        *_of_structured_outputs(fields.structured_outputs),
        *_of_guided(fields),
    ]
    if len(found) > 1:
        raise BadRequestError(
            f"`{found[0].param}` and `{found[1].param}` exclude each other: the output has one structure.",
            param=found[1].param,
        )
    return found[0] if found else None


def of_schema(param: str, schema: JsonSchema | None) -> Structure:
    """OpenAI's named schema, of chat and of responses. Without `schema` it is any JSON."""
    if schema is None:
        raise MalformedRequestError(f"`{param}` is missing.", param=f"body.{param}")
    if schema.schema is None:
        return Structure("json_object", "", param)
    return Structure("json_schema", _text(schema.schema), param)


def _of_response_format(form: ResponseFormat | None) -> list[Structure]:
    if form is None or form.type == "text":
        return []
    if form.type == "json_object":
        return [Structure("json_object", "", "response_format")]
    if form.type == "json_schema":
        return [of_schema("response_format.json_schema", form.json_schema)]
    parts = {"type": form.type, "structures": form.structures, "triggers": form.triggers, "format": form.format}
    source = _text({name: part for name, part in parts.items() if part is not None})
    return [Structure("structural_tag", source, "response_format")]


def _of_structured_outputs(asked: StructuredOutputs | None) -> list[Structure]:
    if asked is None:
        return []
    at = "structured_outputs"
    for name in REFUSED:
        if getattr(asked, name):
            raise UnsupportedFieldError(f"`{at}.{name}` is not implemented.", param=f"{at}.{name}")
    whitespace = _whitespace(asked)
    found = _schema(f"{at}.json", asked.json) + _choice(f"{at}.choice", asked.choice)
    if asked.regex is not None:
        found.append(Structure("regex", asked.regex, f"{at}.regex"))
    if asked.grammar is not None:
        found.append(Structure("grammar", asked.grammar, f"{at}.grammar"))
    if asked.json_object:
        found.append(Structure("json_object", "", f"{at}.json_object"))
    if asked.structural_tag is not None:
        found.append(Structure("structural_tag", asked.structural_tag, f"{at}.structural_tag"))
    if not found:
        raise BadRequestError(f"`{at}` must set one of {', '.join(KINDS)}.", param=at)
    return [msgspec.structs.replace(structure, whitespace=whitespace) for structure in found]


def _whitespace(asked: StructuredOutputs) -> str | None:
    """`Structure.whitespace`. Raises BadRequestError for a pattern of anything but white space."""
    pattern, param = asked.whitespace_pattern, "structured_outputs.whitespace_pattern"
    if asked.disable_any_whitespace:
        if pattern:
            raise BadRequestError(f"`{param}` and `disable_any_whitespace` exclude each other.", param=param)
        return ""
    if not pattern:
        return None
    if len(pattern) > _MAX_WHITESPACE_CHARACTERS or not _WHITESPACE.fullmatch(pattern):
        raise BadRequestError(
            f"`{param}` must be an expression of white space of at most {_MAX_WHITESPACE_CHARACTERS} characters.",
            param=param,
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise BadRequestError(f"`{param}` is no expression: {error}.", param=param) from error
    return pattern.replace(r"\s", r"[ \n\r\t]")  # others than these are no white space of JSON


def _of_guided(fields: GenerationFields) -> list[Structure]:
    found = _schema("guided_json", fields.guided_json) + _choice("guided_choice", fields.guided_choice)
    if fields.guided_regex is not None:
        found.append(Structure("regex", fields.guided_regex, "guided_regex"))
    if fields.guided_grammar is not None:
        found.append(Structure("grammar", fields.guided_grammar, "guided_grammar"))
    return found


def _schema(param: str, schema: str | dict[str, Any] | None) -> list[Structure]:
    if schema is None:
        return []
    return [Structure("json_schema", schema if isinstance(schema, str) else _text(schema), param)]


def _choice(param: str, choices: list[str] | None) -> list[Structure]:
    if choices is None:
        return []
    if not choices or not all(choices):
        raise BadRequestError(f"`{param}` must be texts, none of them empty.", param=param)
    return [Structure("choice", _text(choices), param)]


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
