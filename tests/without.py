"""Runs tests in a copy of the repository without publications: `python -m tests.without NAME… [-- pytest's arguments]`.

The copy lacks the folders src/sloop_systems/NAME and tests/sloop_systems/NAME, and its installation their entry points;
with `all` it lacks sloop_systems altogether. An environment of its own makes this hold in the processes that tests
start, too. The commands' exit code is 1 if a test fails without one of them.
"""

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = ("src/sloop_systems", "tests/sloop_systems")
SHARED: Final = {"comparison"}
"""No publication, but what their experiments share."""


def publications() -> list[str]:
    """The names of all publications' folders."""
    return sorted(
        path.parent.name for path in (ROOT / FOLDERS[0]).glob("*/__init__.py") if path.parent.name not in SHARED
    )


def copy_without(names: Sequence[str], folder: Path) -> Path:
    """Copy the repository without these publications, or without all, into a folder. Returns its Python."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    removed = [Path(each, *([] if name == "all" else [name])) for each in FOLDERS for name in names]
    for file in map(Path, listed.stdout.decode().split("\0")[:-1]):
        if (ROOT / file).is_file() and not any(file.is_relative_to(each) for each in removed):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / file)
    project = folder / "pyproject.toml"
    project.write_text("".join(_kept_lines(names, project.read_text().splitlines(keepends=True))))
    return _installed(folder)


def _kept_lines(names: Sequence[str], lines: Sequence[str]) -> list[str]:
    """The lines of a pyproject.toml without the entry points of publications."""
    gone = r"\w+" if "all" in names else "|".join(names)
    return [line for line in lines if not re.match(rf'[\w".*@-]+ = "sloop_systems\.({gone})[.:]', line)]


def _installed(folder: Path) -> Path:
    """An environment in which the copy is installed, with all packages of this one. Returns its Python."""
    venv.create(folder / ".venv", symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / ".venv")}))
    # Packages on a path that a file names are found; files of that kind among them, such as ours, are not read.
    (packages / "outer.pth").write_text(f"{folder / 'src'}\n{sysconfig.get_path('purelib')}\n")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    metadata = packages / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    return folder / ".venv" / "bin" / "python"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests without each of the publications in turn. Returns 1 if some failed, otherwise 0."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    own, options = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(prog="python -m tests.without", description="Run tests without publications.")
    choices = ["all", "each", *publications()]
    parser.add_argument("names", nargs="+", choices=choices, help="remove it; `each`: one after the other; `all`: all")
    names = list(dict.fromkeys(parser.parse_args(own).names))
    failed = []
    for name in publications() if "each" in names else names:
        with tempfile.TemporaryDirectory(prefix=f"without-{name}-") as folder:
            sys.stderr.write(f"== without {name}\n")
            python = copy_without([name], Path(folder))
            if subprocess.run([python, "-m", "pytest", *options], cwd=folder, check=False).returncode:
                failed.append(name)
    sys.stderr.write(f"== tests fail without: {', '.join(failed)}\n" if failed else "== all passed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
