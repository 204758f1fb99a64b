"""Bodies and shadows in the simulated cluster, and what the checkers say of a core that handles them wrongly."""

from collections.abc import Sequence

import pytest
from msgspec import structs

from sloop.actions import Decided, ResizeWorker, StartBatch, StartWorker, StopWorker
from sloop.app.application import Application, Stage, SystemChoice, Variant
from sloop.app.scenario import ResizeRule
from sloop.events import WOKE, Finished, WorkerLost, WorkerReady, WorkerResized, WorkerStopped
from sloop.profile.pairs import MIB
from sloop.sim.checkers import Checkers, Rules, Violation
from sloop.sim.cluster import Cluster, ClusterTruths
from sloop.sim.happenings import Crashed
from sloop.sim.replicas import Truths
from sloop.sim.truth.cold_start import AcquisitionSampler, ColdStartSampler, ResizeSampler, SpareWorkers
from sloop.sim.truth.failure import FaultRates, FaultSampler
from sloop.sim.truth.service import ServiceSampler
from sloop.units import ms, s
from sloop.vocabulary import (
    BatchId,
    Group,
    Node,
    Plan,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Slot,
    StagePlan,
    Worker,
    WorkerId,
)
from tests.profile.test_blocks import PROFILE
from tests.sim.test_checkers import Step, follow
from tests.sim.test_cluster import batch, play_until

R0, R1, R2 = (ReplicaId(id) for id in range(3))
NODE = Node("n0", "slow", 8.0, 400 * MIB)
BODY = ReplicaSpec("only", "a", Slot(2.0, "slow"), "n0")
SHADOW = Worker(4.0, (0, 1))
"""The pair of section 2.12 of AsyFunc's specification: batches of 1 to 4 take 29.85, 54, 59.1 and 85.35 ms, on the body
alone 51, 99, 147 and 195 ms; its blocks load in 10.26 ms."""
LOAD_NS = ms(10.26)


def cluster_of(
    faults: FaultRates | None = None, *, spares: SpareWorkers | None = None, in_flight: ResizeRule = "next_batch"
) -> Cluster:
    sampler, key = FaultSampler(1, faults or FaultRates()), ("only", "a", "slow")
    truths = Truths(
        ServiceSampler(1, {key: PROFILE}, cv=0.0, ratio=1.0),
        ColdStartSampler(1, {key: PROFILE}, start_s=0.0),
        ResizeSampler(1, in_flight=in_flight),
        sampler,
    )
    acquisition = AcquisitionSampler(1, {})
    made = Cluster(ClusterTruths({"only": truths}, acquisition, sampler, spares=spares or SpareWorkers()), [NODE])
    for id in (R0, R1, R2):
        made.obey(0, StartWorker(id, structs.replace(BODY, slot=Slot(2.0, "slow"))))
    play_until(made, 0)
    return made


def starts(replica: ReplicaId, number: int, shadow: Worker) -> StartWorker:
    return StartWorker(WorkerId(number), structs.replace(BODY, shape=(shadow,)), replica)


def attach(cluster: Cluster, now_ns: int = 0, number: int = 0, *, replica: ReplicaId = R0) -> None:
    cluster.obey(now_ns, starts(replica, 10 + number, SHADOW))


def took_ns(cluster: Cluster, now_ns: int, size: int) -> int:
    """How long a batch takes that begins now and is not disturbed."""
    cluster.start_batch(now_ns, batch(now_ns, size))
    (end,) = [(at_ns, event) for at_ns, event in play_until(cluster, now_ns + s(1)) if isinstance(event, Finished)]
    return end[0] - now_ns


def test_a_shadow_loads_its_blocks_and_the_pair_takes_what_its_blocks_take() -> None:
    cluster = cluster_of()
    assert took_ns(cluster, 0, 4) == ms(195)
    attach(cluster, s(1))
    assert play_until(cluster, s(2)) == [(s(1) + LOAD_NS, WorkerReady(WorkerId(10)))]
    assert [took_ns(cluster, s(at), at - 2) for at in (3, 4, 5, 6)] == [ms(29.85), ms(54), ms(59.1), ms(85.35)]


def test_a_batch_that_began_alone_ends_alone() -> None:
    cluster = cluster_of()
    cluster.start_batch(0, batch(0, 4))
    attach(cluster)
    assert play_until(cluster, s(1)) == [
        (LOAD_NS, WorkerReady(WorkerId(10))),
        (ms(195), Finished(BatchId(0), R0, ms(195))),
    ]


def test_a_shadow_that_is_told_to_stop_finishes_the_batch_first() -> None:
    cluster = cluster_of()
    attach(cluster)
    play_until(cluster, ms(20))
    cluster.start_batch(ms(20), batch(0, 4))
    cluster.obey(ms(30), StopWorker(WorkerId(10), "why"))
    assert play_until(cluster, s(1)) == [
        (ms(105.35), Finished(BatchId(0), R0, ms(85.35))),
        (ms(105.35), WorkerStopped(WorkerId(10))),
    ]
    assert took_ns(cluster, s(2), 4) == ms(195)


