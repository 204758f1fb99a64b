"""`sloop plan`, `sloop check` and `sloop systems`: nothing is started."""

import json
import re
from math import inf
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from sloop.app.load import load_application
from sloop.cli import main
from sloop.cli.check import condition
from sloop.cli.plan import plan_display
from sloop.core.protocols import Policies
from sloop.systems import SYSTEMS
from sloop.systems.planning import explain_plan
from sloop.systems.setup import set_up


def test_the_json_of_a_plan_has_the_promised_keys(app: Path) -> None:
    answer = json.loads(CliRunner().invoke(main, ["plan", str(app), "--rate", "100", "--json"]).stdout)
    keys = {"system", "feasible", "stages", "cores", "usd_per_h", "predicted_ms", "solve_ms", "why"}
    assert answer.keys() >= keys
    assert answer["stages"][0].keys() >= {"stage", "variant", "replicas", "batch", "cores", "predicted_ms"}
    assert (answer["arrivals"], answer["feasible_arrivals"]) == ("even", ["burst", "even"])
    assert (answer["system"], answer["feasible"], answer["cores"], answer["usd_per_h"]) == ("static", True, 8, 0.68)


def test_rows_and_sizes_are_those_of_the_options_or_of_the_trace(app: Path) -> None:
    asked = ["plan", str(app), "--rate", "20", "--json"]
    answer = json.loads(CliRunner().invoke(main, [*asked, "--rows", "4", "--sizes", "[8, 64]"]).stdout)
    assert (answer["stages"][0]["rows"], answer["stages"][0]["rate_rps"], answer["rate_rps"]) == (4, 80, 20)
    assert any("as if all rows were typical" in note for note in answer["notes"])
    app.write_text(app.read_text() + "trace: {kind: equal, rate: 5, rows: [1, 3]}\nduration_s: 400\n")
    answer = json.loads(CliRunner().invoke(main, asked).stdout)
    assert answer["stages"][0]["rows"] == pytest.approx(2, abs=0.1)
    shown = CliRunner().invoke(main, asked[:-1]).stdout
    assert "rows/s" in shown
    assert "requests/s   service" not in shown


def test_people_see_the_verdict_and_the_reason(app: Path) -> None:
    shown = CliRunner().invoke(main, ["plan", str(app), "--rate", "1000"]).stdout
    assert "static: not feasible" in shown
    assert "cannot keep up with 1,000 requests/s" in shown


def test_what_cannot_keep_up_has_no_latency(app: Path) -> None:
    shown = CliRunner().invoke(main, ["plan", str(app), "--rate", "1000"]).stdout
    assert "the plan cannot keep up, so latencies grow without bound" in shown
    assert "predicted ∞" not in shown


def test_people_see_what_a_latency_is_of_and_both_batches(app: Path) -> None:
    shown = CliRunner().invoke(main, ["plan", str(app), "--rate", "100"]).stdout
    assert "largest batch   expected batch" in shown
    assert "predicted P99 of a request: " in shown
    assert "on nodes that cost 0.68 USD/h" in shown
    assert "no price" not in shown


def test_the_range_of_a_prediction_is_told_in_words(app: Path) -> None:
    report = explain_plan(set_up(load_application(app)), 100)
    text = "\n".join(map(str, plan_display(replace(report, predicted_ms_low=90.0, predicted_ms_high=110.0))))
    assert "; on a real machine likely between 90 and 110 ms" in text
    text = "\n".join(map(str, plan_display(replace(report, predicted_ms_low=90.0, predicted_ms_high=inf))))
    assert "cannot keep up on a machine as slow as" in text


def test_a_known_speed_scales_a_plan_and_gives_it_a_narrow_range(app: Path) -> None:
    slow, fast, unsure = (
        json.loads(CliRunner().invoke(main, ["plan", str(app), "--rate", "50", "--json", "--speed", speed]).stdout)
        for speed in ("0.8", "1.25", "1.25+-0.05")
    )
    assert slow["predicted_ms"] > 1.2 * fast["predicted_ms"]
    assert 0.97 * fast["predicted_ms"] < fast["predicted_ms_low"] < fast["predicted_ms"] < fast["predicted_ms_high"]
    assert fast["predicted_ms_high"] < 1.03 * fast["predicted_ms"]
    assert unsure["predicted_ms_high"] > 1.06 * fast["predicted_ms"]


