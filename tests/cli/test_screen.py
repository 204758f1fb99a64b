from io import StringIO

import pytest
from rich.console import Console

from sloop.cli.screen import figure, progress, table


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (True, "yes"),
        (12_345, "12,345"),
        (2.0, "2"),
        (0.999_51, "0.9995"),
        (12_345.67, "12,345.7"),
        (0.000_12, "1.2e-04"),
        (0.0, "0"),
        ("edf", "edf"),
    ],
)
def test_figures_as_people_read_them(value: object, shown: str) -> None:
    assert figure(value) == shown


def test_a_table_keeps_brackets_and_sets_figures_to_the_right() -> None:
    made = table(["name", "p99_ms"], [["[a]", 1.5], ["b", None]], title="runs")
    file = StringIO()
    Console(file=file, width=60).print(made)
    title, head, _, first, _ = [line for line in file.getvalue().split("\n") if line.strip()]
    assert title.strip() == "runs"
    assert head.index("name") == first.index("[a]")
    assert head.rindex("s") == first.rindex("5")


def test_progress_stays_off_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("working", total=2) as advance:
        advance(1, "half")
        advance(2)
    assert capsys.readouterr().out == ""
