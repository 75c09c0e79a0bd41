"""What the documentation names exists, what it shows runs, and the page of settings equals the code.

`python -m tests.test_docs` writes `docs/configuration.md` anew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast, get_args, get_origin

import httpx
import msgspec
import pytest

from triptych.api.app import create_app
from triptych.api.seam import RouterLike
from triptych.api.unsupported import CHAT
from triptych.cli.main import build_parser
from triptych.cli.options import Option, options
from triptych.cli.serve import placement_of
from triptych.config import ApiConfig, Config, load
from triptych.demo.pages import Task, held_out
from triptych.launch import Deployment
from triptych.observe.metrics import Metrics
from triptych.observe.worker_metrics import HELP, PREFIX, WorkerCollector
from triptych.placement import Placement, parse_pins

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "src" / "triptych"
CONFIGURATION = REPOSITORY / "docs" / "configuration.md"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(REPOSITORY)) for page in PAGES]

MADE_WHILE_RUNNING = re.compile(r"demo-output/|\.venv|/tmp/")
NOT_HERE = {
    "join.json",
    "keys.json",
    "store/",
    "bench/",
    "sim/",
    "config.json",
    "preprocessor_config.json",
    "tokenizer.json",
}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
URL = "http://127.0.0.1:8000"  # in the examples

every_page = pytest.mark.parametrize("page", PAGES, ids=IDS)


def fences(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(page.read_text()) if found == language]


def ticked(page: Path) -> list[str]:
    """What stands in single back-ticks outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text()))


def commands(page: Path) -> list[str]:
    """Lines of shell blocks, and commands in back-ticks."""
    lines = [line for block in fences(page, "bash") for line in block.splitlines()]
    return [*lines, *ticked(page)]


# -- names -------------------------------------------------------------------------------------------------------------


@every_page
def test_paths_exist(page: Path) -> None:
    for name in ticked(page):
        looks_like_a_path = re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", name) and (
            name.endswith("/") or re.search(r"\.(py|md|json|toml|yaml|safetensors)$", name)
        )
        if not looks_like_a_path or name in NOT_HERE or MADE_WHILE_RUNNING.match(name):
            continue
        roots = (REPOSITORY, PACKAGE, page.parent)
        assert any((root / name).exists() for root in roots), f"{page.name} names {name}, which does not exist"


@every_page
def test_dotted_names_of_settings_exist(page: Path) -> None:
    known = {option.key for option in options()}
    sections = {option.section for option in options()}
    for name in ticked(page):
        if re.fullmatch(r"[a-z_]+\.[a-z_]+", name) and name.split(".")[0] in sections and not name.endswith(".py"):
            assert name in known or name.endswith((".md", ".json")), f"{page.name} names the setting {name}"


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@every_page
def test_no_page_names_a_machine(page: Path) -> None:
    assert not re.search(r"/home/|/work/|/root/|/Users/", page.read_text())


def test_every_page_is_reached_from_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    for page in PAGES:
        if page.parent.name == "docs":
            assert f"docs/{page.name}" in readme, f"README does not name docs/{page.name}"


def test_decisions_have_the_three_parts() -> None:
    pages = [page for page in PAGES if page.parent.name == "decisions"]
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        text = page.read_text()
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"], page.name
        assert text.startswith(f"# {page.name[:4]}: "), page.name


# -- commands ----------------------------------------------------------------------------------------------------------


@every_page
def test_makefile_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    for command in commands(page):
        if command.startswith("make "):
            assert set(command.split()[1:]) <= targets, f"{page.name}: {command}"


