import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec import structs

from sloop.actions import End, StartBatch, StartWorker, Transfer
from sloop.app.application import Application, Stage, SystemChoice, Variant
from sloop.app.load import load_application, load_scenario
from sloop.app.scenario import ColdStartTruth, NetworkTruth, TopologyTruth, Truth
from sloop.core.pipeline import layers_of
from sloop.errors import InputError
from sloop.events import Deployed, Finished, Promoted, Removed, WorkerProgressed, WorkerReady
from sloop.policies.forecast import OracleForecast
from sloop.profile.profile import Profile, Quadratic, Startup, digest_of_model, save_profile
from sloop.runlog import FileLog, MemoryLog
from sloop.runlog.fold import DeploymentState
from sloop.runlog.summary import RunSummary
from sloop.sim import RecordedRun, World, recorded_in, simulate
from sloop.sim.truth.failure import FaultRates
from sloop.sim.world import faults_of
from sloop.sim.worlds import random_deployment, random_world
from sloop.systems.replay import header_of, replay_log
from sloop.systems.setup import build, weights_of
from sloop.units import ms, s
from sloop.vocabulary import LayerSet, ModelWeights, Outcome, Request
from tests.sim.scene import application, graph_world, provisioned, records_of, several, world

PROFILE = {
    "latency_ms": {"form": "quadratic", "alpha": 0, "beta": 2, "gamma": 10},
    "max_batch": 8,
    "max_cores": 16,
    "load_s": 0.5,
}
SCENARIO = """
name: demo
slo_ms: 200
stages:
  - name: only
    profile: {latency_ms: {form: amdahl, gamma: 20, epsilon: 5, delta: 1, eta: 2}, max_batch: 8, max_cores: 16}
systems: [static, {name: elastic, margin: 0.9}]
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
    assert second.setup().system.name == "elastic"
    assert first.origin == f"sloop simulate {scenario_file} --system static --seed 3"
    arrivals = [list(played.ingress()) for played in (first, second)]
    assert arrivals[0] == arrivals[1], "the same requests for everybody"


def test_a_declared_forecast_that_knows_the_future_gets_the_requests(scenario_file: Path) -> None:
    text = re.sub(r"systems?:.*\n", "", scenario_file.read_text())
    scenario_file.write_text(text + "system: {name: hpa, forecast: {name: oracle, horizon_s: 5}}\n")
    played = World.from_scenario(load_scenario(scenario_file))
    (made,) = played.setup().applications
    assert isinstance(made.system.policies.forecast, OracleForecast)
    assert (
        sum(made.system.policies.forecast.counts) == sum(played.clients[made.application.name].trace.counts_per_s()) > 0
    )


FORETELLING = """
from dataclasses import dataclass, replace
from typing import ClassVar

from sloop.api.policies import Forecast
from sloop.systems import SYSTEMS


