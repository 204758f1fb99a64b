import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sloop.cli import main


@pytest.fixture
def log(app: Path, tmp_path: Path) -> Path:
    app.write_text(app.read_text() + "trace: {kind: poisson, rate: 50}\nduration_s: 3\n")
    path = tmp_path / "run.jsonl"
    result = CliRunner().invoke(main, ["simulate", str(app), "--log", str(path)])
    assert result.exit_code == 0, result.output
    return path


def test_a_simulated_run_replays_as_recorded(log: Path) -> None:
    result = CliRunner().invoke(main, ["replay", str(log), "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    assert answer["difference"] is None
    assert answer["events"] > 150
    assert answer["actions"] > 150


def test_a_forged_action_is_found_and_fails(log: Path) -> None:
    lines = log.read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if '"start_batch"' in line)
    lines[place] = lines[place].replace('"batch":', '"batch":9')
    log.write_text("\n".join(lines) + "\n")
    result = CliRunner().invoke(main, ["replay", str(log)])
    assert result.exit_code == 1
    assert f"first difference at record {place}" in result.stdout


def test_what_is_no_log_is_refused(app: Path) -> None:
    result = CliRunner().invoke(main, ["replay", str(app)])
    assert result.exit_code == 1
    assert "not an event log" in result.stderr
