from collections.abc import Mapping, Sequence
from heapq import heappop
from itertools import pairwise

import pytest
from msgspec import structs

from sloop.actions import (
    AcquireNode,
    CancelTransfer,
    Decided,
    Evict,
    ReleaseNode,
    ResizeWorker,
    StartBatch,
    StartWorker,
    StopWorker,
    Transfer,
)
from sloop.app.graph import Each, Graph, GraphStage
from sloop.app.scenario import ResizeRule, TopologyTruth
from sloop.events import (
    BatchFailed,
    Event,
    Finished,
    NodeLost,
    NodeReady,
    NodeReleased,
    TransferFailed,
    Transferred,
    WorkerLost,
    WorkerProgressed,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.profile.profile import Amdahl, Profile, Startup
from sloop.runlog.durations import VariantKey
from sloop.sim.cluster import Cluster, ClusterTruths
from sloop.sim.happenings import NodeFailed
from sloop.sim.replicas import Truths
from sloop.sim.truth.branches import BranchSampler
from sloop.sim.truth.cold_start import AcquisitionSampler, ColdStartSampler, ResizeSampler, SpareWorkers
from sloop.sim.truth.failure import FaultRates, FaultSampler
from sloop.sim.truth.flows import Topology
from sloop.sim.truth.service import ServiceSampler
from sloop.sim.truth.weights import WeightPlaces
from sloop.units import FOREVER_NS, ms, s
from sloop.vocabulary import STORE, BatchId, ModelWeights, Node, ReplicaId, ReplicaSpec, RequestId, Slot, TransferId

PROFILE = Profile(latency_ms=Amdahl(gamma=10.0, epsilon=0.0, delta=0.0, eta=0.0), max_batch=4, max_cores=8)
"""A batch of b on c cores takes 10 b / c ms."""
QUICK = Profile(latency_ms=Amdahl(gamma=5.0, epsilon=0.0, delta=0.0, eta=0.0), max_batch=4, max_cores=8)
R0 = ReplicaId(0)
N0, RENTED = Node("n0", "slow", 8.0, 1), Node("n1", "quick", 8.0, 1, on_demand=True)


def cluster_of(
    faults: FaultRates | None = None,
    *,
    start_ms: float = 0.0,
    local_s: float | None = None,
    resize_ms: float = 0.0,
    resize_cv: float = 0.0,
    in_flight: ResizeRule = "next_batch",
    branches: BranchSampler | None = None,
    warm: bool = False,
    profiles: Mapping[VariantKey, Profile] | None = None,
    weights: WeightPlaces | None = None,
    quota_ms: float | None = None,
    nodes: Sequence[Node] = (N0, RENTED),
    spares: int = 0,
) -> Cluster:
    sampler = FaultSampler(1, faults or FaultRates())
    speeds = {("only", "a", "slow"): PROFILE, ("only", "a", "quick"): QUICK, **(profiles or {})}
    truths = Truths(
        ServiceSampler(1, speeds, cv=0.0, ratio=1.0, quota_ms=quota_ms),
        ColdStartSampler(1, profiles or {}, start_s=start_ms / 1e3, local_s=local_s, warm=warm),
        ResizeSampler(1, delay_ns=ms(resize_ms), cv=resize_cv, in_flight=in_flight),
        sampler,
        branches,
    )
    acquisition = AcquisitionSampler(1, {"quick": 60.0}, warm=warm)
    waiting = SpareWorkers(spares, 1.0)
    found = ClusterTruths({"only": truths}, acquisition, sampler, is_warm=warm, weights=weights, spares=waiting)
    return Cluster(found, nodes)


def spec(cores: float = 1.0, hardware: str = "slow", node: str = "n0") -> ReplicaSpec:
    return ReplicaSpec("only", "a", Slot(cores, hardware), node)


def batch(id: int, size: int = 1) -> StartBatch:
    return StartBatch(BatchId(id), R0, "only", tuple(RequestId(number) for number in range(size)))


def play_until(cluster: Cluster, until_ns: int) -> list[tuple[int, Event]]:
    """Everything the core would be told up to and at an instant."""
    told: list[tuple[int, Event]] = []
    while cluster.pending.heap[0][0] <= until_ns:
        now_ns, sequence, happening = heappop(cluster.pending.heap)
        event = cluster.happen(now_ns, sequence, happening)
        if event is not None:
            told.append((now_ns, event))
    return told


def started(cluster: Cluster, cores: float = 1.0) -> Cluster:
    cluster.obey(0, StartWorker(R0, spec(cores)))
    play_until(cluster, ms(0))
    return cluster


def test_a_start_progresses_and_is_ready_after_its_cold_start() -> None:
    cluster = cluster_of(start_ms=300)
    cluster.obey(ms(5), StartWorker(R0, spec()))
    assert play_until(cluster, s(1)) == [(ms(5), WorkerProgressed(R0, "loading")), (ms(305), WorkerReady(R0))]


def test_a_batch_takes_what_the_profile_says_for_its_size_and_cores() -> None:
    cluster = started(cluster_of(), cores=2.0)
    cluster.start_batch(ms(1), batch(7, size=3))
    assert play_until(cluster, s(1)) == [(ms(16), Finished(BatchId(7), R0, ms(15)))]


def test_a_replica_that_was_idle_has_saved_cpu_time() -> None:
    cluster = started(cluster_of(quota_ms=10), cores=0.5)
    cluster.start_batch(ms(100), batch(1, size=2))
    assert play_until(cluster, s(1)) == [(ms(130), Finished(BatchId(1), R0, ms(30)))]
    cluster.start_batch(ms(130), batch(2, size=2))
    assert play_until(cluster, s(1)) == [(ms(170), Finished(BatchId(2), R0, ms(40)))]
    cluster.obey(ms(170), ResizeWorker(R0, 1.0))
    play_until(cluster, ms(170))
    cluster.start_batch(ms(300), batch(3, size=2))
    assert play_until(cluster, s(1)) == [(ms(320), Finished(BatchId(3), R0, ms(20)))], "whole cores have no quota"


def test_a_resize_counts_from_the_next_batch() -> None:
    cluster = started(cluster_of(resize_ms=50))
    cluster.start_batch(0, batch(0, size=4))
    cluster.obey(0, ResizeWorker(R0, 4.0))
    assert play_until(cluster, ms(45)) == [(ms(40), Finished(BatchId(0), R0, ms(40)))]
    cluster.start_batch(ms(45), batch(1, size=4))
    assert play_until(cluster, ms(90)) == [(ms(50), WorkerResized(R0, 4.0)), (ms(85), Finished(BatchId(1), R0, ms(40)))]
    cluster.start_batch(ms(90), batch(2, size=4))
    assert play_until(cluster, ms(100)) == [(ms(100), Finished(BatchId(2), R0, ms(10)))]


def test_a_resize_rescales_what_remains_where_the_world_says_so() -> None:
    cluster = started(cluster_of(resize_ms=20, in_flight="rescale"))
    cluster.start_batch(0, batch(0, size=4))
    cluster.obey(0, ResizeWorker(R0, 2.0))
    assert play_until(cluster, s(1)) == [(ms(20), WorkerResized(R0, 2.0)), (ms(30), Finished(BatchId(0), R0, ms(30)))]


def test_resizes_take_effect_in_the_order_they_were_given() -> None:
    """However long each of them takes."""
    cluster, sizes = started(cluster_of(resize_ms=20, resize_cv=0.5)), (2.0, 3.0, 4.0, 5.0, 6.0)
    for at_ms, cores in enumerate(sizes):
        cluster.obey(ms(at_ms), ResizeWorker(R0, cores))
    assert [event for _, event in play_until(cluster, s(1))] == [WorkerResized(R0, cores) for cores in sizes]


def test_what_was_under_way_dies_with_the_replica() -> None:
    cluster = started(cluster_of(resize_ms=20))
    cluster.start_batch(0, batch(0))
    cluster.obey(0, ResizeWorker(R0, 2.0))
    cluster.obey(ms(1), StopWorker(R0, "no use for it"))
    cluster.obey(ms(1), StopWorker(R0, "said twice"))
    cluster.start_batch(ms(1), batch(1))
    assert play_until(cluster, s(1)) == [(ms(1), WorkerStopped(R0))]
    assert not cluster.pending.void


def test_a_starting_replica_that_is_stopped_is_never_ready() -> None:
    cluster = cluster_of(start_ms=300)
    cluster.obey(0, StartWorker(R0, spec()))
    cluster.obey(ms(10), StopWorker(R0, "not needed any more"))
    assert [type(event) for _, event in play_until(cluster, s(1))] == [WorkerStopped]


def test_notes_are_no_orders() -> None:
    cluster = cluster_of()
    cluster.obey(0, Decided("plan", "because"))
    assert play_until(cluster, s(1)) == []
    assert cluster.pending.heap[0][0] == FOREVER_NS


def test_a_crash_loses_the_replica_and_its_batch() -> None:
    cluster = started(cluster_of(FaultRates(crash_mtbf_s=0.001)))
    cluster.start_batch(0, batch(0, size=4))
    told = play_until(cluster, s(1))
    assert [event for _, event in told] == [WorkerLost(R0, "the worker process died")]


def test_a_node_takes_all_its_replicas_down_and_starts_none_until_it_is_repaired() -> None:
    cluster = started(cluster_of(FaultRates(node_mtbf_s=0.5, node_repair_s=1000.0)))
    lost, *rest = play_until(cluster, s(10))
    assert lost[1] == NodeLost("n0", "it went down")
    assert rest == [(lost[0], WorkerLost(R0, "node n0 went down"))]
    cluster.obey(s(10), StartWorker(ReplicaId(1), spec()))
    assert play_until(cluster, s(10)) == [(s(10), WorkerLost(ReplicaId(1), "node n0 is not ready"))]
    repaired = (lost[0] + s(1000), NodeReady(N0))
    assert play_until(cluster, repaired[0]) == [repaired]
    cluster.obey(repaired[0], StartWorker(ReplicaId(2), spec()))
    assert (repaired[0], WorkerReady(ReplicaId(2))) in play_until(cluster, repaired[0])


def test_a_node_is_ready_when_it_has_been_acquired_and_gone_when_it_has_been_released() -> None:
    cluster = cluster_of()
    cluster.obey(s(1), StartWorker(R0, spec(hardware="quick", node="n1")))
    assert play_until(cluster, s(1)) == [(s(1), WorkerLost(R0, "node n1 is not ready"))]
    cluster.obey(s(1), AcquireNode("n1"))
    assert play_until(cluster, s(100)) == [(s(61), NodeReady(RENTED))]
    cluster.obey(s(100), ReleaseNode("n1"))
    assert play_until(cluster, s(100)) == [(s(100), NodeReleased("n1"))]
    cluster.obey(s(100), AcquireNode("n1"))
    assert play_until(cluster, s(1000)) == [(s(160), NodeReady(RENTED))]


def test_what_is_ordered_in_the_first_microsecond_of_a_warm_world_is_there_at_once() -> None:
    cluster = cluster_of(start_ms=300, warm=True)
    cluster.obey(5, AcquireNode("n1"))
    cluster.obey(6, StartWorker(R0, spec()))
    assert play_until(cluster, 10) == [(5, NodeReady(RENTED)), (6, WorkerReady(R0))]
    cluster.obey(ms(1), StartWorker(ReplicaId(1), spec()))
    assert play_until(cluster, s(1))[-1] == (ms(301), WorkerReady(ReplicaId(1)))


def test_the_provider_may_have_no_node_left() -> None:
    cluster = cluster_of(FaultRates(failed_acquire=1.0))
    cluster.obey(0, AcquireNode("n1"))
    assert play_until(cluster, s(100)) == [(s(60), NodeLost("n1", "no quick is available"))]


def test_a_node_on_demand_that_is_lost_must_be_acquired_again() -> None:
    cluster = cluster_of(FaultRates(node_mtbf_s=1.0, node_repair_s=1.0))
    cluster.obey(0, AcquireNode("n1"))
    told = [
        event
        for _, event in play_until(cluster, s(300))
        if event not in (NodeReady(N0), NodeLost("n0", "it went down"))
    ]
    assert told == [NodeReady(RENTED), NodeLost("n1", "it went down")]
    cluster.obey(s(300), AcquireNode("n1"))
    assert (s(360), NodeReady(RENTED)) in play_until(cluster, s(360))


def test_an_outage_takes_the_node_in_use_and_nobody_gets_it_before_it_is_over() -> None:
    cluster = cluster_of(FaultRates(outage_at_s=100.0, outage_s=80.0))
    cluster.obey(0, AcquireNode("n1"))
    play_until(cluster, s(60))
    cluster.obey(s(61), StartWorker(R0, spec(hardware="quick", node="n1")))
    assert play_until(cluster, s(100))[-2:] == [
        (s(100), NodeLost("n1", "it went down")),
        (s(100), WorkerLost(R0, "node n1 went down")),
    ]
    cluster.obey(s(110), AcquireNode("n1"))
    assert play_until(cluster, s(170)) == [(s(170), NodeLost("n1", "no quick is available"))]
    cluster.obey(s(180), AcquireNode("n1"))
    assert play_until(cluster, s(259)) == [(s(240), NodeReady(RENTED))]
    assert play_until(cluster, s(420)) == [], "no node has a replica when the next outage begins"


def test_an_outage_of_a_node_that_is_always_there_ends_by_itself() -> None:
    cluster = started(cluster_of(FaultRates(outage_at_s=1.0, outage_s=2.0)))
    assert play_until(cluster, s(4)) == [
        (s(1), NodeLost("n0", "it went down")),
        (s(1), WorkerLost(R0, "node n0 went down")),
        (s(3), NodeReady(N0)),
    ]
    cluster.stop_faults(s(4))
    cluster.obey(s(4), StartWorker(ReplicaId(1), spec()))
    assert all(not isinstance(event, NodeLost) for _, event in play_until(cluster, s(50)))


def test_background_work_slows_batches_in_phases() -> None:
    rates = FaultRates(background=0.3, background_s=3.0, background_factor=2.0, background_device_factor=1.5)
    sampler = FaultSampler(4, rates)
    factors = [sampler.slowed(s(second / 10), on_device=False) for second in range(30_000)]
    assert set(factors) == {1.0, 2.0}
    assert factors.count(2.0) / len(factors) == pytest.approx(0.3, abs=0.03)
    phases = sum(after > before for before, after in pairwise(factors))
    assert phases == pytest.approx(3000 / 10, rel=0.15), "3 s of every 10 s on average"
    assert FaultSampler(4, FaultRates(background=1.0)).slowed(0, on_device=True) == 1.035
    cluster = started(cluster_of(FaultRates(background=1.0)))
    cluster.start_batch(ms(1), batch(7, size=3))
    assert play_until(cluster, s(1)) == [(ms(61), Finished(BatchId(7), R0, ms(60)))]


def test_a_released_node_fails_no_more() -> None:
    cluster = cluster_of(FaultRates(node_mtbf_s=50.0, node_repair_s=1e6))
    cluster.obey(0, AcquireNode("n1"))
    play_until(cluster, s(60))
    cluster.obey(s(60), ReleaseNode("n1"))
    later = [event for _, event in play_until(cluster, s(10_000))]
    assert NodeLost("n1", "it went down") not in later
    assert not cluster.pending.void


def test_a_replica_is_as_fast_as_its_kind_of_hardware() -> None:
    cluster = cluster_of(warm=True)
    cluster.obey(0, AcquireNode("n1"))
    play_until(cluster, 0)
    cluster.obey(1, StartWorker(R0, spec(hardware="quick", node="n1")))
    play_until(cluster, 1)
    cluster.start_batch(ms(1), batch(0))
    assert play_until(cluster, s(1)) == [(ms(6), Finished(BatchId(0), R0, ms(5)))]


def test_a_start_may_fail() -> None:
    cluster = cluster_of(FaultRates(failed_start=1.0), start_ms=100)
    cluster.obey(0, StartWorker(R0, spec()))
    assert [type(event) for _, event in play_until(cluster, s(1))] == [WorkerProgressed, WorkerLost]


def test_a_slow_start_is_slow() -> None:
    cluster = cluster_of(FaultRates(slow_start=1.0), start_ms=100)
    cluster.obey(0, StartWorker(R0, spec()))
    assert play_until(cluster, s(1))[-1] == (ms(500), WorkerReady(R0))


def test_a_machine_may_refuse_a_resize() -> None:
    cluster = started(cluster_of(FaultRates(refused_resize=1.0)))
    cluster.obey(0, ResizeWorker(R0, 8.0))
    assert play_until(cluster, s(1)) == [(0, WorkerResized(R0, 1.0))]


def test_a_straggler_takes_longer() -> None:
    cluster = started(cluster_of(FaultRates(straggler=1.0)))
    cluster.start_batch(0, batch(0))
    assert play_until(cluster, s(1)) == [(ms(50), Finished(BatchId(0), R0, ms(50)))]


def test_a_failing_model_says_so() -> None:
    cluster = started(cluster_of(FaultRates(failed_batch=1.0)))
    cluster.start_batch(0, batch(0))
    assert [event for _, event in play_until(cluster, s(1))] == [BatchFailed(BatchId(0), R0, "the model raised")]


def test_news_may_be_lost_late_or_repeated() -> None:
    news = Finished(BatchId(0), R0, ms(10))
    lost = started(cluster_of(FaultRates(lost_finished=1.0)))
    lost.start_batch(0, batch(0))
    assert play_until(lost, s(1)) == []
    late = started(cluster_of(FaultRates(late_finished=1.0)))
    late.start_batch(0, batch(0))
    [(at_ns, event)] = play_until(late, s(1))
    assert event == news
    assert at_ns > ms(10)
    repeated = started(cluster_of(FaultRates(repeated_finished=1.0)))
    repeated.start_batch(0, batch(0))
    assert [event for _, event in play_until(repeated, s(1))] == [news, news]


def test_a_healed_cluster_breaks_no_more() -> None:
    faults = FaultRates(crash_mtbf_s=0.01, node_mtbf_s=0.01, failed_start=1.0, failed_batch=1.0, refused_resize=1.0)
    cluster = cluster_of(faults, start_ms=100)
    cluster.obey(0, StartWorker(R0, spec()))
    cluster.stop_faults(0)
    assert play_until(cluster, ms(100))[-1] == (ms(100), WorkerReady(R0))
    cluster.start_batch(ms(100), batch(0))
    cluster.obey(ms(100), ResizeWorker(R0, 2.0))
    assert [event for _, event in play_until(cluster, s(100))] == [
        WorkerResized(R0, 2.0),
        Finished(BatchId(0), R0, ms(10)),
    ]


def test_a_healed_cluster_repairs_its_nodes() -> None:
    cluster = started(cluster_of(FaultRates(node_mtbf_s=0.5, node_repair_s=1e6)))
    play_until(cluster, s(100))
    cluster.stop_faults(s(100))
    assert play_until(cluster, s(10**7)) == [(s(100), NodeReady(N0))]
    assert not cluster.pending.void


PARTS = Graph((GraphStage("only"), GraphStage("more", ("only",), each=Each("only"))))


def test_news_say_where_requests_go_next_however_late_or_often_they_come() -> None:
    def branches() -> BranchSampler:
        return BranchSampler(1, PARTS, fan_out={"more": (0, 2, 5)})

    expected = branches().taken(batch(0, size=4))
    assert len(expected) == 4
    assert {count for (count,) in expected} <= {0, 2, 5}
    calm = started(cluster_of(branches=branches()))
    calm.start_batch(0, batch(0, size=4))
    assert play_until(calm, s(1)) == [(ms(40), Finished(BatchId(0), R0, ms(40), expected))]
    resized = started(cluster_of(resize_ms=20, in_flight="rescale", branches=branches()))
    resized.start_batch(0, batch(0, size=4))
    resized.obey(0, ResizeWorker(R0, 2.0))
    assert play_until(resized, s(1))[-1] == (ms(30), Finished(BatchId(0), R0, ms(30), expected))
    repeated = started(cluster_of(FaultRates(repeated_finished=1.0, late_finished=1.0), branches=branches()))
    repeated.start_batch(0, batch(0, size=4))
    news = [event for _, event in play_until(repeated, s(1))]
    assert news == [Finished(BatchId(0), R0, ms(40), expected)] * 2


def test_without_branches_nothing_is_said_of_them() -> None:
    cluster = started(cluster_of(branches=BranchSampler(1, Graph((GraphStage("only"), GraphStage("more", ("only",)))))))
    cluster.start_batch(0, batch(0))
    assert play_until(cluster, s(1)) == [(ms(10), Finished(BatchId(0), R0, ms(10)))]


# Weights that must be fetched

R1 = ReplicaId(1)


def fetching(
    faults: FaultRates | None = None, *, start_ms: float = 400.0, warm: bool = False, spares: int = 0
) -> Cluster:
    """Weights of 100 MB, and a store whose link moves 100 MB a second."""
    parts = structs.replace(PROFILE, startup=Startup(process_s=1.0, weights_s=2.0, first_batch_s=1.0))
    weights = {("only", "a", hardware): ModelWeights("a", 100_000_000) for hardware in ("slow", "quick")}
    places = WeightPlaces(Topology(TopologyTruth(800.0), [N0, RENTED]), weights)
    profiles = {("only", "a", "slow"): parts}
    return cluster_of(faults, start_ms=start_ms, warm=warm, profiles=profiles, weights=places, spares=spares)


def sharing(
    *,
    parts: Startup | None = Startup(1.0, 2.0, 1.0, 4.0),  # noqa: B008  # frozen
    spares: int = 0,
    local_s: float | None = None,
) -> Cluster:
    """Three more nodes on a network of 100 MB a second, which are there from the start; starts take 800 ms."""
    nodes = [Node(f"n{number}", "slow", 8.0, 1) for number in range(4)]
    places = WeightPlaces(Topology(TopologyTruth(800.0, node_mbps=800.0), nodes), {("only", "a", "slow"): HUNDRED})
    profiles = {("only", "a", "slow"): structs.replace(PROFILE, startup=parts)}
    return cluster_of(start_ms=800.0, local_s=local_s, nodes=nodes, profiles=profiles, weights=places, spares=spares)


HUNDRED = ModelWeights("a", 100_000_000)


def provided(number: int, node: str, transfer: int | None = None) -> StartWorker:
    brought = None if transfer is None else TransferId(transfer)
    return StartWorker(ReplicaId(number), spec(node=node), transfer=brought)


def transfer(number: int, source: str, *receivers: str, is_kept: bool = True) -> Transfer:
    return Transfer(TransferId(number), HUNDRED, source, receivers, is_kept)


def transferred(told: list[tuple[int, Event]]) -> list[tuple[int, int, str]]:
    return [(now_ns, each.transfer, each.node) for now_ns, each in told if isinstance(each, Transferred)]


def test_a_chain_takes_as_long_as_one_transfer_and_those_who_wait_go_on() -> None:
    cluster = sharing()
    cluster.obey(0, transfer(0, STORE, "n0", "n1"))
    cluster.obey(0, provided(0, "n0", 0))
    told = play_until(cluster, s(1.5))
    assert transferred(told) == [(s(1), 0, "n0"), (s(1), 0, "n1")]
    assert steps(told) == [(0, "fetching"), (s(1), "spawning"), (ms(1100), "loading"), (ms(1300), "sending")]
    cluster.obey(s(2), transfer(1, "n1", "n2"))
    cluster.obey(s(2), transfer(2, "n1", "n3"))
    cluster.obey(s(2), provided(1, "n1"))
    told = play_until(cluster, s(9))
    assert transferred(told) == [(s(4), 1, "n2"), (s(4), 2, "n3")], "two transfers share the link of their source"
    assert steps(told, R1)[0] == (s(2), "spawning"), "its weights are there"


def test_a_chain_goes_on_without_a_link_that_is_lost() -> None:
    cluster = sharing()
    cluster.obey(0, transfer(0, STORE, "n0", "n1", "n2"))
    for number in range(3):
        cluster.obey(0, provided(number, f"n{number}", 0))
    play_until(cluster, ms(500))
    cluster.happen(ms(500), -1, NodeFailed("n1"))
    told = play_until(cluster, s(9))
    assert transferred(told) == [(s(1), 0, "n0"), (s(1), 0, "n2")]
    assert (ms(500), WorkerLost(R1, "node n1 went down")) in told
    assert not any(isinstance(event, TransferFailed) for _, event in told)


def test_when_the_source_is_lost_nobody_gets_the_rest() -> None:
    cluster = sharing()
    cluster.obey(0, transfer(0, STORE, "n0"))
    play_until(cluster, s(2))
    cluster.obey(s(2), transfer(1, "n0", "n1", "n2"))
    cluster.obey(s(2), provided(0, "n1", 1))
    play_until(cluster, ms(2500))
    cluster.happen(ms(2500), -1, NodeFailed("n0"))
    told = play_until(cluster, s(9))
    failed = [(now_ns, event.node) for now_ns, event in told if isinstance(event, TransferFailed)]
    assert failed == [(ms(2500), "n1"), (ms(2500), "n2")]
    assert (ms(2500), WorkerLost(R0, "its weights do not come")) in told
    cluster.obey(s(10), provided(1, "n1", 1))
    assert play_until(cluster, s(11)) == [(s(10), WorkerLost(R1, "its weights do not come"))]


def test_a_transfer_that_is_cancelled_leaves_its_links_to_others() -> None:
    cluster = sharing()
    cluster.obey(0, transfer(0, STORE, "n0", "n1", is_kept=False))
    cluster.obey(0, transfer(1, STORE, "n2", is_kept=False))
    cluster.obey(0, provided(0, "n0", 0))
    play_until(cluster, s(1))
    cluster.obey(s(1), CancelTransfer(TransferId(0), "n1"))
    play_until(cluster, ms(1500))
    cluster.obey(ms(1500), CancelTransfer(TransferId(1), "n2"))
    cluster.obey(ms(1500), CancelTransfer(TransferId(1), "n2"))
    assert transferred(play_until(cluster, s(9))) == [(ms(1750), 0, "n0")], "75 of 100 MB at half the rate"


def test_a_start_where_the_weights_are_takes_as_long_as_declared() -> None:
    cluster = sharing(local_s=0.08)
    cluster.obey(0, transfer(0, STORE, "n0"))
    cluster.obey(0, provided(0, "n0", 0))
    assert steps(play_until(cluster, s(3)))[-1] == (ms(1800), "ready")
    cluster.obey(s(3), provided(1, "n0"))
    found = steps(play_until(cluster, s(5)), R1)
    assert (found[0], found[1], found[-1]) == ((s(3), "spawning"), (ms(3010), "loading"), (ms(3080), "ready"))
    cluster.obey(s(5), Evict("n0", HUNDRED))
    cluster.obey(s(5), transfer(1, STORE, "n0"))
    cluster.obey(s(5), provided(2, "n0", 1))
    assert steps(play_until(cluster, s(9)), ReplicaId(2))[-1] == (ms(6800), "ready")


def test_what_is_not_kept_is_for_those_who_wait_alone() -> None:
    cluster = sharing()
    cluster.obey(0, transfer(0, STORE, "n0", is_kept=False))
    cluster.obey(0, provided(0, "n0", 0))
    told = play_until(cluster, s(5))
    assert steps(told)[-1] == (ms(1800), "ready")
    cluster.obey(s(5), StartWorker(R1, spec(node="n0")))
    assert steps(play_until(cluster, s(9)), R1)[0] == (s(5), "fetching")


def test_in_a_warm_world_the_first_weights_are_there_at_once() -> None:
    weights = WeightPlaces(Topology(TopologyTruth(800.0), [N0]), {("only", "a", "slow"): HUNDRED})
    cluster = cluster_of(start_ms=800.0, warm=True, weights=weights)
    cluster.obey(0, transfer(0, STORE, "n0"))
    cluster.obey(0, provided(0, "n0", 0))
    assert play_until(cluster, s(1)) == [(0, Transferred(TransferId(0), "n0")), (0, WorkerReady(R0))]


def steps(told: list[tuple[int, Event]], replica: ReplicaId = R0) -> list[tuple[int, str]]:
    """What a replica reported, and when."""
    return [
        (now_ns, event.step if isinstance(event, WorkerProgressed) else "ready")
        for now_ns, event in told
        if isinstance(event, WorkerProgressed | WorkerReady) and event.worker == replica
    ]


def test_a_start_fetches_the_weights_and_then_goes_through_its_steps() -> None:
    cluster = fetching()
    cluster.obey(ms(5), StartWorker(R0, spec()))
    assert steps(play_until(cluster, s(9))) == [
        (ms(5), "fetching"),
        (ms(1005), "spawning"),
        (ms(1105), "loading"),
        (ms(1305), "warming"),
        (ms(1405), "ready"),
    ]
    cluster.obey(s(10), StartWorker(R1, spec()))
    assert [step for _, step in steps(play_until(cluster, s(19)), R1)] == ["spawning", "loading", "warming", "ready"]
    assert cluster.pending.heap[0][0] == FOREVER_NS


def test_a_replica_takes_a_worker_that_waits_on_its_node_and_starts_without_a_new_process() -> None:
    parts = structs.replace(PROFILE, startup=Startup(process_s=5.0, weights_s=2.0, first_batch_s=1.0))
    cluster = cluster_of(start_ms=800, profiles={("only", "a", "slow"): parts}, spares=1)
    for number, at_ns in enumerate((ms(100), ms(200), ms(1100))):
        cluster.obey(at_ns, StartWorker(ReplicaId(number), spec()))
    ready = {event.worker: now_ns for now_ns, event in play_until(cluster, s(9)) if isinstance(event, WorkerReady)}
    assert ready == {R0: ms(400), R1: ms(1000), ReplicaId(2): ms(1400)}, "the second finds none"


def test_a_start_with_a_worker_that_waits_goes_through_the_other_steps() -> None:
    cluster = fetching(spares=1)
    cluster.obey(ms(5), StartWorker(R0, spec()))
    told = steps(play_until(cluster, s(9)))
    assert told == [(ms(5), "fetching"), (ms(1005), "loading"), (ms(1205), "warming"), (ms(1305), "ready")]


def test_a_start_that_fails_does_so_before_it_would_be_ready() -> None:
    parts = structs.replace(PROFILE, startup=Startup(process_s=5.0, weights_s=2.0, first_batch_s=1.0))
    profiles = {("only", "a", "slow"): parts}
    lost_ns = []
    for spares in (0, 1):
        cluster = cluster_of(FaultRates(failed_start=1.0), start_ms=800, profiles=profiles, spares=spares)
        cluster.obey(ms(5), StartWorker(R0, spec()))
        lost_ns += [now_ns - ms(5) for now_ns, event in play_until(cluster, s(9)) if isinstance(event, WorkerLost)]
    assert lost_ns[1] == lost_ns[0] * 300 // 800


def test_a_second_start_waits_for_the_same_weights_and_one_elsewhere_shares_the_link() -> None:
    cluster = fetching(start_ms=0)
    cluster.obey(0, AcquireNode("n1"))
    play_until(cluster, s(60))
    cluster.obey(s(60), StartWorker(R0, spec()))
    cluster.obey(s(60), StartWorker(ReplicaId(2), spec(hardware="quick", node="n1")))
    told = play_until(cluster, s(60) + ms(500))
    cluster.obey(s(60) + ms(500), StartWorker(R1, spec()))
    told += play_until(cluster, s(70))
    assert steps(told) == [(s(60), "fetching"), (s(62), "ready")]
    assert steps(told, R1) == [(s(60) + ms(500), "fetching"), (s(62), "ready")]
    assert steps(told, ReplicaId(2)) == [(s(60), "fetching"), (s(62), "ready")]


def test_a_start_that_is_stopped_while_it_fetches_leaves_the_link_to_others() -> None:
    cluster = fetching(start_ms=0)
    cluster.obey(0, AcquireNode("n1"))
    play_until(cluster, s(60))
    cluster.obey(s(60), StartWorker(R0, spec()))
    cluster.obey(s(60), StartWorker(R1, spec(hardware="quick", node="n1")))
    told = play_until(cluster, s(61))
    cluster.obey(s(61), StopWorker(R0, "not needed any more"))
    told += play_until(cluster, s(70))
    assert (s(61), WorkerStopped(R0)) in told
    assert steps(told) == [(s(60), "fetching")]
    assert steps(told, R1) == [(s(60), "fetching"), (s(61) + ms(500), "ready")]
    assert not cluster.pending.void


def test_a_node_that_fails_or_is_released_loses_its_weights() -> None:
    cluster = fetching(FaultRates(node_mtbf_s=1e9, node_repair_s=2.0), start_ms=0)
    cluster.obey(0, StartWorker(R0, spec()))
    play_until(cluster, ms(500))
    cluster.happen(ms(500), -1, NodeFailed("n0"))
    told = play_until(cluster, s(3))
    assert (ms(500), WorkerLost(R0, "node n0 went down")) in told
    cluster.obey(s(3), StartWorker(R1, spec()))
    assert steps(play_until(cluster, s(9)), R1) == [(s(3), "fetching"), (s(4), "ready")]
    cluster.obey(s(10), AcquireNode("n1"))
    play_until(cluster, s(70))
    for number, at_ns in enumerate((s(70), s(180)), start=2):
        cluster.obey(at_ns, StartWorker(ReplicaId(number), spec(hardware="quick", node="n1")))
        assert steps(play_until(cluster, at_ns + s(9)), ReplicaId(number))[0] == (at_ns, "fetching")
        cluster.obey(at_ns + s(9), StopWorker(ReplicaId(number), ""))
        cluster.obey(at_ns + s(9), ReleaseNode("n1"))
        cluster.obey(at_ns + s(9), AcquireNode("n1"))
        play_until(cluster, at_ns + s(80))


def test_a_start_may_fail_after_its_weights_have_come() -> None:
    cluster = fetching(FaultRates(failed_start=1.0, slow_start=1.0))
    cluster.obey(0, StartWorker(R0, spec()))
    told = play_until(cluster, s(9))
    assert told[0] == (0, WorkerProgressed(R0, "fetching"))
    (lost_ns,) = (now_ns for now_ns, event in told if isinstance(event, WorkerLost))
    assert s(1) < lost_ns < s(3)
    assert (0, "ready") not in steps(told)
    healed = fetching(FaultRates(failed_start=1.0))
    healed.obey(0, StartWorker(R0, spec()))
    healed.stop_faults(ms(1))
    assert steps(play_until(healed, s(9)))[-1] == (ms(1400), "ready")


def test_the_first_replicas_of_a_warm_world_have_their_weights() -> None:
    cluster = fetching(warm=True)
    cluster.obey(5, StartWorker(R0, spec()))
    assert play_until(cluster, 5) == [(5, WorkerReady(R0))]
    cluster.obey(s(1), StartWorker(R1, spec()))
    assert steps(play_until(cluster, s(9)), R1)[0] == (s(1), "spawning")
