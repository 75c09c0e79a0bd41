"""What all processes of a system cost, from /proc: CPU seconds, peak memory. Linux only; called between rounds.

CPU of a child that died is in its parent's cutime and cstime once the parent has waited for it, so a sum over the
living loses nothing but children that nobody waits for (SIGCHLD ignored) or whose parent died first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")
LABEL_CHARACTERS = 100


class ProcessId(NamedTuple):
    """A pid may be used again; with its start time it is not."""

    pid: int
    start_ticks: int


@dataclass(frozen=True)
class _Stat:
    id: ProcessId
    parent: int
    session: int
    own_ticks: int  # CPU of itself
    child_ticks: int  # and of all children that it has waited for
    dead: bool  # a zombie: its CPU is still to be read, it does nothing any more


@dataclass(frozen=True)
class Usage:
    """Since each process started."""

    cpu_s: float
    own_cpu_s: dict[str, float]  # of each process, by pid and command; without children that died
    peak_rss_bytes: int  # sum of each process's own peak
    num_processes: int


def _read(pid: int) -> _Stat | None:
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (OSError, UnicodeDecodeError):  # it is gone
        return None
    fields = text[text.rindex(")") + 2 :].split()  # from field 3 of proc(5); the name before may hold anything
    utime, stime, cutime, cstime = (int(fields[k]) for k in (11, 12, 13, 14))
    return _Stat(
        id=ProcessId(pid, int(fields[19])),
        parent=int(fields[1]),
        session=int(fields[3]),
        own_ticks=utime + stime,
        child_ticks=cutime + cstime,
        dead=fields[0] in "ZX",
    )


def _label(pid: int) -> str:
    """Its pid and the start of its command line."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
    except OSError:
        words = ""
    return f"{pid} {words[:LABEL_CHARACTERS]}"


def _peak_rss_bytes(pid: int) -> int:
    try:
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class ProcessTree:
    """Roots, their descendants, what shares a session that a root leads, and all that was any of these once."""

    def __init__(self, roots: Sequence[int]) -> None:
        self.roots = tuple(roots)
        self._known: set[ProcessId] = set()

    def alive(self) -> bool:
        """Every root is."""
        stats = [_read(pid) for pid in self.roots]
        return all(stat is not None and not stat.dead for stat in stats)

    def usage(self) -> Usage | None:
        """None when a root is gone: what its children had spent is lost with it."""
        if not self.alive():
            return None
        members = self._members()
        return Usage(
            cpu_s=sum(stat.own_ticks + stat.child_ticks for stat in members) / _TICKS_PER_S,
            own_cpu_s={_label(stat.id.pid): stat.own_ticks / _TICKS_PER_S for stat in members},
            peak_rss_bytes=sum(_peak_rss_bytes(stat.id.pid) for stat in members),
            num_processes=sum(not stat.dead for stat in members),
        )

    def living(self) -> list[int]:
        """Pids of members that run."""
        return [stat.id.pid for stat in self._members() if not stat.dead]

    def _members(self) -> list[_Stat]:
        stats = {stat.id.pid: stat for name in os.listdir(PROC) if name.isdigit() and (stat := _read(int(name)))}
        sessions = {pid for pid in self.roots if pid in stats and stats[pid].session == pid}
        members = {
            pid
            for pid, stat in stats.items()
            if pid in self.roots or stat.session in sessions or stat.id in self._known
        }
        fresh = members
        while fresh:
            fresh = {pid for pid, stat in stats.items() if stat.parent in fresh and pid not in members}
            members = members | fresh
        self._known = {stats[pid].id for pid in members}
        return [stats[pid] for pid in sorted(members)]
