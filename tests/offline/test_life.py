"""How an `LLM` begins and ends, and what it leaves behind: nothing."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from triptych import LLM, SamplingParams
from triptych.errors import ConfigError, EngineError
from triptych.offline.local import LocalDeployment
from triptych.transport import inproc
from triptych.worker import Worker

from .test_llm import SHORT, RecordingBar, ask

LONG = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)


def small(checkpoint: Path) -> LLM:
    return LLM(checkpoint, num_kv_blocks=300, max_num_seqs=4)


Left = Callable[[], list[str]]


@pytest.fixture
def left() -> Left:
    """Threads and memory pools that were not there when the test began."""
    threads, pools = set(threading.enumerate()), set(inproc._pools)
    return lambda: [
        *(thread.name for thread in threading.enumerate() if thread not in threads),
        *(epoch for epoch in inproc._pools if epoch not in pools),
    ]


def worker_of(llm: LLM) -> Worker:
    service = llm._runtime._service
    assert isinstance(service, LocalDeployment)
    assert service._compute is not None
    assert service._compute.worker is not None
    return service._compute.worker


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_closed_one_leaves_nothing_and_answers_nothing(checkpoint: Path, left: Left) -> None:
    with small(checkpoint) as llm:
        worker = weakref.ref(worker_of(llm))
        assert "triptych-compute" in left()
    assert left() == []
    gc.collect()
    assert worker() is None, "its memory would stay"
    with pytest.raises(EngineError, match="the LLM is closed"):
        llm.chat(ask("a"), SHORT)
    llm.close()


def test_one_that_does_not_start_leaves_nothing(left: Left) -> None:
    with pytest.raises(ConfigError, match="KV blocks"):
        LLM("demo", kv_bytes=1)
    assert left() == []


@pytest.mark.parametrize("shard", [1, 3], ids=["the vision tower's", "the last, when the tower is loaded"])
def test_one_whose_weights_are_damaged_leaves_nothing(checkpoint: Path, tmp_path: Path, left: Left, shard: int) -> None:
    damaged = shutil.copytree(checkpoint, tmp_path / "damaged")
    file = damaged / f"model-0000{shard}-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    children = psutil.Process().children()
    with pytest.raises(ConfigError, match=r"damaged: .*incomplete metadata"):
        small(damaged)
    assert left() == []
    assert psutil.Process().children() == children


def test_an_unreachable_one_is_closed(checkpoint: Path, left: Left) -> None:
    llm = small(checkpoint)
    llm.chat(ask("a"), SHORT)
    del llm
    gc.collect()
    assert left() == []


def test_one_that_becomes_unreachable_on_another_thread_is_closed(checkpoint: Path, left: Left) -> None:
    held = [small(checkpoint)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    until(lambda: left() == [])


def test_closing_ends_calls_of_other_threads(checkpoint: Path, left: Left) -> None:
    llm = small(checkpoint)
    errors: list[EngineError] = []

    def call() -> None:
        try:
            llm.chat([ask("a")] * 20, LONG, use_tqdm=False)
        except EngineError as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    until(lambda: worker_of(llm).num_live() > 0)
    llm.close()
    caller.join(30)
    assert [str(error) for error in errors] == ["closed before the end"]
    assert left() == []


class InterruptedBar(RecordingBar):
    """Ctrl-C when the first answer is here: at once, or when the caller waits for the next one."""

    wait_s = 0.0

    def update(self, n: int, /) -> None:
        super().update(n)
        if self.wait_s:
            threading.Timer(self.wait_s, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("wait_s", [0.0, 0.2])
def test_ctrl_c_cancels_what_runs_and_the_next_call_works(
    llm: LLM, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InterruptedBar, "wait_s", wait_s)
    expected = llm.chat(ask("b"), SHORT)[0].outputs
    with pytest.raises(KeyboardInterrupt):
        llm.chat([ask("a")] * 30, [SHORT, *[LONG] * 29], use_tqdm=InterruptedBar)
    until(lambda: worker_of(llm).num_live() == 0)
    for stage in worker_of(llm).stages.hosted:
        stage.check()
    assert llm.chat(ask("b"), SHORT)[0].outputs == expected


def test_the_death_of_the_compute_thread_is_an_error_and_no_hang(
    checkpoint: Path, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(timeout_s: float) -> bool:
        raise RuntimeError("out of luck")

    with small(checkpoint) as llm:
        monkeypatch.setattr(worker_of(llm), "turn", die)
        for _ in range(2):
            with pytest.raises(EngineError, match="the compute thread died: out of luck"):
                llm.chat([ask("a")] * 3, SHORT, use_tqdm=False)
    assert left() == []


def test_a_forked_process_is_told_so(llm: LLM) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            llm.chat(ask("a"), SHORT)
        except EngineError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            llm.close()  # of the parent's threads there is nothing here to wait for
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(llm.chat(ask("a"), SHORT)) == 1


# -- scripts -----------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from triptych import LLM, SamplingParams
assert "torch" not in sys.modules, "importing the package is light"
llm = LLM({model!r}, num_kv_blocks=300)
params = SamplingParams(temperature=0, max_tokens={max_tokens}, ignore_eos=True)
print("asking", flush=True)
outputs = llm.chat([[{{"role": "user", "content": "a"}}]] * 40, params, use_tqdm=False)
print(len(outputs), flush=True)
"""


