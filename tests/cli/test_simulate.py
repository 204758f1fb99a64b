import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from sloop.cli import main

KEYS = {
    *("system", "seed", "requests", "served", "late", "dropped", "rejected", "failed", "attainment", "goodput_rps"),
    *("mean_ms", "p50_ms", "p99_ms", "core_seconds", "usd", "accuracy", "cold_starts", "wall_s", "assumed"),
}


@pytest.fixture
def scenario(app: Path) -> Path:
    systems = "systems: [{name: static, cores: 8}, {name: static, cores: 1}]\n"
    world = "trace: {kind: poisson, rate: 50}\nduration_s: 5\n"
    app.write_text(app.read_text().replace("system: {name: static, cores: 8}\n", systems + world))
    return app


def test_json_has_one_run_for_each_system_with_the_promised_keys(scenario: Path) -> None:
    result = CliRunner().invoke(main, ["simulate", str(scenario), "--seed", "3", "--json"])
    runs = json.loads(result.stdout)["runs"]
    assert len(runs) == 2
    for run in runs:
        assert run.keys() >= KEYS
        ends = sum(run[end] for end in ("served", "late", "dropped", "rejected", "failed"))
        assert (run["seed"], ends) == (3, run["requests"])
    assert runs[0]["attainment"] > runs[1]["attainment"]


def test_the_same_seed_gives_the_same_figures(scenario: Path) -> None:
    def figures(seed: str) -> dict[str, object]:
        answer = CliRunner().invoke(main, ["simulate", str(scenario), "--seed", seed, "--json"]).stdout
        return {key: value for key, value in json.loads(answer)["runs"][0].items() if key != "wall_s"}

    assert figures("3") == figures("3")
    assert figures("3") != figures("4")


def test_a_chosen_system_replaces_the_scenarios_and_several_logs_keep_apart(scenario: Path, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    CliRunner().invoke(main, ["simulate", str(scenario), "--log", str(log)], catch_exceptions=False)
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["run-0-static.jsonl", "run-1-static.jsonl"]
    shown = CliRunner().invoke(main, ["simulate", str(scenario), "--system", "sponge", "--log", str(log)])
    assert "attainment" in shown.stdout
    assert log.exists()


def test_an_unknown_system_is_refused(scenario: Path) -> None:
    result = CliRunner().invoke(main, ["simulate", str(scenario), "--system", "statik"])
    assert result.exit_code == 1
    assert "did you mean 'static'?" in result.stderr


def test_batches_may_take_what_they_took_in_a_recorded_run(scenario: Path, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    slow = scenario.with_name("slow.yaml")
    slow.write_text(scenario.read_text() + "truth: {profile_error: 1.5}\n")
    arguments = ["simulate", str(slow), "--system", "static", "--seed", "3", "--json"]
    recorded = json.loads(CliRunner().invoke(main, [*arguments, "--log", str(log)]).stdout)["runs"][0]
    log = tmp_path / "run-0-static.jsonl"
    plain, again = (
        json.loads(CliRunner().invoke(main, ["simulate", str(scenario), *arguments[2:], *more]).stdout)["runs"][0]
        for more in ([], ["--recorded", str(log)])
    )
    assert again["mean_ms"] == pytest.approx(recorded["mean_ms"], rel=0.02)
    assert plain["mean_ms"] < 0.8 * recorded["mean_ms"]


def test_what_is_no_log_is_refused(scenario: Path) -> None:
    result = CliRunner().invoke(main, ["simulate", str(scenario), "--recorded", str(scenario)])
    assert result.exit_code == 1
    assert "log" in result.stderr


def test_a_graph_is_shown_stage_by_stage(scenario: Path) -> None:
    stages = "  - {name: look, profile: ResNet-T}\n  - {name: read, after: look, each: {mean: 2}, profile: ResNet-T}\n"
    scenario.write_text(scenario.read_text().replace("  - name: classify\n    profile: ResNet-T\n", stages))
    result = CliRunner().invoke(main, ["simulate", str(scenario), "--json"])
    (first, _) = json.loads(result.stdout)["runs"]
    assert [stage["stage"] for stage in first["stages"]] == ["look", "read"]
    assert first["stages"][1]["visits"] > first["stages"][0]["visits"]
    assert sum(route["answered"] for route in first["routes"]) == first["served"] + first["late"]
    shown = CliRunner().invoke(main, ["simulate", str(scenario)]).stdout
    assert "Stage by stage" in shown
    assert "look, read" in shown
