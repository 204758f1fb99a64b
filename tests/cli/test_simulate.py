"""`sloop simulate` and `sloop trace`."""

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
    shown = CliRunner().invoke(main, ["simulate", str(scenario), "--log", str(log)])
    assert "run-1-static.jsonl" in "".join(shown.stdout.split())
    shown = CliRunner().invoke(main, ["simulate", str(scenario), "--system", "elastic", "--log", str(log)])
    assert "attainment" in shown.stdout
    assert log.exists()


def test_a_price_that_nobody_declared_is_told_apart_from_none(scenario: Path) -> None:
    assert "no price" not in CliRunner().invoke(main, ["simulate", str(scenario)]).stdout
    scenario.write_text(scenario.read_text().replace("c5.4xlarge, count: 2", "local, cores: 8"))
    shown = CliRunner().invoke(main, ["simulate", str(scenario)]).stdout
    assert "cost: no price is declared for local" in shown


def test_every_record_is_checked_on_request(scenario: Path) -> None:
    result = CliRunner().invoke(main, ["simulate", str(scenario), "--check", "--json"])
    assert result.exit_code == 0
    assert len(json.loads(result.stdout)["runs"]) == 2


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


def test_runs_stand_side_by_side_on_a_page_with_a_live_one(scenario: Path, tmp_path: Path) -> None:
    log, page = tmp_path / "run.jsonl", tmp_path / "pages" / "run.html"
    simulated = ["simulate", str(scenario)]
    run = CliRunner().invoke(main, [*simulated, "--log", str(log), "--page", str(page)], catch_exceptions=False)
    assert f"report: {page}" in run.stdout.replace("\n", "")
    assert "static (cores 8) and static (cores 1)" in page.read_text()
    assert "(recorded)" not in page.read_text()

    first = tmp_path / "run-0-static.jsonl"
    CliRunner().invoke(main, [*simulated, "--recorded", str(first), "--page", str(page)], catch_exceptions=False)
    assert "static (recorded), static (cores 8) and static (cores 1)" in page.read_text()

    live = tmp_path / "live.jsonl"
    live.write_text(first.read_text().replace('"origin":"sim"', '"origin":"live"', 1))
    asked = [*simulated, "--live", str(live), "--page", str(page)]
    run = CliRunner().invoke(main, asked, catch_exceptions=False)
    assert "static (live)" in run.stdout
    assert "static (live), static (cores 8) and static (cores 1)" in page.read_text()
    answer = json.loads(CliRunner().invoke(main, [*asked, "--json"]).stdout)
    assert answer["live"]["served"] == answer["runs"][0]["served"]
    assert len(answer["runs"]) == 2


MADE = "{kind: equal, rate: 10}"


def test_json_describes_the_trace() -> None:
    answer = json.loads(CliRunner().invoke(main, ["trace", MADE, "--duration-s", "5", "--json"]).stdout)
    assert (answer["requests"], answer["duration_s"], answer["max_rps"]) == (50, 5.0, 10)


def test_people_see_the_same() -> None:
    assert "mean rate" in CliRunner().invoke(main, ["trace", MADE, "--duration-s", "5"]).stdout