def start(checkpoint: Path, directory: Path, max_tokens: int) -> subprocess.Popen[str]:
    script = directory / "script.py"
    script.write_text(SCRIPT.format(model=str(checkpoint), max_tokens=max_tokens))
    command = [sys.executable, "-W", "always::ResourceWarning", str(script)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_script_ends_without_closing(checkpoint: Path, tmp_path: Path) -> None:
    process = start(checkpoint, tmp_path, max_tokens=2)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (0, "asking\n40\n", "")


def test_a_script_ends_at_ctrl_c(checkpoint: Path, tmp_path: Path) -> None:
    process = start(checkpoint, tmp_path, max_tokens=1500)
    assert process.stdout is not None
    assert process.stdout.readline() == "asking\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 1)  # 1: Python forgets why it ends when modules are imported then
    assert out == ""
    assert err.rstrip().endswith("KeyboardInterrupt"), err
    assert err.count("Traceback") == 1, err


UNGUARDED = """
from triptych import LLM
llm = LLM({model!r}, num_kv_blocks=300, placement="1E/1PD")
"""


def test_a_script_with_workers_and_no_guard_is_told_so(checkpoint: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED.format(model=str(checkpoint)))
    with tempfile.TemporaryDirectory(dir="/tmp") as temp:  # sockets need a short path
        done = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"TMPDIR": temp},
            check=False,
        )
        assert os.listdir(temp) == []
    assert done.returncode == 1
    assert 'below `if __name__ == "__main__":`' in done.stderr.splitlines()[-1]
    assert done.stderr.startswith("Traceback")
    assert done.stderr.count("Traceback") == 1, done.stderr


PLACED = """
import os, sys
from triptych import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM({model!r}, num_kv_blocks=300, placement="1E/1PD")
    print(os.path.basename(llm._runtime._service.runtime_dir), flush=True)
    params = SamplingParams(temperature=0, max_tokens={max_tokens}, ignore_eos=True)
    outputs = llm.chat([[{{"role": "user", "content": "a"}}]] * 40, params, use_tqdm=False)
    print(len(outputs), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_script_with_workers_leaves_no_process_and_no_file(
    checkpoint: Path, tmp_path: Path, interrupted: bool
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PLACED.format(model=str(checkpoint), max_tokens=1500 if interrupted else 2))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    runtime_dir = Path(tempfile.gettempdir(), process.stdout.readline().strip())
    assert runtime_dir.name.startswith("tri-")
    group = psutil.Process(process.pid).children(recursive=True)
    assert len(group) >= 3  # the fork server and the workers
    if interrupted:
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == ("" if interrupted else "40\n"), err
    assert err.count("Traceback") == interrupted, err
    _, alive = psutil.wait_procs(group, timeout=10)
    assert alive == []
    assert not runtime_dir.exists()
