"""Python files that a user wrote: executed once, and errors in them named with their line."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from sloop.errors import InputError
from sloop.user_code import module_in, raise_user_error


@pytest.fixture(autouse=True)
def every_file_is_new() -> Iterator[None]:
    module_in.cache_clear()
    yield
    module_in.cache_clear()


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(text)
    return path


def test_a_file_is_executed_once_and_can_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("VALUE = 7")
    path = written(tmp_path, "from beside_it import VALUE\nseen = [VALUE]")
    module_in(path).seen.append(8)
    assert module_in(path).seen == [7, 8]


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
