"""Every order in every phase of a worker, and every two orders: each is answered exactly once. The node is the one that
serves; its processes and its models are simulated."""

from collections.abc import Mapping, Sequence
from heapq import heappop
from itertools import product
from typing import Any, cast

import pytest

from sloop.actions import (
    AcquireNode,
    AdoptWorker,
    CancelTransfer,
    Evict,
    Order,
    ReleaseNode,
    ResizeWorker,
    StartWorker,
    StopWorker,
    Transfer,
)
from sloop.events import (
    Event,
    Finished,
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
from sloop.serve.messages import Run, encode
from sloop.serve.network import BlockClient
from sloop.serve.node.models import NodeModels, Peers
from sloop.serve.node.node import (
    AWAIT,
    ENDING,
    EXIT,
    KILL,
    NOTE,
    OBEY,
    REACTIONS,
    REFUSE,
    START_S_MAX,
    STOP_S_MAX,
    LiveNode,
    NodeWorker,
    WorkerPhase,
)
from sloop.sim.happenings import Pending
from sloop.units import s
from sloop.vocabulary import STORE, BatchId, ReplicaId, ReplicaSpec, RequestId, Slot, TransferId, Worker, WorkerId
from tests.dst.agents import Ear
from tests.dst.nodes import Clock, SimulatedCache, SimulatedProcess, SimulatedProcesses, SimulatedQuotas, VirtualLoop
from tests.dst.schedules import HOME
from tests.dst.test_agents import STAGE, closed, cluster

__all__ = ["closed"]  # a fixture
A, SHADOW = ReplicaId(0), WorkerId(1)
VARIANT = STAGE.variants[0].name
SPEC = ReplicaSpec(STAGE.name, VARIANT, Slot(1.0, "cpu"), HOME.name)
ORDERS: Mapping[str, Order] = {
    "stop": StopWorker(A, "a test"),
    "grow": ResizeWorker(A, 2.0),
    "shrink": ResizeWorker(A, 0.5),
    "shadow": StartWorker(
        SHADOW, ReplicaSpec(STAGE.name, VARIANT, SPEC.slot, HOME.name, shape=(Worker(1.0, (0,)),)), A
    ),
}
ENDS = WorkerLost | WorkerStopped


class Rig:
    """A node with a worker, and what it reports (`tests.dst.nodes.Circumstances`)."""

    fetches_bytes_per_s = 1e9

    def __init__(self, faults: Sequence[str] = ()) -> None:
        self.clock, self._pending, self._faults = Clock(0), Pending(), faults
        known = cluster()
        self.stages, (servables, wirings) = known.stages, known._versions[0]
        self.weights = servables[STAGE.name, VARIANT].weights[0]
        self.loop = VirtualLoop(self._pending, self.clock)  # type: ignore[abstract]  # see tests.dst.agents
        sizes = dict.fromkeys(known.sizes_bytes, 1 << 28)
        self.events: list[Event] = []
        self.processes: SimulatedProcesses

        def processes(loop: VirtualLoop, *_: object) -> Any:
            self.processes = SimulatedProcesses(self, HOME.name, loop, lambda: self.node)
            return self.processes

        def begin() -> None:
            models = NodeModels(HOME.name, lambda: cast(Any, SimulatedCache(self, HOME.name, sizes)))
            models.connect(BlockClient(b""), ("home", 1))
            quotas = SimulatedQuotas(self, HOME.name, HOME.cores)
            self.node = LiveNode(servables, wirings, quotas, nodes=[HOME], models=models, processes=processes)
            self.node.attach(Ear(cast(Any, self)))

        self.loop.run(begin)

    # What is around the node, and hears it

    def acts(self, kind: str, node: str) -> int:
        return kind in self._faults

    def faults_of(self, requests: Sequence[RequestId]) -> Sequence[str | None]:
        return [None] * len(requests)

    def report(self, event: Event) -> None:
        self.events.append(event)

    report_end = report

    # What tests do

    def order(self, order: Order) -> list[Event]:
        """Give an order; returns what is reported before any time has passed."""
        before = len(self.events)
        peers: list[Peers] = [{source: [] for source in self._sources()}] if isinstance(order, Transfer) else []
        self.loop.run(self.node.order, order, *peers)
        return self.events[before:]

    def _sources(self) -> list[str]:
        (servable,) = self.node.with_weights(self.weights)
        assert servable.cut is not None
        return [block.source for block in servable.cut.blocks]

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until_ns = self.clock.now_ns + s(seconds)
        while self._pending.heap and self._pending.heap[0][0] <= until_ns:
            self._step()
        self.clock.now_ns = until_ns

    def _step(self) -> None:
        self.clock.now_ns, _, handle = heappop(self._pending.heap)
        timer = cast(Any, handle)
        if not timer._cancelled:
            self.loop.run(timer._run)

    @property
    def worker(self) -> NodeWorker | None:
        return self.node.workers.get(A)

    @property
    def process(self) -> SimulatedProcess:
        assert self.worker is not None
        return cast(SimulatedProcess, self.worker.process)

    def reach(self, phase: WorkerPhase) -> None:
        """Let the worker come into a phase."""
        self.order(StartWorker(A, SPEC))
        if phase not in (WorkerPhase.FETCHING, WorkerPhase.STARTING, WorkerPhase.LOADING):
            self._until(WorkerPhase.READY)
        if phase is WorkerPhase.BUSY:
            self.run_batch()
        elif phase is WorkerPhase.STOPPING:
            self.order(ORDERS["stop"])
        elif phase is WorkerPhase.LOST:
            self.process.die()
        self._until(phase)

    def _until(self, phase: WorkerPhase) -> None:
        while self.worker is None or self.worker.phase is not phase:
            self._step()

    def run_batch(self) -> None:
        self.loop.run(self.node.run, BatchId(1), A, Run(1, [encode((1, 0))]))

    def finish(self) -> None:
        """Let everything end."""
        self.run(20)
        if self.worker is not None:
            self.order(ORDERS["stop"])
        self.run(START_S_MAX + 5)
        assert not self.node.workers

    def about(self, worker: WorkerId) -> list[Event]:
        return [each for each in self.events if getattr(each, "worker", None) == worker]

    def count(self, kind: Any, worker: WorkerId = A) -> int:
        return sum(isinstance(each, kind) for each in self.about(worker))


def names_of(order: type) -> list[str]:
    return [name for name, each in ORDERS.items() if isinstance(each, order)]


CASES = [(name, phase) for order in REACTIONS for name in names_of(order) for phase in WorkerPhase]


@pytest.mark.parametrize(("name", "phase"), CASES)
def test_an_order_has_the_consequence_that_the_table_says(name: str, phase: WorkerPhase) -> None:
    rig, order = Rig(), ORDERS[name]
    reaction = cast(Any, REACTIONS)[type(order)][phase]
    rig.reach(phase)
    answered = [each for each in rig.order(order) if isinstance(each, ENDS | WorkerResized)]
    worker = rig.worker
    process = cast(SimulatedProcess | None, worker.process if worker is not None else None)
    if reaction is NOTE:
        assert answered == [WorkerResized(A, cast(ResizeWorker, order).cores)]
    elif reaction is REFUSE:
        assert answered == [WorkerLost(SHADOW, "its replica is not ready")]
    elif reaction is AWAIT:
        assert not answered
        assert worker is not None
        assert worker.phase in ENDING
        assert worker.is_over is (phase is WorkerPhase.LOST), "one that was told to exit exits by itself"
    elif reaction is KILL:
        assert worker is None or worker.is_over
        assert process is None or process.is_dead
    elif reaction is EXIT:
        assert worker is not None
        assert not worker.is_over
        assert process is not None
        assert not process.is_dead
    else:
        assert reaction is OBEY
    rig.run(20)
    if reaction in (NOTE, OBEY, REFUSE):
        assert rig.worker is not None
        assert rig.worker.phase is WorkerPhase.READY
    else:
        assert rig.worker is None
        assert [type(each) for each in rig.about(A) if isinstance(each, ENDS)] == [
            WorkerLost if phase is WorkerPhase.LOST and name != "stop" else WorkerStopped
        ]
    if name in ("grow", "shrink") and reaction in (NOTE, OBEY):
        assert rig.worker is not None
        assert rig.worker.cores == cast(ResizeWorker, order).cores
        assert rig.count(WorkerResized) == 1
    if name == "shadow":
        wanted = {OBEY: [WorkerReady], REFUSE: [WorkerLost], AWAIT: []}[reaction]
        assert [type(each) for each in rig.about(SHADOW)] == wanted


FAULTS = [
    *product(((), ("refused resizes",), ("hang",)), WorkerPhase),
    *product([("failed starts",)], tuple(WorkerPhase)[:3]),
    (("failed fetch",), WorkerPhase.FETCHING),
]
"""With these faults a worker comes to these phases."""


@pytest.mark.parametrize(("faults", "phase"), FAULTS)
def test_of_two_orders_each_is_answered_once(faults: Sequence[str], phase: WorkerPhase) -> None:
    """Also by a machine that refuses, and by a worker that never answers."""
    for first, second in product(ORDERS, repeat=2):
        if (first, second) == ("shadow", "shadow"):
            continue  # of one number
        rig = Rig(faults)
        rig.reach(phase)
        if "hang" in faults and rig.worker is not None and rig.worker.process is not None:
            rig.process.is_hung = True
        rig.order(ORDERS[first])
        has_ended = rig.worker is None
        rig.order(ORDERS[second])
        rig.run(STOP_S_MAX + 1)
        stops = [first, second].count("stop")
        assert rig.worker is None or not stops, (first, second)
        rig.finish()
        own, what = rig.about(A), f"{first}, {second}: {rig.events}"
        assert rig.count(ENDS) == 1 + (has_ended and second == "stop"), what
        assert isinstance(own[-1], ENDS), what
        resizes = sum(name in ("grow", "shrink") for name in (first, second))
        assert rig.count(WorkerResized) <= resizes, what
        if not stops and phase not in ENDING and faults in ((), ("refused resizes",)):
            assert rig.count(WorkerResized) == resizes, what
        assert rig.count(ENDS, SHADOW) <= 1, what


def test_a_worker_answers_its_batch_or_ends() -> None:
    for name in (*ORDERS, ""):
        rig = Rig()
        rig.reach(WorkerPhase.BUSY)
        if name:
            rig.order(ORDERS[name])
        rig.run(5)
        assert rig.count(ENDS) + sum(isinstance(each, Finished) for each in rig.events) == 1


def test_an_order_about_a_worker_that_has_ended_is_answered_by_its_end() -> None:
    rig = Rig()
    rig.reach(WorkerPhase.READY)
    rig.order(ORDERS["stop"])
    rig.run(5)
    assert rig.count(ENDS) == 1
    assert not rig.order(ORDERS["grow"])
    assert not rig.order(ORDERS["shadow"])
    assert rig.order(ORDERS["stop"]) == [WorkerStopped(A)], "the two orders may have crossed"


def test_orders_about_nodes_and_weights_are_answered_once() -> None:
    rig = Rig()
    assert rig.order(AcquireNode(HOME.name)) == [NodeReady(HOME)]
    assert rig.order(ReleaseNode(HOME.name)) == [NodeReleased(HOME.name)]
    (lost,) = rig.order(AdoptWorker(A, SPEC, True))
    assert isinstance(lost, WorkerLost)
    transfer = Transfer(TransferId(1), rig.weights, STORE, (HOME.name,))
    assert not rig.order(transfer)
    assert not rig.order(CancelTransfer(TransferId(1), HOME.name))
    rig.run(5)
    assert not any(isinstance(each, Transferred | TransferFailed) for each in rig.events), "one that is cancelled"
    rig.order(Transfer(TransferId(2), rig.weights, STORE, (HOME.name,)))
    rig.run(5)
    assert not rig.order(CancelTransfer(TransferId(2), HOME.name))
    assert rig.events.count(Transferred(TransferId(2), HOME.name)) == 1
    assert not rig.order(Evict(HOME.name, rig.weights))
    rig.order(StartWorker(A, SPEC))
    assert WorkerProgressed(A, "fetching") in rig.events
    assert rig.worker is not None
    assert rig.worker.phase is WorkerPhase.FETCHING, "the files were deleted"
