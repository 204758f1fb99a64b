"""Forecasters beside what came."""

import math
from array import array
from pathlib import Path

import pytest

from sloop.core.protocols import Forecast
from sloop.errors import InputError
from sloop.policies.forecast.last import Last
from sloop.policies.forecast.moving_max import MovingMax
from sloop.policies.forecast.oracle import Oracle
from sloop.policies.forecast.times import Times
from sloop.reproduce import data_folder, forecasts, twitter
from sloop.reproduce.forecasts import Foresight, Lesson
from sloop.solvers.lstm import Training
from sloop.units import s
from sloop.workload import trace_from

COUNTS = [20 + second % 7 for second in range(200)]


def silent(share: float) -> None:
    """For those who do not look."""


def foreseen(horizon_s: int = 5, every_s: int = 3) -> Foresight:
    policies: dict[str, Forecast] = {"last": Last(), "twice": Times(factor=2), "max": MovingMax()}
    policies["oracle"] = forecasts.forecaster("oracle", {}, COUNTS, horizon_s=horizon_s)
    return forecasts.foresee("made", policies, COUNTS, horizon_s=horizon_s, every_s=every_s, advance=silent)


def test_each_sees_the_past_and_is_held_against_what_came() -> None:
    found = foreseen()
    assert found.at_s == list(range(120, 196, 3))
    assert found.came_rps == [max(COUNTS[at : at + 5]) for at in found.at_s]
    assert found.foreseen_rps["last"] == [COUNTS[at - 1] for at in found.at_s]
    assert found.foreseen_rps["twice"] == [2 * COUNTS[at - 1] for at in found.at_s]
    assert found.foreseen_rps["max"] == [max(COUNTS[at - 10 : at]) for at in found.at_s]


def test_scores_by_hand() -> None:
    found = Foresight("made", 1, [0, 1, 2], [10, 20, 0], {"a": [10.0, 10.0, 0.0], "b": [0.0, 30.0, 5.0]})
    a, b = found.scores()
    assert (a.smape, a.mape, a.bias, a.forecasts) == pytest.approx((200 * 10 / 30 / 3, 25, -25, 3))
    assert a.short == pytest.approx(100 / 3)
    assert (b.smape, b.mape, b.bias) == pytest.approx(((200 + 40 + 200) / 3, 75, -25))


def test_the_oracle_is_right_and_nobody_else() -> None:
    by_name = {row.forecaster: row for row in foreseen().scores()}
    assert (by_name["oracle"].smape, by_name["oracle"].short) == (0, 0)
    assert all(row.smape > 0 for name, row in by_name.items() if name != "oracle")
    assert by_name["twice"].bias > 50


def test_an_oracle_may_look_less_far() -> None:
    counts = tuple(map(float, COUNTS))
    oracle = forecasts.forecaster("oracle", {"horizon_s": 2}, COUNTS, horizon_s=5)
    assert oracle == Oracle(counts=counts, horizon_ns=s(2))
    assert forecasts.forecaster("oracle", {}, COUNTS, horizon_s=5) == Oracle(counts=counts, horizon_ns=s(5))


def test_table_and_figure() -> None:
    found = foreseen()
    assert [row[0] for row in found.table().rows] == ["last", "twice", "max", "oracle"]
    (panel,) = found.figure().panels
    assert [series.name.partition(",")[0] for series in panel.series] == ["came", "max", "last", "twice"]


def test_every_forecaster_is_scored() -> None:
    names = list(forecasts.every_forecaster(COUNTS, horizon_s=20))
    assert {"last", "times", "moving_max", "ewma", "holt", "p99_rate", "oracle"} < set(names)
    assert names[-2:] == ["lstm ipa", "lstm biscale"]


def test_too_short_a_trace() -> None:
    with pytest.raises(InputError, match="139 s long"):
        forecasts.foresee("made", {}, COUNTS[:139], horizon_s=20, every_s=1, advance=silent)


def test_lessons() -> None:
    trace = trace_from({"kind": "equal", "rate": 2}, seed=0, duration_s=9, folder=Path())
    lesson = forecasts.two_thirds(trace)
    assert (list(lesson.before), list(lesson.after)) == ([2] * 6, [2] * 3)
    assert list(forecasts.all_of(trace).after) == [2] * 9
    lesson = Lesson("made", "", array("q", [0, 1]), array("q", [5, 0, 7, 0, 9]))
    assert list(lesson.part(1, 3).after) == [0, 7, 0]
    assert list(lesson.part(1, None).after) == [0, 7, 0, 9]
    assert [part.name for part in (lesson.part(0, None), lesson.part(1, 3), lesson.part(2, 99))] == [
        "made",
        "made, 1–4 s",
        "made, 2–5 s",
    ]
    assert [list(counts) for counts in (lesson.without_silence().before, lesson.without_silence().after)] == [
        [1],
        [5, 7, 9],
    ]


def test_a_network_learns_a_trace() -> None:
    """A slow sine, of which the last value is always late."""
    counts = [round(200 + 150 * math.sin(second / 40)) for second in range(6_000)]
    said: list[float] = []
    how = Training(units=8, epochs=12, batch=32, step=0.02)
    network = forecasts.learned(counts, (12, 10, 20), seed=1, how=how, say=lambda epoch: said.append(epoch.held_back))
    again = forecasts.learned(counts, (12, 10, 20), seed=1, how=how, say=lambda epoch: None)
    assert network.encoded() == again.encoded()
    assert said[-1] < 0.05 < said[0]


def test_days_are_made_up_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twitter, "TRAIN_S", (0, 1000))
    monkeypatch.setattr(twitter, "TEST_S", (1000, 1600))
    lesson = forecasts.fortnight(None, seed=2)
    assert (len(lesson.before), len(lesson.after)) == (1000, 600)
    assert lesson.provenance.startswith("assumed")


def test_the_specified_bound_on_a_day_of_the_trace() -> None:
    """IPA specification 7.5, 8: below persistence, the last ten seconds' busiest, both by the same script."""
    folder = data_folder()
    if folder is None or not (folder / twitter.FILE).is_file():
        pytest.skip("no Twitter trace here; set SLOOP_SHARED to the folder that holds data/")
    counts = forecasts.fortnight(folder).part(0, 86_400).without_silence().after
    chosen = {name: forecasts.forecaster(name, {}, counts, horizon_s=20) for name in ("moving_max", "lstm")}
    found = forecasts.foresee("day 14", chosen, counts, horizon_s=20, every_s=30, advance=silent)
    persistence, lstm = found.scores()
    assert lstm.smape < 0.85 * persistence.smape