def test_a_shadow_that_still_loads_stops_at_once() -> None:
    cluster = cluster_of()
    attach(cluster)
    cluster.obey(ms(1), StopWorker(WorkerId(17), "another one"))
    cluster.obey(ms(1), StopWorker(WorkerId(10), "why"))
    assert play_until(cluster, s(1)) == [(ms(1), WorkerStopped(WorkerId(10)))]
    attach(cluster, s(1), 1)
    assert [event for _, event in play_until(cluster, s(3))] == [WorkerReady(WorkerId(11))]


def test_a_shadow_that_dies_leaves_the_rest_of_its_batch_to_the_body() -> None:
    """A crash after a third of the batch: the rest takes as long as it does alone."""
    cluster = cluster_of(FaultRates(shadow_mtbf_s=0.02))
    attach(cluster)
    play_until(cluster, LOAD_NS)
    crash_ns = min(at_ns for at_ns, _, event in cluster.pending.heap if isinstance(event, Crashed))
    begin_ns = crash_ns - ms(25)
    cluster.start_batch(begin_ns, batch(0, 3))
    lost, finished = play_until(cluster, s(1))
    assert lost == (crash_ns, WorkerLost(WorkerId(10), "the shadow's process died"))
    assert finished[0] - crash_ns == pytest.approx(ms(59.1 - 25) * 147 / 59.1, abs=2)
    assert isinstance(finished[1], Finished)
    assert took_ns(cluster, s(2), 4) == ms(195)


def test_a_batch_that_does_not_use_the_dead_shadow_is_not_slower() -> None:
    cluster = cluster_of(FaultRates(failed_shadow=1.0))
    cluster.start_batch(0, batch(0, 4))
    attach(cluster)
    assert play_until(cluster, s(1))[0][1] == WorkerLost(WorkerId(10), "the shadow's process died")
    late = cluster_of(FaultRates(shadow_mtbf_s=0.001))
    late.start_batch(0, batch(0, 4))
    attach(late)
    assert play_until(late, s(1))[-1] == (ms(195), Finished(BatchId(0), R0, ms(195)))


def test_faults_of_shadows_stop_when_the_world_heals() -> None:
    cluster = cluster_of(FaultRates(shadow_mtbf_s=0.02, failed_shadow=1.0))
    cluster.stop_faults(0)
    attach(cluster)
    assert play_until(cluster, s(10)) == [(LOAD_NS, WorkerReady(WorkerId(10)))]


@pytest.mark.parametrize("order", [StopWorker(R0, "why"), None])
def test_a_body_that_is_gone_takes_its_shadow_along(order: StopWorker | None) -> None:
    cluster = cluster_of() if order else cluster_of(FaultRates(crash_mtbf_s=1e-5))
    attach(cluster)
    if order is not None:
        cluster.obey(ms(1), order)
    told = [event for _, event in play_until(cluster, s(5)) if getattr(event, "worker", R0) in (R0, WorkerId(10))]
    assert told == [WorkerStopped(R0) if order else WorkerLost(R0, "the worker process died")]


def test_a_resize_changes_the_speed_of_a_pair() -> None:
    cluster = cluster_of()
    attach(cluster)
    play_until(cluster, ms(20))
    cluster.obey(ms(20), ResizeWorker(R0, 4.0))
    assert play_until(cluster, ms(30)) == [(ms(20), WorkerResized(R0, 4.0))]
    slower_ns = took_ns(cluster, s(1), 4)
    assert slower_ns < ms(85.35)
    cluster.obey(s(3), StopWorker(WorkerId(10), "why"))
    play_until(cluster, s(3))
    assert took_ns(cluster, s(4), 4) == ms(99)


def test_shadows_wait_for_a_spare_worker_of_their_node() -> None:
    """One is there; the next ones are a second apart."""
    cluster = cluster_of(spares=SpareWorkers(1, 1.0))
    for id in (R0, R1, R2):
        attach(cluster, ms(100), id, replica=id)
    assert [at_ns for at_ns, _ in play_until(cluster, s(10))] == [ms(100) + wait + LOAD_NS for wait in (0, s(1), s(2))]
    two = cluster_of(spares=SpareWorkers(2, 1.0))
    for id in (R0, R1, R2):
        attach(two, ms(100), id, replica=id)
    assert [at_ns for at_ns, _ in play_until(two, s(10))] == [ms(100) + wait + LOAD_NS for wait in (0, 0, s(1))]
    none = cluster_of(spares=SpareWorkers(0, 1.0))
    attach(none, ms(100))
    assert [at_ns for at_ns, _ in play_until(none, s(10))] == [ms(1100) + LOAD_NS]


# Checkers

