"""The `triptych` command: one module of this folder a subcommand, each with `add_parser` and `run`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from triptych import __version__
from triptych.cli import bench, config, demo, restart, router, serve, worker
from triptych.errors import TriptychError


class Parser(argparse.ArgumentParser):
    """Its subcommands are of the same kind: argparse makes them of the parser's own class."""

    def error(self, message: str) -> NoReturn:
        """Without the usage, which with a flag for every setting fills a screen."""
        self.exit(2, f"{self.prog}: {message}\nsee {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="triptych",
        description="Serve a vision-language model with encode, prefill and decode as stages that scale separately.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"triptych {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, router, worker, restart, demo, bench, config):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 for what cannot work, 130 when interrupted before it served; argparse exits with 2."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except TriptychError as error:
        print(f"triptych: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
