"""The architecture as a test: the contracts of pyproject.toml hold, and each one bites when it is broken."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PURE = ("core", "policies", "solvers")
CHANCE = {"random", "secrets", "uuid", "time", "datetime", "numpy.random"}
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """import-linter's verdict on the package below `root`, which need not be the installed one."""
    return subprocess.run(
        [sys.executable, "-c", LINT],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


of_both_packages = pytest.mark.skipif(
    not (ROOT / "src" / "sloop_systems").exists(), reason="the contracts are of sloop and sloop_systems"
)


@of_both_packages
def test_imports_go_downwards_only() -> None:
    verdict = lint_imports(ROOT)
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr


@of_both_packages
@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("core/views.py", "import time", "Law 1"),
        ("vocabulary.py", "from random import Random", "Law 1"),
        ("systems/planning/__init__.py", "import time", "Law 1: systems"),
        ("units.py", "import sloop.sim", "The house"),
        ("report/__init__.py", "import sloop.sim.truth", "Law 2"),
        ("workload/link.py", "import sloop.app", "The house"),
        ("report/sections.py", "import sloop.sim.run", "The house"),
        ("cli/systems.py", "import sloop_systems.comparison", "Law 4: the platform"),
    ],
)
def test_a_broken_contract_is_noticed(tmp_path: Path, file: str, line: str, contract: str) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    planted = tmp_path / "src" / "sloop" / file
    planted.write_text(f"{planted.read_text()}\n{line}\n")
    verdict = lint_imports(tmp_path)
    assert verdict.returncode != 0
    broken = [row for row in verdict.stdout.splitlines() if row.endswith("BROKEN")]
    assert any(contract in row for row in broken), verdict.stdout


def impurities(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Chance, also that inside numpy, clocks, builtin I/O, coroutines, order by identity."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "random":
            yield node.lineno, "numpy's chance"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = {node.module or ""} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
            yield from ((node.lineno, f"import {name}") for name in sorted(names & CHANCE))
        elif isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield node.lineno, "async"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"open", "input", "id"}:
            yield node.lineno, f"{node.func.id}()"


def policies_of_publications() -> Iterator[Path]:
    """Modules of sloop_systems that have policies or solvers, and all of it that these import."""
    graph = import_graph(ROOT / "src")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sloop.policies"]
    seen: set[str] = set()
    open_ones = {value.partition(":")[0] for value in points.values()}
    open_ones |= {name for name in graph if re.fullmatch(r"sloop_systems\.\w+\.(policy|solver)", name)}
    while open_ones:
        seen |= open_ones
        open_ones = {name for each in open_ones for name in graph[each] if name.startswith("sloop_systems.")} - seen
    for name in sorted(seen):
        path = (ROOT / "src").joinpath(*name.split("."))
        yield path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_policies_and_solvers_use_no_hidden_chance_io_or_async() -> None:
    rooms = [path for room in PURE for path in sorted((ROOT / "src" / "sloop" / room).rglob("*.py"))]
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what} — take it as a value from the caller (law 1)"
        for path in (*rooms, *policies_of_publications())
        for line, what in impurities(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("line", ["import random", "from time import monotonic", "x = np.random.rand()", "open('a')"])
def test_hidden_chance_is_noticed(line: str) -> None:
    assert list(impurities(ast.parse(f"{line}\n")))


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, inside functions too, but not those for the type checker alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test).endswith("TYPE_CHECKING")
        for body in branch.body
        for node in ast.walk(body)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_publications_import_only_the_interface() -> None:
    """What docs/write-a-system.md names; it is enough for them, and so for anybody."""
    interface = re.compile(r"sloop\.(api|testing|__version__)\b")
    found = [
        f"{path.relative_to(ROOT)}: {name} — it is not in sloop.api: add it there in general form, or do without"
        for path in sorted((ROOT / "src" / "sloop_systems").rglob("*.py"))
        for name in imports_of(path)
        if f"{name}.".startswith("sloop.") and not interface.match(name)
    ]
    assert not found, "\n".join(found)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Module → modules of the same package that it imports. A name that is not a module stands for its module."""
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = ((name, name.rpartition(".")[0]) for name in imports_of(path))
        graph[module] = {next((name for name in pair if name in modules), "") for pair in names} - {"", module}
    return graph


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first one at both ends; empty if there is none."""
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module in done:
            return []
        for imported in sorted(graph[module]):
            if found := visit(imported, [*way, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := visit(module, []))), [])


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = cycle_in(import_graph(ROOT / "src"))
    assert not found, f"import cycle: {' → '.join(found)}; move what both need below them"


def test_a_cycle_is_noticed_also_inside_functions(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").write_text("from room.one import a\n")
    (tmp_path / "room" / "one.py").write_text("def a():\n    from room.two import b\n")
    (tmp_path / "room" / "two.py").write_text("from typing import TYPE_CHECKING\n")
    assert cycle_in(import_graph(tmp_path)) == []
    (tmp_path / "room" / "two.py").write_text("if TYPE_CHECKING:\n    from room.one import a\n")
    assert cycle_in(import_graph(tmp_path)) == []
    (tmp_path / "room" / "two.py").write_text("from room.one import a\n")
    assert cycle_in(import_graph(tmp_path)) == ["room.one", "room.two", "room.one"]
