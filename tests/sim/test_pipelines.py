"""Pipelines in the simulated cluster: how parts start, what batches take in them, what happens when one is lost."""

from array import array
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop.actions import End, ResizeWorker, StartBatch, StartWorker, StopWorker, Transfer
from sloop.app.application import Application, Estimates, Stage, SystemChoice, Variant
from sloop.app.scenario import ColdStartTruth, NetworkTruth, ServiceTruth, TopologyTruth, Truth
from sloop.core.protocols import Scale
from sloop.core.views import ClusterView
from sloop.events import (
    BatchLost,
    Event,
    Finished,
    TransferFailed,
    WorkerCompleted,
    WorkerLost,
    WorkerReady,
)
from sloop.profile.pipelines import moving_ms, passed_line, stations_ms, whole_ms
from sloop.profile.profile import LatencyTable, LayerBlock, LayerProfile, Profile, Quadratic, Startup
from sloop.runlog import MemoryLog
from sloop.sim import World, simulate
from sloop.sim.cluster import Cluster
from sloop.sim.happenings import Crashed, NodeFailed
from sloop.sim.pipelines import RestLoad
from sloop.sim.truth.flows import Topology
from sloop.sim.truth.weights import WeightPlaces
from sloop.systems import build_system
from sloop.units import ms, s, to_s
from sloop.vocabulary import (
    STORE,
    Group,
    LayerSet,
    ModelWeights,
    Node,
    Plan,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Slot,
    StagePlan,
    TransferId,
    parts_at,
)
from sloop.workload import Trace
from tests.profile.test_blocks import EXAMPLE
from tests.sim.test_cluster import PROFILE, cluster_of, play_until, spec

BOUNDS = (0, 1, 3)
EQUAL = structs.replace(EXAMPLE, blocks=tuple(structs.replace(each, param_bytes=100) for each in EXAMPLE.blocks))
START = Startup(0.0, 6.0, 0.0, send_s=3.0)
ON_CORES = Startup(0.0, 6.0, 3.0)
R0, R1, R2 = (ReplicaId(number) for number in range(3))
MBPS = 800.0


def cluster(*, length_ms: float = 900.0, startup: Startup = START) -> Cluster:
    """Four nodes on a network of 100 MB a second; starts take 900 ms, of which loading takes two thirds."""
    nodes = [Node(f"n{number}", "slow", 8.0, 1) for number in range(4)]
    weights = {("only", "a", "slow"): ModelWeights("a", 300_000_000)}
    places = WeightPlaces(Topology(TopologyTruth(MBPS, "per_node", node_mbps=MBPS), nodes), weights)
    profiles = {("only", "a", "slow"): structs.replace(PROFILE, startup=startup, layers=EQUAL)}
    return cluster_of(start_ms=length_ms, nodes=nodes, profiles=profiles, weights=places)


def part(place: int, transfer: int | None = None, *, node: str = "") -> StartWorker:
    brought = None if transfer is None else TransferId(transfer)
    whole = structs.replace(spec(node=node or f"n{place}"), shape=parts_at(BOUNDS))
    return StartWorker(ReplicaId(place), whole, transfer=brought, pipeline=ReplicaId(0), place=place)


def layers(number: int, node: str, brings: LayerSet, completes: ReplicaId | None = None) -> Transfer:
    size_bytes = 100_000_000 * len(brings.positions(3))
    return Transfer(
        TransferId(number),
        ModelWeights("a", size_bytes, brings),
        STORE,
        (node,),
        completes=() if completes is None else (completes,),
    )


def serving(startup: Startup = START) -> Cluster:
    """A pipeline of one layer and two layers that serves from 2.6 s on."""
    made = cluster(startup=startup)
    for place, brings in enumerate((LayerSet(0, 1), LayerSet(1, 3))):
        made.obey(0, layers(place, f"n{place}", brings))
        made.obey(0, part(place, place))
    assert ready(play_until(made, s(2.6))) == [(ms(1300), R0), (ms(2600), R1)], "a third of 900 ms, and two thirds"
    return made


def ready(told: list[tuple[int, Event]]) -> list[tuple[int, ReplicaId]]:
    return [(now_ns, each.worker) for now_ns, each in told if isinstance(each, WorkerReady)]


