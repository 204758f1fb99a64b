"""`sloop explain` and `sloop replay`: what a log answers."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sloop.cli import main


@pytest.fixture
def log(app: Path, tmp_path: Path) -> Path:
    """A run that one core is too slow for."""
    text = app.read_text().replace("cores: 8", "cores: 1").replace("slo_ms: 1000", "slo_ms: 100")
    app.write_text(text + "trace: {kind: poisson, rate: 50}\nduration_s: 3\n")
    path = tmp_path / "run.jsonl"
    assert CliRunner().invoke(main, ["simulate", str(app), "--log", str(path)]).exit_code == 0
    return path


def explain(log: Path, *arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(main, ["explain", str(log), *arguments, "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


def test_without_a_question_the_reasons_are_counted(log: Path) -> None:
    found = explain(log)["reasons"]
    assert isinstance(found, list)
    assert {reason["outcome"] for reason in found} <= {"late", "dropped"}
    assert sum(reason["count"] for reason in found) > 20


def test_a_request_is_told_from_its_sending_to_its_end(log: Path) -> None:
    story = explain(log, "--request", "3")
    parts = [
        story[part]
        for part in ("network_ms", "edge_ms", "wait_ms", "service_ms", "transport_ms", "lost_ms", "unaccounted_ms")
    ]
    assert story["total_ms"] == pytest.approx(sum(float(str(part)) for part in parts))
    shown = CliRunner().invoke(main, ["explain", str(log), "--request", "3"]).stdout
    assert "sent; an answer is due within 100.0 ms" in shown


def test_a_decision_is_told_with_its_grounds(log: Path) -> None:
    assert "static: the configured replicas" in str(explain(log, "--at", "1.5")["why"])
    assert "what was known" in CliRunner().invoke(main, ["explain", str(log), "--at", "1.5"]).stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--request", "100000"], 1, "the log has requests"),
        (["--at", "-1"], 1, "nothing had been decided"),
        (["--request", "1", "--at", "1"], 2, "not both"),
        (["--request", "1", "--application", "demo"], 2, "not both"),
    ],
)
def test_what_cannot_be_explained_is_said(log: Path, arguments: list[str], code: int, said: str) -> None:
    result = CliRunner().invoke(main, ["explain", str(log), *arguments])
    assert result.exit_code == code
    assert said in result.stderr


def test_the_whole_run_as_a_page(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    assert CliRunner().invoke(main, ["explain", str(log), "--page", str(page)]).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")
    failed = CliRunner().invoke(main, ["explain", str(log), "--page", str(tmp_path / "none" / "run.html")])
    assert failed.exit_code == 1
    assert "cannot be written" in failed.stderr


@pytest.fixture
def good_log(app: Path, tmp_path: Path) -> Path:
    app.write_text(app.read_text() + "trace: {kind: poisson, rate: 50}\nduration_s: 3\n")
    path = tmp_path / "run.jsonl"
    result = CliRunner().invoke(main, ["simulate", str(app), "--log", str(path)])
    assert result.exit_code == 0, result.output
    return path


def test_a_simulated_run_replays_as_recorded(good_log: Path) -> None:
    result = CliRunner().invoke(main, ["replay", str(good_log), "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    assert answer["difference"] is None
    assert answer["events"] > 150
    assert answer["actions"] > 150


def test_a_forged_action_is_found_and_fails(good_log: Path) -> None:
    lines = good_log.read_text().splitlines()
    place = next(place for place, line in enumerate(lines) if '"start_batch"' in line)
    lines[place] = lines[place].replace('"batch":', '"batch":9')
    good_log.write_text("\n".join(lines) + "\n")
    result = CliRunner().invoke(main, ["replay", str(good_log)])
    assert result.exit_code == 1
    assert f"first difference at record {place}" in result.stdout


def test_replay_refuses_what_is_no_log(app: Path) -> None:
    result = CliRunner().invoke(main, ["replay", str(app)])
    assert result.exit_code == 1
    assert "not an event log" in result.stderr


# Several applications


@pytest.fixture
def log_of_two(app: Path, tmp_path: Path) -> Path:
    """Version 2 of one of two applications is a canary that is too slow."""
    slow = "profile: {latency_ms: {form: quadratic, alpha: 0, beta: 0, gamma: 1500}, max_batch: 4}"
    app.with_name("slow.yaml").write_text(app.read_text().replace("profile: ResNet-T", slow))
    app.with_name("two.yaml").write_text(
        "name: two\n"
        "applications: [app.yaml, {file: app.yaml, name: other}]\n"
        "system: {name: static, cores: 4}\n"
        "cluster: {nodes: [{hardware: c5.4xlarge, count: 2}]}\n"
        "traces: {demo: {kind: poisson, rate: 40}, other: {kind: poisson, rate: 10}}\n"
        "duration_s: 8\n"
        "truth: {cold_start: {start_s: 1}}\n"
        "changes: [{at_s: 1, deploy: slow.yaml, canary: {share: 0.5, requests_min: 10}}]\n"
    )
    path = tmp_path / "two.jsonl"
    result = CliRunner().invoke(main, ["simulate", str(app.with_name("two.yaml")), "--log", str(path)])
    assert result.exit_code == 0, result.output
    return path


def test_rollouts_and_reasons_are_shown_by_application(log_of_two: Path) -> None:
    answer = explain(log_of_two)
    steps, reasons = answer["rollouts"], answer["reasons"]
    assert isinstance(steps, list)
    assert isinstance(reasons, list)
    assert [step["state"] for step in steps][:3] == ["starting", "canary", "retiring"]
    assert "rolled back" in steps[2]["why"]
    assert {reason["application"] for reason in reasons} == {"demo"}
    shown = CliRunner().invoke(main, ["explain", str(log_of_two)]).stdout
    assert "Rollouts" in shown


def test_decisions_of_all_applications_or_of_one(log_of_two: Path) -> None:
    answer = explain(log_of_two, "--at", "2")
    versions = answer["versions"]
    assert isinstance(versions, list)
    assert [(each["application"], each["version"]) for each in versions] == [
        ("demo", "1"),
        ("other", "1"),
        ("demo", "2"),
    ]
    assert "demo 8, other 8 and demo@2 8 of at most 32 cores" in str(answer["together"])
    one = explain(log_of_two, "--at", "2", "--application", "demo@2")
    assert (one["application"], one["version"]) == ("demo", "2")
    shown = CliRunner().invoke(main, ["explain", str(log_of_two), "--at", "2"]).stdout
    assert "planned together" in shown
    refused = CliRunner().invoke(main, ["explain", str(log_of_two), "--at", "2", "--application", "demu"])
    assert refused.exit_code == 1
    assert "name one of demo and other" in refused.stderr


def test_an_overview_of_one_application(log_of_two: Path) -> None:
    assert explain(log_of_two, "--application", "demo") == explain(log_of_two)
    assert explain(log_of_two, "--application", "other") == {"reasons": [], "rollouts": []}
    shown = CliRunner().invoke(main, ["explain", str(log_of_two), "--application", "other"]).stdout
    assert shown == "every request of other was served in time\n"
    refused = CliRunner().invoke(main, ["explain", str(log_of_two), "--application", "demu"])
    assert refused.exit_code == 1
    assert "name one of demo and other" in refused.stderr
    assert CliRunner().invoke(main, ["explain", str(log_of_two), "--application", "demo@2"]).exit_code == 2


def test_an_overview_of_the_only_application(log: Path) -> None:
    assert explain(log, "--application", "demo") == explain(log)


def test_a_run_of_several_replays_and_has_a_page(log_of_two: Path, tmp_path: Path) -> None:
    assert CliRunner().invoke(main, ["replay", str(log_of_two)]).exit_code == 0
    page = tmp_path / "two.html"
    assert CliRunner().invoke(main, ["explain", str(log_of_two), "--page", str(page)]).exit_code == 0
    assert "Versions of demo over time" in page.read_text()
