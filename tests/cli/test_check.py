import json
from pathlib import Path

from click.testing import CliRunner

from sloop.cli import main


def test_a_good_application_passes_and_nothing_is_written(app: Path) -> None:
    result = CliRunner().invoke(main, ["check", str(app), "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    assert answer["application"] == "demo"
    assert answer["stages"][0]["variants"][0]["profile"] == "fitted"
    assert answer["plan"]["feasible"] is True
    assert list(app.parent.iterdir()) == [app]


def test_an_infeasible_plan_fails(app: Path) -> None:
    result = CliRunner().invoke(main, ["check", str(app), "--rate", "1000"])
    assert result.exit_code == 1
    assert "cannot keep up" in result.stdout


def test_a_mistake_names_file_line_key_and_the_fix(app: Path) -> None:
    app.write_text(app.read_text().replace("slo_ms", "slo_msec"))
    result = CliRunner().invoke(main, ["check", str(app)])
    assert result.exit_code == 1
    assert f"{app}:2" in result.stderr
    assert "did you mean 'slo_ms'?" in result.stderr
