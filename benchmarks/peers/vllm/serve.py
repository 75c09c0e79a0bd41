#!/usr/bin/env python3
"""Runs vLLM on CPU cores for a comparison: `serve.py MODE MODEL PORT --venv DIR`; README.md explains each option.

Needs only the standard library; the installed vLLM is the one of `--venv` (install.sh). This process is the parent of
all that it starts and stays in front: kill its process group, or send it SIGTERM, and nothing is left. GET /health on
PORT answers 200 once a request can be served. Exits with 1 if a part dies, after ending the others.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import FrameType

MODES = {
    "colocated": "one engine, one thread a core",
    "replicas": "one single-threaded engine a core behind one API server (vLLM's data parallelism)",
    "1e1pd": "an encoder on the first core, prefill and decode on the second, vLLM's example proxy in front",
    "single": "one engine on the first core, one thread",
}
SHARED_MEMORY = Path("/dev/shm")
SHARED_PREFIX = "vllm-ec-"
STOP_S = 20.0  # from SIGTERM to SIGKILL
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> int:
    args = parse_args()
    server = Server(args)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.stop_on_signal)
    try:
        server.start()
        return server.watch()
    except Stopped:
        return 0
    except PartDied as error:
        print(f"serve.py: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        server.close()


def parse_args() -> argparse.Namespace:
    modes = "\n".join(f"  {name:10} {text}" for name, text in MODES.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nmodes:\n{modes}\n\nArguments after -- go to every `vllm serve` as they are.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("model", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--venv", type=Path, default=os.environ.get("VLLM_VENV"), help="default: $VLLM_VENV")
    parser.add_argument("--cores", default=os.environ.get("VLLM_CORES", "0,1"), help="0,1 or 0-3 ($VLLM_CORES)")
    parser.add_argument("--served-name", default="", help="default: the model directory's name")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-batched-tokens", type=int, default=0, help="0: vLLM's default")
    parser.add_argument("--max-images", type=int, default=24)
    parser.add_argument("--kv-gib", type=int, default=2, help="KV cache of each engine")
    parser.add_argument("--eager", action="store_true", help="no torch.compile (the encoder never compiles)")
    parser.add_argument("--openmp", choices=("intel", "gnu"), default="intel")
    parser.add_argument("--malloc", choices=("tcmalloc", "glibc"), default="tcmalloc")
    parser.add_argument("--log-dir", type=Path, help="a log file for each part; default: all to stderr")
    parser.add_argument("--start-timeout-s", type=float, default=600.0)
    own, separator, extra = sys.argv[1:], "--", []
    if separator in own:
        own, extra = own[: own.index(separator)], own[own.index(separator) + 1 :]
    args = parser.parse_args(own)
    args.extra = extra
    if args.venv is None:
        parser.error("--venv DIR or VLLM_VENV is needed")
    args.cores = cores(args.cores)
    if args.mode in ("1e1pd", "replicas") and len(args.cores) < 2:
        parser.error(f"{args.mode} needs two cores")
    args.served_name = args.served_name or args.model.resolve().name
    return args


def cores(text: str) -> list[int]:
    """'0,2-4' as [0, 2, 3, 4]."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


class Stopped(Exception):
    """A signal asked this process to end."""


class PartDied(Exception):
    """A part ended, or was not ready in time."""


