"""The simulated cluster: the core's orders in, events out, with truth deciding when and whether.

Promises one event stream ordered by (instant, order of creation), and that what was under way on a replica dies with
it. It obeys whatever it is told: whether an order was right is for `sim.checkers` to say. Must not know beliefs,
policies or the core; it holds no request, only how long batches take.
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
from sloop.sim.truth.cold_start import STEP, ColdStart
from sloop.sim.truth.failure import Failure
from sloop.sim.truth.resize import Resize
from sloop.sim.truth.service import Service, Speed
from sloop.sim.truth.ways import Ways
from sloop.units import FOREVER_NS, s
from sloop.vocabulary import ReplicaId, ReplicaSpec


class Truths(Struct, frozen=True):
    """All truths of one run, their streams at the beginning."""

    service: Service
    cold_start: ColdStart
    resize: Resize
    failure: Failure
    ways: Ways | None = None


class NodeFailed(Struct, frozen=True):
    """A node goes down, and all that runs on it. Stays inside the simulator: the core hears of lost replicas."""

    node: str


class Crashed(Struct, frozen=True):
    """A ready replica dies by itself. Stays inside likewise."""

    replica: ReplicaId


Happening = Event | NodeFailed | Crashed
Entry = tuple[int, int, Happening]
"""When, in which order among equals, what."""


class SimulatedReplica:
    """A process: what it is, how fast it runs, and what is under way on it."""

    __slots__ = ("cores", "news", "resized_ns", "size", "spec", "speed")

    def __init__(self, spec: ReplicaSpec, speed: Speed) -> None:
        self.spec = spec
        self.cores = spec.cores
        self.speed = speed
        """On the cores in effect."""
        self.news: tuple[int, int, Finished] | None = None
        """The heap's entry for the end of the last batch started, of `size` requests; None where it comes to none."""
        self.size = 0
        self.resized_ns = 0
        """When the last resize ordered is in force; later ones cannot overtake it."""


