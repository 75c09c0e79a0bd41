"""`triptych worker`: one worker process that joins a router of this host."""

from __future__ import annotations

import argparse

from triptych.cli.options import add_config_flags, load_config
from triptych.config import WorkerConfig
from triptych.errors import ConfigError
from triptych.placement import parse_cores
from triptych.types import Stage


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("worker", help="run one worker", allow_abbrev=False, description=__doc__)
    parser.add_argument("--stages", required=True, metavar="LIST", help="of encode, prefill, decode, with commas")
    parser.add_argument("--name", required=True, help="unlike every other worker's of the router")
    parser.add_argument("--router", required=True, metavar="URL", help="URL of the router's API")
    parser.add_argument("--runtime-dir", required=True, metavar="DIR", help="the router's directory of unix sockets")
    parser.add_argument("--cores", default="", metavar="CORES", help="cores to stay on, as 0,2-3 (default: any)")
    add_config_flags(parser)
    parser.set_defaults(run=run)


def worker_config(args: argparse.Namespace) -> WorkerConfig:
    """Raises ConfigError for stages or cores that cannot be read."""
    try:
        stages = [Stage(name) for name in dict.fromkeys(args.stages.split(","))]
    except ValueError:
        raise ConfigError(f"--stages {args.stages}: not a list of {', '.join(Stage)}") from None
    try:
        cores = parse_cores(args.cores) if args.cores else []
    except ValueError:
        raise ConfigError(f"--cores {args.cores}: not a list such as 0,2-3") from None
    return WorkerConfig(
        name=args.name,
        stages=stages,
        router_url=args.router,
        runtime_dir=args.runtime_dir,
        cores=cores,
        num_threads=max(1, len(cores)),
    )


def run(args: argparse.Namespace) -> int:
    config, worker = load_config(args), worker_config(args)
    from triptych.launch import set_environment
    from triptych.observe import logging

    set_environment()
    logging.set_up(config.api.log_level)
    from triptych.worker import run as run_worker

    run_worker(config, worker)
    return 0
