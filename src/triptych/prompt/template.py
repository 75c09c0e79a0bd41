"""The checkpoint's chat template, rendered as transformers renders it. Called by `layout.py` in the router.

The template comes with the checkpoint and runs in jinja's sandbox; clients choose its variables, and bring their own
only where the server trusts them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triptych.errors import BadRequestError, ConfigError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_ERROR_CHARS = 300  # a template may put whole messages into its exception

# What expressions of a template raise on messages that they were not written for.
_RENDER_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
)  # fmt: skip


def read_settings(file: Path) -> dict[str, Any]:
    """A JSON object of the checkpoint; empty where there is no such file. Raises ConfigError if it is damaged."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return content


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's own text, for training; its content is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """`named_tokens` are variables of every render: bos_token, eos_token and the like."""

    def __init__(self, source: str, named_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.named_tokens = dict(named_tokens or {})
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise ConfigError("chat template: nested too deep") from error

    def with_source(self, source: str) -> ChatTemplate:
        """A template from a request, for the same model. Raises BadRequestError."""
        try:
            return ChatTemplate(source, self.named_tokens)
        except ConfigError as error:
            raise BadRequestError(error.message[:_ERROR_CHARS], param="chat_template") from error

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate:
        """Raises ConfigError where the checkpoint has no template or one that is not valid."""
        settings = read_settings(model_dir / "tokenizer_config.json")
        return cls(_source(model_dir, settings), _named_tokens(settings))

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, /, **kwargs: Any) -> str:
        """The prompt's text. Raises BadRequestError where the template refuses the messages."""
        # As in transformers: many templates take a missing key and fail on None.
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        variables = {**self.named_tokens, "tools": None, "documents": None, **kwargs}
        variables |= {"messages": present, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(variables)
        except _RENDER_ERRORS as error:
            raise BadRequestError(f"chat template: {error}"[:_ERROR_CHARS], param="messages") from error


def _source(model_dir: Path, settings: dict[str, Any]) -> str:
    try:
        return (model_dir / "chat_template.jinja").read_text()
    except FileNotFoundError:
        pass
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{model_dir / 'chat_template.jinja'}: {error}") from error
    source = read_settings(model_dir / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(source, list):  # several templates by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise ConfigError(f"{model_dir} has no chat template: neither chat_template.jinja, nor `chat_template` in JSON")
    return source


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    named = {name: settings.get(name) for name in _NAMED_TOKENS}
    extra = settings.get("extra_special_tokens")
    if isinstance(extra, dict):
        named |= extra
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
