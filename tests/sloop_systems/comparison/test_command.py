"""`sloop reproduce`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sloop.cli import main
from sloop_systems.comparison import REPRODUCTIONS, Reproduction, Row
from sloop_systems.comparison import command as module

ROW_KEYS = {"experiment", "metric", "unit", "paper", "ours", "low", "high", "verdict", "note"}


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row at once; the real ones are tested where they are made."""
    row = Row(experiment="S0", metric="speed", unit="rps", paper=1.0, ours=1.1, low=1.0, high=1.2, verdict="reproduced")

    def reproduced(name: str, **_: object) -> Reproduction:
        return Reproduction(name, "a source", (row,), (), ("a guess",), "ResNet", "100 ms")

    monkeypatch.setattr(module, "reproduced", reproduced)


@pytest.mark.usefixtures("canned")
def test_json_has_rows_with_the_promised_keys() -> None:
    answer = json.loads(CliRunner().invoke(main, ["reproduce", "sponge", "--quick", "--json"]).stdout)
    assert answer["rows"][0].keys() >= ROW_KEYS
    assert answer["assumed"] == ["a guess"]


@pytest.mark.usefixtures("canned")
def test_people_see_verdicts_and_a_page(tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["reproduce", "all", "--page", str(tmp_path)]).stdout
    assert "sponge: 1 rows: 1 reproduced" in shown
    assert "Sponge, reproduced" in (tmp_path / "sponge.html").read_text()


def test_an_unknown_name_is_refused() -> None:
    result = CliRunner().invoke(main, ["reproduce", "spong"])
    assert result.exit_code == 1
    assert "did you mean 'sponge'?" in result.stderr


def test_it_explains_itself_with_an_example() -> None:
    result = CliRunner().invoke(main, ["reproduce", "--help"])
    assert result.exit_code == 0, result.output
    assert "Example:\n    sloop reproduce" in result.stdout
    assert "--json" in result.stdout
    assert all(name in result.stdout for name in REPRODUCTIONS)
