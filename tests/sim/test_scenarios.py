from pathlib import Path
from typing import Any

import pytest

from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.events import ReplicaReady
from sloop.runlog import read_log
from sloop.runlog.summary import RunSummary
from sloop.sim.scenarios import ScenarioRun, chosen_systems, run_scenario, run_systems
from sloop.units import NS_PER_S

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
    run = run_scenario(scenario, scenario.systems[0], log=tmp_path / "run.jsonl")
    again = RunSummary(scenario.application, start_ns=0).fold(read_log(tmp_path / "run.jsonl"))
    assert run.row.requests == again.requests > 60
    assert run.row.p99_ms == again.latency_ms([0.99])[0]
    assert run.row.core_seconds == again.core_seconds


def test_the_header_says_under_which_system_and_seed(tmp_path: Path) -> None:
    scenario = load_scenario(SCENARIO)
    list(run_systems(scenario, scenario.systems, seed=9, log=tmp_path / "run.jsonl"))
    header = read_log(tmp_path / "run-1-static.jsonl").header
    assert (header.origin, header.seed, header.system, header.parameters) == ("sim", 9, "static", {"cores": 4})


def test_a_named_system_keeps_the_scenarios_parameters_where_it_has_some() -> None:
    scenario = load_scenario(SCENARIO)
    assert chosen_systems(scenario, []) == scenario.systems
    assert chosen_systems(scenario, ["static"]) == scenario.systems
    assert chosen_systems(scenario, ["sponge"]) == (SystemChoice("sponge"),)


def test_requests_that_never_end_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    crowded = {
        "stages": [{"name": "a", "profile": "ResNet-T"}, {"name": "b", "profile": "ResNet-T", "after": "a"}],
        "systems": [{"name": "static", "drop": "never"}],
        "cluster": {"nodes": [{"hardware": "custom", "cores": 1}]},
        "trace": {"kind": "poisson", "rate": 5},
    }
    scenario = load_scenario(SCENARIO | crowded)
    run = run_scenario(scenario, scenario.systems[0])
    assert run.open == run.row.requests > 10, "no room for the second stage"
    assert f"static: {run.open} of {run.open} requests were never answered" in caplog.text
    caplog.clear()
    scenario = load_scenario(
        SCENARIO | crowded | {"systems": [{"name": "static", "drop": {"name": "age", "limit": 2}}]}
    )
    run = run_scenario(scenario, scenario.systems[0])
    assert (run.open, run.row.dropped) == (0, run.row.requests)
    assert not caplog.text


PROFILE = {
    "latency_ms": {"form": "amdahl", "gamma": 20, "epsilon": 5, "delta": 1, "eta": 2},
    "max_batch": 8,
    "max_cores": 16,
    "origin": "published",
}


def cold_run(tmp_path: Path, profile: dict[str, Any], truth: dict[str, Any]) -> tuple[ScenarioRun, float]:
    """A run that begins with one cold start, and how long that took in seconds."""
    changes = {"stages": [{"name": "a", "profile": profile}], "systems": ["static"]}
    scenario = load_scenario(SCENARIO | changes | {"duration_s": 12, "truth": {"cold_start": {"warm": False} | truth}})
    run = run_scenario(scenario, scenario.systems[0], log=tmp_path / "run.jsonl")
    at_ns = {type(record): now_ns for now_ns, record in read_log(tmp_path / "run.jsonl")}
    return run, at_ns[ReplicaReady] / NS_PER_S


def test_a_cold_start_takes_what_the_profile_says(tmp_path: Path) -> None:
    run, start_s = cold_run(tmp_path, PROFILE | {"load_s": 2.5}, {})
    assert start_s == 2.5
    assert run.row.assumed == ()


def test_a_declared_cold_start_overrides_the_profile(tmp_path: Path) -> None:
    run, start_s = cold_run(tmp_path, PROFILE | {"load_s": 2.5}, {"start_s": 1.25})
    assert start_s == 1.25
    assert run.row.assumed == ()


def test_a_cold_start_that_nobody_measured_or_declared_is_listed_as_assumed(tmp_path: Path) -> None:
    run, start_s = cold_run(tmp_path, PROFILE, {})
    assert start_s == 10.0
    (line,) = run.row.assumed
    assert read_log(tmp_path / "run.jsonl").header.assumed_starts == {"a/a": line}, "for reports of the log"
    assert line.startswith("a/a: cold starts take 10 s (its profile has no `load_s`")


def test_a_cold_start_that_never_happens_is_not_listed(tmp_path: Path) -> None:
    changes = {"stages": [{"name": "a", "profile": PROFILE}], "systems": ["static"]}
    scenario = load_scenario(SCENARIO | changes)
    assert run_scenario(scenario, scenario.systems[0]).row.assumed == ()
