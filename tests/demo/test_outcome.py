from pathlib import Path

from sloop.actions import StartReplica
from sloop.app.load import load_scenario
from sloop.demo.outcome import began_ns, read_outcome, rebased
from sloop.events import WOKE
from sloop.report.simulated import play
from sloop.runlog import Record
from sloop.sim.world import World
from sloop.units import ms, s
from sloop.vocabulary import ReplicaId, ReplicaSpec, Request, RequestId

SCENARIO = {
    "name": "x",
    "slo_ms": 500,
    "stages": [{"name": "a", "profile": "ResNet-T"}],
    "systems": [{"name": "static", "cores": 8}],
    "cluster": {"nodes": [{"hardware": "c5.4xlarge"}]},
    "trace": {"kind": "poisson", "rate": 30},
    "duration_s": 4,
}


def test_time_begins_with_the_schedule_and_what_came_before_is_kept_there() -> None:
    start = StartReplica(ReplicaId(0), ReplicaSpec("a", "a", 1.0))
    request = Request(RequestId(1), sent_ns=s(5), arrived_ns=s(5) + ms(40), deadline_ns=s(6))
    records: list[tuple[int, Record]] = [(0, WOKE), (ms(3), start), (s(5) + ms(40), request), (s(7), WOKE)]
    moved = list(rebased(records, first_ns=ms(100)))
    assert [now_ns for now_ns, _ in moved] == [0, 0, ms(140), s(2) + ms(100)]
    assert moved[1][1] == start
    assert moved[2][1] == Request(RequestId(1), sent_ns=ms(100), arrived_ns=ms(140), deadline_ns=s(1) + ms(100))


def test_a_log_without_requests_gives_nothing() -> None:
    assert list(rebased([(0, WOKE)], first_ns=0)) == []


def test_a_simulated_run_is_counted_over_its_own_seconds(tmp_path: Path) -> None:
    scenario = load_scenario(SCENARIO)
    log = tmp_path / "run.jsonl"
    counted = play(scenario, scenario.systems[0], log=log)
    first_ns = next(World.from_scenario(scenario).trace.times_ns())
    outcome = read_outcome(log, first_ns=first_ns, duration_s=4)
    assert outcome.row.requests == counted.row.requests
    assert outcome.row.core_seconds == 8 * 4
    assert outcome.row.p99_ms == counted.row.p99_ms


def test_a_run_with_a_lead_is_counted_from_where_its_schedule_begins(tmp_path: Path) -> None:
    scenario = load_scenario(SCENARIO)
    log = tmp_path / "late.jsonl"
    play(scenario, scenario.systems[0], log=log, lead_ns=ms(700))
    first_ns = next(World.from_scenario(scenario).trace.times_ns())
    assert began_ns(log, first_ns=first_ns) == ms(700)
    assert read_outcome(log, first_ns=first_ns, duration_s=4).row.core_seconds == 8 * 4
