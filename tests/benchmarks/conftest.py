"""Benchmarks compare with publications: tests that need one whose folder is not there are not collected."""

import ast
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def imported_by(path: Path, seen: frozenset[Path] = frozenset()) -> set[str]:
    """Modules of sloop_systems that a file imports, by itself or through modules of benchmarks other than `seen`."""
    names = {
        name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }
    files = [ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in names if name.startswith("benchmarks.")]
    return {name for name in names if name.startswith("sloop_systems.")}.union(
        *(imported_by(file, seen | {path}) for file in files if file.exists() and file not in seen | {path})
    )


def is_there(module: str) -> bool:
    """Whether the folder is there that a module of sloop_systems is in."""
    folder = ".".join(module.split(".")[:2])
    return find_spec("sloop_systems") is not None and find_spec(folder) is not None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix == ".py" and not all(map(is_there, imported_by(collection_path))):
        return True
    return None  # others may have reasons of their own