def completed(told: list[tuple[int, Event]]) -> list[tuple[int, ReplicaId]]:
    return [(now_ns, each.worker) for now_ns, each in told if isinstance(each, WorkerCompleted)]


def batch(number: int, replica: ReplicaId) -> StartBatch:
    return StartBatch(number, replica, "only", (RequestId(number),))  # type: ignore[arg-type]


def stations_ns(made: Cluster, cores: float | None = None) -> list[float]:
    cores = spec().slot.cores if cores is None else cores
    alone_ns = made._replicas[R0].speed.means_ns[1]
    found = stations_ms(EQUAL, cores, BOUNDS, 1, MBPS)
    scale = alone_ns / whole_ms(EQUAL, cores, 1)
    return [ms(1) * each if place % 2 else each * scale for place, each in enumerate(found)]


def test_parts_load_their_share_and_then_the_rest() -> None:
    made = serving()
    made.obey(s(3), layers(2, "n0", LayerSet(0, 1).others, R0))
    made.obey(s(3), layers(3, "n1", LayerSet(1, 3).others, R1))
    told = play_until(made, s(9))
    assert completed(told) == [(s(4) + ms(300), R1), (s(5) + ms(600), R0)], "1 and 2 s of transfer, the rest of 900 ms"
    made.obey(s(9), StartWorker(R2, spec(node="n0")))
    assert ready(play_until(made, s(11))) == [(s(9) + ms(900), R2)], "the node has the whole model"


def test_a_chain_brings_the_rest_to_all_parts_at_once() -> None:
    made = serving()
    whole = ModelWeights("a", 300_000_000, LayerSet(0, 3))
    made.obey(s(3), Transfer(TransferId(2), whole, STORE, ("n0", "n1"), completes=(R0, R1)))
    told = play_until(made, s(9))
    assert completed(told) == [(s(6) + ms(300), R1), (s(6) + ms(600), R0)], "3 s of transfer, the rest of 900 ms"


@pytest.mark.parametrize(
    ("cores", "is_capped", "factor"), [(1.0, True, 1), (0.25, True, 4), (0.25, False, 1), (2.0, True, 2)]
)
def test_the_rest_is_loaded_with_the_cores_that_serve(cores: float, is_capped: bool, factor: float) -> None:
    """A start has a whole core. What serves has its own cores only, unless these are only reserved, and a tenth of them
    while it computes a batch. With two threads, each layer is opened twice."""
    made = cluster(startup=ON_CORES)
    slot = structs.replace(spec().slot, cores=cores, is_capped=is_capped)
    for place, brings in enumerate((LayerSet(0, 1), LayerSet(1, 3))):
        made.obey(0, layers(place, f"n{place}", brings))
        order = part(place, place)
        made.obey(0, structs.replace(order, spec=structs.replace(order.spec, slot=slot)))
    assert ready(play_until(made, s(3))) == [(ms(1300), R0), (ms(2600), R1)]
    made.obey(s(3), layers(2, "n0", LayerSet(0, 1).others, R0))
    made.obey(s(3), layers(3, "n1", LayerSet(1, 3).others, R1))
    now_ns = s(5) + ms(100)
    told = play_until(made, now_ns)
    made.start_batch(now_ns, batch(0, R1))
    stations = stations_ns(made, cores)
    whole_ms = 600 * factor
    told += play_until(made, s(60))
    r0_ns, r1_ns = s(5) + ms(whole_ms), s(4) + ms(whole_ms / 2)
    assert (r1_ns > now_ns) == (factor == 4), "a part that is complete by then is not delayed"
    expected = {R0: r0_ns + 0.9 * stations[0], R1: r1_ns + (0.9 * stations[2] if r1_ns > now_ns else 0)}
    assert {replica: at_ns for at_ns, replica in completed(told)} == pytest.approx(expected, abs=2)


def test_a_part_whose_pipeline_breaks_computes_no_more_and_loads_at_full_speed() -> None:
    made = serving(ON_CORES)
    made.obey(s(3), layers(2, "n0", LayerSet(0, 1).others, R0))
    play_until(made, s(5) + ms(1))
    for number in range(1000):
        made.start_batch(s(5) + ms(1), batch(number, R1))
    made.happen(s(5) + ms(101), -1, Crashed(R1))
    told = completed(play_until(made, s(9)))
    assert ms(620) < told[0][0] - s(5) < ms(690), "it computed for 100 ms, with pauses"
    assert told == [(made._replicas[R0].rest_load.end_ns, R0)]  # type: ignore[union-attr]


spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12)


@given(st.integers(0, 100), st.integers(0, 300), spans, st.none() | st.integers(0, 400))
def test_the_rest_is_loaded_tick_by_tick(
    from_ns: int, work_ns: int, gaps: list[tuple[int, int]], ends: int | None
) -> None:
    """Against counting each nanosecond: ten units of work in an idle one, one in a busy one."""
    rest, at_ns, busy = RestLoad(from_ns, work_ns), 0, set[int]()
    for gap_ns, length_ns in gaps:
        rest.computes((at_ns + gap_ns, at_ns + gap_ns + length_ns))
        busy |= set(range(at_ns + gap_ns, at_ns + gap_ns + length_ns))
        at_ns += gap_ns + length_ns
    if ends is not None:
        rest.stops_computing(ends)
        busy = {each for each in busy if each < ends}
    now_ns, left = from_ns, 10 * work_ns
    while left > 0:
        left -= 1 if now_ns in busy else 10
        now_ns += 1
    assert rest.end_ns == pytest.approx(now_ns, abs=1)


def test_a_part_that_batches_have_delayed_completes_sooner_when_its_pipeline_breaks() -> None:
    made, now_ns = serving(ON_CORES), s(5) + ms(1)
    made.obey(s(3), layers(2, "n0", LayerSet(0, 1).others, R0))
    play_until(made, now_ns)
    for number in range(1000):
        made.start_batch(now_ns, batch(number, R1))
    play_until(made, s(5) + ms(700))  # beyond the 600 ms that it takes if it computes nothing
    made.happen(s(5) + ms(700), -1, Crashed(R1))
    end_ns = made._replicas[R0].rest_load.end_ns  # type: ignore[union-attr]
    assert completed(play_until(made, s(9))) == [(end_ns, R0)]


def test_the_rest_is_loaded_with_the_cores_that_a_part_has_now() -> None:
    made = cluster(startup=ON_CORES)
    slot = structs.replace(spec().slot, cores=0.25)
    for place, brings in enumerate((LayerSet(0, 1), LayerSet(1, 3))):
        made.obey(0, layers(place, f"n{place}", brings))
        order = part(place, place)
        made.obey(0, structs.replace(order, spec=structs.replace(order.spec, slot=slot)))
    play_until(made, s(3))
    made.obey(s(3), layers(2, "n0", LayerSet(0, 1).others, R0))
    play_until(made, s(5) + ms(1200))
    made.obey(s(5) + ms(1200), ResizeWorker(R0, 1.0))
    assert completed(play_until(made, s(60))) == [(s(5) + ms(1500), R0)], "half of 2.4 s, and half of 600 ms"


def test_parts_of_a_warm_world_get_the_other_layers_at_once() -> None:
    nodes = [Node(f"n{number}", "slow", 8.0, 1) for number in range(2)]
    weights = {("only", "a", "slow"): ModelWeights("a", 300_000_000)}
    places = WeightPlaces(Topology(TopologyTruth(MBPS, "per_node", node_mbps=MBPS), nodes), weights)
    profiles = {("only", "a", "slow"): structs.replace(PROFILE, startup=ON_CORES, layers=EQUAL)}
    made = cluster_of(start_ms=900.0, nodes=nodes, profiles=profiles, weights=places, warm=True)
    for place, brings in enumerate((LayerSet(0, 1), LayerSet(1, 3))):
        made.obey(0, layers(place, f"n{place}", brings))
        made.obey(0, part(place, place))
    assert ready(play_until(made, 1)) == [(0, R0), (0, R1)]
    made.obey(1, layers(2, "n0", LayerSet(0, 1).others, R0))
    made.obey(1, layers(3, "n1", LayerSet(1, 3).others, R1))
    assert completed(play_until(made, s(9))) == [(1, R0), (1, R1)]
    made.obey(s(9), StartWorker(R2, spec(node="n0")))
    assert ready(play_until(made, s(11))) == [(s(9) + ms(900), R2)], "the node has the whole model"


