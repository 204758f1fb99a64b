import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sloop.actions import End, StartBatch
from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.errors import InputError
from sloop.events import Finished
from sloop.runlog import FileLog
from sloop.runlog.summary import RunSummary
from sloop.sim import RecordedRun, World, recorded_in, simulate
from sloop.systems.replay import header_of
from sloop.units import ms
from sloop.vocabulary import Outcome, Request
from tests.sim.scene import graph_world, records_of, world

SCENARIO = """
name: demo
slo_ms: 200
stages:
  - name: only
    profile: {latency_ms: {form: amdahl, gamma: 20, epsilon: 5, delta: 1, eta: 2}, max_batch: 8, max_cores: 16}
systems: [static, {name: sponge, margin: 0.9}]
cluster: {nodes: [{hardware: custom, count: 1, cores: 16, memory_bytes: 1000000000}]}
trace: {kind: poisson, rate: 20}
duration_s: 5
seed: 3
truth:
  profile_error: 1.2
  network: {link: {kind: constant, mbps: 20}, payload_kb: [100, 200], semantics: attach}
  failures: {mtbf_s: 4}
"""


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    path = tmp_path / "scene.yaml"
    path.write_text(SCENARIO)
    return path


def test_a_scenario_is_a_world_for_each_of_its_systems(scenario_file: Path) -> None:
    scenario = load_scenario(scenario_file)
    first = World.from_scenario(scenario)
    second = World.from_scenario(scenario, scenario.systems[1])
    assert first.setup().system.name == "static"
    assert second.setup().system.name == "sponge"
    assert first.origin == f"sloop simulate {scenario_file} --system static --seed 3"
    arrivals = [list(played.ingress()) for played in (first, second)]
    assert arrivals[0] == arrivals[1], "the same requests for everybody"


def test_what_the_scenario_declares_is_what_happens(scenario_file: Path) -> None:
    played = World.from_scenario(load_scenario(scenario_file))
    requests = [event for _, event in played.ingress() if isinstance(event, Request)]
    transfers_ms = {round(request.elapsed_ns / 1e6, 3) for request in requests}
    assert transfers_ms == {40.96, 81.92}, "100 and 200 KB at 2,500 bytes per ms"
    assert {request.slo_ns for request in requests} == {200_000_000}
    assert played.faults.crash_mtbf_s == 4
    assert simulate(played).open == 0


def test_a_lead_moves_the_trace_and_nothing_else(scenario_file: Path) -> None:
    played = World.from_scenario(load_scenario(scenario_file))
    late = replace(played, lead_ns=400_000_000)
    now, then = ([event for _, event in world.ingress() if isinstance(event, Request)] for world in (played, late))
    assert [request.sent_ns + 400_000_000 for request in now] == [request.sent_ns for request in then]
    assert [request.elapsed_ns for request in now] == [request.elapsed_ns for request in then]
    run = simulate(late)
    assert run.open == 0


def test_a_world_can_be_played_again(scenario_file: Path) -> None:
    played = World.from_scenario(load_scenario(scenario_file))
    assert simulate(played) == simulate(played)


def test_a_recorded_link_is_read_from_the_folder_of_the_scenario(scenario_file: Path) -> None:
    link = scenario_file.with_name("link.log")
    link.write_text("0 1000 51.0 3.7 1000000 1000\n1 2000 51.0 3.7 9995000 1000\n")
    text = SCENARIO.replace("{kind: constant, mbps: 20}", "link.log")
    scenario_file.write_text(text)
    found = World.from_scenario(load_scenario(scenario_file)).clients["demo"].link
    assert found is not None
    assert list(found.bytes_per_ms) == [1_000.0, 9_995.0]


def test_a_misspelt_system_parameter_is_refused(scenario_file: Path) -> None:
    scenario = load_scenario(scenario_file)
    with pytest.raises(InputError, match="spong"):
        simulate(World.from_scenario(scenario, SystemChoice("sponge", {"spong": 1})))


def test_a_trace_that_is_wrong_says_where_in_the_scenario(scenario_file: Path) -> None:
    scenario_file.write_text(re.sub(r"trace: \{.*\}", "trace: {kind: poisson, rate: -20}", SCENARIO))
    with pytest.raises(InputError, match=r"\.yaml:\d+: trace\.rate: must be a number of at least 0"):
        load_scenario(scenario_file)


def test_a_recorded_link_is_a_path_or_a_file_with_options(scenario_file: Path) -> None:
    (scenario_file.parent / "bus.csv").write_text("carrier,mbps\nA,20\nB,1\nA,40\n")
    text = scenario_file.read_text()
    assert "{kind: constant, mbps: 20}" in text
    scenario_file.write_text(
        text.replace("{kind: constant, mbps: 20}", "{file: bus.csv, column: mbps, only: {carrier: A}}")
    )
    link = World.from_scenario(load_scenario(scenario_file)).clients["demo"].link
    assert link is not None
    assert link is not None
    assert tuple(link.bytes_per_ms) == (2500.0, 5000.0)
    scenario_file.write_text(text.replace("{kind: constant, mbps: 20}", "{mbps: 20}"))
    with pytest.raises(InputError, match=r"link has either `kind` or `file`"):
        World.from_scenario(load_scenario(scenario_file))


