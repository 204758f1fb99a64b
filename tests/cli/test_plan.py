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


GRAPH = """
name: reading
slo_ms: 2000
stages:
  - {name: detect, profile: ResNet-T}
  - {name: read, after: detect, each: {output: boxes, mean: 3}, profile: ResNet-T}
  - {name: digits, after: detect, when: {output: kind, is: [1, 2], share: 0.25}, profile: ResNet-T}
  - {name: spell, after: read, join: true, profile: ResNet-T}
system: {name: static, cores: 4}
cluster: {nodes: [{hardware: c5.4xlarge, count: 2}]}
"""


def test_a_graph_explains_itself(app: Path) -> None:
    app.write_text(GRAPH)
    answer = json.loads(CliRunner().invoke(main, ["plan", str(app), "--rate", "4", "--json"]).stdout)
    assert {row["stage"]: row["rate_rps"] for row in answer["stages"]} == {
        "detect": 4,
        "read": 12,
        "digits": 1,
        "spell": 4,
    }
    assert all(row["predicted_ms"] == row["service_ms"] + row["wait_ms"] for row in answer["stages"])
    assert [path["stages"] for path in answer["paths"]] == [["detect", "read", "spell"], ["detect", "digits"]]
    assert answer["paths"][0]["predicted_ms"] == answer["predicted_ms"]
    assert answer["one_more"].keys() >= {"feasible", "says", "cores", "changes"}
    shown = CliRunner().invoke(main, ["plan", str(app), "--rate", "4"]).stdout
    for said in ("What binds", "one more request/s needs", "detect → read → spell", "one more request per second: "):
        assert said in shown


def test_what_is_lacking_is_said_with_its_stage_and_how_much(app: Path) -> None:
    app.write_text(GRAPH.replace("slo_ms: 2000", "slo_ms: 10"))
    result = CliRunner().invoke(main, ["plan", str(app), "--rate", "4", "--json"])
    (lack, other) = json.loads(result.stdout)["lacks"]
    assert (lack["kind"], lack["path"], lack["has"]) == ("deadline", ["detect", "read", "spell"], 10)
    assert other["path"] == ["detect", "digits"]
    assert "too many, even unloaded" in lack["why"]


def test_replicas_that_no_node_could_hold_are_explained_not_refused(app: Path) -> None:
    app.write_text(GRAPH.replace("cores: 4", "cores: 64"))
    result = CliRunner().invoke(main, ["plan", str(app), "--rate", "4"])
    assert result.exit_code == 0
    assert "the largest node has 16, 48 too few" in " ".join(result.stdout.split())


def test_a_variant_that_no_profile_covers(app: Path) -> None:
    (app.parent / "net.onnx").write_bytes(b"")
    app.write_text(GRAPH.replace("join: true, profile: ResNet-T", "join: true, model: net.onnx"))
    result = CliRunner().invoke(main, ["plan", str(app), "--rate", "4"])
    assert result.exit_code == 1
    assert "no profile covers spell/" in result.stderr
    assert "sloop profile" in result.stderr
