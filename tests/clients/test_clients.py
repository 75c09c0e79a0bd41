"""Public clients, each in an environment of its own, against one deployment of real processes with an API key.

An environment is made at the first run and kept in `.venv-clients/` until its requirements change. Each script says
itself what failed; here only its end is looked at, and that the server has seen no error of its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from triptych.demo import checkpoint_path

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ENVIRONMENTS = ROOT / ".venv-clients"
CLIENTS = sorted(path.parent.name for path in HERE.glob("*/requirements.txt"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = ROOT / "docs" / "clients.md"
PAGE_URL, PAGE_KEY, PAGE_TOKENIZER = "http://127.0.0.1:8000", "unused", "path/to/the/checkpoint"

API_KEY = "key-of-the-clients-tests"
NOT_FOR_CLIENTS = {
    "HF_HUB_OFFLINE",  # with it, load tools do not read a tokenizer from a folder either
    "PYTHONDONTWRITEBYTECODE",  # modules are compiled when they are first imported, not as they are installed
}
MAX_MODEL_LEN = 3000  # of prompt and answer: requests made at random do not all name a limit
LOG_SHOWN = 8000  # characters of the server's log, beside a failure
START_S = 120.0
STOP_S = 60.0
SCRIPT_S = 600.0


class Served(NamedTuple):
    url: str
    log: Path

    def errors(self, since: int) -> list[str]:
        """Lines of the log, from this byte on, that tell of a fault of the server's."""
        text = self.log.read_bytes()[since:].decode()
        return [line for line in text.splitlines() if re.search(r"level=error|status=5\d\d|Traceback", line)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`triptych serve` of the packaged model, one worker a stage."""
    directory = tmp_path_factory.mktemp("served")
    log = directory / "log"
    command = [sys.executable, "-m", "triptych.cli.main", "serve", "--placement", "1E/1P/1D", "--port", "0"]
    command += ["--max-model-len", str(MAX_MODEL_LEN)]
    environment = os.environ | {"TRIPTYCH_API_KEYS": API_KEY}
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield Served(_url_when_ready(process, log), log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.returncode == 0, log.read_text()[-4000:]


def _url_when_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        if ready := re.search(r"^ready after .*: (http\S+)$", log.read_text(), re.MULTILINE):
            return ready[1]
        time.sleep(0.1)
    raise AssertionError(f"the deployment did not start:\n{log.read_text()}")


def environment(client: str) -> Path:
    """The folder of the client's environment, made where there is none for these requirements and this Python."""
    requirements = HERE / client / "requirements.txt"
    key = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = ENVIRONMENTS / f"{client}-{key}"
    if not (folder / "complete").exists():
        for old in ENVIRONMENTS.glob(f"{client}-*"):
            shutil.rmtree(old)
        python = str(folder / "bin" / "python")
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], os.environ.copy())
        pip = [sys.executable, "-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check"]
        _run([*pip, "install", "--no-compile", "--requirement", str(requirements)], os.environ.copy())
        (folder / "complete").touch()
    return folder


def _run(command: list[str], variables: dict[str, str], directory: Path = ROOT) -> str:
    done = subprocess.run(
        command,
        cwd=directory,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SCRIPT_S,
    )
    if done.returncode:
        pytest.fail(f"{' '.join(command[:3])} ended with {done.returncode}:\n{done.stdout}", pytrace=False)
    return done.stdout


def _variables(folder: Path) -> dict[str, str]:
    """Triptych is not installed there: scripts read its drawn pages from the source."""
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CLIENTS}
    return kept | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


@pytest.mark.parametrize("client", CLIENTS)
def test_client(client: str, served: Served) -> None:
    folder = environment(client)
    since = served.log.stat().st_size
    script = [str(folder / "bin" / "python"), "-m", f"tests.clients.{client}.run", served.url, "demo"]
    try:
        print(_run([*script, "--api-key", API_KEY, "--tokenizer", str(checkpoint_path())], _variables(folder)))
    finally:
        print(served.log.read_bytes()[since:].decode()[-LOG_SHOWN:])  # why, where the client tells the status only
    assert served.errors(since) == []


@pytest.mark.parametrize("client", CLIENTS)
def test_the_page_of_clients(client: str, served: Served, tmp_path: Path) -> None:
    """What docs/clients.md shows for the client runs as it stands, but for the address, the key and the tokenizer."""
    _, found, section = PAGE.read_text().partition(f"\n## {client}\n")
    assert found, f"docs/clients.md has no section {client}"
    blocks = FENCE.findall(section.partition("\n## ")[0])
    assert blocks, f"docs/clients.md shows no use of {client}"
    folder = environment(client)
    for language, code in blocks:
        here = code.replace(PAGE_URL, served.url).replace(PAGE_KEY, API_KEY)
        here = here.replace(PAGE_TOKENIZER, str(checkpoint_path()))
        interpreter = {"python": ["python", "-c"], "bash": ["bash", "-euo", "pipefail", "-c"]}[language]
        print(_run([*interpreter, here], _variables(folder), tmp_path))
