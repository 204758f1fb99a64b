from io import StringIO

import pytest
from rich.console import Console, RenderableType

from sloop.cli.screen import facts, progress, table
from sloop.report.tables import Table


def printed(part: RenderableType) -> list[str]:
    file = StringIO()
    Console(file=file, width=60).print(part)
    return [line.rstrip() for line in file.getvalue().split("\n") if line.strip()]


def test_a_title_stands_above_its_table_unbroken() -> None:
    title = "a title that is much longer than the table below it"
    lines = printed(table(Table(title, ("name",), (("[a]",), ("b",)))))
    assert lines[0] == title
    assert lines[-2].strip() == "[a]"


def test_facts_are_labels_and_what_belongs_to_them() -> None:
    assert printed(facts([("rate", "20 rps"), ("requests", "1,200")])) == ["rate       20 rps", "requests   1,200"]


def test_progress_stays_off_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("working", total=2) as advance:
        advance(1, "half")
        advance(2)
    assert capsys.readouterr().out == ""
