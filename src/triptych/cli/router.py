"""`triptych router`: the router and the API alone; workers are started by hand with `triptych worker`."""

from __future__ import annotations

import argparse

from triptych.cli.options import add_config_flags, load_config
from triptych.cli.serve import say


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "router", help="run the router and the API without workers", allow_abbrev=False, description=__doc__
    )
    parser.add_argument("--runtime-dir", required=True, metavar="DIR", help="directory for the unix sockets; short")
    add_config_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = load_config(args)
    import uvloop

    from triptych.cli.foreground import serve
    from triptych.launch import Deployment
    from triptych.observe import logging

    async def main() -> int:
        return await serve(Deployment(config, None, runtime_dir=args.runtime_dir, say=say), say)

    logging.set_up(config.api.log_level)
    return uvloop.run(main())
