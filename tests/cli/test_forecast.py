import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sloop.app.document import parse
from sloop.cli import main
from sloop.policies.build import build

MADE = "{kind: diurnal, rate: 40, swing: 0.6, period_s: 300, duration_s: 900}"


def asked(*words: str) -> dict[str, object]:
    result = CliRunner().invoke(main, ["forecast", *words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_forecasters_are_scored_on_a_trace() -> None:
    found = asked(MADE, "--forecaster", "last", "--forecaster", "{name: holt, trend: 0.3}", "--every-s", "20")
    assert (found["seconds"], found["horizon_s"], found["every_s"]) == (900, 20, 20)
    scores = found["scores"]
    assert isinstance(scores, list)
    assert [row["forecaster"] for row in scores] == ["last", "{name: holt, trend: 0.3}"]
    assert all(0 < row["smape"] < 200 for row in scores)


def test_all_of_them_unless_told(tmp_path: Path) -> None:
    plot = tmp_path / "forecasts.svg"
    result = CliRunner().invoke(main, ["forecast", MADE, "--every-s", "50", "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in ("moving_max", "p99_rate", "lstm ipa", "lstm biscale", "oracle"))
    assert plot.read_text().startswith("<svg")


def test_a_part_of_it() -> None:
    found = asked(MADE, "--forecaster", "last", "--start-s", "300", "--duration-s", "400", "--horizon-s", "10")
    assert (found["seconds"], found["horizon_s"]) == (400, 10)


@pytest.mark.parametrize("name", ["mine.yaml", "mine.lstm"])
def test_a_network_is_trained_and_written(name: str, tmp_path: Path) -> None:
    into = tmp_path / name
    found = asked(MADE, "--train", str(into), "--epochs", "2", "--shape", "biscale", "--forecaster", "last")
    training, scores = found["training"], found["scores"]
    assert isinstance(training, list)
    assert isinstance(scores, list)
    assert [epoch["number"] for epoch in training] == [1, 2]
    assert [row["forecaster"] for row in scores] == ["last", f"lstm {name}"]
    assert found["seconds"] == 300, "the last third"
    weights: object = into.read_text()
    if name.endswith(".yaml"):
        weights = parse(into.read_text(), name).mapping()["forecast"].mapping()["weights"].plain()
    build("forecast", "lstm", {"weights": weights})


def test_what_there_is_not() -> None:
    result = CliRunner().invoke(main, ["forecast", MADE, "--forecaster", "hold"])
    assert result.exit_code == 1
    assert "did you mean 'holt'?" in result.stderr


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    into = tmp_path / "nowhere" / "mine.yaml"
    result = CliRunner().invoke(main, ["forecast", MADE, "--train", str(into), "--epochs", "1"])
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr


def test_too_little_to_train_on(tmp_path: Path) -> None:
    short = "{kind: equal, rate: 40, duration_s: 200}"
    result = CliRunner().invoke(main, ["forecast", short, "--train", str(tmp_path / "mine.yaml")])
    assert result.exit_code == 1
    assert "too few to train on" in result.stderr