@every_page
def test_triptych_commands_parse(page: Path) -> None:
    for command in commands(page):
        words = shlex.split(command) if command.startswith("triptych ") else []
        if len(words) < 2:
            continue
        if any(argument in ("--help", "--version") for argument in words) or len(words) == 2:
            known = {"serve", "router", "worker", "restart", "demo", "config", "--help", "--version"}
            assert set(words[1:]) <= known, f"{page.name}: {command}"
            continue
        try:
            args = build_parser().parse_args(words[1:])
        except SystemExit:
            pytest.fail(f"{page.name}: {command} does not parse")
        if words[1] == "serve":
            assert _workers_of(args), command


def _workers_of(args: argparse.Namespace) -> list[str]:
    return [worker.name for worker in placement_of(args).workers(URL, "/tmp", parse_pins(args.pin))]


@every_page
def test_flags_exist(page: Path) -> None:
    """Flags in back-ticks are of one of the subcommands."""
    text = " ".join(
        command.format_help()
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
        for command in action.choices.values()
    )
    for name in ticked(page):
        if name.startswith("--"):
            flag = name.split()[0].split("=")[0]
            assert re.search(rf"{flag}\b", text) or flag in ("--help", "--version"), f"{page.name} names {flag}"


def test_the_placements_table_means_what_it_says() -> None:
    rows = re.findall(r"^\| `([\dEPD/]+)` \|.*\| `(triptych serve.*)` \|$", PAGES[0].read_text(), re.MULTILINE)
    assert len(rows) == 5
    for shape, command in rows:
        assert str(placement_of(build_parser().parse_args(shlex.split(command)[1:]))) == shape


# -- pages that follow from the code -----------------------------------------------------------------------------------


def configuration_page() -> str:
    """docs/configuration.md, from the fields of config.py."""
    lines = [
        "# Configuration",
        "",
        "Written by `python -m tests.test_docs` from `src/triptych/config.py`; a test keeps it so.",
        "",
        "A setting is its default, unless the TOML file of `--config` has it, unless a flag has it. The flag of",
        "`engine.block_size` is `--engine-block-size`, and `--block-size` too, because no other section has a field of",
        "that name. Unknown names are refused. `triptych config` prints every value and where it came from.",
        "",
        "```toml",
        "[model]",
        'path = "demo"',
        "",
        "[engine]",
        "block_size = 32",
        "```",
    ]
    section = ""
    for option in options():
        if option.section != section:
            section = option.section
            lines += ["", f"## {section}", "", "| field | type | default | meaning |", "|---|---|---|---|"]
        lines.append(
            f"| `{option.field}` | {_type(option)} | `{_value(option.default)}` | {_cell(option.description)} |"
        )
    return "\n".join([*lines, ""])


def _type(option: Option) -> str:
    if get_origin(option.base) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(option.base))
    names = {int: "integer", float: "number", str: "text", bool: "boolean"}
    base = option.base
    while get_origin(base) is not None or hasattr(base, "__metadata__"):
        base = get_args(base)[0]
    return names[base]


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def test_the_configuration_page_equals_the_code() -> None:
    assert CONFIGURATION.read_text() == configuration_page(), "run `python -m tests.test_docs`"


@every_page
def test_toml_examples_load(page: Path, tmp_path: Path) -> None:
    for block in fences(page, "toml"):
        (tmp_path / "example.toml").write_text(block)
        load(tmp_path / "example.toml", {})


def test_the_metrics_page_lists_the_metrics() -> None:
    router = {line.split()[2] for line in Metrics().render().decode().splitlines() if line.startswith("# TYPE")}
    router = {name for name in router if not name.endswith("_created")}
    gauges = {family.name for family in WorkerCollector(list, ()).collect()}
    listed = set(re.findall(rf"^\| `({PREFIX}\w+)`", (REPOSITORY / "docs" / "metrics.md").read_text(), re.MULTILINE))
    assert router | gauges <= listed
    assert listed <= router | gauges | {PREFIX + name for name in HELP}


@every_page
def test_metric_names_exist(page: Path) -> None:
    known = re.findall(r"^\| `(triptych:\w+)`", (REPOSITORY / "docs" / "metrics.md").read_text(), re.MULTILINE)
    for name in ticked(page):
        if name.startswith(PREFIX) and name != PREFIX:
            assert name in known, f"{page.name} names {name}"


