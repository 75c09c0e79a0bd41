"""The checkpoint's own chat template: messages to text, with one placeholder text where each media item stands.

Runs in the router, in a sandbox; called by `prompt/layout.py`. The environment offers what transformers offers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triptych.errors import BadRequestError, ConfigError


class ChatTemplate:
    """A compiled template. Raises ConfigError where it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the checkpoint's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate:
        """From chat_template.jinja, chat_template.json or tokenizer_config.json, in this order."""
        config = _read_json(model_dir / "tokenizer_config.json")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return cls(_find_source(model_dir, config), {n: t for n in names if (t := _token_text(config.get(n)))})

    def render(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool, kwargs: Mapping[str, object]
    ) -> str:
        """Raises BadRequestError when the template refuses the messages or cannot make sense of them."""
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(**{**self._special_tokens, **kwargs, **given})
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRequestError(f"the chat template refused the messages: {error}", param="messages") from error


def _find_source(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> str:
    jinja = model_dir / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    source = _read_json(model_dir / "chat_template.json").get("chat_template") or tokenizer_config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ConfigError(f"{model_dir} has no chat template")
    return source


def _read_json(path: Path) -> dict[str, Any]:
    """{} when the file is missing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    return content if isinstance(content, dict) else {}


def _token_text(token: object) -> str:
    """A special token is a string, or an object that has it as its content."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML; a prompt wants the characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now(UTC).strftime(form)
