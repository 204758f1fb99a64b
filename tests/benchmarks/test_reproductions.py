"""The pages of reproductions: what is counted, which rows and figures are on them, and what is run again."""

import os
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from benchmarks import notebook, reproductions
from benchmarks.reproductions import PublishedRows, made, overview, page_of, path_of, write, written
from sloop.report.plots import Figure
from sloop_systems.comparison import REPRODUCTIONS, Reproduction
from sloop_systems.comparison.rows import Claim, Row, compare, directed

FAR = compare(Claim("Fig. 1", "latency", "ms", paper=10.0), [90.0, 91.0, 92.0])
NEAR = compare(Claim("Fig. 2", "cores", "", derived=10.0), [10.0, 10.0, 10.0])
OURS = directed(Claim("ours", "cost", "%"), [-4.0, -2.0], "cheaper", below=0)


def rows_of(*rows: Row, name: str = "x", state: str = "abc") -> PublishedRows:
    return PublishedRows(name, "source", state, "2026-11-29", "a machine", 2.0, 3.5, ("assumed",), rows)


def test_the_page_shows_what_is_off_and_our_own_rows() -> None:
    lines = page_of(rows_of(FAR, NEAR, OURS)).splitlines()
    assert lines[2] == "| abc | 2 | 3.5 | 3 | 0 | 1 | 0 | 0 | 0 | 1 | 1 | 0 |"
    assert [line for line in lines if line.startswith("| Fig.")] == [
        f"| Fig. 1 | latency | ms | 10 | – | 91 | {FAR.note} |"
    ]
    assert "| cost | % | -3 | -4 | -2 | shape | expected: cheaper, below 0 |" in lines
    assert "[JSON](reproduce-x.json)" in page_of(rows_of(NEAR))
    assert "No row is off." in page_of(rows_of(NEAR))


def test_one_table_counts_all_publications() -> None:
    text = overview([rows_of(FAR, NEAR, OURS), rows_of(FAR, name="a")])
    counted = [line for line in text.splitlines() if line.startswith(("| [", "| all"))]
    assert counted == [
        "| [a](reproduce-a.md) | abc | 2026-11-29 | 2 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 0 |",
        "| [x](reproduce-x.md) | abc | 2026-11-29 | 2 | 3 | 0 | 1 | 0 | 0 | 0 | 1 | 1 | 0 |",
        "| all |  |  | – | 4 | 0 | 1 | 0 | 0 | 0 | 1 | 2 | 0 |",
        "| [a](reproduce-a.md) | abc | 2026-11-29 | 2 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 0 |",
        "| [x](reproduce-x.md) | abc | 2026-11-29 | 2 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 1 | 0 |",
        "| all |  |  | – | 2 | 0 | 0 | 0 | 0 | 0 | 0 | 2 | 0 |",
    ], "all rows, then those with a printed figure"
    assert f"Not run whole since verdicts are these: {', '.join(sorted(REPRODUCTIONS))};" in text


def test_processor_time_of_processes_that_have_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(1.0, 2.0, 3.0, 4.0, 99.0), (1.5, 2.25, 5.0, 4.5, 123.0)])
    monkeypatch.setattr(os, "times", lambda: next(times))
    monkeypatch.setattr(reproductions, "reproduce", lambda name, **_: Reproduction("x", "s", (), (), (), "", ""))
    found, _ = made("x", Path(), 1)
    assert found.processor_s == pytest.approx(0.5 + 0.25 + 2.0 + 0.5)


def test_each_row_is_published_and_nothing_is_run_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = Figure(name="split", title="", x_label="", panels=(), alt="")
    ran = list[str]()

    def reproduce(name: str, **_: object) -> Reproduction:
        ran.append(name)
        return Reproduction(name, "source", (FAR, NEAR), (figure,), (), "", "")

    monkeypatch.setattr(reproductions, "reproduce", reproduce)
    monkeypatch.setattr(reproductions, "state_of_source", lambda: "abc")
    for module in (notebook, reproductions):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(notebook, "svg", lambda figure: "<svg></svg>")
    for options, expected in (
        (["--only", "sponge"], 1),
        (["--only", "sponge"], 1),
        (["--only", "sponge", "--again"], 2),
    ):
        monkeypatch.setattr(sys, "argv", ["reproductions", *options])
        reproductions.main()
        assert len(ran) == expected
    found = written("sponge")
    assert found is not None
    assert found.rows == (FAR, NEAR)
    assert path_of("sponge").read_text().count("\n") == 4, "a line for each row"
    assert {path.name for path in tmp_path.iterdir()} == {
        *("reproduce-sponge.md", "reproduce-sponge.json", "reproduce-sponge-split.svg", "reproductions.md")
    }
    write(structs.replace(found, state="older"))
    reproductions.main()
    assert len(ran) == 3


@pytest.mark.parametrize("name", list(REPRODUCTIONS))
def test_every_published_row_could_have_failed(name: str) -> None:
    found = written(name)
    if found is None:
        pytest.skip("not yet run")
    assert msgspec.json.decode(msgspec.json.encode(found), type=PublishedRows) == found
    for row in found.rows:
        assert row.least is not None or row.most is not None, row
        beyond = (row.least is not None and row.ours < row.least) or (row.most is not None and row.ours > row.most)
        assert not beyond or row.verdict in {"off", "source-inconsistent"} or "unless" in row.note, row
