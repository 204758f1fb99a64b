"""The tables are read with care, figures follow from latencies, rows from results, and a small window runs."""

import math
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from sloop.errors import InputError
from sloop_systems.comparison import reproduce
from sloop_systems.faro.experiments import ALL, OTHERS, SPARE, WORTH, Contestant, queue_rows, wanted
from sloop_systems.faro.experiments.runs import (
    FOLDER,
    HUNDRED,
    TEN,
    WARM_MIN,
    FaroResult,
    FaroTrial,
    figures_of,
    read_table,
    trace_by_minute,
    world_of,
)

LEVELS = {WORTH: 2.0, SPARE: 2.5} | {who: 3.0 + place for place, who in enumerate(OTHERS)}
"""Late requests in %: those of ours least, then max-min's."""


def table_in(folder: Path, *, minutes: int = 9, applications: int = 2, rate: int = 300) -> Path:
    names = ",".join(f"job{place}" for place in range(applications))
    lines = [f"{minute}," + ",".join([str(rate)] * applications) for minute in range(minutes)]
    path = folder / FOLDER / TEN
    path.parent.mkdir()
    path.write_text("\n".join([f"minute,{names}", *lines, ""]))
    return path


def test_a_table_is_read(tmp_path: Path) -> None:
    assert read_table(table_in(tmp_path, minutes=3)).tolist() == [[300, 300]] * 3


@pytest.mark.parametrize(
    ("line", "number"),
    [("1,5", 3), ("1,5,-2", 3), ("1,5,x", 3), ("1,5,2.5", 3), ("7,5,5", 3), ("1,5,5,5", 3), ("", 3)],
    ids=["a cell is missing", "negative", "text", "a fraction", "another minute", "a cell too many", "empty"],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, number: int) -> None:
    path = tmp_path / "jobs.csv"
    path.write_text(f"minute,job0,job1\n0,4,5\n{line}\n2,4,5\n")
    with pytest.raises(InputError, match="is not minute 1 and 2 counts") as caught:
        read_table(path)
    assert caught.value.where == f"{path}:{number}"


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "jobs.csv"
    for text in ("", "minute,job0\n"):
        path.write_text(text)
        with pytest.raises(InputError, match="no minute of requests"):
            read_table(path)


def test_each_minute_has_its_requests() -> None:
    trace = trace_by_minute([3, 0, 5], 7)
    times = list(trace.times_ns())
    assert times == sorted(times) == list(trace_by_minute([3, 0, 5], 7).times_ns())
    assert [int(at // 60e9) for at in times] == [0] * 3 + [2] * 5
    assert times != list(trace_by_minute([3, 0, 5], 8).times_ns())


def test_figures_of_a_minute() -> None:
    own = figures_of([100.0] * 95 + [1440.0] * 4 + [math.inf], 720.0)
    assert (own.requests, own.late, own.refused) == (100, 5, 1)
    assert not own.is_slow, "the mean of the answered is far below"
    assert own.utility == 0.0, "one in a hundred waits for ever"
    assert own.effective == pytest.approx(0.5), "a P99 of twice the deadline, and one percent refused costs nothing"
    assert figures_of([100.0] * 100, 720.0).utility == 1.0
    assert figures_of([1000.0] * 10, 720.0).is_slow
    refused = figures_of([math.inf] * 3, 720.0)
    assert (refused.is_slow, refused.effective, refused.late) == (True, 0.0, 3)


def test_mixed_models_differ_in_time_and_deadline() -> None:
    trial = FaroTrial(system="faro", workers=4, first_min=0, minutes=2, is_mixed=True)
    world = world_of(trial, np.full((2, 3), 60))
    assert [application.slo_ms for application in world.applications] == [400.0, 720.0, 400.0]
    with pytest.raises(InputError, match="minute 2 is wanted"):
        world_of(trial, np.full((1, 3), 60))


def test_a_small_window(tmp_path: Path) -> None:
    """Two applications of six requests a second; two workers are too few for both, and four are enough."""
    table_in(tmp_path, rate=360)
    trial = FaroTrial(system="faro", workers=4, first_min=0, minutes=9, data=str(tmp_path), seed=1)
    enough, few = trial.play(), structs.replace(trial, workers=2).play()
    assert enough.violations < 1
    assert enough.minutes == 0
    assert 3.5 < enough.cores <= 4
    assert few.violations > 20
    assert few.lost > 10 * enough.lost
    assert trial.play() == enough
    static = structs.replace(trial, system="static").play()
    assert static.cores == 4
    assert static.violations == pytest.approx(enough.violations, abs=1)


def kind(of: Contestant | FaroTrial) -> tuple[str, str, str]:
    return of.system, of.divide, of.idle


def made_up(trial: FaroTrial) -> FaroResult:
    level = next(level for who, level in LEVELS.items() if kind(who) == kind(trial))
    level += 0.01 * trial.seed
    return FaroResult(
        violations=level, cores=trial.workers, rate=level, minutes=level, lost=level / 100, lost_effective=0, refused=0
    )


@pytest.mark.parametrize("quick", [True, False])
def test_from_end_to_end(quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaroTrial, "play", made_up)
    for name in (TEN, HUNDRED):
        (tmp_path / FOLDER).mkdir(exist_ok=True)
        (tmp_path / FOLDER / name).write_text("minute\n")
    found = reproduce("faro", quick=quick, data=tmp_path, processes=1)
    verdicts = {(row.experiment, row.metric): row.verdict for row in found.rows}
    for workers in (32, 36):
        best = verdicts[f"ours, {workers} workers", "violations of worth, over those of Faro's best variant"]
        assert best == ("shape" if quick else "within-bound"), "one seed proves no mean"
        assert verdicts[f"ours, {workers} workers", "violations of worth, over those of max-min"] == "off"  # 2 of 3
    best = verdicts["32 workers", "violations of the best baseline, over Faro's"]
    assert best == ("shape" if quick else "derived")  # 9 of 4 is not far from 2.8, which is not in print
    assert verdicts["32 workers", "violations of the worst baseline, over Faro's"] == "off"  # 12 of 4 is not 8.4
    assert {row.paper for row in found.rows if row.paper is not None} == {2.3, 23.0}
    assert len(found.figures) == (5 if quick else 9)
    assert all(figure.alt and figure.panels for figure in found.figures)
    assert any("N-HiTS" in line for line in found.assumed)


def test_without_the_tables_nothing_is_simulated(tmp_path: Path) -> None:
    found = reproduce("faro", quick=True, data=tmp_path)
    assert {row.experiment for row in found.rows} == {"estimates"}
    assert TEN in found.assumed[0]
    assert not found.figures


def test_estimates_are_those_of_the_paper() -> None:
    assert {row.ours: row.verdict for row in queue_rows()} == {8.0: "derived", 10.0: "derived"}


def test_the_quick_part_is_a_part_of_the_whole() -> None:
    assert {kind(trial) for trial, _ in wanted(quick=True)} == set(map(kind, ALL))
    assert len(wanted(quick=True)) < len(wanted(quick=False))
    assert all(trial.minutes > WARM_MIN for trial, _ in wanted(quick=True))