APPLICATION = Application(
    "pairs", 1000.0, (Stage("only", (Variant("a", profiles={"slow": PROFILE}),)),), SystemChoice("static"), (NODE,)
)
GROUPS = (Group(BODY, 1, 2), Group(structs.replace(BODY, shape=(SHADOW,)), 1, 4))
PLAN = Plan((StagePlan("only", GROUPS, batch_max=2),), "a body and a pair")
BEGIN: Sequence[Step] = ((WOKE, Decided("plan", "why", plan=PLAN), StartWorker(R0, BODY)), (WorkerReady(R0),))
ATTACHED: Sequence[Step] = (*BEGIN, (WOKE, starts(R0, 10, SHADOW)))
PAIR: Sequence[Step] = (*ATTACHED, (WorkerReady(WorkerId(10)),))
DETACHED: Sequence[Step] = (*PAIR, (WOKE, StopWorker(WorkerId(10), "why")))


def of_four(at: int) -> Sequence[Step]:
    """Four requests, in one batch."""
    requests: list[Step] = [(Request(RequestId(id), 0, 0, s(9)),) for id in range(4)]
    order = StartBatch(BatchId(0), R0, "only", tuple(RequestId(id) for id in range(4)))
    return (*requests, (WOKE, order))


@pytest.mark.parametrize(
    "steps",
    [
        (*DETACHED, (WorkerStopped(WorkerId(10)),), (WOKE, starts(R0, 11, SHADOW))),
        (*PAIR, (WorkerLost(WorkerId(10), "died"), starts(R0, 11, SHADOW))),
        (*PAIR, *of_four(0)),
        (*PAIR, (WorkerLost(R0, "died"), StartWorker(WorkerId(11), BODY))),
        (
            *ATTACHED,
            (WorkerReady(WorkerId(13)),),
            (WorkerLost(WorkerId(13), "?"),),
            (WorkerStopped(WorkerId(13)),),
            (WorkerStopped(WorkerId(10)),),
        ),
    ],
)
def test_what_a_core_may_do(steps: Sequence[Step]) -> None:
    follow(Checkers([Rules(APPLICATION)], [NODE]), *steps)


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        ((*ATTACHED, (WOKE, starts(R0, 11, SHADOW))), "has shadow 10, which has not stopped"),
        ((*DETACHED, (WOKE, starts(R0, 11, SHADOW))), "has shadow 10, which has not stopped"),
        ((*ATTACHED, (WorkerLost(WorkerId(10), "died"), starts(R0, 10, SHADOW))), "worker 10 after worker 10"),
        ((BEGIN[0], (WOKE, starts(R0, 10, SHADOW))), "not ready or drains"),
        ((*BEGIN, (WOKE, StopWorker(R0, "why"), starts(R0, 10, SHADOW))), "not ready or drains"),
        ((*BEGIN, (WOKE, starts(R1, 10, SHADOW))), "does not exist"),
        ((*BEGIN, (WOKE, starts(R0, 10, Worker(4.0, (2, 3))))), "blocks that the profile does not have"),
        ((*BEGIN, (WOKE, starts(R0, 10, Worker(4.0, ())))), "blocks that the profile does not have"),
        ((*BEGIN, (WOKE, starts(R0, 10, Worker(7.0, (0,))))), "has 8 cores and gives out 9"),
        ((*BEGIN, (WOKE, StopWorker(WorkerId(10), "why"))), "does not exist"),
        ((*PAIR, (WOKE, StopWorker(WorkerId(11), "why"))), "does not exist"),
        ((*DETACHED, (WOKE, StopWorker(WorkerId(10), "why"))), "is ordered to stop twice"),
        ((*ATTACHED, *of_four(0)), "a batch of 4 where the plan allows up to 2"),
        ((*DETACHED, *of_four(0)), "a batch of 4 where the plan allows up to 2"),
        ((*PAIR, (WorkerLost(WorkerId(10), "died"),), *of_four(0)), "a batch of 4 where the plan allows up to 2"),
        (
            (*PAIR, (WOKE, StartWorker(WorkerId(11), structs.replace(BODY, slot=Slot(2.5, "slow"))))),
            "has 8 cores and gives",
        ),
        ((*BEGIN, (WOKE, StartWorker(R1, structs.replace(BODY, shape=(SHADOW,))))), "starts without its shadow"),
    ],
)
def test_what_a_core_must_not_do(steps: Sequence[Step], complaint: str) -> None:
    with pytest.raises(Violation, match=complaint):
        follow(Checkers([Rules(APPLICATION)], [NODE]), *steps)


def test_memory_of_shadows_counts() -> None:
    small = structs.replace(NODE, memory_bytes=104 * MIB)
    with pytest.raises(Violation, match="bytes and gives out"):
        follow(Checkers([Rules(APPLICATION)], [small]), *ATTACHED)
    follow(Checkers([Rules(APPLICATION)], [structs.replace(NODE, memory_bytes=105 * MIB)]), *ATTACHED)
