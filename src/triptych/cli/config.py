"""`triptych config`: every setting's effective value and where it came from."""

from __future__ import annotations

import argparse

from triptych.cli.options import add_config_flags, load_config, options, sources


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "config", help="print each setting, its value and its source", allow_abbrev=False, description=__doc__
    )
    add_config_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = load_config(args)
    origin = sources(args)
    rows = [
        (option.key, _shown(getattr(getattr(config, option.section), option.field)), origin[option.key])
        for option in options()
    ]
    widths = [max(len(row[k]) for row in rows) for k in range(2)]
    for key, value, source in rows:
        print(f"{key:<{widths[0]}} = {value:<{widths[1]}}  # {source}")
    return 0


def _shown(value: object) -> str:
    """As TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
