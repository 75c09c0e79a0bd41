"""CPU of a tree of processes, against what the processes say of themselves; ratios, no times."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from triptych.bench.processes import ProcessTree

BURN = "import time\nwhile time.process_time() < float({amount}): pass\n"
SHELL = """
import os, subprocess, sys
for line in sys.stdin:
    word, amount = line.split()
    code = {burn!r}.format(amount=amount)
    if word == "self":
        exec(code)
    elif word == "child":
        subprocess.run([sys.executable, "-c", code], check=True)
    elif word == "orphan":
        subprocess.run(["sh", "-c", "sleep 600 & echo $! >&2"], check=True, stdout=subprocess.DEVNULL)
    print("done", flush=True)
"""


class Shell:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def does(self, word: str, amount: float = 0.0) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word} {amount}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@contextmanager
def shell(new_session: bool = True) -> Iterator[Shell]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", SHELL.format(burn=BURN)],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=new_session,
    ) as process:
        try:
            yield Shell(process)
        finally:
            if process.poll() is None:
                (os.killpg if new_session else os.kill)(process.pid, 9)


def cpu_s(tree: ProcessTree) -> float:
    usage = tree.usage()
    assert usage is not None
    return usage.cpu_s


@pytest.mark.parametrize("word", ["self", "child"])
def test_what_a_process_and_its_dead_children_burnt_is_counted_once(word: str) -> None:
    with shell() as running:
        running.does("none")
        tree = ProcessTree([running.pid])
        before_s = cpu_s(tree)
        burnt_s = 0.5
        running.does(word, burnt_s + (before_s if word == "self" else 0.0))
        assert 0.8 < (cpu_s(tree) - before_s) / burnt_s < 1.8  # a child's start costs, too


def test_a_process_without_parent_still_belongs_to_its_session() -> None:
    with shell() as running:
        tree = ProcessTree([running.pid])
        running.does("orphan")
        assert len(tree.living()) == 2
        usage = tree.usage()
        assert usage is not None
        assert usage.num_processes == 2
        assert usage.peak_rss_bytes > 1 << 20
        [orphan] = set(tree.living()) - {running.pid}
        running.process.kill()
        running.process.wait()
        assert tree.usage() is None, "the root is gone, and what it knew with it"
        assert tree.living() == [orphan], "who was a member stays one"
        os.kill(orphan, 9)


def test_only_its_own(tmp_path: object) -> None:
    with shell(new_session=False) as one, shell() as other:
        tree = ProcessTree([one.pid])
        assert tree.living() == [one.pid]
        assert ProcessTree([one.pid, other.pid]).living() == sorted([one.pid, other.pid])


def test_a_pid_that_nobody_has() -> None:
    assert ProcessTree([2**22 + 1]).usage() is None
    assert not ProcessTree([2**22 + 1]).alive()
