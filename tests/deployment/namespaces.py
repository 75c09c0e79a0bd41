"""Hosts made of network namespaces: each has its own address, its own loopback, and a bridge to the others.

Everything lies in namespaces that are made here, the bridge too; `close` removes them by their names. A process of a
host sees an empty directory where it keeps its unix sockets, so that no shared memory reaches from host to host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import triptych

Result = TypeVar("Result")

CLONE_NEWNET = 0x40000000  # linux/sched.h
SOURCES = str(Path(triptych.__file__).parent.parent)


def why_not() -> str:
    """What keeps namespaces from being made here; "" when nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "unshare", "mount") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed"
    probe = f"tri{os.getpid()}p"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"namespaces cannot be made: {made.stderr.strip()}"
    link = ["ip", "-n", probe, "link", "add", "br0", "type", "bridge"]
    bridged = subprocess.run(link, capture_output=True, text=True, check=False)
    _run("ip", "netns", "del", probe)
    return f"no bridge in a namespace: {bridged.stderr.strip()}" if bridged.returncode else ""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Hosts:
    """`add` makes a host, `start` a process on it. Addresses are 10.77.0.1 and up, in the order of `add`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._prefix = f"tri{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self._addresses: dict[str, str] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "br0", "up")

    def add(self, name: str) -> str:
        """The address of the new host."""
        number = len(self._addresses) + 1
        host, port = self._namespace(name), f"port{number}"
        address = self._addresses[name] = f"10.77.0.{number}"
        _run("ip", "netns", "add", host)
        _run("ip", "-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", host, "address", "add", f"{address}/24", "dev", "eth0")
        _run("ip", "-n", host, "link", "set", "eth0", "up")
        _run("ip", "-n", host, "link", "set", "lo", "up")
        return address

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def sockets(self, name: str) -> Path:
        """Where a process of the host keeps its unix sockets: seen by the processes of this host alone."""
        path = self._directory / f"s-{name}"
        path.mkdir(exist_ok=True)
        return path

    def start(self, name: str, arguments: Sequence[str], private: bool = True) -> None:
        """Run `triptych` with the arguments on the host."""
        command = [sys.executable, "-m", "triptych.cli.main", *arguments]
        if private:
            mount = f'mount -t tmpfs -o mode=0700 tmpfs {self.sockets(name)} && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", mount, "sh", *command]
        log = (self._directory / f"{name}.log").open("wb")
        environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with log:
            self.processes[name] = subprocess.Popen(
                ["ip", "netns", "exec", self._namespace(name), *command], stdout=log, stderr=log, env=environment
            )

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()

    def on(self, name: str, work: Callable[[], Result]) -> Result:
        """Call it in a thread whose sockets are the host's."""
        outcome: list[Result] = []
        failures: list[BaseException] = []

        def run() -> None:
            try:
                with open(f"/run/netns/{self._namespace(name)}") as namespace:
                    if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                outcome.append(work())
            except BaseException as error:  # noqa: BLE001 (raised again in the caller's thread)
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failures:
            raise failures[0]
        return outcome[0]

    # -- faults --------------------------------------------------------------------------------------------------------

    def set_link(self, name: str, state: str) -> None:
        """`down` cuts the host off from all others, `up` brings it back."""
        number = self._addresses[name].rpartition(".")[2]
        _run("ip", "-n", self._switch, "link", "set", f"port{number}", state)

    def block(self, name: str, other: str) -> None:
        """Every packet between the two goes to a station that is not there, without a word to either."""
        for host, peer in ((name, other), (other, name)):
            where = [self._addresses[peer], "dev", "eth0", "lladdr", "02:00:00:00:00:99", "nud", "permanent"]
            _run("ip", "-n", self._namespace(host), "neighbour", "replace", *where)

    def unblock(self, name: str, other: str) -> None:
        for host, peer in ((name, other), (other, name)):
            _run("ip", "-n", self._namespace(host), "neighbour", "del", self._addresses[peer], "dev", "eth0")

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
                continue
            process.kill()
            process.wait()
        for name in [*map(self._namespace, self._addresses), self._switch]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
