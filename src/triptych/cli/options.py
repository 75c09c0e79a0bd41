"""Command-line flags made from the fields of `config.py`: one flag a field, with the field's own description.

`--engine-block-size` always works; `--block-size` too, where no other section has a field of that name. Used by every
subcommand that takes a configuration.
"""

from __future__ import annotations

import argparse
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from triptych.config import Config, load
from triptych.errors import ConfigError

Overrides = dict[str, dict[str, Any]]  # by section and field


@dataclass(frozen=True)
class Option:
    """One field of one section."""

    section: str
    field: str
    annotation: Any  # as written in config.py, constraints included
    default: Any

    @property
    def key(self) -> str:
        return f"{self.section}.{self.field}"

    @property
    def description(self) -> str:
        texts = [meta.description for meta in get_args(self.annotation)[1:] if isinstance(meta, msgspec.Meta)]
        return next((text for text in reversed(texts) if text), "")

    @property
    def base(self) -> Any:
        """The type without its constraints."""
        args = get_args(self.annotation)
        return args[0] if hasattr(self.annotation, "__metadata__") else self.annotation

    def read(self, text: str) -> Any:
        """The value that `text` means. Raises argparse.ArgumentTypeError."""
        try:
            return msgspec.convert(text, self.annotation, strict=False)
        except msgspec.ValidationError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def options() -> Iterator[Option]:
    """Every setting, in the order of config.py."""
    for section, kind in get_type_hints(Config).items():
        hints = get_type_hints(kind, include_extras=True)
        for field in msgspec.structs.fields(kind):
            yield Option(section, field.name, hints[field.name], field.default)


def add_config_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """`--config FILE`, a positional MODEL, and a flag for each field. Only what is given lands in the namespace.

    `without` names settings that mean nothing to the command and get no flag.
    """
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="the same as --model-path")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with a table for each section")
    every = list(options())
    counts = Counter(option.field for option in every)
    groups: dict[str, Any] = {}
    for option in every:
        if option.key in without:
            continue
        if option.section not in groups:
            groups[option.section] = parser.add_argument_group(option.section)
        names = [f"{option.section}_{option.field}"]
        if counts[option.field] == 1 and option.field != "path":
            names.append(option.field)
        _add_flag(groups[option.section], [f"--{name.replace('_', '-')}" for name in names], option)


def _add_flag(group: Any, flags: list[str], option: Option) -> None:
    shown = "empty" if option.default == "" else option.default
    text = f"{option.description} (default: {shown})".replace("%", "%%")
    common = {"dest": option.key, "default": argparse.SUPPRESS, "help": text}
    if option.base is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
    elif get_origin(option.base) is Literal:
        group.add_argument(*flags, choices=get_args(option.base), **common)
    else:
        metavar = {int: "N", float: "X", str: "TEXT"}.get(option.base, "VALUE")
        group.add_argument(*flags, type=option.read, metavar=metavar, **common)


def overrides(args: argparse.Namespace) -> Overrides:
    """What the command line sets."""
    given: Overrides = {}
    for name, value in vars(args).items():
        section, dot, field = name.partition(".")
        if dot:
            given.setdefault(section, {})[field] = value
    model = getattr(args, "model", None)
    if model is not None:
        if given.get("model", {}).get("path", model) != model:
            raise ConfigError("MODEL and --model-path name two models")
        given.setdefault("model", {})["path"] = model
    return given


def load_config(args: argparse.Namespace) -> Config:
    """Defaults, then the file, then flags. Raises ConfigError."""
    return load(args.config, overrides(args))


def sources(args: argparse.Namespace) -> dict[str, str]:
    """Where each setting's value came from, by `section.field`: default, the file's name, or flag."""
    file: Overrides = tomllib.loads(args.config.read_text()) if args.config is not None else {}
    flags = overrides(args)
    found = {}
    for option in options():
        if option.field in flags.get(option.section, {}):
            found[option.key] = "flag"
        elif option.field in file.get(option.section, {}):
            found[option.key] = str(args.config)
        else:
            found[option.key] = "default"
    return found
