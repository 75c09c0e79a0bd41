"""`triptych serve`: the router, the API and the workers of one host, under one parent process."""

from __future__ import annotations

import argparse
import os

from triptych import __version__
from triptych.cli.options import add_config_flags, load_config
from triptych.errors import ConfigError
from triptych.placement import Placement, check_cores, parse_pins

GROUPS = ("encode", "prefill", "decode", "prefill-decode", "encode-prefill", "epd")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", help="serve a model on this host", allow_abbrev=False, description=__doc__)
    where = parser.add_argument_group("placement (default: EPD, every stage in one worker)")
    where.add_argument("--placement", metavar="SHAPE", help="counts of workers by the stages they host, as 2E/1P/2D")
    for name in GROUPS:
        stages = "every stage" if name == "epd" else name.replace("-", " and ")
        where.add_argument(f"--{name}", type=int, default=0, metavar="N", help=f"workers that host {stages}")
    where.add_argument(
        "--pin", action="append", default=[], metavar="NAME=CORES", help="cores of a worker, group or router: encode=0"
    )
    where.add_argument(
        "--lend-cores", action="store_true", help="pinned workers compute on each other's cores that have nothing to do"
    )
    add_config_flags(parser)
    parser.set_defaults(run=run)


def placement_of(args: argparse.Namespace) -> Placement:
    counts = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in GROUPS}
    if min(counts.values()) < 0:
        raise ConfigError("a number of workers cannot be negative")
    if args.placement is None:
        return Placement.from_counts(**counts)
    if any(counts.values()):
        raise ConfigError("give either --placement or the numbers of workers, not both")
    return Placement.parse(args.placement)


def run(args: argparse.Namespace) -> int:
    config, placement, pins = load_config(args), placement_of(args), parse_pins(args.pin)
    for name, cores in pins.items():
        check_cores(f"--pin {name}", cores, os.sched_getaffinity(0))
    import uvloop

    from triptych.cli.foreground import serve
    from triptych.launch import Deployment
    from triptych.observe import logging

    async def main() -> int:
        return await serve(Deployment(config, placement, pins=pins, lend_cores=args.lend_cores, say=say), say)

    logging.set_up(config.api.log_level)
    say(f"triptych {__version__}, starting")
    return uvloop.run(main())


def say(line: str) -> None:
    print(line, flush=True)
