import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sloop.cli import main


def test_json_has_the_promised_keys(app: Path) -> None:
    answer = json.loads(CliRunner().invoke(main, ["plan", str(app), "--rate", "100", "--json"]).stdout)
    keys = {"system", "feasible", "stages", "cores", "usd_per_h", "predicted_ms", "solve_ms", "why"}
    assert answer.keys() >= keys
    assert answer["stages"][0].keys() >= {"stage", "variant", "replicas", "batch", "cores", "predicted_ms"}
    assert (answer["system"], answer["feasible"], answer["cores"], answer["usd_per_h"]) == ("static", True, 8, 0.68)


def test_people_see_the_verdict_and_the_reason(app: Path) -> None:
    shown = CliRunner().invoke(main, ["plan", str(app), "--rate", "1000"]).stdout
    assert "static: not feasible" in shown
    assert "cannot keep up with 1000 requests/s" in shown


def test_a_profile_of_another_processor_is_noted(app: Path) -> None:
    """ResNet-T is of the paper's machine; on `local` nodes that is another one."""
    app.write_text(app.read_text().replace("c5.4xlarge, count: 2", "local, cores: 8"))
    shown = CliRunner().invoke(main, ["plan", str(app), "--rate", "10"]).stdout
    assert "note: classify/classify: its profile is of Intel Xeon Gold 6240R" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--rate", "100", "--system", "stattic"], 1, "did you mean 'static'?"),
        (["--rate", "-1"], 2, "-1"),
        ([], 2, "--rate"),
    ],
)
def test_what_is_wrong_is_said(app: Path, arguments: list[str], code: int, said: str) -> None:
    result = CliRunner().invoke(main, ["plan", str(app), *arguments])
    assert result.exit_code == code
    assert said in result.stderr
