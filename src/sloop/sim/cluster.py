"""The simulated cluster: executes the core's orders and returns events, whose times and faults come from the truth.

Guarantees one stream of events ordered by instant and then by creation, and that the pending work of a lost replica is
discarded. It executes every order; `sim.checkers` verifies orders. Must not import beliefs, policies or the core. It
stores no requests, only batch durations.
"""

from collections.abc import Iterable
from heapq import heappush
from itertools import count

from msgspec import Struct

from sloop.actions import Action, ResizeReplica, StartBatch, StartReplica, StopReplica
from sloop.events import (
    WOKE,
    BatchFailed,
    Event,
    Finished,
    ReplicaLost,
    ReplicaProgressed,
    ReplicaReady,
    ReplicaStopped,
    Resized,
)
from sloop.sim.truth.branches import BranchSampler
from sloop.sim.truth.cold_start import LOADING, ColdStartSampler, ResizeSampler
from sloop.sim.truth.failure import FaultSampler
from sloop.sim.truth.service import ServiceSampler, Speed
from sloop.units import FOREVER_NS, s
from sloop.vocabulary import ReplicaId, ReplicaSpec


class Truths(Struct, frozen=True):
    """The truth of one run; every random stream is at its start."""

    service: ServiceSampler
    cold_start: ColdStartSampler
    resize: ResizeSampler
    faults: FaultSampler
    branches: BranchSampler | None = None


class NodeFailed(Struct, frozen=True):
    """A node fails with all its replicas. Internal to the simulator: the core sees lost replicas."""

    node: str


class Crashed(Struct, frozen=True):
    """A ready replica crashes. Also internal to the simulator."""

    replica: ReplicaId


Happening = Event | NodeFailed | Crashed
PendingHappening = tuple[int, int, Happening]
"""The instant, the sequence number among entries of one instant, and the event."""


class SimulatedReplica:
    """A worker process: its spec, its speed, and the end of its batch."""

    __slots__ = ("batch_end", "cores", "resized_ns", "size", "spec", "speed")

    def __init__(self, spec: ReplicaSpec, speed: Speed) -> None:
        self.spec = spec
        self.cores = spec.cores
        self.speed = speed
        """Speed on the cores in effect."""
        self.batch_end: tuple[int, int, Finished] | None = None
        """The pending end of the running batch, which has `size` requests; None if that message will be lost."""
        self.size = 0
        self.resized_ns = 0
        """When the last ordered resize takes effect; later ones must not overtake it."""


