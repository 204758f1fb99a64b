"""The requests of a log, simulated again under other systems."""

from dataclasses import replace
from pathlib import Path

import pytest

from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.errors import InputError
from sloop.runlog.summary import RunRow
from sloop.sim.scenarios import run_scenario, run_systems
from sloop.sim.traffic import recorded_traffic

SCENARIO = Path(__file__).parents[2] / "examples/three/bursts.yaml"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunRow]:
    path = tmp_path_factory.mktemp("traffic") / "run.jsonl"
    scenario = replace(load_scenario(SCENARIO), duration_s=12.0)
    return path, run_scenario(scenario, SystemChoice("elastic"), log=path).row


def test_what_happened_equals_the_rows_of_the_run(recorded: tuple[Path, RunRow]) -> None:
    path, row = recorded
    traffic = recorded_traffic(path)
    rows = {found.application: found for found in traffic.happened}
    for application in row.applications:
        found = rows[application.name]
        assert (found.requests, found.served, found.late, found.dropped) == (
            *(application.requests, application.served, application.late, application.dropped),
        )
        assert found.p99_ms == pytest.approx(application.p99_ms)


def test_the_same_system_with_the_same_requests_does_the_same_again(recorded: tuple[Path, RunRow]) -> None:
    path, row = recorded
    scenario = recorded_traffic(path).scenario
    (again,) = run_systems(scenario, scenario.systems, check_first=None)
    assert again.row.requests == row.requests
    assert again.row.attainment == pytest.approx(row.attainment, abs=0.01)  # durations are drawn by other streams


def test_only_the_last_seconds(recorded: tuple[Path, RunRow]) -> None:
    path, row = recorded
    whole, last = recorded_traffic(path), recorded_traffic(path, 4.0)
    assert last.from_s == pytest.approx(whole.scenario.duration_s - 4.0)
    assert last.scenario.duration_s == pytest.approx(4.0)
    for name, trace in last.scenario.traces.items():
        times = list(trace.times_ns())  # type: ignore[union-attr]
        before = [at - 10**9 * last.from_s for at in whole.scenario.traces[name].times_ns()]  # type: ignore[union-attr]
        assert times == [round(at) for at in before if at >= 0]
    assert sum(found.requests for found in last.happened) < row.requests


def test_a_time_without_requests_is_refused(recorded: tuple[Path, RunRow]) -> None:
    path, _ = recorded
    with pytest.raises(InputError, match="no requests in this time"):
        recorded_traffic(path, 1e-9)
