"""Trials are played once per seed, in order, and found again by trial."""

import os
from datetime import UTC, datetime
from math import sqrt
from typing import Self

import pytest
from msgspec import structs

from sloop import __version__
from sloop.machine import hardware_name
from sloop_systems.comparison.harness import (
    THREADS,
    UNSEEN,
    Reproduction,
    Results,
    RunResult,
    Trial,
    bars,
    by_second,
    default_processes,
    equalised,
    in_parallel,
    run_trials,
    silent,
)
from sloop_systems.comparison.rows import Claim, compare

PLAYED: list["Square"] = []


class Square(Trial, frozen=True, kw_only=True):
    """As many violations as the square of a number, and one more for each seed."""

    number: int
    name: str = ""

    def label(self) -> str:
        return f"{self.number}²"

    def key(self) -> Self:
        return structs.replace(self, seed=0, data="", name="")

    def play(self) -> RunResult:
        PLAYED.append(self)
        return RunResult(violations=self.number**2 + self.seed, cores=1.0)


def test_twins_are_played_once_and_found_by_either_name() -> None:
    PLAYED.clear()
    wanted = [(Square(number=2, name="a"), 2), (Square(number=2, name="b"), 3), (Square(number=3), 1)]
    results: Results[RunResult] = run_trials(wanted, "folder", processes=1)
    assert [(trial.number, trial.seed, trial.data) for trial in PLAYED] == [
        (2, 0, "folder"),
        (2, 1, "folder"),
        (2, 2, "folder"),
        (3, 0, "folder"),
    ]
    assert results.violations(Square(number=2)) == [4, 5, 6]
    assert results.violations(Square(number=2, name="c"), 2) == [4, 5]
    assert results.mean(Square(number=2), "violations") == 5
    assert results.cores(Square(number=3)) == [1.0]


def test_seeds_begin_with_that_of_the_trial() -> None:
    PLAYED.clear()
    later = Square(number=2, seed=UNSEEN)
    results: Results[RunResult] = run_trials([(Square(number=2), 2), (later, 2)], processes=1)
    assert [trial.seed for trial in PLAYED] == [0, 1, UNSEEN, UNSEEN + 1]
    assert results.violations(Square(number=2)) == [4, 5], "not those after the gap"
    assert results.violations(later) == [4 + UNSEEN, 5 + UNSEEN]
    assert results.violations(later, 1) == [4 + UNSEEN]
    with pytest.raises(KeyError):
        results.of(Square(number=2, seed=2))


def test_in_one_process() -> None:
    seen: list[tuple[float, str]] = []
    assert in_parallel(sqrt, [1, 4, 9, 16], processes=1, progress=lambda *now: seen.append(now)) == [1, 2, 3, 4]
    assert seen == [(0.25, "1"), (0.5, "4"), (0.75, "9"), (1.0, "16")]


def test_in_several() -> None:
    seen: list[float] = []
    values = [float(n * n) for n in range(7)]
    found = in_parallel(sqrt, values, processes=2, progress=lambda share, _: seen.append(share))
    assert found == [0, 1, 2, 3, 4, 5, 6]
    assert seen[-1] == 1.0


def test_each_process_computes_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS[0], "8")
    monkeypatch.delenv(THREADS[1], raising=False)
    assert in_parallel(os.getenv, THREADS, processes=2) == ["1"] * len(THREADS)
    assert os.environ[THREADS[0]] == "8"
    assert THREADS[1] not in os.environ


def test_nothing_to_do() -> None:
    assert in_parallel(sqrt, [], progress=silent) == []
    assert default_processes() >= 1


def test_a_reproduction_on_a_page() -> None:
    row = compare(Claim("check 1", "m < n", "%", paper=1.0), [1.0] * 3)
    found = Reproduction("sponge", "Somebody, 2024", (row,), (), ("a guess",), "ResNet", "100 ms")
    assert found.summary == "1 rows: 1 reproduced"
    text = found.page(made=datetime(2026, 11, 29, 3, 9, tzinfo=UTC))
    for fact in ("2026-11-29 03:09 UTC", "ResNet", "100 ms", hardware_name(), __version__):
        assert f"{fact}" in text
    assert "m \\u003c n" in text, "in JSON that no text can end"
    assert "a guess" in text
    assert "within-bound: an inequality" in text, "what verdicts mean"
    assert [table.title for table in found.tables()] == ["Check 1"]


def test_series() -> None:
    series = bars("x", [[1.0, 3.0], [5.0]])
    assert (series.x, series.y, series.low, series.high) == ((0.0, 1.0), (2.0, 5.0), (1.0, 5.0), (3.0, 5.0))
    assert by_second("x", [3, 4]).x == (0.0, 1.0)
    assert (by_second("x", [3]).kind, by_second("x", [3], steps=True).kind) == ("line", "steps")


@pytest.mark.parametrize("wanted", [2.0, 9.5, 13.0, 40.0, 300.0])
@pytest.mark.parametrize("power", [0.4, 1.0, 2.0])
def test_resources_are_made_equal_within_twelve_runs(wanted: float, power: float) -> None:
    """Whatever the resources follow from, if they rise with the knob."""
    found = equalised(lambda knob: 13.0 * knob**power, lambda result: result, wanted)
    assert found.is_equal
    assert abs(found.result / wanted - 1) <= 0.05
    assert found.runs <= 12


def test_what_is_equal_at_once_takes_one_run() -> None:
    assert equalised(lambda knob: knob, lambda result: 100 * result, 104.9)[1:] == (1, True)


def test_the_nearest_counts_where_nothing_is_equal() -> None:
    """Whole numbers: 1 or 2 replicas, never 1.5."""
    played: list[float] = []

    def run(knob: float) -> int:
        played.append(knob)
        return 1 if knob < 1.3 else 2

    found = equalised(run, float, 1.4, runs_max=8)
    assert (found.result, found.is_equal, found.runs, len(played)) == (1, False, 8, 8)
    assert max(knob for knob in played if knob < 1.3) > 1.25, "it searched between the two"
