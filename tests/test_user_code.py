"""Python files that a user wrote: executed once, and errors in them named with their line."""

from pathlib import Path

import pytest

from sloop.errors import InputError
from sloop.user_code import (
    LEFT_OUT,
    MESSAGE_CHARS_MAX,
    TRACE_CHARS_MAX,
    ModelFailure,
    WrongOutputsError,
    failure_of,
    module_in,
    modules_beside,
    raise_user_error,
)


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def test_a_file_is_executed_once_and_can_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is named."""
    (tmp_path / "beside_it.py").write_text("VALUE = 7")
    path = written(tmp_path, "from beside_it import VALUE\nseen = [VALUE]")
    module_in(path).seen.append(8)
    monkeypatch.chdir(tmp_path)
    assert module_in(Path(path.name)).seen == [7, 8]


def test_what_a_file_prints_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module_in(written(tmp_path, "print('hello')"))
    assert capsys.readouterr() == ("", "hello\n")


def test_a_file_that_has_changed_is_executed_again(tmp_path: Path) -> None:
    """Also within the second, with a text of the same length: then Python itself would take its old bytecode."""
    first = module_in(written(tmp_path, "class Kept: pass\nvalue = 1"))
    second = module_in(written(tmp_path, "class Kept: pass\nvalue = 2"))
    assert (first.value, second.value) == (1, 2)
    assert first.Kept is not second.Kept
    assert first is module_in(written(tmp_path, "class Kept: pass\nvalue = 1")), "what was executed stays"


def test_a_module_beside_a_file_that_has_changed_is_imported_again(tmp_path: Path) -> None:
    """Also one that is imported by another, within the second, and with a text of the same length."""
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text("VALUE = 1")
    (tmp_path / "outer_one.py").write_text("from parts.inner import VALUE\nclass Kept: pass")
    path = written(tmp_path, "import math, outer_one\nfrom outer_one import VALUE, Kept\nclass Own: pass")
    first = module_in(path)
    assert module_in(path) is first
    (folder / "inner.py").write_text("VALUE = 2")
    second = module_in(path)
    assert (first.VALUE, second.VALUE) == (1, 2)
    assert second.outer_one is not first.outer_one
    assert first.outer_one.VALUE == 1, "what was executed before keeps what it has"
    assert first.math is second.math, "only what is beside the file"
    assert first.Own.__module__ == second.Own.__module__, "as in another process, which reads a snapshot"
    assert module_in(path) is second


def test_a_neighbour_that_comes_too_late_or_goes_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path, "from late_one import VALUE")
    with pytest.raises(InputError, match="late_one"):
        module_in(path)
    (tmp_path / "late_one.py").write_text("VALUE = 1")
    assert module_in(path).VALUE == 1
    (tmp_path / "late_one.py").unlink()
    with pytest.raises(InputError, match="late_one"):
        module_in(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\ny = x / 0", r"mine\.py:2: it cannot be imported: ZeroDivisionError: division by zero\nhelp: correct"),
        ("x = 1\ny = (", r"mine\.py:2: it cannot be imported: SyntaxError"),
        ("import sys\nsys.exit(3)", r"mine\.py:2: it cannot be imported: SystemExit: 3"),
        ("from nowhere_at_all import it", r"mine\.py:1: it cannot be imported: ModuleNotFoundError"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        module_in(written(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.py: there is no such file"):
        module_in(tmp_path / "none.py")


def test_an_error_outside_the_file_has_no_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mine\.py: it fails: ValueError: here"):
        raise_user_error(ValueError("here"), tmp_path / "mine.py", "it fails")


def failure_in(path: Path) -> ModelFailure:
    """Why the function `run` of a file fails."""
    try:
        module_in(path).run()
    except BaseException as error:
        return failure_of(error)
    raise AssertionError("it does not fail")


def test_a_failure_names_the_line_of_the_user(tmp_path: Path) -> None:
    path = written(tmp_path, "import json\ndef inner(): json.loads('{')\ndef run():\n    inner()\n")
    failure = failure_in(path)
    assert failure.summary == "the model raised JSONDecodeError"
    assert failure.detail.startswith("JSONDecodeError: Expecting property name")
    assert failure.detail.endswith("(mine.py:2)"), "not the line of the library that raised"
    first, *frames, last = failure.trace.splitlines()
    assert first == "Traceback (most recent call last):"
    assert [frame for frame in frames if "mine.py" in frame and "in run" in frame]
    assert "def inner(): json.loads('{')" in failure.trace
    assert last.startswith("JSONDecodeError")


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("import sys; sys.exit('bye')", "SystemExit: bye (mine.py:1)"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt (mine.py:1)"),
        ("raise MemoryError", "MemoryError (mine.py:1)"),
        ("raise ValueError('a\\nb')", "ValueError: a b (mine.py:1)"),
    ],
)
def test_whatever_python_can_catch_is_a_failure(body: str, detail: str, tmp_path: Path) -> None:
    assert failure_in(written(tmp_path, f"def run(): {body}")).detail == detail


def test_what_is_kept_of_a_failure_is_bounded(tmp_path: Path) -> None:
    deep = failure_in(written(tmp_path, "def run(n=0): other(n + 1)\ndef other(n): run(n + 1)"))
    assert deep.summary == "the model raised RecursionError"
    assert len(deep.trace) <= TRACE_CHARS_MAX + len(deep.detail)
    assert deep.trace.splitlines()[0] == "Traceback (most recent call last):"
    assert "  File" in deep.trace
    wide = "def run(n=30):\n    if n: return run(n - 1)  # " + "x" * 1000 + "\n    raise ValueError(n)"
    first, *others = failure_in(written(tmp_path, wide)).trace.split("  File ")
    assert first + LEFT_OUT == f"Traceback (most recent call last):\n{LEFT_OUT}"
    assert 3 < len(others) < 30
    assert all(each.count("\n") >= 2 for each in others), "frames are whole"
    long = failure_in(written(tmp_path, "def run(): raise ValueError('x' * 10**7)"))
    assert len(long.detail) < MESSAGE_CHARS_MAX + 50
    assert len(long.trace) <= TRACE_CHARS_MAX + len(long.detail)
    rude = failure_in(written(tmp_path, "class E(Exception):\n    def __str__(self): return 5\ndef run(): raise E"))
    assert rude.detail == "E: its text cannot be made (mine.py:3)"


def test_a_failure_travels_as_bytes() -> None:
    for failure in (ModelFailure("a"), ModelFailure("a", "b\ud800", "c\nd"), failure_of(WrongOutputsError("no rows"))):
        decoded = ModelFailure.decode(memoryview(failure.encode()))
        assert (decoded.summary, decoded.trace) == (failure.summary, failure.trace)
    assert failure_of(WrongOutputsError("no rows")) == ModelFailure(
        "the model's outputs are not those that it declares", "no rows"
    )


def test_modules_beside_a_file_are_found_in_its_text(tmp_path: Path) -> None:
    for name, text in {
        "one.py": "import two.inner, math",
        "two/__init__.py": "",
        "two/inner.py": "from . import third\nfrom .deep.leaf import X as Y\nfrom .. import nowhere",
        "two/third.py": "this is no Python",
        "two/deep/leaf.py": "from ..fourth import *",
        "two/fourth.py": "import mine",
        "two/unused.py": "",
        "lazy.py": "",
        "unused.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    path = written(tmp_path, "import os, one\ndef run():\n    try:\n        import lazy\n    except ImportError: pass")
    names = (
        "lazy.py",
        "one.py",
        "two/__init__.py",
        "two/deep/leaf.py",
        "two/fourth.py",
        "two/inner.py",
        "two/third.py",
    )
    assert modules_beside(path) == {name: tmp_path / name for name in names}
    assert modules_beside(written(tmp_path, "import (")) == {}


def test_modules_are_beside_a_link_and_beside_the_file_that_it_leads_to(tmp_path: Path) -> None:
    for folder, names in (("real", "ab"), ("named", "b")):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / f"linked_{name}.py").write_text(f"PLACE = {folder!r}")
    path = written(tmp_path / "real", "from linked_a import PLACE as A\nfrom linked_b import PLACE as B")
    link = tmp_path / "named" / "mine.py"
    link.symlink_to(path)
    assert [file.parent.name for file in modules_beside(link).values()] == ["real", "named"]
    module = module_in(link)
    assert (module.A, module.B) == ("real", "named")