class Cluster:
    """Replicas on nodes. `pending` is a heap of future events; it always has an entry at `FOREVER_NS`."""

    def __init__(self, truths: Truths, nodes: Iterable[str] = ()) -> None:
        self._cold_start = truths.cold_start
        self._service = truths.service
        self._resize = truths.resize
        self._faults = truths.faults
        self._branches = truths.branches or None
        self._rates = truths.faults.rates
        self._touches_batches = self._rates.touches_batches
        self._healed = False
        self._sequences = count()
        self._replicas: dict[ReplicaId, SimulatedReplica] = {}
        self._down_until_ns: dict[str, int] = {}
        self.pending: list[PendingHappening] = []
        self.void: set[int] = set()
        """Sequence numbers of cancelled entries."""
        self._push(FOREVER_NS, WOKE)
        for node in nodes:
            self._plan_fault(0, "node", self._rates.node_mtbf_s, NodeFailed(node))

    def start_batch(self, now_ns: int, order: StartBatch) -> None:
        """Run a batch. The hot path of every simulation."""
        replica = self._replicas.get(order.replica)
        if replica is None:
            return
        replica.size = size = len(order.requests)
        speed = replica.speed
        service_ns = round(speed.means_ns[size] * next(speed.noises[size]))
        if self._touches_batches:
            self._start_with_faults(now_ns, order, replica, service_ns)
            return
        if self._branches is None:
            finished = Finished(order.batch, order.replica, service_ns)
        else:
            finished = Finished(order.batch, order.replica, service_ns, self._branches.taken(order))
        replica.batch_end = end = (now_ns + service_ns, next(self._sequences), finished)
        heappush(self.pending, end)

    def obey(self, now_ns: int, order: Action) -> None:
        """Execute an order about a replica; other actions, such as decisions, have no effect."""
        if isinstance(order, StartReplica):
            self._start(now_ns, order)
        elif isinstance(order, StopReplica):
            self._stop(now_ns, order.replica)
        elif isinstance(order, ResizeReplica):
            replica = self._replicas.get(order.replica)
            if replica is not None:
                replica.resized_ns = max(replica.resized_ns, now_ns + self._resize.draw_ns())
                self._push(replica.resized_ns, Resized(order.replica, order.cores))

    def happen(self, now_ns: int, sequence: int, event: Happening) -> Event | None:
        """Apply a pending entry. Returns the event for the core, or None."""
        if sequence in self.void:
            self.void.remove(sequence)
            return None
        if isinstance(event, NodeFailed):
            self._lose_node(now_ns, event)
            return None
        if isinstance(event, Crashed):
            self._lose(now_ns, event.replica, "the worker process died")
            return None
        if isinstance(event, ReplicaProgressed | ReplicaReady | Resized | BatchFailed):
            replica = self._replicas.get(event.replica)
            if replica is None:
                return None
            if isinstance(event, Resized):
                return self._resize_now(now_ns, replica, event)
            if isinstance(event, ReplicaReady):
                self._plan_fault(now_ns, "crash", self._rates.crash_mtbf_s, Crashed(event.replica))
        return event

    def stop_faults(self) -> None:
        """Disable all faults from now on, pending ones included. Lost replicas and messages stay lost."""
        self._healed = True
        self._touches_batches = False
        self._down_until_ns.clear()
        self.void.update(entry[1] for entry in self.pending if isinstance(entry[2], NodeFailed | Crashed))

    def _push(self, at_ns: int, event: Happening) -> int:
        sequence = next(self._sequences)
        heappush(self.pending, (at_ns, sequence, event))
        return sequence

    def _plan_fault(self, now_ns: int, kind: str, mean_s: float, fault: Happening) -> None:
        """Schedule the next fault of a kind with a mean time between faults of `mean_s`."""
        if mean_s > 0.0 and not self._healed:
            self._push(now_ns + self._faults.after_ns(kind, mean_s), fault)

    def _start_with_faults(self, now_ns: int, order: StartBatch, replica: SimulatedReplica, service_ns: int) -> None:
        """`start_batch` for worlds with faults in batches or in their completion messages."""
        rates, faults = self._rates, self._faults
        if faults.strikes("straggler", rates.straggler):
            service_ns = round(service_ns * rates.straggler_factor)
        replica.batch_end = None
        if faults.strikes("failed_batch", rates.failed_batch):
            at_ns = now_ns + faults.within_ns("failed_batch", service_ns)
            self._push(at_ns, BatchFailed(order.batch, order.replica, "the model raised"))
            return
        if faults.strikes("lost_finished", rates.lost_finished):
            return
        edge_counts = self._branches.taken(order) if self._branches is not None else ()
        finished = Finished(order.batch, order.replica, service_ns, edge_counts)
        end_ns = now_ns + service_ns
        if faults.strikes("late_finished", rates.late_finished):
            end_ns += faults.within_ns("late_finished", rates.late_finished_ns)
        replica.batch_end = (end_ns, self._push(end_ns, finished), finished)
        if faults.strikes("repeated_finished", rates.repeated_finished):
            again_ns = end_ns + faults.within_ns("repeated_finished", rates.late_finished_ns)
            self._push(again_ns, finished)

    def _start(self, now_ns: int, order: StartReplica) -> None:
        spec, id = order.spec, order.replica
        self._replicas[id] = SimulatedReplica(spec, self._service.speed(spec.stage, spec.variant, spec.cores))
        if now_ns < self._down_until_ns.get(spec.node or "", 0):
            self._lose(now_ns, id, f"node {spec.node} is down")
            return
        length_ns = self._cold_start.draw_ns(now_ns, spec.stage, spec.variant)
        if not self._healed:
            if self._faults.strikes("slow_start", self._rates.slow_start):
                length_ns = round(length_ns * self._rates.slow_start_factor)
            if self._faults.strikes("failed_start", self._rates.failed_start):
                self._push(now_ns + self._faults.within_ns("failed_start", length_ns), Crashed(id))
        if length_ns:
            self._push(now_ns, ReplicaProgressed(id, LOADING))
        self._push(now_ns + length_ns, ReplicaReady(id))

    def _stop(self, now_ns: int, id: ReplicaId) -> None:
        replica = self._replicas.pop(id, None)
        if replica is not None:
            self._abandon_batch(now_ns, replica)
            self._push(now_ns, ReplicaStopped(id))

    def _lose(self, now_ns: int, id: ReplicaId, error: str) -> None:
        """Lose a replica that was not ordered to stop."""
        replica = self._replicas.pop(id, None)
        if replica is not None:
            self._abandon_batch(now_ns, replica)
            self._push(now_ns, ReplicaLost(id, error))

    def _lose_node(self, now_ns: int, failure: NodeFailed) -> None:
        """Lose every replica on a node; none starts there until it is repaired."""
        back_ns = now_ns + s(self._rates.node_repair_s)
        self._down_until_ns[failure.node] = back_ns
        for id in [id for id, replica in self._replicas.items() if replica.spec.node == failure.node]:
            self._lose(now_ns, id, f"node {failure.node} went down")
        self._plan_fault(back_ns, "node", self._rates.node_mtbf_s, failure)

    def _abandon_batch(self, now_ns: int, replica: SimulatedReplica) -> None:
        if replica.batch_end is not None and replica.batch_end[0] > now_ns:
            self.void.add(replica.batch_end[1])
        replica.batch_end = None

    def _resize_now(self, now_ns: int, replica: SimulatedReplica, event: Resized) -> Resized:
        if not self._healed and self._faults.strikes("refused_resize", self._rates.refused_resize):
            return Resized(event.replica, replica.cores)
        before_ns, spec = replica.speed.means_ns, replica.spec
        replica.cores = event.cores
        replica.speed = self._service.speed(spec.stage, spec.variant, event.cores)
        after_ns = replica.speed.means_ns
        if self._resize.rescales and replica.batch_end is not None and replica.batch_end[0] > now_ns:
            self._rescale(now_ns, replica, replica.batch_end, after_ns[replica.size] / before_ns[replica.size])
        return event

    def _rescale(self, now_ns: int, replica: SimulatedReplica, end: tuple[int, int, Finished], ratio: float) -> None:
        """Multiply the remaining time of the running batch by `ratio`."""
        end_ns, sequence, finished = end
        remaining_ns = end_ns - now_ns
        longer_ns = round(remaining_ns * ratio) - remaining_ns
        self.void.add(sequence)
        finished = Finished(finished.batch, finished.replica, finished.service_ns + longer_ns, finished.edge_counts)
        replica.batch_end = (end_ns + longer_ns, self._push(end_ns + longer_ns, finished), finished)