def test_a_model_is_sent_to_an_accelerator_while_that_computes() -> None:
    made = serving()
    made.obey(s(3), layers(2, "n0", LayerSet(0, 1).others, R0))
    play_until(made, s(5))
    made.start_batch(s(5), batch(0, R0))
    assert completed(play_until(made, s(9))) == [(s(5) + ms(600), R0)]


def test_a_batch_of_any_part_passes_all_of_them() -> None:
    made = serving()
    stations, now_ns = stations_ns(made), s(3)
    assert stations[1] == pytest.approx(ms(1) * moving_ms(EQUAL.blocks[0].crossing_bytes, MBPS))
    made.start_batch(now_ns, batch(0, R1))
    made.start_batch(now_ns, batch(1, R0))
    told = [(at_ns, each.batch) for at_ns, each in play_until(made, s(9)) if isinstance(each, Finished)]
    first = passed_line(now_ns, stations, [])
    second = passed_line(now_ns, stations, first)
    assert told == [(round(first[-1]), 0), (round(second[-1]), 1)]
    assert told[1][0] - told[0][0] == pytest.approx(max(stations), abs=2), "the slowest station"


def test_a_complete_replica_runs_alone_when_the_pipeline_is_empty() -> None:
    made = serving()
    made.obey(s(3), layers(2, "n0", LayerSet(0, 1).others, R0))
    made.obey(s(3), layers(3, "n1", LayerSet(1, 3).others, R1))
    play_until(made, s(5) + ms(599))
    stations, alone_ns = stations_ns(made), round(made._replicas[R0].speed.means_ns[1])
    made.start_batch(s(5) + ms(599), batch(0, R0))
    left_ns = round(passed_line(s(5) + ms(599), stations, [])[-1])
    assert completed(play_until(made, s(5) + ms(600))) == [(s(5) + ms(600), R0)]
    made.start_batch(s(5) + ms(600), batch(1, R1))
    told = [(at_ns, each.batch) for at_ns, each in play_until(made, s(9)) if isinstance(each, Finished)]
    assert told == [(left_ns, 0), (left_ns + alone_ns, 1)]


def test_batches_of_the_others_are_lost_with_a_part() -> None:
    made = serving()
    made.start_batch(s(3), batch(0, R0))
    made.start_batch(s(3), batch(1, R1))
    made.happen(s(3), -1, Crashed(R0))
    told = play_until(made, s(9))
    assert told[:2] == [
        (s(3), WorkerLost(R0, "the worker process died")),
        (s(3), BatchLost(1, R1, "replica 0, another part of it, is lost")),  # type: ignore[arg-type]
    ]
    assert not any(isinstance(each, Finished) for _, each in told)
    made.obey(s(9), layers(2, "n1", LayerSet(1, 3).others, R1))
    assert completed(play_until(made, s(12))) == [(s(10) + ms(300), R1)], "it completes itself"
    made.start_batch(s(12), batch(2, R1))
    ((at_ns, _),) = play_until(made, s(20))
    assert at_ns == s(12) + round(made._replicas[R1].speed.means_ns[1])


def test_a_part_that_starts_after_another_one_is_lost_serves_alone_in_the_end() -> None:
    made = cluster()
    made._nodes.lose(0, "n0")
    made.obey(0, part(0))
    made.obey(0, layers(1, "n1", LayerSet(1, 3)))
    made.obey(0, part(1, 1))
    assert ready(play_until(made, s(3))) == [(ms(2600), R1)]
    made.obey(s(3), layers(3, "n1", LayerSet(1, 3).others, R1))
    assert completed(play_until(made, s(9)))
    made.start_batch(s(9), batch(0, R1))
    alone_ns = round(made._replicas[R1].speed.means_ns[1])
    assert [now_ns for now_ns, each in play_until(made, s(99)) if isinstance(each, Finished)] == [s(9) + alone_ns]


def test_layers_whose_source_is_lost_can_be_ordered_again() -> None:
    made = serving()
    made.obey(s(3), Transfer(TransferId(9), ModelWeights("a", 300_000_000), STORE, ("n3",)))
    play_until(made, s(7))
    rest = structs.replace(layers(10, "n0", LayerSet(0, 1).others, R0), source="n3")
    made.obey(s(7), rest)
    made.happen(s(8), -1, NodeFailed("n3"))
    told = play_until(made, s(8))
    assert [each.transfer for _, each in told if isinstance(each, TransferFailed)] == [10]
    assert not any(isinstance(each, WorkerLost) for _, each in told), "the part serves on"
    made.obey(s(8), structs.replace(rest, transfer=TransferId(11), source=STORE))
    assert completed(play_until(made, s(20))) == [(s(10) + ms(600), R0)]


