"""House rules as a test: every message names the place and says what to do about it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC, TESTS = ROOT / "src" / "sloop", ROOT / "tests"
SOURCES = sorted(SRC.rglob("*.py"))
PYTHON = SOURCES + sorted(TESTS.rglob("*.py")) + sorted((ROOT / "benchmarks").rglob("*.py"))
TEXTS = [
    path
    for folder in ("src", "tests", "docs", "benchmarks", "examples", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".html", ".css", ".js", ""}
] + [path for path in ROOT.iterdir() if path.is_file() and path.suffix in {".md", ".toml", ""} and path.name != ".git"]

FILE_LINES, FUNCTION_LINES = 400, 70
SAY = {
    "request, or its own noun": "query queries task tasks job jobs item items",
    "replica": "instance instances pod pods",
    "slo": "sla slas",
    "a noun for what it is": "manager handler helper helpers util utils common misc tmp obj",
}
SAY_INSTEAD = {word: advice for advice, words in SAY.items() for word in words.split()}
OTHERS_WORDS = {"query_string"}
"""Names that HTTP or another standard gave."""

NO_MIRROR = {"events", "actions", "errors", "core.seams"}
"""Values and protocols only: the tests of every room speak them, so they need no test file of their own."""

ADVICE = {
    "name the package, not where it comes from": ("pypi" + ".org", "crates" + ".io", "index" + "-url"),
    "use a path relative to the project": ("/ho" + "me/", "/Us" + "ers/", "/wo" + "rk/"),
    "do it now or delete it": ("FIX" + "ME", "TO" + "DO", "XX" + "X"),
}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def dotted(path: Path) -> str:
    """The module's name inside the package: src/sloop/core/views.py is `core.views`."""
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def complain(found: Iterator[str]) -> None:
    complaints = "\n".join(sorted(found))
    assert not complaints, "\n" + complaints


def test_files_are_small() -> None:
    complain(
        f"{path.relative_to(ROOT)}: {lines} lines, at most {FILE_LINES} — it holds two ideas: split it by noun"
        for path in PYTHON
        if (lines := len(path.read_text().splitlines())) > FILE_LINES
    )


def test_functions_are_small() -> None:
    complain(
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES} — split it"
        for path in PYTHON
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES
    )


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def test_names_use_the_vocabulary() -> None:
    names = [(path, 1, path.stem) for path in SOURCES] + [(p, *row) for p in SOURCES for row in defined_names(parse(p))]
    complain(
        f"{path.relative_to(ROOT)}:{line}: `{name}` — say {SAY_INSTEAD[word]} instead of `{word}` (docs/vocabulary.md)"
        for path, line, name in names
        for word in re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())
        if word in SAY_INSTEAD and name not in OTHERS_WORDS
    )


def imports(tree: ast.Module) -> Iterator[str]:
    """Every module a file may mean: imported, imported from, or named in a string to be imported lazily."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.partition(":")[0]


def test_every_source_file_is_used() -> None:
    used = {name for path in SOURCES for name in imports(parse(path))}
    complain(
        f"{path.relative_to(ROOT)}: nothing imports it — delete it, or use it"
        for path in SOURCES
        if not path.name.startswith("__") and f"sloop.{dotted(path)}" not in used
        if "__main__" not in imports(parse(path))  # a program of its own
    )


def test_every_module_has_tests_in_its_own_room() -> None:
    rooms = {path.parent: path.parent.relative_to(SRC) for path in SOURCES}
    tested = {room: {n for p in (TESTS / at).glob("*.py") for n in imports(parse(p))} for room, at in rooms.items()}
    mirrors = {path: TESTS / path.relative_to(SRC).with_name(f"test_{path.name}") for path in SOURCES}
    complain(
        f"{path.relative_to(ROOT)}: no test beside its mirror imports it — write {mirror.relative_to(ROOT)}"
        for path, mirror in mirrors.items()
        if not path.name.startswith("__") and dotted(path) not in NO_MIRROR
        if not mirror.exists() and f"sloop.{dotted(path)}" not in tested[path.parent]
    )


def test_modules_say_what_they_promise() -> None:
    complain(
        f"{path.relative_to(ROOT)}: no docstring — say what it promises, what it must not know, and its source"
        for path in SOURCES
        if path.read_text().strip() and not ast.get_docstring(parse(path))
    )


def test_texts_are_clean() -> None:
    texts = {path: path.read_text(errors="replace") for path in TEXTS if "__pycache__" not in path.parts}
    complain(
        f"{path.relative_to(ROOT)}: contains {word!r} — {advice}"
        for path, text in texts.items()
        for advice, words in ADVICE.items()
        for word in words
        if word in text
    )
    complain(
        f"{path.relative_to(ROOT)}: end it with exactly one newline"
        for path, text in texts.items()
        if text and (not text.endswith("\n") or text.endswith("\n\n"))
    )