def test_routes_that_the_readme_names_exist() -> None:
    router = cast(RouterLike, SimpleNamespace(registry=None))  # routes are made without asking it anything
    paths = {getattr(route, "path", "") for route in create_app(router, Config(), Metrics()).routes}
    named = {name for name in ticked(PAGES[0]) if re.fullmatch(r"/[a-z]+", name)}
    assert {"/metrics", "/topology", "/health", "/ready"} <= named <= paths


def test_fields_that_the_readme_calls_refused_are() -> None:
    assert {"use_beam_search", "prompt_embeds"} <= CHAT.keys()


@every_page
def test_python_examples_compile(page: Path) -> None:
    for block in fences(page, "python"):
        flags = 0x2000 if "async " in block else 0  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compile(block, str(page), "exec", flags=flags)


# -- the examples, run -------------------------------------------------------------------------------------------------

TASKS: tuple[Task, ...] = ("title", "number", "count", "stamp", "colour", "list")  # as `triptych demo` asks them


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[Deployment]:
    """`make serve`, but in one process, with the picture that the examples ask about."""
    picture = tmp_path / "demo-output" / "4-1.png"
    picture.parent.mkdir()
    question = held_out(4, tasks=TASKS)[3]
    assert question.text in PAGES[0].read_text(), "the examples ask the question that belongs to the picture"
    question.images[0].save(picture)
    async with Deployment(Config(api=ApiConfig(port=0)), Placement.parse("EPD")) as running:
        yield running


async def run_example(running: Deployment, directory: Path, *command: str) -> str:
    """What it printed. The examples' URL is replaced by the deployment's."""
    command = tuple(word.replace(URL, running.url) for word in command)
    environment: dict[str, Any] = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=directory, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, err.decode()
    return out.decode()


def _example(language: str, word: str) -> str:
    blocks = [block for block in fences(PAGES[0], language) if word in block]
    assert len(blocks) == 1
    assert URL in blocks[0]
    return blocks[0]


@pytest.mark.slow
async def test_the_readmes_examples_run(deployment: Deployment, tmp_path: Path) -> None:
    curl = _example("bash", "curl")
    answer = msgspec.json.decode(await run_example(deployment, tmp_path, "bash", "-euo", "pipefail", "-c", curl))
    text = answer["choices"][0]["message"]["content"]
    assert text.strip()
    assert answer["timing"]["critical_path"]

    client = _example("python", "OpenAI")
    whole, streamed = (await run_example(deployment, tmp_path, sys.executable, "-c", client)).splitlines()
    assert whole == streamed == text, "greedy answers to one question are one answer"


@pytest.mark.slow
async def test_a_router_and_workers_started_by_hand(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    block = _example("bash", "triptych router").replace("8000", port)
    runtime_dir = tempfile.mkdtemp(dir="/tmp")  # short: paths of unix sockets are
    words = [shlex.split(line.replace("/tmp/tri", runtime_dir))[1:] for line in block.splitlines()]
    command = (sys.executable, "-m", "triptych.cli.main")
    processes = [await asyncio.create_subprocess_exec(*command, *line, cwd=tmp_path) for line in words]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
            assert await _becomes_ready(client)
            body = {"messages": [{"role": "user", "content": "What is 2 plus 3?"}], "max_tokens": 8}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        for process in reversed(processes):  # workers first: they leave over the router's API
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
        shutil.rmtree(runtime_dir, ignore_errors=True)


async def _becomes_ready(client: httpx.AsyncClient) -> bool:
    for _ in range(450):
        with contextlib.suppress(httpx.TransportError):  # the router does not listen yet
            if (await client.get("/ready")).is_success:
                return True
        await asyncio.sleep(0.2)
    return False


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration_page())