@pytest.mark.parametrize("speed", ["fast", "1.2+-x", "0", "1.2+-2"])
def test_a_speed_is_a_number_with_or_without_its_error(app: Path, speed: str) -> None:
    refused = CliRunner().invoke(main, ["plan", str(app), "--rate", "50", "--speed", speed])
    assert refused.exit_code == 2
    assert "--speed" in refused.stderr


def test_a_price_that_nobody_declared_is_told_apart_from_none(app: Path) -> None:
    app.write_text(app.read_text().replace("c5.4xlarge, count: 2", "local, cores: 8"))
    shown = CliRunner().invoke(main, ["plan", str(app), "--rate", "10"]).stdout
    assert "cost: no price is declared for local" in shown
    answer = json.loads(CliRunner().invoke(main, ["plan", str(app), "--rate", "10", "--json"]).stdout)
    assert (answer["usd_per_h"], answer["unpriced"]) == (0, ["local"])


@pytest.mark.parametrize("command", [["plan", "--rate", "1"], ["check", "--rate", "1"]])
def test_an_assumed_profile_is_noted(app: Path, command: list[str]) -> None:
    app.write_text(app.read_text().replace("ResNet-T", "YOLOv5s-S"))
    shown = " ".join(CliRunner().invoke(main, [command[0], str(app), *command[1:]]).stdout.split())
    assert "note: classify/classify: its profile is assumed, not measured (" in shown


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
def test_wrong_use_of_plan_is_refused(app: Path, arguments: list[str], code: int, said: str) -> None:
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
    assert answer["one_more"].keys() >= {"feasible", "summary", "cores", "changes"}
    shown = CliRunner().invoke(main, ["plan", str(app), "--rate", "4"]).stdout
    for said in (
        "Binding constraints",
        "one more request/s needs",
        "detect → read → spell",
        "one more request per second needs",
    ):
        assert said in shown


def test_shortfalls_name_stage_and_amount(app: Path) -> None:
    app.write_text(GRAPH.replace("slo_ms: 2000", "slo_ms: 10"))
    result = CliRunner().invoke(main, ["plan", str(app), "--rate", "4", "--json"])
    (first, other) = json.loads(result.stdout)["shortfalls"]
    assert (first["kind"], first["path"], first["has"]) == ("deadline", ["detect", "read", "spell"], 10)
    assert other["path"] == ["detect", "digits"]
    assert "even without load" in first["why"]


def test_replicas_that_no_node_could_hold_are_explained_not_refused(app: Path) -> None:
    app.write_text(
        "name: demo\nslo_ms: 900\nstages: [{name: find, profile: ResNet-T}]\nsystem: {name: static, cores: 64}\n"
        "cluster: {nodes: [{hardware: c5.4xlarge}]}\n"
    )
    result = CliRunner().invoke(main, ["plan", str(app), "--rate", "4"])
    assert result.exit_code == 0
    assert "the largest node has 16 cores, 48 too few" in " ".join(result.stdout.split())


def test_stages_that_cannot_all_have_their_cores_share_those_of_the_node(app: Path) -> None:
    app.write_text(GRAPH.replace("cores: 4", "cores: 64"))
    result = CliRunner().invoke(main, ["plan", str(app), "--rate", "4"])
    assert result.exit_code == 0
    assert "so each reserves at most 8 and shares the rest" in " ".join(result.stdout.split())


def test_a_variant_that_no_profile_covers(app: Path) -> None:
    (app.parent / "net.onnx").write_bytes(b"")
    app.write_text(GRAPH.replace("join: true, profile: ResNet-T", "join: true, model: net.onnx"))
    result = CliRunner().invoke(main, ["plan", str(app), "--rate", "4"])
    assert result.exit_code == 1
    assert "spell/spell has no profile" in result.stderr
    assert "sloop profile" in result.stderr


