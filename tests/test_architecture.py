"""The shape of the code, proven from its syntax: which package imports which, where torch may live, names and sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

import triptych

ROOT = Path(triptych.__file__).parent
PACKAGE = "triptych"

BASE = frozenset({"types", "messages", "config", "errors", "clock", "block_hash", "byte_spelling", "merge"})

# What each package or top-level module may import beside the base and itself.
ARROWS: dict[str, frozenset[str]] = {
    **dict.fromkeys(BASE, frozenset()),
    "__init__": frozenset({"offline"}),  # `from triptych import LLM`, imported when it is asked for
    "media": frozenset(),
    "prompt": frozenset({"media"}),
    "curve": frozenset(),
    "transport": frozenset({"curve"}),
    "observe": frozenset(),
    "kernels": frozenset(),
    "models": frozenset({"kernels"}),
    "demo": frozenset(),
    "handoff": frozenset({"transport"}),
    "engine": frozenset({"observe"}),
    "stages": frozenset({"media", "transport", "observe", "handoff", "engine"}),
    "router": frozenset({"curve", "media", "prompt", "observe"}),
    "api": frozenset({"observe"}),
    "heartbeat": frozenset({"curve"}),
    "lent_cores": frozenset({"kernels"}),
    "placement": frozenset(),
    "runtime_dir": frozenset(),
    "worker": frozenset(
        {"curve", "stages", "handoff", "transport", "kernels", "lent_cores", "models", "observe", "heartbeat"}
    ),
    "supervisor": frozenset({"observe", "runtime_dir", "worker"}),
    "launch": frozenset(
        {
            "api",
            "curve",
            "lent_cores",
            "models",
            "observe",
            "placement",
            "prompt",
            "router",
            "runtime_dir",
            "supervisor",
        }  # it composes them
    ),
    "offline": frozenset(
        {"api", "launch", "media", "models", "observe", "placement", "prompt"}
        | {"router", "stages", "handoff", "transport", "worker"}  # it composes them, and a deployment in one process
    ),
    "bench": frozenset(),
    "cli": frozenset({"bench", "demo", "launch", "observe", "placement", "worker"}),
}
# Single modules with one arrow more, and why.
MORE: dict[str, frozenset[str]] = {
    "engine.runner": frozenset({"models"}),  # it executes the model; the rest of the engine knows none
    "stages.build": frozenset({"models"}),  # from configuration to loaded stages
    "models.registry": frozenset({"demo"}),  # where the packaged checkpoint lies
    "testing": frozenset(ARROWS),  # the in-process cluster is made of everything
    "testing_checkpoints": frozenset(ARROWS),
}
BASE_ARROWS: dict[str, frozenset[str]] = {
    "types": frozenset(),
    "errors": frozenset(),
    "clock": frozenset(),
    "byte_spelling": frozenset(),
    "merge": frozenset(),
    "messages": frozenset({"types"}),
    "block_hash": frozenset({"types"}),
    "config": frozenset({"errors", "types"}),
}

HEAVY = frozenset({"torch", "transformers", "torchvision"})
HEAVY_PACKAGES = frozenset({"models", "stages", "handoff"})
HEAVY_MODULES = frozenset(
    {"worker", "testing", "testing_checkpoints", "bench.ceiling_probe"}  # the probe is a script of its own process
    | {
        f"engine.{name}"
        for name in (
            "attention",
            "batch",
            "decode_graphs",
            "logits",
            "logprobs",
            "runner",
            "sampler",
            "varlen_attention",
        )
    }
)
# The router opens the model by these; a family's file is one of them.
LIGHT_MODELS = frozenset(
    f"models.{name}" for name in ("registry", "family", "checkpoint", "image_patches", "qwen_vl")
) | {"models.qwen2_5_vl", "models.qwen3_vl"}
LIGHT_PACKAGES = ("api", "bench", "cli", "media", "observe", "prompt", "router")

BANNED_NAMES = frozenset({"utils", "util", "common", "helpers", "helper", "misc", "manager", "handler"})
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
LONG_FUNCTIONS: dict[str, str] = {}  # "module.function": why it is longer


@dataclass(frozen=True)
class Module:
    """One file of the package. Names are without the leading `triptych.`."""

    name: str
    path: Path
    tree: ast.Module
    imports: frozenset[str] = field(default_factory=frozenset)  # modules of this package, at run time or for types
    runtime_imports: frozenset[str] = field(default_factory=frozenset)  # without those under TYPE_CHECKING
    outside: frozenset[str] = field(default_factory=frozenset)  # top-level names of other packages, at run time

    @property
    def part(self) -> str:
        """The package, or the module's own name at the top level."""
        return self.name.split(".")[0]


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _statements(tree: ast.AST, *, with_types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements at any depth. Those that only a type checker sees are left out unless `with_types`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test) and not with_types:
            for statement in child.orelse:
                yield from _statements(statement, with_types=with_types)
        else:
            yield from _statements(child, with_types=with_types)


