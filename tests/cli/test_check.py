import json
from pathlib import Path

from click.testing import CliRunner

from sloop.app.load import load_application
from sloop.cli import main
from sloop.cli.check import led_to


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


def test_how_requests_come_to_stages(app: Path) -> None:
    app.write_text(
        "name: g\nslo_ms: 2000\nstages:\n"
        "  - {name: look, profile: ResNet-T}\n"
        "  - {name: read, after: look, each: {output: boxes, mean: 3, most: 9}, profile: ResNet-T}\n"
        "  - {name: sum, after: [look, read], join: true, profile: ResNet-T}\n"
        "  - {name: face, after: look, when: {output: kind, is: [1, 2], share: 0.25}, profile: ResNet-T}\n"
        "  - {name: text, after: look, when: {share: 0.5}, profile: ResNet-T}\n"
        "  - {name: late, after: face, entry: true, profile: ResNet-T}\n"
        "system: {name: static, cores: 2}\n"
    )
    application = load_application(app)
    assert {stage.name: led_to(stage) for stage in application.stages} == {
        "look": "",
        "read": "each boxes of look, 3 on average, 9 at most",
        "sum": "join",
        "face": "when kind of look is 1 or 2 (0.25 of requests)",
        "text": "when some after look (0.5 of requests)",
        "late": "entry",
    }
    assert "each boxes of look" in " ".join(CliRunner().invoke(main, ["check", str(app)]).stdout.split())
    answer = json.loads(CliRunner().invoke(main, ["check", str(app), "--json"]).stdout)
    read, face = answer["stages"][1], answer["stages"][3]
    assert (read["each"]["mean"], read["join"], read["when"]) == (3, False, [])
    assert face["when"] == [{"of": "look", "output": "kind", "values": [1, 2], "share": 0.25}]
