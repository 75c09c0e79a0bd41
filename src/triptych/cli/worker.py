"""`triptych worker`: one worker process that joins a router, of this host or, with its join file, of another."""

from __future__ import annotations

import argparse
import os
import tempfile

import msgspec

from triptych.cli.options import add_config_flags, load_config
from triptych.config import WorkerConfig
from triptych.errors import ConfigError
from triptych.placement import check_cores, parse_cores
from triptych.types import Stage


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("worker", help="run one worker", allow_abbrev=False, description=__doc__)
    parser.add_argument("--stages", required=True, metavar="LIST", help="of encode, prefill, decode, with commas")
    parser.add_argument("--name", required=True, help="unlike every other worker's of the router")
    parser.add_argument("--router", default="", metavar="URL", help="on the router's host: URL of its API")
    parser.add_argument(
        "--runtime-dir", default="", metavar="DIR", help="directory of unix sockets; on the router's host, the router's"
    )
    parser.add_argument("--join-file", default="", metavar="FILE", help="a copy of the file that the router wrote")
    parser.add_argument("--host", default="", metavar="ADDRESS", help="with it: IP address at which others reach us")
    parser.add_argument("--port", type=int, default=0, help="port for messages there (default: any free one)")
    parser.add_argument("--data-port", type=int, default=0, help="port for embeddings and KV (default: any free one)")
    parser.add_argument("--cores", default="", metavar="CORES", help="cores to stay on, as 0,2-3 (default: any)")
    add_config_flags(parser, without=("api.host", "api.port"))  # a worker has no API
    parser.set_defaults(run=run)


def worker_config(args: argparse.Namespace) -> WorkerConfig:
    """Raises ConfigError for stages or cores that cannot be read, and where the way to the router is not clear."""
    try:
        stages = [Stage(name) for name in dict.fromkeys(args.stages.split(","))]
    except ValueError:
        raise ConfigError(f"--stages {args.stages}: not a list of {', '.join(Stage)}") from None
    try:
        cores = parse_cores(args.cores) if args.cores else []
    except ValueError:
        raise ConfigError(f"--cores {args.cores}: not a list such as 0,2-3") from None
    if bool(args.join_file) != bool(args.host):
        raise ConfigError("--join-file and --host go together: others reach a worker only with keys, and at an address")
    if not args.join_file and not (args.router and args.runtime_dir):
        raise ConfigError("a worker needs --router and --runtime-dir, or --join-file and --host")
    return WorkerConfig(
        name=args.name,
        stages=stages,
        router_url=args.router,
        runtime_dir=args.runtime_dir,
        cores=cores,
        num_threads=max(1, len(cores)),
        join_file=args.join_file,
        host=args.host,
        port=args.port,
        data_port=args.data_port,
    )


def check_runtime_dir(worker: WorkerConfig) -> None:
    """Made where it is the worker's own. Raises ConfigError where it is the router's, which is not there yet."""
    if worker.join_file and worker.runtime_dir:
        try:
            os.makedirs(worker.runtime_dir, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--runtime-dir {worker.runtime_dir}: {error.strerror}") from error
    elif worker.runtime_dir and not os.path.isdir(worker.runtime_dir):
        raise ConfigError(
            f"--runtime-dir {worker.runtime_dir}: no such directory; the router makes it, so give the same to "
            "`triptych router` and start that first"
        )


def run(args: argparse.Namespace) -> int:
    config, worker = load_config(args), worker_config(args)
    check_cores("--cores", worker.cores, os.sched_getaffinity(0))
    check_runtime_dir(worker)
    from triptych.launch import set_environment
    from triptych.observe import logging

    set_environment()
    logging.set_up(config.api.log_level)
    from triptych.worker import run as run_worker

    with tempfile.TemporaryDirectory(prefix="tri-") as private:  # for the socket of its memory pool
        run_worker(config, msgspec.structs.replace(worker, runtime_dir=worker.runtime_dir or private))
    return 0
