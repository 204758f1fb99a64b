"""Systems in files of a user's own; tests/docs/test_write_a_system.py runs a whole one."""

from pathlib import Path

import pytest

from sloop.app.load import load_application
from sloop.errors import InputError
from sloop.systems import build_system
from sloop.systems.own import is_own, own_system
from sloop.systems.setup import set_up

SHOWN = """
from dataclasses import replace
from sloop.systems.static import STATIC
SYSTEM = replace(STATIC, name="mine")
"""


@pytest.mark.parametrize(("name", "own"), [("static", False), ("./mine.py", True), ("/a/b.py", True)])
def test_a_path_is_no_name(name: str, own: bool) -> None:
    assert is_own(name) is own


def test_a_system_in_a_file_takes_parameters_as_any_other(tmp_path: Path) -> None:
    path = tmp_path / "own_system.py"
    path.write_text(SHOWN)
    assert own_system(str(path)).name == "mine"
    built = build_system(str(path), {"replicas": 3, "batch": "slack"})
    assert built.slots["scale"]["replicas"] == 3
    assert built.slots["batch"]["name"] == "slack"
    with pytest.raises(InputError, match="system mine has no parameter 'replica'"):
        build_system(str(path), {"replica": 3})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("SYSTM = 1", r"own\.py: it has no SYSTEM\nhelp: end it with SYSTEM = System\("),
        ("SYSTEM = 1", r"own\.py: its SYSTEM is no System but int"),
        ("SYSTEM = 1/0", r"own\.py:1: it cannot be imported: ZeroDivisionError"),
    ],
)
def test_what_is_no_system_is_refused(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "own.py").write_text(content)
    stage = {"name": "a", "profile": "ResNet-T"}
    application = load_application({"name": "x", "slo_ms": 10, "stages": [stage], "system": str(tmp_path / "own.py")})
    with pytest.raises(InputError, match=says):
        set_up(application)


def test_a_file_that_is_not_there_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text("name: x\nslo_ms: 10\nsystem: ./mine.py\nstages: [{name: a, profile: ResNet-T}]")
    with pytest.raises(InputError, match=r"app\.yaml:3: system: no system file '\./mine\.py'"):
        load_application(tmp_path / "app.yaml")
