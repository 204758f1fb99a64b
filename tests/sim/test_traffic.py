"""The requests of a log, simulated again under other systems."""

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from sloop.actions import Rollout, VersionState
from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.errors import InputError
from sloop.events import Deployed
from sloop.page.answers import served_now
from sloop.runlog import FileLog, Header, read_log
from sloop.runlog.summary import RunRow
from sloop.sim import simulate
from sloop.sim.scenarios import run_scenario, run_systems
from sloop.sim.traffic import recorded_traffic
from sloop.systems.replay import ServedApplications, header_of
from sloop.systems.setup import application_in, definition_of, set_up
from sloop.workload import Trace
from sloop.workload.trace import first_works
from tests.sim.scene import world

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


def test_requests_bring_again_what_they_brought(tmp_path: Path) -> None:
    trace = {"kind": "poisson", "rate": 20, "rows": [1, 2], "sizes": [8, 512]}
    made = world(trace=trace)
    header = header_of(made.setup(), origin="sim", seed=1)
    with FileLog(tmp_path / "run.jsonl", header) as log:
        simulate(made, [log])
    scenario = recorded_traffic(tmp_path / "run.jsonl").scenario
    again = scenario.traces["scene"]
    assert isinstance(again, Trace)
    assert list(again.times_ns()) == list(made.trace.times_ns())
    assert first_works(again, 1_000) == first_works(made.trace, 1_000)
    assert {work.size for work in first_works(again, 1_000)} == {8, 512}


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


def test_what_was_deployed_later_is_there_in_the_version_that_served_last(
    recorded: tuple[Path, RunRow], tmp_path: Path
) -> None:
    log = read_log(recorded[0])
    *others, last = log.header.definitions
    second = replace(application_in(log.header.definitions[others[0]]), slo_ms=777.0).qualified("2")
    (setup,) = set_up(second, must_fit=False).applications
    deployed = [Deployed(last, "1", log.header.definitions[last]), Deployed(second.name, "2", definition_of(setup))]
    header = structs.replace(log.header, definitions={name: log.header.definitions[name] for name in others})
    with FileLog(tmp_path / "later.jsonl", header) as later:
        for each in deployed:
            later.append(0, each)
            later.append(0, Rollout(each.application, each.version, VersionState.SERVING, 1.0, ""))
        later.append(0, Rollout(second.name, "1", VersionState.RETIRED, 0.0, ""))
        for now_ns, record in log:
            later.append(now_ns, record)
    traffic = recorded_traffic(tmp_path / "later.jsonl")
    assert {row.application: row.requests for row in traffic.happened} == {
        row.application: row.requests for row in recorded_traffic(recorded[0]).happened
    }
    slos_ms = {each.name: each.slo_ms for each in traffic.scenario.deployment.applications}
    assert slos_ms[second.name] == 777.0
    assert set(slos_ms) == {*others, last}
    now = served_now(read_log(tmp_path / "later.jsonl"))
    assert {each.name: each.version for each in now.applications} == {**dict.fromkeys(slos_ms, "1"), second.name: "2"}


def test_more_time_than_there_is_is_all(recorded: tuple[Path, RunRow]) -> None:
    assert recorded_traffic(recorded[0], 1e300).happened == recorded_traffic(recorded[0]).happened


def test_a_time_without_requests_is_refused(recorded: tuple[Path, RunRow]) -> None:
    path, _ = recorded
    with pytest.raises(InputError, match="no requests in this time"):
        recorded_traffic(path, 1e-9)


def test_what_a_server_writes_while_its_log_is_read_does_not_count(
    recorded: tuple[Path, RunRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is looked up before its requests are read."""
    path = tmp_path / "log.jsonl"
    lines = recorded[0].read_bytes().splitlines(keepends=True)
    instants = [line.partition(b",")[0] for line in lines]
    half = next(place for place in range(len(lines) // 2, len(lines)) if instants[place] != instants[place - 1])
    path.write_bytes(b"".join(lines[:half]))  # what is of one instant is written at once
    before = recorded_traffic(path).happened

    def grown(header: Header) -> ServedApplications:
        path.write_bytes(b"".join(lines))
        return ServedApplications(header)

    monkeypatch.setattr("sloop.sim.traffic.ServedApplications", grown)
    assert recorded_traffic(path).happened == before