def test_check_passes_a_good_application_and_nothing_is_written(app: Path) -> None:
    result = CliRunner().invoke(main, ["check", str(app), "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    assert answer["application"] == "demo"
    assert answer["stages"][0]["variants"][0]["profile"] == "fitted"
    assert answer["plan"]["feasible"] is True
    assert list(app.parent.iterdir()) == [app]


def test_check_fails_an_infeasible_plan(app: Path) -> None:
    result = CliRunner().invoke(main, ["check", str(app), "--rate", "1000"])
    assert result.exit_code == 1
    assert "cannot keep up" in result.stdout


def test_check_may_assume_bursts(app: Path) -> None:
    app.write_text(app.read_text().replace("slo_ms: 1000", "slo_ms: 200"))
    assert CliRunner().invoke(main, ["check", str(app), "--rate", "40"]).exit_code == 0
    burst = CliRunner().invoke(main, ["check", str(app), "--rate", "40", "--arrivals", "burst"])
    assert burst.exit_code == 1
    assert "not feasible at 40 requests/s, all of a second at once" in burst.stdout


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
    assert {stage.name: condition(stage) for stage in application.stages} == {
        "look": "",
        "read": "for each boxes of look: 3 on average, 9 at most",
        "sum": "joins the parts",
        "face": "when kind of look is 1 or 2 (0.25 of requests)",
        "text": "for some requests after look (0.5 of requests)",
        "late": "requests may enter here",
    }
    assert "for each boxes of look" in " ".join(CliRunner().invoke(main, ["check", str(app)]).stdout.split())
    answer = json.loads(CliRunner().invoke(main, ["check", str(app), "--json"]).stdout)
    read, face = answer["stages"][1], answer["stages"][3]
    assert (read["each"]["mean"], read["join"], read["when"]) == (3, False, [])
    assert face["when"] == [{"of": "look", "output": "kind", "values": [1, 2], "share": 0.25}]


# Several applications, several kinds of hardware


SECOND = """\
name: second
slo_ms: 400
weight: 2
rest_after_s: 300
limits: {requests: 50, bytes: 8e6}
stages:
  - {name: look, profile: ResNet-T}
system: {name: static, cores: 8}
cluster: {nodes: [{hardware: c5.4xlarge, count: 2}]}
"""


@pytest.fixture
def apps(app: Path) -> list[str]:
    (app.parent / "second.yaml").write_text(SECOND)
    return [str(app), str(app.parent / "second.yaml")]


def planned(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def test_several_files_share_a_cluster(apps: list[str]) -> None:
    answer = planned(*apps, "--rate", "demo=90", "--rate", "2")
    assert [(each["application"], each["rate_rps"]) for each in answer["applications"]] == [("demo", 90), ("second", 2)]
    assert [(row["application"], row["stage"]) for row in answer["stages"]] == [
        ("demo", "demo/classify"),
        ("second", "second/look"),
    ]
    placement = {"application", "stage", "node", "device", "share", "batch", "rate_rps", "replicas", "cores"}
    assert all(row.keys() >= placement for row in answer["placements"])
    assert (answer["feasible"], answer["cores"], answer["usd_per_h"]) == (True, 16, 0.68)
    shown = CliRunner().invoke(main, ["plan", *apps, "--rate", "5"]).stdout
    assert "static: feasible at 10 requests/s of 2 applications, evenly spaced" in shown
    assert "why static chooses it for second: " in shown


def test_a_deployment_file_is_planned_as_a_whole(app: Path, apps: list[str]) -> None:
    for path in map(Path, apps):
        path.write_text("\n".join(path.read_text().splitlines()[:-2]))  # the deployment's system and cluster
    (app.parent / "all.yaml").write_text(
        "name: all\napplications: [app.yaml, {file: second.yaml, name: other}]\n"
        "system: hpa\ncluster: {nodes: [{hardware: c5.4xlarge, count: 1}]}\n"
    )
    answer = planned(str(app.parent / "all.yaml"), "--rate", "300")
    assert [each["application"] for each in answer["applications"]] == ["demo", "other"]
    demo, other = answer["applications"]
    assert demo["limits"][0]["others"] == [["other", other["cores"]]]
    shown = " ".join(CliRunner().invoke(main, ["plan", str(app.parent / "all.yaml"), "--rate", "300"]).stdout.split())
    assert "limited by" in shown
    assert f"not feasible: demo: {demo['limits'][0]['why']}" in shown
    for each in ("demo", "other"):
        assert f"why hpa chooses it for {each}: " in shown


@pytest.mark.parametrize(
    ("rates", "code", "said"),
    [
        (["5", "secnd=3"], 1, "did you mean 'second'?"),
        (["demo=5"], 1, "no rate is given for second"),
        (["demo=5", "demo=6", "1"], 2, "--rate: two rates for demo; keep one"),
        (["=5"], 2, "has no name before '='"),
        (["demo=many"], 2, "'many' is not a number"),
        (["demo=-1"], 2, "-1"),
    ],
)
def test_wrong_rates_are_refused(apps: list[str], rates: list[str], code: int, said: str) -> None:
    arguments = [part for rate in rates for part in ("--rate", rate)]
    result = CliRunner().invoke(main, ["plan", *apps, *arguments])
    assert result.exit_code == code
    assert said in result.stderr


MIXED = """\
name: rank
slo_ms: 120
stages:
  - name: rank
    profiles:
      c5.2xlarge: {latency_ms: {form: amdahl, gamma: 20, epsilon: 0, delta: 0, eta: 4}, max_batch: 8, max_cores: 8}
      g4dn.xlarge: {latency_ms: {quadratic: {alpha: 0, beta: 1.2, gamma: 6}}, max_batch: 32, accelerator: T4}
system:
  name: static
  cores: 4
  stages: {rank: {groups: [{hardware: c5.2xlarge, replicas: 4}, {hardware: g4dn.xlarge}]}}
cluster: {nodes: [{hardware: c5.2xlarge, count: 1, most: 9}, {hardware: g4dn.xlarge, count: 0, most: 5}]}
"""


def test_a_mix_shows_kinds_and_nodes(app: Path) -> None:
    app.write_text(MIXED)
    answer = planned(str(app), "--rate", "500")
    assert [(row["hardware"], row["accelerator"], row["share"]) for row in answer["stages"]] == [
        ("c5.2xlarge", "", 0),
        ("g4dn.xlarge", "T4", 1),
    ]
    assert [(each["hardware"], each["held"], each["rented"]) for each in answer["nodes"]] == [
        ("c5.2xlarge", 1, 1),
        ("g4dn.xlarge", 0, 1),
    ]
    assert [(each["node"], each["device"]) for each in answer["placements"]][-1] == ("g4dn.xlarge-9", "T4")
    shown = " ".join(CliRunner().invoke(main, ["plan", str(app), "--rate", "500"]).stdout.split())
    assert "on nodes that cost 1.206 USD/h" in shown
    assert "g4dn.xlarge: T4" in shown
    assert "rented" in shown


def test_check_shows_every_application_with_its_limits(apps: list[str]) -> None:
    result = CliRunner().invoke(main, ["check", *apps, "--rate", "2", "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    second = answer["applications"][1]
    assert (second["application"], second["weight"], second["rest_after_s"]) == ("second", 2, 300)
    assert second["wake_s"] == 30
    assert second["limits"] == {"requests": 50, "bytes": 8_000_000, "rows": 0, "worker_bytes": 0}
    assert second["stages"][0]["variants"][0]["profiles"] == {"c5.4xlarge": "fitted"}
    assert answer["plan"]["feasible"] is True
    assert "stages" not in answer
    shown = CliRunner().invoke(main, ["check", *apps]).stdout
    assert (
        "second: deadline 400 ms, 2 nodes, weight 2, rests after 300 s without requests, "
        "at most 50 open requests and 7.63 MiB of bodies"
    ) in shown
    assert CliRunner().invoke(main, ["check", *apps, "--rate", "second=900"]).exit_code == 1


def test_check_says_for_which_default_it_plans_and_which_nodes_are_on_demand(app: Path, apps: list[str]) -> None:
    def shown(*arguments: str) -> str:
        return " ".join(CliRunner().invoke(main, ["check", *arguments]).stdout.split())

    assert "planned for 10 requests/s, the default of `sloop check`" in shown(str(app))
    assert "planned for 10 requests/s of each application, the default" in shown(*apps)
    assert "planned for 10 requests/s of second, the default" in shown(*apps, "--rate", "demo=5")
    assert "the default" not in shown(*apps, "--rate", "5")
    for count, most, nodes in ((1, 5, "1 node, up to 4 more on demand"), (0, 1, "up to 1 node on demand")):
        app.write_text(re.sub("count: 2", f"count: {count}, most: {most}", app.read_text(), count=1))
        assert f"ms, {nodes}" in shown(str(app))
        app.write_text(app.read_text().replace(f"count: {count}, most: {most}", "count: 2"))


def test_a_plan_for_no_requests_has_no_empty_tables_and_says_how_long_a_start_takes(apps: list[str]) -> None:
    report = planned(apps[1], "--rate", "0")
    assert report["notes"][-1].endswith(
        "it rests without replicas; the first request waits until one has started, about 10 s (assumed: the profile "
        "has no load_s)"
    )
    lines = CliRunner().invoke(main, ["plan", apps[1], "--rate", "0"]).stdout.splitlines()
    assert lines[0] == "static: feasible at 0 requests/s, evenly spaced"
    assert lines[1] == "in all: 0 cores"
    assert "Binding constraints" not in lines


def test_check_names_the_limits_of_the_whole_deployment(app: Path, apps: list[str]) -> None:
    (app.parent / "all.yaml").write_text("name: all\napplications: [app.yaml, second.yaml]\nlimits: {requests: 9}\n")
    assert (
        "all: at most 9 open requests in all"
        in CliRunner().invoke(main, ["check", str(app.parent / "all.yaml")]).stdout
    )


def test_json_names_every_system_with_a_policy_for_each_verb() -> None:
    found = json.loads(CliRunner().invoke(main, ["systems", "--json"]).stdout)["systems"]
    assert sorted(row["name"] for row in found) == sorted(SYSTEMS)
    assert [row["name"] for row in found[: len(SYSTEMS.own)]] == list(SYSTEMS.own)
    assert {row["package"] for row in found[: len(SYSTEMS.own)]} == {"sloop"}
    for row in found:
        assert row.keys() >= {"name", "source", "kind", "mixed", "slots", "runs", "package"}
        assert row["slots"].keys() == set(Policies.__dataclass_fields__)
        assert set(row["runs"]) <= {"live", "sim"}


def test_people_see_the_source() -> None:
    shown = CliRunner().invoke(main, ["systems"]).stdout
    assert shown.startswith("sloop\n"), "its own come first"
    assert max(map(len, shown.splitlines())) <= 100
    assert SYSTEMS["static"].source[:20] in shown
    assert "On a cluster of several kinds of hardware" in shown
    assert SYSTEMS["static"].mixed[:40] in shown
    assert "`sloop systems NAME` shows the parameters of one system" in shown


def test_one_system_is_shown_with_its_parameters(tmp_path: Path) -> None:
    shown = " ".join(CliRunner().invoke(main, ["systems", "elastic"]).stdout.split())
    assert "resizes in place" in shown
    assert "mixed clusters keeps to one kind of hardware" in shown
    assert "margin 0.9 above 0 and at most 1 Fraction of each deadline to plan with." in shown
    assert "forecast.window_ms 2000" in shown
    found = json.loads(CliRunner().invoke(main, ["systems", "elastic", "--json"]).stdout)
    assert {"name", "source", "kind", "mixed", "slots", "runs", "parameters"} == found.keys()
    margin = {"verb": "scale", "policy": "vertical", "key": "margin", "default": 0.9}
    assert margin.items() <= next(each for each in found["parameters"] if each["key"] == "margin").items()
    assert "did you mean 'elastic'?" in CliRunner().invoke(main, ["systems", "elastik"]).stderr
    own = tmp_path / "mine.py"
    own.write_text(
        "from dataclasses import replace\nfrom sloop.systems import SYSTEMS\n"
        "SYSTEM = replace(SYSTEMS['static'], name='mine', mixed='')\n"
    )
    shown = " ".join(CliRunner().invoke(main, ["systems", str(own)]).stdout.split())
    assert "it does not say what it does there" in shown
    assert f"{own} was executed in this process" in shown


def test_plan_and_check_say_that_they_execute_a_system_file(app: Path) -> None:
    own = app.parent / "mine.py"
    own.write_text(
        "from dataclasses import replace\nfrom sloop.systems import SYSTEMS\n"
        "print('executed')\nSYSTEM = replace(SYSTEMS['static'], name='mine')\n"
    )
    app.write_text(app.read_text().replace("{name: static, cores: 8}", "{name: ./mine.py, cores: 8}"))
    for arguments in (["plan", str(app), "--rate", "5"], ["check", str(app)]):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0, result.output
        assert f"{own} was executed in this process: it defines the system" in result.stdout
        assert "with your rights" in " ".join(CliRunner().invoke(main, [arguments[0], "--help"]).stdout.split())