def _targets(statement: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Dotted names that the statement may import: a name taken from a package may be a module of it."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    else:
        assert statement.level == 0, "imports are absolute"
        assert statement.module is not None
        yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


@cache
def modules() -> dict[str, Module]:
    files = {_name(path): path for path in sorted(ROOT.rglob("*.py"))}

    def own(targets: set[str]) -> frozenset[str]:
        found = set()
        for target in targets:
            if target.split(".")[0] == PACKAGE:
                name = target.removeprefix(PACKAGE).removeprefix(".")
                while name not in files and name:
                    name = name.rpartition(".")[0]
                found.add(name or "__init__")
        return frozenset(found)

    parsed = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text(), str(path))
        seen: dict[bool, set[str]] = {True: set(), False: set()}
        for with_types, targets in seen.items():
            for statement in _statements(tree, with_types=with_types):
                targets.update(_targets(statement))
        outside = frozenset(target.split(".")[0] for target in seen[False]) - {PACKAGE}
        parsed[name] = Module(name, path, tree, own(seen[True]), own(seen[False]), outside)
    return parsed


ALL = sorted(modules())


def test_the_package_is_read() -> None:
    assert {"router.router", "engine.scheduler", "worker", "types"} <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_imports_point_one_way(name: str) -> None:
    module = modules()[name]
    if module.part in BASE_ARROWS:
        allowed = BASE_ARROWS[module.part]
    else:
        assert name in MORE or module.part in ARROWS, f"{name} has no place among the arrows: give it one"
        allowed = BASE | {module.part, "__init__"} | ARROWS.get(module.part, frozenset()) | MORE.get(name, frozenset())
    against = sorted(target for target in module.imports if target.split(".")[0] not in allowed)
    assert not against, f"{name} may not import {', '.join(against)}"


def test_imports_have_no_cycle() -> None:
    graph = {name: module.runtime_imports - {name} for name, module in modules().items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"a cycle: {' -> '.join([*way[way.index(name) :], name])}"
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*way, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_nothing_inside_a_running_server_imports_its_tests() -> None:
    twins = {"testing", "testing_checkpoints"}
    assert not [name for name, module in modules().items() if twins & module.imports and name not in twins]


@pytest.mark.parametrize("name", ALL)
def test_torch_lives_where_it_may(name: str) -> None:
    module = modules()[name]
    may = name in HEAVY_MODULES or (module.part in HEAVY_PACKAGES and name not in LIGHT_MODELS)
    if not may:
        assert not HEAVY & module.outside, f"{name} imports {', '.join(sorted(HEAVY & module.outside))}"


def test_the_router_process_starts_without_torch() -> None:
    """With all that it composes: the model's layout and settings, the API, the workers' supervisor, every command."""
    light = [name for name in ALL if name.split(".")[0] in LIGHT_PACKAGES or name in LIGHT_MODELS]
    light = [name for name in light if name not in HEAVY_MODULES]
    names = ["launch", "supervisor", "placement", *light]
    imports = "; ".join(f"import triptych.{name}" for name in names)
    code = f"import sys; {imports}; print(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_the_api_is_handed_its_router() -> None:
    assert not [name for name in ALL if name.startswith("api.") and any("router" in i for i in modules()[name].imports)]


@pytest.mark.parametrize("name", ALL)
def test_a_module_has_a_telling_name_and_says_what_it_is(name: str) -> None:
    module = modules()[name]
    assert not BANNED_NAMES & set(name.split(".")), f"{name}: a name that says nothing"
    if module.tree.body:  # an empty __init__.py has nothing to say
        doc = ast.get_docstring(module.tree)
        assert doc, f"{name} has no docstring"
        assert len(doc.splitlines()) <= 6, f"{name}: its docstring is longer than six lines"


@pytest.mark.parametrize("name", ALL)
def test_files_and_functions_are_small(name: str) -> None:
    module = modules()[name]
    num_lines = len(module.path.read_text().splitlines())
    assert num_lines < MAX_FILE_LINES, f"{name} has {num_lines} lines"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            allowed = f"{name}.{node.name}" in LONG_FUNCTIONS
            assert allowed or length < MAX_FUNCTION_LINES, f"{name}.{node.name} has {length} lines"


def test_no_exception_of_these_tests_is_stale() -> None:
    assert set(MORE) <= set(ALL)
    assert set(ALL) >= LIGHT_MODELS | HEAVY_MODULES
    parts = {module.part for module in modules().values()}
    assert set(ARROWS) <= parts
    for name in ("engine.runner", "stages.build", "models.registry"):
        used = {target.split(".")[0] for target in modules()[name].imports}
        assert MORE[name] <= used, f"{name} does not need {', '.join(sorted(MORE[name] - used))} any more"
