"""Copies of the repository without publications."""

import subprocess
from pathlib import Path

import pytest

from tests.needed import is_missing
from tests.without import ROOT, copy_without, publications

SCRIPT = """
from importlib.metadata import entry_points
from importlib.util import find_spec
import sloop, sloop.systems
print(sloop.__file__)
print(find_spec("sloop_systems.comparison") is not None if find_spec("sloop_systems") else None)
groups = ("systems", "policies", "reproductions")
print([point.value for group in groups for point in entry_points(group="sloop." + group)])
print(*sloop.systems.SYSTEMS)
"""


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="files are copied as git lists them")
@pytest.mark.parametrize("name", ["all", *publications()[:1]])
def test_a_copy_has_neither_the_folder_nor_its_entry_points(tmp_path: Path, name: str) -> None:
    python = copy_without([name], tmp_path)
    printed = subprocess.run([python, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    file, comparison, points, systems = printed.splitlines()
    assert Path(file).is_relative_to(tmp_path)
    assert comparison == ("None" if name == "all" else "True")
    assert f"sloop_systems.{'' if name == 'all' else name}" not in points
    assert "static" in systems.split()


@pytest.mark.parametrize(
    ("line", "is_so"),
    [("from sloop_systems.nowhere.policy import Nothing", True), ("from sloop.errors import InputError", False)],
)
def test_a_test_that_compares_with_a_publication_that_is_not_there_is_not_collected(
    tmp_path: Path, line: str, is_so: bool
) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(f"{line}\n")
    assert is_missing(path) is is_so
