"""House rules as a test: every message names the place and says what to do about it."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC, TESTS = ROOT / "src", ROOT / "tests"
SOURCES = sorted(SRC.rglob("*.py"))
PYTHON = SOURCES + sorted(TESTS.rglob("*.py")) + sorted((ROOT / "benchmarks").rglob("*.py"))
TEXTS = [
    path
    for folder in ("src", "tests", "docs", "benchmarks", "examples", ".ci")
    for path in (ROOT / folder).rglob("*")
    if path.is_file()
    and path.suffix in {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".html", ".css", ".js", ""}
    and path.parent.name != "vendor"  # as others have published it
] + [path for path in ROOT.iterdir() if path.is_file() and path.suffix in {".md", ".toml", ""} and path.name != ".git"]

FUNCTION_LINES = 70
OTHERS_WORDS = {"query_string"}
"""Names that HTTP, gRPC or another standard gave."""

ADVICE = {
    "name the package, not where it comes from": ("pypi" + ".org", "crates" + ".io", "index" + "-url"),
    "use a path relative to the project": ("/ho" + "me/", "/Us" + "ers/", "/wo" + "rk/"),
    "do it now or delete it": ("FIX" + "ME", "TO" + "DO", "XX" + "X"),
}


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def dotted(path: Path) -> str:
    """The module's name: src/sloop/core/views.py is `sloop.core.views`."""
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def complain(found: Iterator[str]) -> None:
    complaints = "\n".join(sorted(found))
    assert not complaints, "\n" + complaints


def test_functions_are_small() -> None:
    complain(
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES} — split it"
        for path in PYTHON
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES
    )


def test_packages_are_named_as_they_can_be_had() -> None:
    """Commands that messages and documents give name packages that sloop requires, or the repository one stands in. No
    index has sloop's own distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = {re.split(r"[>;]", each)[0] for each in chain(project["dependencies"], *extras.values())}
    known = {each for each in required if not each.startswith(project["name"])}
    known |= {name.partition("[")[0] for name in known} | {".", *(f".[{extra}]" for extra in extras)}
    complain(
        f"{path.relative_to(ROOT)}: pip install {name} — name a package of pyproject.toml, or '.[extra]'"
        for path in TEXTS
        if path.suffix in {".py", ".md"} and not path.is_relative_to(TESTS)
        for names in re.findall(r"pip install((?: (?:'[^'\n]+'|[\w.\[\]-]+))+)", path.read_text())
        for name in re.findall(r"[^' ]+", names)
        if name not in known and not name.startswith("-")
    )


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def refused_words() -> dict[str, str]:
    """Every word of the last column of docs/vocabulary.md, with the name to use instead."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "vocabulary.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith(("| name", "| ---"))
    ]
    return {word.strip(): name for name, _, refused in rows for word in refused.split(",") if word.strip()}


def test_the_vocabulary_is_read() -> None:
    words = refused_words()
    assert words["query"] == "request"
    assert "util" in words


def test_names_use_the_vocabulary() -> None:
    instead = refused_words()
    names = [(path, 1, path.stem) for path in SOURCES] + [(p, *row) for p in SOURCES for row in defined_names(parse(p))]
    complain(
        f"{path.relative_to(ROOT)}:{line}: `{name}` — write {instead[word]!r} instead of `{word}` (docs/vocabulary.md)"
        for path, line, name in names
        for word in re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())
        if word in instead and name not in OTHERS_WORDS
    )


def test_class_names_are_defined_once() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    complain(
        f"class {name} is defined in {', '.join(found)} — give each a name of its own"
        for name, found in places.items()
        if len(found) > 1
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


def entries() -> Iterator[str]:
    """The modules of entry points."""
    for group in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"].values():
        yield from (value.partition(":")[0] for value in group.values())


def test_every_source_file_is_used() -> None:
    used = {name for path in SOURCES for name in imports(parse(path))} | set(entries())
    complain(
        f"{path.relative_to(ROOT)}: nothing imports it — delete it, or use it"
        for path in SOURCES
        if not path.name.startswith("__") and dotted(path) not in used and "api" not in path.parts  # for users
        if "__main__" not in imports(parse(path))  # a program of its own
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