STAGES: dict[str, dict[str, Any]] = {
    "find": {},
    "read": {"after": "find", "each": {"mean": 2.5, "most": 9}},
    "check": {"after": "read", "when": {"share": 0.4}},
    "tell": {"after": ["find", "check"], "join": True},
}
STATIC = {"name": "static", "replicas": 3, "cores": 1.0, "drop": "never"}


def branches_of(played: World) -> tuple[dict[tuple[str, int, int], tuple[int, ...]], list[End]]:
    """Where every request and part went, and how the requests ended."""
    went: dict[tuple[str, int, int], tuple[int, ...]] = {}
    orders: dict[int, StartBatch] = {}
    ends: list[End] = []
    for _, record in records_of(played):
        if isinstance(record, StartBatch):
            orders[record.batch] = record
        elif isinstance(record, Finished) and record.edge_counts:
            order = orders[record.batch]
            parts = order.parts or (0,) * len(order.requests)
            for request, part, ways in zip(order.requests, parts, record.edge_counts, strict=True):
                assert went.setdefault((order.stage, request, part), ways) == ways
        elif isinstance(record, End):
            ends.append(record)
    return went, ends


def test_requests_go_the_same_ways_whatever_serves_them() -> None:
    quick, ends = branches_of(graph_world(STAGES, system=STATIC, slo_ms=5_000))
    slow, _ = branches_of(
        graph_world(STAGES, system=STATIC | {"replicas": 1, "batch_max": 1, "order": "fifo"}, slo_ms=5_000)
    )
    assert {end.outcome for end in ends} == {Outcome.SERVED}
    assert len(quick) > 500
    assert {visit: slow[visit] for visit in quick if visit in slow} == {v: w for v, w in quick.items() if v in slow}
    assert len(slow.keys() & quick.keys()) > 400


def test_visits_are_those_that_were_believed_or_truly_other() -> None:
    def parts_each(truth: dict[str, Any]) -> float:
        went, ends = branches_of(graph_world(STAGES, truth=truth, system=STATIC, slo_ms=5_000))
        return sum(stage == "read" for stage, _, _ in went) / len(ends)

    assert parts_each({}) == pytest.approx(2.5, rel=0.15)
    assert parts_each({"fan_out": {"read": 4}}) == 4.0


def test_where_there_really_are_too_many_parts_requests_fail() -> None:
    _, ends = branches_of(graph_world(STAGES, truth={"fan_out": {"read": [1, 10]}}, system=STATIC))
    failed = [end for end in ends if end.outcome is Outcome.FAILED]
    assert len(ends) / 3 < len(failed) < len(ends) * 2 / 3
    assert {end.why for end in failed} == {"find sends 10 parts to read, which takes at most 9 per request"}


def test_requests_enter_where_their_paths_begin() -> None:
    stages: dict[str, dict[str, Any]] = {"a": {}, "b": {}, "c": {"after": ["a", "b"]}}
    paths = [{"stages": ["a", "c"], "share": 0.25}, {"stages": ["b", "c"], "share": 0.75}]
    played = graph_world(stages, paths=paths, rate=100)
    enters = [event.enters for _, event in played.ingress() if isinstance(event, Request)]
    assert set(enters) == {("a",), ("b",)}
    assert enters.count(("b",)) / len(enters) == pytest.approx(0.75, abs=0.08)
    assert simulate(played).open == 0


def test_a_run_that_resembles_another_has_its_branches_and_parts(tmp_path: Path) -> None:
    played = graph_world(STAGES, truth={"fan_out": {"read": [0, 7]}, "shares": {"check": 0.9}}, system=STATIC)
    with FileLog(tmp_path / "log.jsonl", header_of(played.setup(), origin="sim")) as log:
        simulate(played, [log])
    recorded = recorded_in(tmp_path / "log.jsonl", played.deployment)
    assert set(recorded.branches) == {"find", "read"}
    again = replace(graph_world(STAGES, system=STATIC | {"replicas": 2}), seed=77, recorded=recorded)
    before, after = branches_of(played)[0], branches_of(again)[0]
    assert {visit: ways for visit, ways in after.items() if visit in before and visit[0] == "find"} == {
        visit: ways for visit, ways in before.items() if visit in after and visit[0] == "find"
    }
    assert {ways[0] for visit, ways in after.items() if visit[0] == "find"} == {0, 7}


def test_the_log_of_another_application_is_refused(tmp_path: Path) -> None:
    played = graph_world(STAGES, system=STATIC)
    with FileLog(tmp_path / "log.jsonl", header_of(played.setup(), origin="sim")) as log:
        simulate(played, [log])
    with pytest.raises(InputError, match=r"log\.jsonl: the log is of a deployment with .*, not only/a"):
        recorded_in(tmp_path / "log.jsonl", world().deployment)


def test_what_requests_took_to_arrive_in_a_recorded_run_is_part_of_their_latency() -> None:
    """At a load that makes nobody wait, all latencies grow by the delay that the log holds."""
    certain = {"service": {"shape": "deterministic"}}
    plain = world(trace={"kind": "equal", "rate": 10}, truth=certain)
    late = replace(plain, recorded=RecordedRun(delays={"scene": ((ms(0.25), ms(1.5)),)}))
    means_ms = []
    for played in (plain, late):
        simulate(played, [summary := RunSummary(played.application.graph)])
        means_ms.append(summary.latency_ms([0.5])[0])
    assert means_ms[1] - means_ms[0] == pytest.approx(1.5)
