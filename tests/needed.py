"""Which publications' folders a test needs: some compare with another publication, as benchmarks do."""

import re
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCES: Final = {"sloop_systems": ROOT / "src", "benchmarks": ROOT}
IMPORT: Final = re.compile(r"^ *from ((sloop_systems|benchmarks)[\w.]*) import \(?([\w ,]*)", re.MULTILINE)


@cache
def imports_of(path: Path) -> tuple[frozenset[str], tuple[Path, ...]]:
    """The folders of sloop_systems, and the files, that a file itself imports."""
    folders, files = set(), []
    for module, package, names in IMPORT.findall(path.read_text()):
        for each in (module, *(f"{module}.{name.split(' as ')[0].strip()}" for name in names.split(","))):
            parts = each.split(".")
            if package == "sloop_systems" and len(parts) > 1 and parts[1]:
                folders.add(parts[1])
            file = SOURCES[package].joinpath(*parts)
            file = file.with_suffix(".py") if file.with_suffix(".py").is_file() else file / "__init__.py"
            if file.is_file():
                files.append(file)
    return frozenset(folders), tuple(files)


@cache
def folders() -> frozenset[str]:
    """The folders of sloop_systems that are here or, in a clone, that git knows, as somebody may have removed some."""
    command = ["git", "ls-files", "src/sloop_systems/*/__init__.py"]
    known = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    here = (ROOT / "src" / "sloop_systems").glob("*/__init__.py")
    return frozenset(path.parent.name for path in (*map(Path, known), *here))


def needed_by(path: Path) -> set[str]:
    """The folders of sloop_systems that a file imports, by itself or through others of sloop_systems and benchmarks."""
    found, seen, rest = set[str](), set[Path](), [path]
    while rest:
        file = rest.pop()
        if file not in seen:
            seen.add(file)
            folders, files = imports_of(file)
            found |= folders
            rest += files
    return found


def is_missing(path: Path) -> bool:
    """Whether a test file needs a folder that is not there."""
    needed = needed_by(path)
    if needed and find_spec("sloop_systems") is None:
        return True
    return not all(find_spec(f"sloop_systems.{folder}") for folder in needed)
