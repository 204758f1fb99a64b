"""`python -m benchmarks.forecasts`: forecasters scored on a trace, and a network trained on one."""

import json
import math
from array import array
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.forecasts import (
    Comparison,
    Split,
    all_of,
    compare,
    every_forecaster,
    forecast,
    forecaster,
    fortnight,
    trained,
    two_thirds,
)
from benchmarks.lstm_training import LstmTraining
from sloop.app.document import parse_yaml
from sloop.core.protocols import Forecast
from sloop.errors import InputError
from sloop.policies.forecast import Last, MovingMax, OracleForecast, Times
from sloop.systems.registry import build
from sloop.units import s
from sloop.workload import trace_from
from sloop_systems.comparison import data_folder, twitter

COUNTS = [20 + second % 7 for second in range(200)]


def silent(share: float) -> None:
    """Progress that nobody looks at."""


def compared(horizon_s: int = 5, every_s: int = 3) -> Comparison:
    policies: dict[str, Forecast] = {"last": Last(), "twice": Times(factor=2), "max": MovingMax()}
    policies["oracle"] = forecaster("oracle", {}, COUNTS, horizon_s=horizon_s)
    return compare("made", policies, COUNTS, horizon_s=horizon_s, every_s=every_s, advance=silent)


def test_each_sees_the_past_and_is_compared_with_what_came() -> None:
    found = compared()
    assert found.at_s == list(range(120, 196, 3))
    assert found.actual_rps == [max(COUNTS[at : at + 5]) for at in found.at_s]
    assert found.forecast_rps["last"] == [COUNTS[at - 1] for at in found.at_s]
    assert found.forecast_rps["twice"] == [2 * COUNTS[at - 1] for at in found.at_s]
    assert found.forecast_rps["max"] == [max(COUNTS[at - 10 : at]) for at in found.at_s]


def test_scores_by_hand() -> None:
    found = Comparison("made", 1, [0, 1, 2], [10, 20, 0], {"a": [10.0, 10.0, 0.0], "b": [0.0, 30.0, 5.0]})
    a, b = found.scores()
    assert (a.smape, a.mape, a.bias, a.forecasts) == pytest.approx((200 * 10 / 30 / 3, 25, -25, 3))
    assert a.short == pytest.approx(100 / 3)
    assert (b.smape, b.mape, b.bias) == pytest.approx(((200 + 40 + 200) / 3, 75, -25))


def test_the_oracle_is_right_and_nobody_else() -> None:
    by_name = {row.forecaster: row for row in compared().scores()}
    assert (by_name["oracle"].smape, by_name["oracle"].short) == (0, 0)
    assert all(row.smape > 0 for name, row in by_name.items() if name != "oracle")
    assert by_name["twice"].bias > 50


def test_an_oracle_may_look_less_far() -> None:
    counts = tuple(map(float, COUNTS))
    oracle = forecaster("oracle", {"horizon_s": 2}, COUNTS, horizon_s=5)
    assert oracle == OracleForecast(counts=counts, horizon_ns=s(2))
    assert forecaster("oracle", {}, COUNTS, horizon_s=5) == OracleForecast(counts=counts, horizon_ns=s(5))


def test_table_and_figure() -> None:
    found = compared()
    assert [row[0] for row in found.table().rows] == ["last", "twice", "max", "oracle"]
    (panel,) = found.figure().panels
    assert [series.name.partition(",")[0] for series in panel.series] == ["actual", "max", "last", "twice"]


def test_every_forecaster_is_scored() -> None:
    names = list(every_forecaster(COUNTS, horizon_s=20))
    assert {"last", "times", "moving_max", "ewma", "oracle"} < set(names)
    assert names[-2:] == ["lstm ipa", "lstm biscale"]


def test_too_short_a_trace() -> None:
    with pytest.raises(InputError, match="139 s long"):
        compare("made", {}, COUNTS[:139], horizon_s=20, every_s=1, advance=silent)


def test_splits() -> None:
    trace = trace_from({"kind": "equal", "rate": 2}, seed=0, duration_s=9, folder=Path())
    split = two_thirds(trace)
    assert (list(split.before), list(split.after)) == ([2] * 6, [2] * 3)
    assert list(all_of(trace).after) == [2] * 9
    split = Split("made", "", array("q", [0, 1]), array("q", [5, 0, 7, 0, 9]))
    assert list(split.part(1, 3).after) == [0, 7, 0]
    assert list(split.part(1, None).after) == [0, 7, 0, 9]
    assert [part.name for part in (split.part(0, None), split.part(1, 3), split.part(2, 99))] == [
        "made",
        "made, 1–4 s",
        "made, 2–5 s",
    ]
    assert [list(counts) for counts in (split.without_silence().before, split.without_silence().after)] == [
        [1],
        [5, 7, 9],
    ]


