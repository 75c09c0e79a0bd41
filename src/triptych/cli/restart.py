"""`triptych restart`: a rolling restart of a running deployment's workers, one after the other, that loses no request.

Each worker finishes what it has, or hands it over, and leaves; its supervisor starts it again, and then comes the next.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from triptych.cli.serve import say
from triptych.errors import ConfigError

if TYPE_CHECKING:
    import httpx

KEYS_VARIABLE = "TRIPTYCH_API_KEYS"  # the server's own
POLL_S = 0.1


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "restart", help="restart a deployment's workers one by one", allow_abbrev=False, description=__doc__
    )
    parser.add_argument("names", nargs="*", metavar="WORKER", help="in this order (default: every worker)")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="of the API, over loopback (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key", default="", metavar="KEY", help=f"where the API needs one (default: the first of {KEYS_VARIABLE})"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, metavar="X", help="for one worker (default: %(default)s)"
    )
    parser.set_defaults(run=run)


class WorkerState(NamedTuple):
    """What the router says of a worker."""

    epoch: str
    live: bool
    supervised: bool  # its supervisor starts it again


def run(args: argparse.Namespace) -> int:
    import httpx

    key = args.api_key or next(iter(os.environ.get(KEYS_VARIABLE, "").replace(",", " ").split()), "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=args.url, headers=headers, timeout=30.0, trust_env=False) as client:
            workers = _workers(client)
            names = args.names or sorted(workers)
            _check(names, workers, args.url)
            for name in names:
                _restart(client, name, args.timeout_s)
    except httpx.HTTPError as error:
        raise ConfigError(f"no answer from {args.url}: {error}") from error
    return 0


def _check(names: Sequence[str], workers: Mapping[str, WorkerState], url: str) -> None:
    """Before any of them is told to leave. Raises ConfigError for one that would not come back."""
    if not workers:
        raise ConfigError(f"{url} has no workers")
    unknown = [name for name in names if name not in workers]
    if unknown:
        raise ConfigError(f"{unknown[0]} cannot be restarted: there are {', '.join(sorted(workers))}")
    by_hand = [name for name in names if not workers[name].supervised]
    if by_hand:
        raise ConfigError(
            f"{', '.join(by_hand)} cannot be restarted: started by hand, so that nothing would start it again; "
            "start another worker first, end this one with SIGTERM, and start it again"
        )


def _restart(client: httpx.Client, name: str, timeout_s: float) -> None:
    """Returns when another life of the worker is live. Raises ConfigError when that takes too long."""
    started_s = time.monotonic()
    before = _workers(client).get(name)
    response = client.post("/workers/drain", json={"name": name})
    if response.status_code != 200 or before is None:
        raise ConfigError(f"{name} cannot be restarted: {response.text[:200]}")
    say(f"waiting for {name} ...")
    while not _is_next_life(_workers(client).get(name), before):
        if time.monotonic() - started_s > timeout_s:
            raise ConfigError(f"{name} was not live again within {timeout_s:.0f} s")
        time.sleep(POLL_S)
    say(f"{name} is live again after {time.monotonic() - started_s:.1f} s")


def _is_next_life(now: WorkerState | None, before: WorkerState) -> bool:
    return now is not None and now.live and now.epoch != before.epoch


def _workers(client: httpx.Client) -> dict[str, WorkerState]:
    """By name. Raises ConfigError for an answer that does not tell."""
    response = client.get("/topology")
    if response.status_code == 401:
        what = "does not know this API key" if "Authorization" in client.headers else "needs an API key"
        raise ConfigError(f"{client.base_url} {what}: give one with --api-key or in {KEYS_VARIABLE}")
    if response.status_code != 200:
        raise ConfigError(f"{client.base_url} shows no workers: {response.text[:200]}")
    workers: list[dict[str, Any]] = response.json()["workers"]
    return {
        worker["name"]: WorkerState(
            worker["info"]["address"]["epoch"], worker["state"] == "live", worker["info"]["supervised"]
        )
        for worker in workers
    }