class Cluster:
    """Replicas on nodes. `pending` is a heap of what will happen; its last entry is at `FOREVER_NS`."""

    def __init__(self, truths: Truths, nodes: Iterable[str] = ()) -> None:
        self._service = truths.service
        self._cold_start = truths.cold_start
        self._resize = truths.resize
        self._failure = truths.failure
        self._ways = truths.ways or None
        self._faults = truths.failure.faults
        self._touches_batches = self._faults.touches_batches
        self._healed = False
        self._sequences = count()
        self._replicas: dict[ReplicaId, SimulatedReplica] = {}
        self._down_until_ns: dict[str, int] = {}
        self.pending: list[Entry] = []
        self.void: set[int] = set()
        """Sequences of entries that will not happen."""
        self._push(FOREVER_NS, WOKE)
        for node in nodes:
            self._foresee(0, "node", self._faults.node_mtbf_s, NodeFailed(node))

    def start_batch(self, now_ns: int, order: StartBatch) -> None:
        """Run a batch. The hot path of every simulation."""
        replica = self._replicas.get(order.replica)
        if replica is None:
            return
        replica.size = size = len(order.requests)
        speed = replica.speed
        service_ns = round(speed.means_ns[size] * next(speed.noises[size]))
        if self._touches_batches:
            self._start_in_trouble(now_ns, order, replica, service_ns)
            return
        if self._ways is None:
            finished = Finished(order.batch, order.replica, service_ns)
        else:
            finished = Finished(order.batch, order.replica, service_ns, self._ways.taken(order))
        replica.news = news = (now_ns + service_ns, next(self._sequences), finished)
        heappush(self.pending, news)

    def obey(self, now_ns: int, order: Action) -> None:
        """Carry out an order about a replica; notes are no orders."""
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
        """Let a pending entry come true. Returns what the core is told; None where nothing happens after all."""
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
                self._foresee(now_ns, "crash", self._faults.crash_mtbf_s, Crashed(event.replica))
        return event

    def heal(self) -> None:
        """No fault strikes from now on, and those on their way do not arrive. What was lost stays lost."""
        self._healed = True
        self._touches_batches = False
        self._down_until_ns.clear()
        self.void.update(entry[1] for entry in self.pending if isinstance(entry[2], NodeFailed | Crashed))

    def _push(self, at_ns: int, event: Happening) -> int:
        sequence = next(self._sequences)
        heappush(self.pending, (at_ns, sequence, event))
        return sequence

    def _foresee(self, now_ns: int, kind: str, mean_s: float, trouble: Happening) -> None:
        """Plan the next failure of a kind that strikes on average every `mean_s`."""
        if mean_s > 0.0 and not self._healed:
            self._push(now_ns + self._failure.after_ns(kind, mean_s), trouble)

    def _start_in_trouble(self, now_ns: int, order: StartBatch, replica: SimulatedReplica, service_ns: int) -> None:
        """As `start_batch`, in a world whose faults touch batches or the news of their end."""
        faults, failure = self._faults, self._failure
        if failure.strikes("straggler", faults.straggler):
            service_ns = round(service_ns * faults.straggler_factor)
        replica.news = None
        if failure.strikes("failed_batch", faults.failed_batch):
            at_ns = now_ns + failure.within_ns("failed_batch", service_ns)
            self._push(at_ns, BatchFailed(order.batch, order.replica, "the model raised"))
            return
        if failure.strikes("lost_finished", faults.lost_finished):
            return
        ways = self._ways.taken(order) if self._ways is not None else ()
        finished = Finished(order.batch, order.replica, service_ns, ways)
        end_ns = now_ns + service_ns
        if failure.strikes("late_finished", faults.late_finished):
            end_ns += failure.within_ns("late_finished", faults.late_finished_ns)
        replica.news = (end_ns, self._push(end_ns, finished), finished)
        if failure.strikes("repeated_finished", faults.repeated_finished):
            again_ns = end_ns + failure.within_ns("repeated_finished", faults.late_finished_ns)
            self._push(again_ns, finished)

    def _start(self, now_ns: int, order: StartReplica) -> None:
        spec, id = order.spec, order.replica
        self._replicas[id] = SimulatedReplica(spec, self._service.speed(spec.stage, spec.variant, spec.cores))
        if now_ns < self._down_until_ns.get(spec.node or "", 0):
            self._lose(now_ns, id, f"node {spec.node} is down")
            return
        length_ns = self._cold_start.draw_ns(now_ns)
        if not self._healed:
            if self._failure.strikes("slow_start", self._faults.slow_start):
                length_ns = round(length_ns * self._faults.slow_start_factor)
            if self._failure.strikes("failed_start", self._faults.failed_start):
                self._push(now_ns + self._failure.within_ns("failed_start", length_ns), Crashed(id))
        if length_ns:
            self._push(now_ns, ReplicaProgressed(id, STEP))
        self._push(now_ns + length_ns, ReplicaReady(id))

    def _stop(self, now_ns: int, id: ReplicaId) -> None:
        replica = self._replicas.pop(id, None)
        if replica is not None:
            self._abandon_batch(now_ns, replica)
            self._push(now_ns, ReplicaStopped(id))

    def _lose(self, now_ns: int, id: ReplicaId, error: str) -> None:
        """A replica that has not been told to stop is gone."""
        replica = self._replicas.pop(id, None)
        if replica is not None:
            self._abandon_batch(now_ns, replica)
            self._push(now_ns, ReplicaLost(id, error))

    def _lose_node(self, now_ns: int, failure: NodeFailed) -> None:
        """Everything on a node is lost, and nothing starts there until it is repaired."""
        back_ns = now_ns + s(self._faults.node_repair_s)
        self._down_until_ns[failure.node] = back_ns
        for id in [id for id, replica in self._replicas.items() if replica.spec.node == failure.node]:
            self._lose(now_ns, id, f"node {failure.node} went down")
        self._foresee(back_ns, "node", self._faults.node_mtbf_s, failure)

    def _abandon_batch(self, now_ns: int, replica: SimulatedReplica) -> None:
        if replica.news is not None and replica.news[0] > now_ns:
            self.void.add(replica.news[1])
        replica.news = None

    def _resize_now(self, now_ns: int, replica: SimulatedReplica, event: Resized) -> Resized:
        if not self._healed and self._failure.strikes("refused_resize", self._faults.refused_resize):
            return Resized(event.replica, replica.cores)
        before_ns, spec = replica.speed.means_ns, replica.spec
        replica.cores = event.cores
        replica.speed = self._service.speed(spec.stage, spec.variant, event.cores)
        after_ns = replica.speed.means_ns
        if self._resize.rescales and replica.news is not None and replica.news[0] > now_ns:
            self._rescale(now_ns, replica, replica.news, after_ns[replica.size] / before_ns[replica.size])
        return event

    def _rescale(self, now_ns: int, replica: SimulatedReplica, news: tuple[int, int, Finished], ratio: float) -> None:
        """What is left of the batch in flight goes on at the new speed."""
        end_ns, sequence, finished = news
        left_ns = end_ns - now_ns
        longer_ns = round(left_ns * ratio) - left_ns
        self.void.add(sequence)
        finished = Finished(finished.batch, finished.replica, finished.service_ns + longer_ns, finished.edge_counts)
        replica.news = (end_ns + longer_ns, self._push(end_ns + longer_ns, finished), finished)