def test_parts_that_stop_break_nothing() -> None:
    made = serving()
    made.obey(s(3), StopWorker(R0, "it is over"))
    made.obey(s(3), StopWorker(R1, "it is over"))
    assert not any(isinstance(each, WorkerLost | BatchLost) for _, each in play_until(made, s(9)))


# The example of the Flashpoint specification, section 2.3


@dataclass(frozen=True)
class LateStart(Scale):
    """No replicas in the first ten seconds, then two."""

    is_quick: ClassVar[bool] = True
    period_ns: int = s(1)

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[Plan, None]:
        (stage,) = view.stages
        group = Group(ReplicaSpec(stage.name, "v", Slot(1.0, "gpu")), 2 * (now_ns >= s(10)))
        return Plan((StagePlan(stage.name, (group,), batch_max=1),), why="two, late"), None


def example() -> World:
    """Two accelerators, a model that starts in 24 s and runs for 4 s, two equal layers, 1 s between them."""
    block = LayerBlock(
        end="",
        operators="MatMul",
        layers=1,
        param_bytes=1,
        output_bytes=1_000_000,
        crossing_bytes=1_000_000,
        load_ms=12_000,
        latency_ms=LatencyTable({1: {1.0: 2000.0}}),
    )
    layers = LayerProfile(
        blocks=(block,) * 2,
        load_ms=24_000,
        latency_ms=LatencyTable({1: {1.0: 4000.0}}),
        input_bytes=1,
        move_ms_per_mb=1.0,
        difference=0.0,
    )
    profile = Profile(
        latency_ms=Quadratic(0.0, 4000.0, 0.0),
        max_batch=1,
        max_cores=1,
        load_s=24.0,
        startup=Startup(0.0, 0.0, 0.0, send_s=24.0),
        weights_bytes=2,
        layers=layers,
    )
    application = Application(
        name="model",
        slo_ms=1e6,
        stages=(Stage("model", (Variant("v", profile=profile),)),),
        system=SystemChoice("static"),
        cluster=tuple(Node(f"h{place}", "gpu", 1.0, 1 << 30) for place in range(2)),
        estimates=Estimates(correct=False),
    )
    truth = Truth(
        service=ServiceTruth(ratio=1.0, cv=0.0),
        cold_start=ColdStartTruth(warm=False),
        network=NetworkTruth(payload_kb=(0.0,), topology=TopologyTruth(8.0, "per_node", 8.0)),
        plan_ms=0.0,
    )
    trace = Trace("eight at once", s(60), "assumed", lambda: iter([array("q", [s(10) - 1] * 8)]))
    return World.of(application, trace, seed=0, duration_ns=s(60), truth=truth)


@pytest.mark.parametrize(("parts", "mean_s"), [(False, 34.0), (True, 25.5)])
def test_the_example_of_two_accelerators_and_eight_requests(parts: bool, mean_s: float) -> None:
    """34 s with whole models. With parts 24 s in the specification, whose pipeline takes a third request while one is
    between the parts; ours has one for each worker, so two are answered every 5 s. Meanwhile the parts get the rest."""
    declared = {"provision": {"name": "cheapest_start", "partition": parts, "link_mbps": 8.0}, "drop": "never"}
    policies = replace(build_system("static", declared).policies, scale=LateStart())
    world, log = replace(example(), policies=policies), MemoryLog()
    simulate(world, [log], check_first=10_000, patience_ns=s(600))
    arrived = {each.id: now_ns for now_ns, each in log.records if isinstance(each, Request)}
    latencies_s = [to_s(now_ns - arrived[each.request]) for now_ns, each in log.records if isinstance(each, End)]
    assert len(latencies_s) == 8
    assert sum(latencies_s) / 8 == pytest.approx(mean_s, abs=0.01)
    complete = [now_ns for now_ns, each in log.records if isinstance(each, WorkerCompleted)]
    assert len(complete) == 2 * parts
    if parts:
        assert s(22) < min(complete) <= max(complete) < s(35), "they serve before they are complete"