def test_a_network_learns_a_trace() -> None:
    """A slow sine, of which the last value is always late."""
    counts = [round(200 + 150 * math.sin(second / 40)) for second in range(6_000)]
    errors: list[float] = []
    how = LstmTraining(units=8, epochs=12, batch=32, step=0.02)
    network = trained(counts, (12, 10, 20), seed=1, how=how, report=lambda epoch: errors.append(epoch.held_back))
    again = trained(counts, (12, 10, 20), seed=1, how=how, report=lambda epoch: None)
    assert network.encoded() == again.encoded()
    assert errors[-1] < 0.05 < errors[0]


def test_days_are_made_up_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twitter, "TRAIN_S", (0, 1000))
    monkeypatch.setattr(twitter, "TEST_S", (1000, 1600))
    split = fortnight(None, seed=2)
    assert (len(split.before), len(split.after)) == (1000, 600)
    assert split.provenance.startswith("assumed")


def test_the_specified_bound_on_a_day_of_the_trace() -> None:
    """IPA specification 7.5, 8: below persistence, the last ten seconds' busiest, both by the same script."""
    folder = data_folder()
    if folder is None or not (folder / twitter.FILE).is_file():
        pytest.skip("no Twitter trace here; set SLOOP_SHARED to the folder that holds data/")
    counts = fortnight(folder).part(0, 86_400).without_silence().after
    chosen = {name: forecaster(name, {}, counts, horizon_s=20) for name in ("moving_max", "lstm")}
    found = compare("day 14", chosen, counts, horizon_s=20, every_s=30, advance=silent)
    persistence, lstm = found.scores()
    assert lstm.smape < 0.85 * persistence.smape


# The command.

MADE = "{kind: diurnal, rate: 40, swing: 0.6, period_s: 300, duration_s: 900}"


def output_of(*words: str) -> dict[str, object]:
    result = CliRunner().invoke(forecast, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_forecasters_are_scored_on_a_trace() -> None:
    found = output_of(MADE, "--forecaster", "last", "--forecaster", "{name: ewma, half_life_s: 3}", "--every-s", "20")
    assert (found["seconds"], found["horizon_s"], found["every_s"]) == (900, 20, 20)
    scores = found["scores"]
    assert isinstance(scores, list)
    assert [row["forecaster"] for row in scores] == ["last", "{name: ewma, half_life_s: 3}"]
    assert all(0 < row["smape"] < 200 for row in scores)


def test_all_of_them_by_default(tmp_path: Path) -> None:
    plot = tmp_path / "forecasts.svg"
    result = CliRunner().invoke(forecast, [MADE, "--every-s", "50", "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in ("moving_max", "ewma", "lstm ipa", "lstm biscale", "oracle"))
    assert plot.read_text().startswith("<svg")


def test_a_part_of_it() -> None:
    found = output_of(MADE, "--forecaster", "last", "--start-s", "300", "--duration-s", "400", "--horizon-s", "10")
    assert (found["seconds"], found["horizon_s"]) == (400, 10)


@pytest.mark.parametrize("name", ["mine.yaml", "mine.lstm"])
def test_a_network_is_trained_and_written(name: str, tmp_path: Path) -> None:
    into = tmp_path / name
    found = output_of(MADE, "--train", str(into), "--epochs", "2", "--shape", "biscale", "--forecaster", "last")
    training, scores = found["training"], found["scores"]
    assert isinstance(training, list)
    assert isinstance(scores, list)
    assert [epoch["number"] for epoch in training] == [1, 2]
    assert [row["forecaster"] for row in scores] == ["last", f"lstm {name}"]
    assert found["seconds"] == 300, "the last third"
    weights: object = into.read_text()
    if name.endswith(".yaml"):
        weights = parse_yaml(into.read_text(), name).mapping()["forecast"].mapping()["weights"].content
    build("forecast", "lstm", {"weights": weights})


def test_what_there_is_not() -> None:
    result = CliRunner().invoke(forecast, [MADE, "--forecaster", "ewmo"])
    assert result.exit_code == 1
    assert "did you mean 'ewma'?" in result.stderr


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    into = tmp_path / "nowhere" / "mine.yaml"
    result = CliRunner().invoke(forecast, [MADE, "--train", str(into), "--epochs", "1"])
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr


def test_too_little_to_train_on(tmp_path: Path) -> None:
    short = "{kind: equal, rate: 40, duration_s: 200}"
    result = CliRunner().invoke(forecast, [short, "--train", str(tmp_path / "mine.yaml")])
    assert result.exit_code == 1
    assert "too few to train on" in result.stderr
