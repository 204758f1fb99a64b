from pathlib import Path

import pytest

from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.report.metrics import Metrics, fold
from sloop.report.simulated import choices, play, play_all
from sloop.runlog import read_log

SCENARIO = {
    "name": "x",
    "slo_ms": 500,
    "stages": [{"name": "a", "profile": "ResNet-T"}],
    "systems": [{"name": "static", "cores": 8}, {"name": "static", "cores": 4}],
    "cluster": {"nodes": [{"hardware": "c5.4xlarge"}]},
    "trace": {"kind": "poisson", "rate": 30},
    "duration_s": 4,
}


def test_a_run_is_counted_as_its_log_says(tmp_path: Path) -> None:
    scenario = load_scenario(SCENARIO)
    counted = play(scenario, scenario.systems[0], log=tmp_path / "run.jsonl")
    again = fold(read_log(tmp_path / "run.jsonl"), Metrics(nodes=scenario.application.cluster, start_ns=0))
    assert counted.row.requests == again.requests > 60
    assert counted.row.p99_ms == again.latency_ms([0.99])[0]
    assert counted.row.core_seconds == again.core_seconds


def test_the_header_says_under_which_system_and_seed(tmp_path: Path) -> None:
    scenario = load_scenario(SCENARIO)
    list(play_all(scenario, scenario.systems, 9, tmp_path / "run.jsonl"))
    header = read_log(tmp_path / "run-1-static.jsonl").header
    assert (header.origin, header.seed, header.system, header.parameters) == ("sim", 9, "static", {"cores": 4})


def test_a_named_system_keeps_the_scenarios_parameters_where_it_has_some() -> None:
    scenario = load_scenario(SCENARIO)
    assert choices(scenario, []) == scenario.systems
    assert choices(scenario, ["static"]) == scenario.systems
    assert choices(scenario, ["sponge"]) == (SystemChoice("sponge"),)


def test_requests_that_never_end_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    crowded = {
        "stages": [{"name": "a", "profile": "ResNet-T"}, {"name": "b", "profile": "ResNet-T", "after": "a"}],
        "systems": [{"name": "static", "drop": "never"}],
        "cluster": {"nodes": [{"hardware": "custom", "cores": 1}]},
        "trace": {"kind": "poisson", "rate": 5},
    }
    scenario = load_scenario(SCENARIO | crowded)
    counted = play(scenario, scenario.systems[0])
    assert counted.open == counted.row.requests > 10, "no room for the second stage"
    assert f"static: {counted.open} of {counted.open} requests were never answered" in caplog.text
    caplog.clear()
    scenario = load_scenario(
        SCENARIO | crowded | {"systems": [{"name": "static", "drop": {"name": "age", "limit": 2}}]}
    )
    counted = play(scenario, scenario.systems[0])
    assert (counted.open, counted.row.dropped) == (0, counted.row.requests)
    assert not caplog.text
