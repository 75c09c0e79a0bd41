"""`triptych bench`: load any OpenAI-compatible server and compare systems side by side (docs/benchmarks)."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from triptych.errors import ConfigError
from triptych.placement import parse_cores

if TYPE_CHECKING:
    from triptych.bench.settings import Spec

COMPARISON_ONLY = frozenset({"baseline", "restart"})
PREFIX = "bench."  # of the names of settings in the namespace


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="load servers and compare them",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ways = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    one = ways.add_parser("run", help="load one server that runs already", allow_abbrev=False)
    one.add_argument("--url", required=True, metavar="URL", help="of the API, with or without /v1")
    one.add_argument("--name", default="system", help="of the server in tables")
    one.add_argument("--model", default="", metavar="NAME", help="name in the API (default: the first it lists)")
    one.add_argument(
        "--pid", type=int, action="append", default=[], metavar="N", help="root of its process tree, to count its CPU"
    )
    one.add_argument("--cores", default="", metavar="CORES", help="that the server may use, as 0,2-3 (default: all)")
    one.add_argument("--ready", default="/health", metavar="PATH", help="that answers 200 (default: %(default)s)")
    _add_settings(one, but=COMPARISON_ONLY)
    one.set_defaults(run=run_one)

    many = ways.add_parser("compare", help="start the systems of a file and compare them", allow_abbrev=False)
    many.add_argument("spec", type=Path, metavar="SPEC.toml", help="systems, own workloads, settings")
    many.add_argument("--only", default="", metavar="NAMES", help="of the file's systems, with commas")
    many.add_argument("--model-path", default="", metavar="DIR", help="what {model} means in commands")
    _add_settings(many)
    many.set_defaults(run=run_many)

    table = ways.add_parser("report", help="table and plot of a result", allow_abbrev=False)
    table.add_argument("file", type=Path, metavar="FILE.json")
    table.add_argument("--markdown", action="store_true", help="tables as Markdown")
    table.add_argument("--plot", type=Path, metavar="FILE.png", help="draw latency against throughput")
    table.set_defaults(run=run_report)

    bound = ways.add_parser("bound", help="how near a result comes to what the processor can do", allow_abbrev=False)
    bound.add_argument("file", type=Path, metavar="FILE.json")
    bound.add_argument("--model-path", type=Path, required=True, metavar="DIR", help="the Qwen3-VL checkpoint that ran")
    bound.add_argument(
        "--text-tokens", type=int, default=37, metavar="N", help="of a request with images (default: %(default)s)"
    )
    bound.set_defaults(run=run_bound)
    parser.epilog = "\n".join(way.format_usage() for way in (one, many, table, bound))


def _add_settings(parser: argparse.ArgumentParser, but: frozenset[str] = frozenset()) -> None:
    """A flag for each field of the settings; only what is given lands in the namespace."""
    from msgspec import Meta
    from msgspec.structs import fields

    from triptych.bench.settings import BenchSettings

    group = parser.add_argument_group("settings")
    hints = get_type_hints(BenchSettings, include_extras=True)
    for field in fields(BenchSettings):
        if field.name in but:
            continue
        kind, *metas = get_args(hints[field.name])
        text = next(meta.description for meta in metas if isinstance(meta, Meta) and meta.description)
        flag = f"--{field.name.replace('_', '-')}"
        common: dict[str, Any] = {"dest": PREFIX + field.name, "default": argparse.SUPPRESS}
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text, **common)
        elif field.name == "slo":
            group.add_argument(flag, action="append", type=_limit, metavar="NAME=S", help=text, **common)
        elif field.name in ("workload", "concurrency", "rate"):
            group.add_argument(flag, nargs="+", metavar="X", help=text, **common)
        else:
            group.add_argument(flag, metavar="X", help=text, **common)
    group.add_argument("--output", type=Path, metavar="FILE", help="the JSON (default: bench-DATE.json)")
    group.add_argument("--plot", type=Path, metavar="FILE.png", help="draw latency against throughput")


def _limit(text: str) -> tuple[str, float]:
    name, _, limit_s = text.partition("=")
    try:
        return name, float(limit_s)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form ttft=2.5") from None


def flags(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line sets, in the types of the settings. Raises ConfigError that names the flag."""
    import msgspec

    from triptych.bench.settings import BenchSettings

    hints = get_type_hints(BenchSettings, include_extras=True)
    given = {}
    for name, value in vars(args).items():
        if name.startswith(PREFIX):
            field = name.removeprefix(PREFIX)
            value = dict(value) if field == "slo" else value
            try:
                given[field] = msgspec.to_builtins(msgspec.convert(value, hints[field], strict=False))
            except msgspec.ValidationError as error:
                raise ConfigError(f"--{field.replace('_', '-')}: {error}") from None
    return given


def run_one(args: argparse.Namespace) -> int:
    from triptych.bench.settings import make_spec

    try:
        cores = parse_cores(args.cores) if args.cores else []
    except ValueError:
        raise ConfigError(f"--cores {args.cores}: not a list such as 0,2-3") from None
    system: dict[str, Any] = {"name": args.name, "url": args.url, "model": args.model, "ready": args.ready}
    system |= {"pids": args.pid, "cores": cores}
    return _run(make_spec({"system": [system]}, {"rounds": 1} | flags(args)), args)


def run_many(args: argparse.Namespace) -> int:
    from triptych.bench.settings import make_spec, read_file

    tables = read_file(args.spec)
    if args.model_path:
        tables["model_path"] = args.model_path
    if args.only:
        names = args.only.split(",")
        known = [system.get("name") for system in tables.get("system", [])]
        for name in names:
            if name not in known:
                raise ConfigError(f"--only: no system of {args.spec} is called {name!r}")
        tables["system"] = [system for system in tables["system"] if system.get("name") in names]
    return _run(make_spec(tables, flags(args)), args)


def _run(spec: Spec, args: argparse.Namespace) -> int:
    """Exit code 1 when a request failed."""
    import asyncio
    import signal

    import uvloop

    from triptych.bench.compare import Comparison
    from triptych.bench.report import report

    output = args.output or Path(time.strftime("bench-%Y%m%d-%H%M%S.json"))
    output.parent.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(spec, output, _say)

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await comparison.run()

    try:
        uvloop.run(main())
    except asyncio.CancelledError:
        _say("told to stop")
    finally:
        if comparison.results.cells:
            comparison.results.save(output)
            print(f"\n{report(comparison.results)}\n\n{output}", flush=True)
    if args.plot:
        _plot(comparison.results, args.plot)
    failed = sum(cell.summary.num_failed for cell in comparison.results.cells)
    return 0 if comparison.results.complete and not failed else 1


def run_report(args: argparse.Namespace) -> int:
    from triptych.bench.report import report
    from triptych.bench.results import read

    results = read(args.file)
    print(report(results, args.markdown))
    if args.plot:
        _plot(results, args.plot)
    return 0


def _plot(results: Any, file: Path) -> None:
    from triptych.bench.plot import plot

    plot(results, file)
    _say(str(file))


def _say(line: str) -> None:
    print(line, flush=True)


def run_bound(args: argparse.Namespace) -> int:
    from triptych.bench.bound import ModelShape, bounds
    from triptych.bench.results import read

    for line in bounds(ModelShape.read(args.model_path), read(args.file), args.text_tokens):
        print(line)
    return 0
