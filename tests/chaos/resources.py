"""What a deployment holds, read from outside: memory, descriptors, sockets, shared memory, leases, KV blocks, files.

Linux only. `grown` compares an idle deployment with its own start.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import NamedTuple

from tests.chaos.server import Server

ROUTER = "router"
SLACK_BYTES = 48 << 20  # of private memory: allocators keep what they once had
SLACK_FDS = 8  # connections that a process makes when it first has to do with another
POLL_S = 0.25


class Process(NamedTuple):
    pid: int
    private_bytes: int  # RssAnon
    num_fds: int
    num_sockets: int


class Snapshot(NamedTuple):
    processes: dict[str, Process]  # by worker's name, and the router
    num_leases: int
    num_used_blocks: int
    num_running: int
    segments: int  # memory pools that any process of the deployment has mapped
    shm_files: int  # in /dev/shm
    runtime_files: list[str]


async def snapshot(server: Server) -> Snapshot:
    topology = await server.topology()
    pids = {worker["name"]: worker["info"]["pid"] for worker in topology["workers"]}
    loads = [worker["load"] for worker in topology["workers"]]
    processes = {name: process for name, pid in {**pids, ROUTER: server.pid}.items() if (process := _process(pid))}
    return Snapshot(
        processes,
        num_leases=sum(load["num_leases"] for load in loads),
        num_used_blocks=sum(load["num_total_blocks"] - load["num_free_blocks"] for load in loads),
        num_running=topology["num_running"],
        segments=len(set().union(*(_pools(process.pid) for process in processes.values()))),
        shm_files=len(os.listdir("/dev/shm")),
        runtime_files=sorted(os.listdir(server.runtime_dir)),
    )


def _process(pid: int) -> Process | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:  # it ended, or a descriptor was closed meanwhile
        return None
    private = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))
    return Process(pid, private, len(links), sum(link.startswith("socket:") for link in links))


def _pools(pid: int) -> set[str]:
    """Inodes of the memory pools that it has mapped; a pool is a memfd named after its worker."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {line.split()[4] for line in maps.splitlines() if "/memfd:triptych-" in line}


async def settled(server: Server, timeout_s: float) -> Snapshot:
    """As soon as nothing runs, no lease is out, no block is used and no dead worker's pool is mapped; or what is there
    after the time for that."""
    give_up_s = time.monotonic() + timeout_s
    while True:
        found = await snapshot(server)
        busy = (found.num_leases, found.num_used_blocks, found.num_running) != (0, 0, 0)
        stale = found.segments > len(found.processes) - 1
        if not (busy or stale) or time.monotonic() > give_up_s:
            return found
        await asyncio.sleep(POLL_S)


def grown(before: Snapshot, after: Snapshot) -> list[str]:
    """What an idle deployment has more than it had at its start, in words. A new life is compared with its earlier."""
    found = []
    for what in ("num_leases", "num_used_blocks", "num_running", "segments"):
        was, now = getattr(before, what), getattr(after, what)
        if now > was:
            found.append(f"{what}: {was} -> {now}")
    if missing := before.processes.keys() - after.processes.keys():
        found.append(f"processes that are gone: {', '.join(sorted(missing))}")
    for name, now in after.processes.items():
        was = before.processes.get(name)
        if was is None:
            found.append(f"a process that was not there: {name}")
            continue
        if now.private_bytes > was.private_bytes + SLACK_BYTES:
            found.append(f"private memory of {name}: {was.private_bytes >> 20} -> {now.private_bytes >> 20} MiB")
        if now.num_fds > was.num_fds + SLACK_FDS:
            found.append(f"descriptors of {name}: {was.num_fds} -> {now.num_fds}, {now.num_sockets} of them sockets")
    if len(after.runtime_files) > len(before.runtime_files):
        more = sorted(set(after.runtime_files) - set(before.runtime_files))
        found.append(f"runtime files: {len(before.runtime_files)} -> {len(after.runtime_files)}, now {more}")
    if after.shm_files > before.shm_files:
        found.append(f"files in /dev/shm: {before.shm_files} -> {after.shm_files}")
    return found