class Server:
    """The parts of one mode, started in order and ended together."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._parts: dict[str, subprocess.Popen[bytes]] = {}
        self._shared: Path | None = None  # embeddings that the encoder publishes as files

    def start(self) -> None:
        """Start every part and wait until requests can be served. Raises PartDied."""
        started = time.monotonic()
        remove_stale_memory()
        # Orphans of a dead part come back to this process, so that its tree stays whole for accounting and for ending.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        args = self._args
        if args.mode == "1e1pd":
            self._start_encode_and_prefill_decode()
        elif args.mode == "replicas":
            flags = ["--data-parallel-size", str(len(args.cores))]
            self._engine("vllm", args.port, args.cores, flags, bind="|".join(map(str, args.cores)))
        else:
            self._engine("vllm", args.port, args.cores[:1] if args.mode == "single" else args.cores, [])
        self._wait_healthy(args.port)
        print(f"serve.py: {args.mode} ready after {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)

    def _start_encode_and_prefill_decode(self) -> None:
        args = self._args
        self._shared = Path(tempfile.mkdtemp(prefix=f"{SHARED_PREFIX}{os.getpid()}-", dir=SHARED_MEMORY))
        encode_port, decode_port = free_ports(2)
        encode = ["--enforce-eager", "--no-enable-prefix-caching", "--mm-encoder-only"]
        encode += ["--max-num-batched-tokens", "16384", "--ec-transfer-config", self._transfer("ec_producer")]
        self._engine("encode", encode_port, args.cores[:1], encode)
        decode = ["--ec-transfer-config", self._transfer("ec_consumer")]
        self._engine("prefill-decode", decode_port, args.cores[1:], decode)
        for port in (encode_port, decode_port):
            self._wait_healthy(port)
        command = [str(args.venv / "bin/python"), str(args.venv / "share/vllm/disagg_epd_proxy.py")]
        command += ["--host", "127.0.0.1", "--port", str(args.port)]
        command += ["--encode-servers-urls", f"http://127.0.0.1:{encode_port}"]
        command += ["--decode-servers-urls", f"http://127.0.0.1:{decode_port}", "--prefill-servers-urls", "disable"]
        self._spawn("proxy", command, args.cores, dict(os.environ))

    def _transfer(self, role: str) -> str:
        where = {"shared_storage_path": str(self._shared)}
        return json.dumps({"ec_connector": "ECExampleConnector", "ec_role": role, "ec_connector_extra_config": where})

    def _engine(self, name: str, port: int, on: list[int], flags: list[str], bind: str = "") -> None:
        args = self._args
        command = [str(args.venv / "bin/vllm"), "serve", str(args.model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--served-model-name", args.served_name, "--max-model-len", str(args.max_model_len)]
        command += ["--limit-mm-per-prompt", json.dumps({"image": args.max_images, "video": 0})]
        command += ["--disable-uvicorn-access-log", "--skip-mm-profiling"]
        if args.max_num_batched_tokens and "--max-num-batched-tokens" not in flags:
            command += ["--max-num-batched-tokens", str(args.max_num_batched_tokens)]
        if args.eager and "--enforce-eager" not in flags:
            command += ["--enforce-eager"]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(args.kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": bind or ",".join(map(str, on)),
        }
        environment["LD_PRELOAD"] = ":".join(preloads(args.venv.resolve() / "lib", args.openmp, args.malloc))
        self._spawn(name, command + flags + args.extra, on, environment)

    def _spawn(self, name: str, command: list[str], on: list[int], environment: dict[str, str]) -> None:
        """Start a part in this process group, on the cores `on`; it ends with this process, whatever kills that."""
        libc = ctypes.CDLL(None)

        def prepare() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            os.sched_setaffinity(0, on)

        log = None
        if self._args.log_dir:
            self._args.log_dir.mkdir(parents=True, exist_ok=True)
            log = (self._args.log_dir / f"{name}.log").open("wb")
        self._parts[name] = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log or sys.stderr, stderr=log, preexec_fn=prepare
        )
        if log:
            log.close()

    def _wait_healthy(self, port: int) -> None:
        deadline = time.monotonic() + self._args.start_timeout_s
        while time.monotonic() < deadline:
            self._raise_if_dead()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        raise PartDied(f"nothing healthy on port {port} within {self._args.start_timeout_s:.0f} s")

    def _raise_if_dead(self) -> None:
        for name, part in self._parts.items():
            if part.poll() is not None:
                raise PartDied(f"{name} ended with {part.returncode}")

    def watch(self) -> int:
        while True:
            self._raise_if_dead()
            time.sleep(0.5)

    def stop_on_signal(self, number: int, frame: FrameType | None) -> None:
        raise Stopped

    def close(self) -> None:
        """End every part and what it left behind; remove the shared embeddings."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        for part in self._parts.values():
            part.terminate()
        deadline = time.monotonic() + STOP_S
        for part in self._parts.values():
            try:
                part.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                part.kill()
        end_descendants()
        if self._shared:
            shutil.rmtree(self._shared, ignore_errors=True)
        remove_stale_memory()


def preloads(folder: Path, openmp: str, malloc: str) -> list[str]:
    """The libraries that vLLM's manual wants preloaded on x86, as far as they are there, before what the user has."""
    found = [folder / "libiomp5.so"] if openmp == "intel" else []  # vLLM itself preloads torch's where there is none
    if malloc == "tcmalloc":
        found.append(folder / "libtcmalloc_minimal.so.4")
    if missing := [str(path) for path in found if not path.exists()]:
        print(f"serve.py: not preloaded, missing: {', '.join(missing)}", file=sys.stderr)
    return [*(str(path) for path in found if path.exists()), *filter(None, [os.environ.get("LD_PRELOAD")])]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports


def descendants(root: int) -> list[int]:
    """Processes below `root`, as /proc has them now."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def end_descendants() -> None:
    """Kill what the parts left behind; Python's resource trackers, which free shared memory, get 3 s to end first."""
    deadline = time.monotonic() + 3.0
    while left := descendants(os.getpid()):
        for pid in left:
            if time.monotonic() < deadline and b"resource_tracker" in command_line(pid):
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
        reap()


def remove_stale_memory() -> None:
    """Remove what killed processes left: files of Intel's OpenMP, and the shared embeddings of a `serve.py`."""
    for pattern in ("__KMP_REGISTERED_LIB_*_*", f"{SHARED_PREFIX}*-*"):
        for path in SHARED_MEMORY.glob(pattern):
            owner = path.name.split("_" if path.is_file() else "-")[-2]
            if owner.isdigit() and not Path("/proc", owner).exists():
                path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def reap() -> None:
    """Take the exit status of every child that has ended, so that none stays as a zombie."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


if __name__ == "__main__":
    sys.exit(main())