@dataclass(frozen=True)
class Foretelling(Forecast):
    knows_future: ClassVar[bool] = True
    counts: tuple[float, ...] = ()
    ahead_s: int = 1

    def demand_rps(self, now_ns, ingress):
        return max(self.counts[now_ns // 10**9 :][: self.ahead_s], default=0.0)


HPA = SYSTEMS["hpa"]
SYSTEM = replace(HPA, name="foretelling", policies=replace(HPA.policies, forecast=Foretelling()))
"""


def test_a_forecast_of_ones_own_that_knows_the_future_gets_the_requests_too(scenario_file: Path) -> None:
    (scenario_file.parent / "mine.py").write_text(FORETELLING)
    text = re.sub(r"systems?:.*\n", "", scenario_file.read_text())
    scenario_file.write_text(text + "system: {name: ./mine.py, forecast: {ahead_s: 3}}\n")
    played = World.from_scenario(load_scenario(scenario_file))
    (made,) = played.setup().applications
    forecast: Any = made.system.policies.forecast
    assert type(forecast).__name__ == "Foretelling"
    assert list(forecast.counts) == list(played.clients[made.application.name].trace.counts_per_s())
    assert forecast.ahead_s == 3
    assert simulate(played).open == 0


def test_what_the_scenario_declares_is_what_happens(scenario_file: Path) -> None:
    played = World.from_scenario(load_scenario(scenario_file))
    requests = [event for _, event in played.ingress() if isinstance(event, Request)]
    transfers_ms = {round(request.elapsed_ns / 1e6, 3) for request in requests}
    assert transfers_ms == {40.96, 81.92}, "100 and 200 KB at 2,500 bytes per ms"
    assert {request.slo_ns for request in requests} == {200_000_000}
    assert played.faults.crash_mtbf_s == 4
    assert simulate(played).open == 0


def test_outages_and_other_work_are_declared() -> None:
    declared = {"nodes": {"mtbf_s": 50, "outage_at_s": 7, "outage_s": 9}, "background": {"part": 0.25, "cores": 3}}
    faults = several(truth=declared).faults
    assert (faults.node_mtbf_s, faults.outage_at_s, faults.outage_s) == (50, 7, 9)
    assert (faults.background, faults.background_factor, faults.background_device_factor) == (0.25, 3, 1.035)
    assert faults_of(Truth()) == FaultRates(node_repair_s=300.0), "nothing fails"


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
    with pytest.raises(InputError, match="elastik"):
        simulate(World.from_scenario(scenario, SystemChoice("elastic", {"elastik": 1})))


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


# Several applications


def requests_of(played: World, name: str) -> list[tuple[int, int]]:
    """When the requests of an application are sent, with their deadlines."""
    events = [event for _, event in played.ingress() if isinstance(event, Request) and event.application == name]
    return [(event.sent_ns, event.deadline_ns) for event in events]


def services_of(played: World, name: str) -> list[int]:
    """The durations of the batches of an application, in order of their start."""
    orders: dict[int, StartBatch] = {}
    found: dict[int, int] = {}
    for _, record in records_of(played):
        if isinstance(record, StartBatch) and record.stage.startswith(f"{name}/"):
            orders[record.batch] = record
        elif isinstance(record, Finished) and record.batch in orders:
            found[record.batch] = record.service_ns
    return [found[batch] for batch in sorted(found)]


def test_an_application_that_is_added_changes_no_draw_of_the_others() -> None:
    two, three = several(("a", "b")), several(("a", "b", "c"))
    assert requests_of(two, "a") == requests_of(three, "a")
    assert requests_of(two, "b") == requests_of(three, "b") != requests_of(two, "a")
    certain = {"network": {"link": {"kind": "lte"}, "payload_kb": [10, 200]}}
    slow = [several(names, truth=certain) for names in (("a", "b"), ("a", "b", "c"))]
    assert requests_of(slow[0], "b") == requests_of(slow[1], "b")
    # One request at a time, so that batches do not depend on the other applications' turns.
    alone = {"name": "static", "batch_max": 1, "drop": "never"}
    few = [several(names, system=alone, rates=dict.fromkeys(names, 5.0)) for names in (("a", "b"), ("a", "b", "c"))]
    assert services_of(few[0], "b") == services_of(few[1], "b")
    assert len(services_of(few[0], "b")) > 10


def test_the_only_application_draws_as_if_there_could_be_no_others() -> None:
    """Its requests name no application; the first of several has the same draws."""
    alone, first = several(("a",)), several(("a", "b"))
    events = [event for _, event in alone.ingress() if isinstance(event, Request)]
    assert {event.application for event in events} == {""}
    assert [event.id for event in events] == list(range(len(events)))
    assert [(event.sent_ns, event.deadline_ns) for event in events] == requests_of(first, "a")


def test_branches_are_the_same_whatever_applications_and_versions_there_are() -> None:
    stages: list[dict[str, Any]] = [
        {"name": "find", "profile": PROFILE},
        {"name": "read", "after": "find", "each": {"mean": 2.5, "most": 9}, "profile": PROFILE},
    ]

    def counts(*names: str, changes: Sequence[dict[str, Any]] = ()) -> dict[int, tuple[int, ...]]:
        played = several(names, stages=stages, changes=changes)
        number_of = len(played.names)
        orders: dict[int, StartBatch] = {}
        found: dict[int, tuple[int, ...]] = {}
        for _, record in records_of(played):
            if isinstance(record, StartBatch) and record.stage.endswith("find"):
                orders[record.batch] = record
            elif isinstance(record, Finished) and record.batch in orders:
                for id, taken in zip(orders[record.batch].requests, record.edge_counts, strict=True):
                    if id % number_of == 0:
                        found[id // number_of] = taken
        return found

    alone, beside = counts("a"), counts("a", "b")
    assert {number: beside[number] for number in alone.keys() & beside.keys()} == {
        number: alone[number] for number in alone.keys() & beside.keys()
    }
    assert len(alone.keys() & beside.keys()) > 40
    new = {"at_s": 1, "deploy": application("a", stages=stages)}
    replaced = counts("a", changes=[new])
    assert all(alone[number] == replaced[number] for number in alone.keys() & replaced.keys())
    assert len(alone.keys() & replaced.keys()) > 40


def test_the_truth_of_a_stage_is_declared_for_one_application_or_for_all() -> None:
    stages: list[dict[str, Any]] = [
        {"name": "find", "profile": PROFILE},
        {"name": "read", "after": "find", "each": {"mean": 1, "most": 9}, "profile": PROFILE},
    ]
    played = several(("a", "b"), stages=stages, truth={"fan_out": {"a/read": 4, "b/read": 2}})
    seen: dict[str, set[int]] = {"a/read": set(), "b/read": set()}
    for _, record in records_of(played):
        if isinstance(record, StartBatch) and record.parts:
            seen[record.stage] |= set(record.parts)
    assert seen == {"a/read": {0, 1, 2, 3}, "b/read": {0, 1}}


# Changes during the run

NEW = {"at_s": 2, "deploy": application("a", slo_ms=300)}


def test_changes_are_events_and_versions_are_numbered() -> None:
    canary = {"at_s": 3, "deploy": application("a"), "canary": {"share": 0.5}}
    changes = [NEW, canary, {"at_s": 3.5, "promote": "a"}, {"at_s": 4, "remove": "b"}]
    played = several(("a", "b"), changes=[*changes, {"at_s": 4.5, "deploy": application("c")}])
    events = [(at_ns, event) for at_ns, event in played.ingress() if not isinstance(event, Request)]
    told = [(at_ns / 1e9, type(event), event.application, event.version) for at_ns, event in events]  # type: ignore[union-attr]
    assert told == [
        (2.0, Deployed, "a", "2"),
        (3.0, Deployed, "a", "3"),
        (3.5, Promoted, "a", "3"),
        (4.0, Removed, "b", ""),
        (4.5, Deployed, "c", "1"),
    ]
    deployed = [event for _, event in events if isinstance(event, Deployed)]
    assert [event.canary and event.canary.share for event in deployed] == [None, 0.5, None]
    assert [each.application.key for each in played.later] == ["a@2", "a@3", "c"]
    assert [each.application.stages[0].name for each in played.later] == ["a@2/only", "a@3/only", "c/only"]
    assert build("a", "2", deployed[0].definition).graph.slo_ns == ms(300)


def test_the_trace_of_an_application_begins_when_it_is_deployed() -> None:
    played = several(("a",), changes=[{"at_s": 3, "deploy": application("c")}])
    sent_ns = [at_ns for at_ns, _ in requests_of(played, "c")]
    assert min(sent_ns) >= 3 * 10**9
    assert max(sent_ns) < 5 * 10**9
    assert len(sent_ns) > 20


def test_a_version_has_the_speed_of_its_own_profile_and_error() -> None:
    slower = application("a")
    slower["stages"][0]["profile"] |= {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 0, "gamma": 40}}
    changes = [{"at_s": 1, "deploy": slower}, NEW | {"truth": {"profile_error": 3.0}}]
    played = several(
        ("a",), changes=changes, truth={"profile_error": 1.5, "service": {"shape": "deterministic", "ratio": 1}}
    )
    errors = {stage: error for (stage, _, _), error in played.all_errors.items()}
    assert errors == {"only": 1.5, "a@2/only": 1.5, "a@3/only": 4.5}
    orders: dict[int, StartBatch] = {}
    seen: dict[str, set[int]] = {}
    for _, record in records_of(played):
        if isinstance(record, StartBatch) and len(record.requests) == 1:
            orders[record.batch] = record
        elif isinstance(record, Finished) and record.batch in orders:
            seen.setdefault(orders[record.batch].stage, set()).add(record.service_ns)
    assert seen == {"only": {ms(18)}, "a@2/only": {ms(60)}, "a@3/only": {ms(54)}}


def test_a_change_that_cannot_be_set_up_is_refused_before_the_run() -> None:
    without = application("a")
    without["stages"] = [{"name": "only", "model": "missing.onnx"}]
    with pytest.raises(InputError, match=r"missing\.onnx"):
        several(("a",), changes=[{"at_s": 1, "deploy": without}])
    huge = application("a")
    huge["stages"][0]["profile"] |= {"memory_bytes": 10**12}
    with pytest.raises(InputError, match="which no node could hold"):
        several(("a",), changes=[{"at_s": 1, "deploy": huge}]).check()


# The network of the cluster

TOPOLOGY = {"network": {"topology": {"store_mbps": 100, "node_mbps": 1000, "nodes_per_leaf": 2, "leaf_mbps": 100}}}


def fetching(truth: dict[str, Any], **profile: Any) -> World:
    """Four replicas that crash now and then, on as many nodes."""
    declared = {"latency_ms": {"table": {1: {1: 40.0}}}, "max_batch": 1, "load_s": 0.5, "weights_bytes": 1e7} | profile
    scenario = {
        "name": "demo",
        "slo_ms": 400,
        "stages": [{"name": "only", "variants": [{"name": name, "profile": declared} for name in ("a", "b")]}],
        "system": {"name": "static", "replicas": 4},
        "cluster": {"nodes": [{"hardware": "custom", "count": 4, "cores": 1, "memory_bytes": 1e9}]},
        "trace": {"kind": "poisson", "rate": 20},
        "duration_s": 60,
        "truth": truth | {"failures": {"mtbf_s": 8}, "cold_start": {"warm": False}},
    }
    return World.from_scenario(load_scenario(scenario))


def test_a_world_with_a_topology_is_the_same_each_time_and_the_topology_draws_nothing() -> None:
    records = records_of(fetching(TOPOLOGY))
    assert records == records_of(fetching(TOPOLOGY))
    steps = {record.step for _, record in records if isinstance(record, WorkerProgressed)}
    assert steps == {"fetching", "loading"}
    plain = records_of(fetching({}))
    assert {record.step for _, record in plain if isinstance(record, WorkerProgressed)} == {"loading"}
    assert arrivals(records) == arrivals(plain)


def arrivals(records: Sequence[tuple[int, Any]]) -> list[Request]:
    return [record for _, record in records if isinstance(record, Request)]


def test_weights_that_are_there_at_once_change_nothing_but_a_nanosecond() -> None:
    """Without bytes, starts take what they take without a topology."""
    unlimited = {"network": {"topology": {"store_mbps": 1e9}}}
    quick, plain = records_of(fetching(unlimited, weights_bytes=1)), records_of(fetching({}))
    assert [type(record) for _, record in quick if type(record) is End] == [
        type(record) for _, record in plain if type(record) is End
    ]
    pairs = list(zip(ready(quick), ready(plain), strict=True))
    assert len(pairs) > 10
    assert all(one == other and abs(one_ns - other_ns) < 1_000 for (one_ns, one), (other_ns, other) in pairs)


def ready(records: Sequence[tuple[int, Any]]) -> list[tuple[int, WorkerReady]]:
    return [(now_ns, record) for now_ns, record in records if isinstance(record, WorkerReady)]


def test_variants_with_the_same_model_have_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"x" * 1000)
    profile = PROFILE | {"weights_bytes": 0}
    variants = [{"name": name, "model": "./net.onnx", "profile": profile} for name in "ab"]
    variants += [{"name": name, "profile": profile | {"weights_bytes": 7}} for name in "cd"]
    stages = [{"name": name, "variants": variants} for name in ("one", "two")]
    found = weights_of(load_application({"name": "x", "slo_ms": 99, "stages": stages}, folder=tmp_path))
    assert set(found.values()) == {
        ModelWeights(str(tmp_path / "net.onnx"), 1000),
        *(ModelWeights(f"{stage}/{name}", 7) for stage in ("one", "two") for name in "cd"),
    }
    assert len(found) == 8


def test_a_version_that_was_trained_again_has_other_weights(tmp_path: Path) -> None:
    """Its file has the same name and size, so that only the digest differs."""
    model = tmp_path / "net.onnx"
    variants = [{"name": "a", "model": "./net.onnx", "profile": "./net.profile.json"}]

    def weights(content: bytes) -> ModelWeights:
        model.write_bytes(content)
        profile = Profile(latency_ms=Quadratic(0, 2, 10), max_batch=8, max_cores=1, model_digest=digest_of_model(model))
        save_profile(profile, tmp_path / "net.profile.json")
        described = {"name": "x", "slo_ms": 99, "stages": [{"name": "one", "variants": variants}]}
        (found,) = weights_of(load_application(described, folder=tmp_path)).values()
        return found

    old, new = weights(b"x" * 1000), weights(b"y" * 1000)
    assert old == weights(b"x" * 1000) != new
    assert (old.name, old.size_bytes) == (new.name, new.size_bytes)
    layers = [layers_of(each, (1, 2, 1), LayerSet(0, 1)) for each in (old, new)]
    assert [each.model for each in layers] == [old.model, new.model]


def slow_to_fetch(world: World, random: Random) -> World:
    """The same world, where weights of different sizes come over a network."""

    def heavy(application: Application) -> Application:
        return replace(application, stages=tuple(replace(each, variants=variants(each)) for each in application.stages))

    def variants(stage: Stage) -> tuple[Variant, ...]:
        def sized(profile: Profile) -> Profile:
            startup = random.choice((None, Startup(1.0, 1.0, 0.5)))
            return structs.replace(profile, weights_bytes=random.choice((1, 10**6, 10**8)), startup=startup)

        return tuple(
            replace(
                each,
                profile=sized(each.profile) if each.profile is not None else None,
                profiles={kind: sized(profile) for kind, profile in each.profiles.items()},
            )
            for each in stage.variants
        )

    topology = TopologyTruth(random.choice((50.0, 1e4)), random.choice(("shared", "per_node")), 100.0, 2, 150.0)
    network = replace(world.truth.network or NetworkTruth(topology=topology), topology=topology)
    return replace(
        world,
        deployment=replace(world.deployment, applications=tuple(map(heavy, world.deployment.applications))),
        changes=tuple(replace(each, deploy=each.deploy and heavy(each.deploy)) for each in world.changes),
        truth=replace(world.truth, network=network, cold_start=ColdStartTruth(None, 0.3, warm=False)),
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_worlds_with_faults_keep_all_invariants_where_weights_must_be_fetched(seed: int) -> None:
    made = random_deployment(seed) if seed % 2 else random_world(seed)
    steps = {
        record.step
        for _, record in records_of(slow_to_fetch(made, Random(seed)))
        if isinstance(record, WorkerProgressed)
    }
    assert {"fetching", "loading"} <= steps


# Weights that the core sends where they are needed


def cold_starts_s(records: Sequence[tuple[int, Any]]) -> list[float]:
    """How long each start took that came after the first plan."""
    ordered = {each.worker: now_ns for now_ns, each in records if isinstance(each, StartWorker)}
    return [
        (now_ns - ordered[each.worker]) / 1e9
        for now_ns, each in records
        if isinstance(each, WorkerReady) and ordered[each.worker] > ms(1)
    ]


def test_cold_starts_take_what_the_level_of_their_source_says() -> None:
    """T5 takes 15.344 s from files, and 27.501 s from another node, where nothing else is on the network."""
    assert {15.344, 27.501} <= {round(taken_s, 3) for taken_s in cold_starts_s(records_of(provisioned()))}


def test_a_provisioned_run_replays_and_its_fold_counts_the_transfers() -> None:
    world = provisioned()
    log = MemoryLog()
    simulate(world, [log])
    assert replay_log(log, world.setup().core()).difference is None
    state = DeploymentState(world.setup().parts(), nodes=world.deployment.cluster)
    for now_ns, record in log:
        state.append(now_ns, record)
    weights = state.weights
    ordered = [record for _, record in log if isinstance(record, Transfer)]
    assert ordered[0].receivers == ("custom-0",)
    assert weights.received["from the store"] == 1
    assert weights.received["from a node"] >= 2
    assert weights.received_bytes["from the store"] == 11_408_000_000
    assert min(weights.transfer_ns["from a node"]) == pytest.approx(s(12.157), rel=1e-3)
    assert not weights.failed
    missing = sum(len(each.receivers) for each in weights.open.values())
    assert weights.received.total() + missing == sum(len(each.receivers) for each in ordered)
    assert any(len(each.receivers) > 1 for each in ordered), "a chain"