def test_a_trace_is_written_and_read_back(tmp_path: Path) -> None:
    times, counts = tmp_path / "times.txt", tmp_path / "counts.txt"
    arguments = ["trace", MADE, "--duration-s", "5", "--times", str(times), "--counts", str(counts)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert counts.read_text() == "10\n" * 5
    again = f"{{file: {times}, format: timestamps, unit: ns}}"
    assert json.loads(CliRunner().invoke(main, ["trace", again, "--json"]).stdout)["requests"] == 50


def test_the_requests_of_a_log_are_a_trace_with_rows_and_sizes(scenario: Path, tmp_path: Path) -> None:
    log, times = tmp_path / "run.jsonl", tmp_path / "requests.csv"
    sizes = "sizes: {kind: uniform, least: 8, most: 64}"
    scenario.write_text(scenario.read_text().replace("rate: 50}", f"rate: 50, rows: [1, 4], {sizes}}}"))
    asked = ["simulate", str(scenario), "--system", "early-drop", "--log", str(log)]
    assert CliRunner().invoke(main, asked, catch_exceptions=False).exit_code == 0
    found = json.loads(CliRunner().invoke(main, ["trace", str(log), "--times", str(times), "--json"]).stdout)
    assert found["work"]["rows_max"] == 4
    assert 8 <= found["work"]["size_p50"] <= found["work"]["size_max"] <= 64
    columns = "column: arrived, unit: ns, rows: {column: rows}, sizes: {column: size}"
    again = ["trace", f"{{file: {times}, {columns}}}", "--json"]
    assert json.loads(CliRunner().invoke(main, again).stdout)["work"] == found["work"]
    others = json.loads(CliRunner().invoke(main, [*again, "--rows", "2", "--sizes", "[7]"]).stdout)["work"]
    assert (others["rows_mean"], others["size_p50"], others["size_max"]) == (2.0, 7, 7)


@pytest.mark.parametrize(
    ("option", "text", "what"),
    [
        ("--rows", "0", "must be a whole number of at least 1"),
        ("--sizes", "{column: tokens}", "of which file is 'tokens' a column?"),
        ("--sizes", "{kind: normal}", "unknown kind of distribution 'normal'"),
    ],
)
def test_a_mistake_in_rows_and_sizes_names_the_option(option: str, text: str, what: str) -> None:
    result = CliRunner().invoke(main, ["trace", MADE, "--duration-s", "5", option, text])
    assert result.exit_code == 1
    assert f"error: {option}" in result.stderr
    assert what in result.stderr


def test_a_trace_is_drawn(tmp_path: Path) -> None:
    plot = tmp_path / "trace.svg"
    assert CliRunner().invoke(main, ["trace", MADE, "--duration-s", "5", "--plot", str(plot)]).exit_code == 0
    assert plot.read_text().startswith("<svg")


# Several applications

SEVERAL = """\
name: two
applications: [app.yaml, {file: app.yaml, name: other}]
system: {name: static, cores: 8}
cluster: {nodes: [{hardware: c5.4xlarge, count: 1, most: 3}]}
traces: {demo: {kind: poisson, rate: 40}, other: {kind: poisson, rate: 10}}
duration_s: 4
changes: [{at_s: 1, deploy: app.yaml, canary: {share: 0.5}}]
truth: {service: {spread: 0.1}, nodes: {acquire_s: 1}}
"""


def test_several_applications_have_a_row_each_and_so_have_their_versions_and_nodes(app: Path) -> None:
    several = app.with_name("several.yaml")
    several.write_text(SEVERAL)
    app.write_text("".join(line for line in app.read_text().splitlines(True) if not line.startswith("cluster")))
    (run,) = json.loads(CliRunner().invoke(main, ["simulate", str(several), "--json"]).stdout)["runs"]
    assert [row["name"] for row in run["applications"]] == ["demo", "other"]
    assert sum(row["requests"] for row in run["applications"]) == run["requests"]
    assert all(row["attainment_low"] <= row["attainment"] for row in run["applications"])
    assert [(row["name"], row["version"]) for row in run["versions"]] == [("demo", "1"), ("demo", "2")]
    (nodes,) = run["nodes"]
    assert (nodes["hardware"], nodes["most"] > 1) == ("c5.4xlarge", True)
    assert run["node_usd"] == pytest.approx(nodes["usd"])
    assert nodes["usd"] == pytest.approx(nodes["held_s"] * 0.68 / 3600)
    shown = CliRunner().invoke(main, ["simulate", str(several)]).stdout
    for title in ("Application by application", "Version by version", "Nodes", "USD of nodes"):
        assert title in shown
    assert "Routes through the graph" not in shown, "each application has one stage"
