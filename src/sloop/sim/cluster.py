"""The simulated cluster: executes the core's orders and returns events, whose times and faults come from the truth.

Guarantees one stream of events ordered by instant and then by creation, and that the pending work of a lost replica is
discarded. It executes every order; `sim.checkers` verifies orders. Must not import beliefs, policies or the core. Of
requests it stores only how many rows those have that are open, and how large these are.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappush

from msgspec import Struct, field, structs

from sloop import actions, events
from sloop.actions import Action, End, StartBatch
from sloop.events import Event, Finished
from sloop.runlog import Record
from sloop.sim import happenings
from sloop.sim.devices import SimulatedDevices
from sloop.sim.happenings import Pending
from sloop.sim.nodes import SimulatedNodes
from sloop.sim.pipelines import FormerPart, PipelinePart, RestLoad, SimulatedPipeline
from sloop.sim.replicas import ONE_ROW, EndsLater, LocalStart, RowsOfBatch, SimulatedReplica, SimulatedShadow, Truths
from sloop.sim.transfers import NO_WEIGHTS, SimulatedTransfers
from sloop.sim.truth.cold_start import FETCHING, LOADING, SPAWNING, WARM_NS, AcquisitionSampler, SpareWorkers
from sloop.sim.truth.failure import FaultSampler
from sloop.sim.truth.sharing import ProcessesWork
from sloop.sim.truth.weights import WeightPlaces
from sloop.units import FOREVER_NS, s
from sloop.vocabulary import BatchId, Node, NodeState, ReplicaId, Request, RequestId, WorkerId, bounds_of


class ClusterTruths(Struct, frozen=True):
    """The truth of a run; every random stream is at its start, and nothing has been fetched."""

    stages: Mapping[str, Truths]
    """Per stage, the truth of its application version; also of versions that are deployed later."""
    acquisition: AcquisitionSampler
    faults: FaultSampler
    """The faults of nodes."""
    plan_ns: int = 0
    """How long a plan beside the loop takes."""
    is_warm: bool = True
    """Whether the first plan is there at once."""
    weights: WeightPlaces | None = None
    """The weights on the nodes; None if no start has to fetch any, and the core orders no transfers."""
    processes: ProcessesWork | None = None
    """What the server's processes take of the cores of a node."""
    spares: SpareWorkers = field(default_factory=SpareWorkers)
    """The workers that shadows take."""


SILENCES_NS = tuple(map(s, (1, 2, 3, 4, 6, 8, 16)))
"""For how long a worker has been silent when the core is told so."""


class Cluster:
    """Replicas on nodes. `pending` always has an entry at `FOREVER_NS`."""

    def __init__(self, truths: ClusterTruths, nodes: Iterable[Node] = ()) -> None:
        self._truths = truths
        self._rates = truths.faults.rates
        self._touches_batches = self._rates.touches_batches
        self._works: dict[RequestId, tuple[int, int]] = {}
        """Of the open requests with several rows, or rows of a size: how many rows they have, and their size."""
        self._is_special = self._touches_batches
        """Whether batches need more than `start_batch` does."""
        self._healed = False
        self.pending = Pending()
        self._push, self._sequences, self._heap = self.pending.add, self.pending.sequences, self.pending.heap
        self._replicas: dict[ReplicaId, SimulatedReplica] = {}
        self._shadows: dict[WorkerId, SimulatedShadow] = {}
        self._pipelines: dict[WorkerId, SimulatedPipeline] = {}
        self._push(FOREVER_NS, events.WOKE)
        self.answer: Callable[[int, actions.RequestSimulation], tuple[int, events.Simulated]] = _no_answer
        """When a question to the simulator is answered, and how."""
        self._nodes = SimulatedNodes(nodes, truths.acquisition, truths.faults, self.pending)
        self._devices = SimulatedDevices(self.pending)
        self._transfers: SimulatedTransfers | None = None
        """None if no start has to fetch any weights, and the core orders no transfers."""
        if truths.weights is not None:
            self._transfers = SimulatedTransfers(
                truths.weights, self._nodes, self._replicas, self.pending, self._go_on, self._lose
            )

    def start_batch(self, now_ns: int, order: StartBatch) -> None:
        """Run a batch. The hot path of every simulation."""
        replica = self._replicas.get(order.replica)
        if replica is None:
            return
        if self._is_special:
            self._start_special(now_ns, order, replica)
            return
        replica.size = size = len(order.requests)
        speed = replica.speed
        service_ns = round(speed.means_ns[size] * next(speed.noises[size]))
        if replica.quota is not None:
            service_ns = replica.quota.run(now_ns, service_ns)
        branches = replica.branches
        if branches is None:
            finished = Finished(order.batch, order.replica, service_ns)
        else:
            finished = Finished(order.batch, order.replica, service_ns, branches.taken(order))
        replica.batch_end = end = (now_ns + service_ns, next(self._sequences), finished)  # as `Pending.add` does
        heappush(self._heap, end)

    def _start_special(self, now_ns: int, order: StartBatch, replica: SimulatedReplica) -> None:
        """`start_batch` for worlds with faults in batches, with replicas that share a device, or with requests of
        several rows, or of rows of a size."""
        replica.work = work = self._work_of(order, replica)
        service_ns = replica.service_ns(work)
        if replica.quota is not None:
            service_ns = replica.quota.run(now_ns, service_ns)
        if self._touches_batches:
            self._start_with_faults(now_ns, order, replica, service_ns)
            return
        finished = self._finished(order, replica, service_ns)
        if replica.sharing is not None:
            self._devices.join(now_ns, replica, service_ns, EndsLater(now_ns, order.batch, finished))
            return
        replica.batch_end = now_ns + service_ns, self._push(now_ns + service_ns, finished), finished

    def note(self, now_ns: int, record: Record) -> None:
        """A request arrives or ends. A cluster is told of each if some have several rows, or rows of a size, or if the
        server's processes take its cores."""
        if type(record) is Request:
            processes = self._truths.processes
            if processes is not None:
                self._devices.disturb(now_ns, processes)
            if record.size or record.rows != 1:
                self._works[record.id] = record.rows, record.size
                self._is_special = True
        elif type(record) is End:
            self._works.pop(record.request, None)

    def _work_of(self, order: StartBatch, replica: SimulatedReplica) -> RowsOfBatch:
        """The rows of a batch. Those of later stages are as large as the request's, if they differ in size at all."""
        pads = replica.truths.pads.get(order.stage)
        if pads is None or not order.size:
            return RowsOfBatch(order.rows)
        works = [self._works.get(id, ONE_ROW) for id in order.requests]
        if order.parts:
            works = [(1, size) for _, size in works]
        for place, piece in enumerate(order.pieces):
            if piece is not None:
                works[place] = piece.rows, works[place][1]
        elements = sum(rows * size for rows, size in works) if pads else 0
        return RowsOfBatch(order.rows, max(size for _, size in works), elements, order.size)

    def _finished(self, order: StartBatch, replica: SimulatedReplica, service_ns: int) -> Finished:
        """What the core is told when a batch is over."""
        edge_counts = replica.branches.taken(order) if replica.branches is not None else ()
        work = replica.work
        if work is None:
            return Finished(order.batch, order.replica, service_ns, edge_counts)
        passed, sizes = replica.truths.passed.get(order.stage, ()), [0] * len(order.requests)
        if passed:
            sizes = [self._works.get(id, ONE_ROW)[1] for id in order.requests]
        return Finished(
            order.batch,
            order.replica,
            service_ns,
            edge_counts,
            sizes=tuple([tuple([(0, size * each) for each in passed]) for size in sizes]) if any(sizes) else (),
            passes=len(replica.passes_of(work.rows)),
            elements=work.elements,
            padded=work.rows * work.size - work.elements if work.elements else 0,
        )

    def obey(self, now_ns: int, order: Action) -> None:
        """Execute an order about a replica or a node; other actions, such as decisions, have no effect."""
        if isinstance(order, actions.StartWorker):
            body = self._replicas.get(order.replica) if order.replica is not None else None
            if order.replica is None:
                self._start(now_ns, order)
            elif body is not None:
                self._start_shadow(now_ns, order, body)
        elif isinstance(order, actions.StopWorker):
            shadow = self._shadows.get(order.worker)
            if shadow is None:
                self._stop(now_ns, order.worker)
            else:
                self._stop_shadow(now_ns, shadow)
        elif isinstance(order, actions.ResizeWorker):
            replica = self._replicas.get(order.worker)
            if replica is not None:
                replica.resized_ns = max(replica.resized_ns, now_ns + replica.truths.resize.draw_ns())
                self._push(replica.resized_ns, events.WorkerResized(order.worker, order.cores))
        elif isinstance(order, actions.AcquireNode):
            self._acquire(now_ns, order.node)
        elif isinstance(order, actions.ReleaseNode):
            self._release(now_ns, order.node)
        elif isinstance(order, actions.Transfer | actions.CancelTransfer | actions.Evict):
            self._move_weights(now_ns, order)
        elif isinstance(order, actions.RequestSimulation):
            self._push(*self.answer(now_ns, order))

    def _acquire(self, now_ns: int, node: str) -> None:
        self._nodes.acquire(now_ns, node)

    def _release(self, now_ns: int, node: str) -> None:
        self._lose_weights(now_ns, node)
        self._nodes.release(now_ns, node)

    def _move_weights(self, now_ns: int, order: actions.Transfer | actions.CancelTransfer | actions.Evict) -> None:
        """Execute an order about weights."""
        transfers = self._transfers
        assert transfers is not None, "the core orders transfers in a world without weights"
        if isinstance(order, actions.Transfer):
            transfers.begin(now_ns, order, is_warm=self._truths.is_warm and now_ns < WARM_NS)
        elif isinstance(order, actions.CancelTransfer):
            transfers.cancel(now_ns, order)
        else:
            transfers.evict(order)

    def deliver_plan(self, now_ns: int, planned: events.Planned) -> None:
        """The core is told a plan when the time that planning takes has passed."""
        is_first = self._truths.is_warm and now_ns < WARM_NS
        self._push(now_ns if is_first else now_ns + self._truths.plan_ns, planned)

    def happen(self, now_ns: int, sequence: int, event: happenings.Happening) -> Event | None:
        """Apply a pending entry. Returns the event for the core, or None."""
        if sequence in self.pending.void:
            self.pending.void.remove(sequence)
            return None
        if isinstance(event, happenings.InternalEvent):
            return self._happen_within(now_ns, sequence, event)
        if isinstance(event, events.NodeReady):
            self._nodes.ready(now_ns, event.node.name)
        elif isinstance(event, happenings.WorkerHappening):
            return self._happen_to(now_ns, event)
        elif isinstance(event, events.WorkerStopped):
            shadow = self._shadows.get(event.worker)
            if shadow is not None:
                shadow.pending = -1
                self._forget_shadow(shadow)
        elif isinstance(event, happenings.BatchHappening):
            replica = self._replicas.get(event.replica)
            if replica is None:
                return None
            if isinstance(event, events.BatchFailed):
                self._devices.leave(now_ns, replica)
        return event

    def _happen_to(self, now_ns: int, event: happenings.WorkerHappening) -> Event | None:
        """Apply an entry about a worker, if it is there."""
        replica = self._replicas.get(event.worker)
        if replica is None:
            shadow = self._shadows.get(event.worker)
            if shadow is None:
                return None
            self._shadow_ready(now_ns, shadow)
        elif isinstance(event, events.WorkerResized):
            return self._resize_now(now_ns, replica, event)
        elif isinstance(event, events.WorkerCompleted):
            return self._complete(now_ns, replica, event)
        elif isinstance(event, events.WorkerReady):
            self._plan_crash(now_ns, event.worker, replica)
        return event

    def _fall_silent(self, now_ns: int, batch: BatchId, replica: ReplicaId) -> None:
        """From now on the worker that runs a batch hangs."""
        for silent_ns in SILENCES_NS:
            self._push(now_ns + silent_ns, events.BatchSilent(batch, replica, silent_ns))

    def _happen_within(self, now_ns: int, sequence: int, event: happenings.InternalEvent) -> Finished | None:
        """Apply an entry that the core is not told. Returns the end of a batch that it is told instead, or None."""
        if isinstance(event, happenings.DeviceDue):
            return self._devices.end(now_ns, sequence, event)
        if isinstance(event, happenings.NodeFailed):
            self._nodes.lose(now_ns, event.node)
            self._lose_all_on(now_ns, event.node)
        elif isinstance(event, happenings.Outage):
            replicas = Counter(replica.spec.node or "" for replica in self._replicas.values())
            if node := self._nodes.begin_outage(now_ns, replicas):
                self._lose_all_on(now_ns, node)
        elif isinstance(event, happenings.Crashed):
            shadow = self._shadows.get(event.worker)
            if shadow is None:
                self._lose(now_ns, event.worker, "the worker process died")
            elif not shadow.is_stopping:
                self._lose_shadow(now_ns, shadow)
        elif self._transfers is not None:
            self._transfers.arrive(now_ns, sequence)
        return None

    def unfinished(self, now_ns: int) -> list[BatchId]:
        """The batches that end later. One whose end nobody will be told of is none of them."""
        ends = [replica.batch_end for replica in self._replicas.values()]
        return [end[2].batch for end in ends if end is not None and end[0] > now_ns]

    def stop_faults(self, now_ns: int) -> None:
        """Disable all faults from now on, pending ones included, and repair the nodes. Lost replicas and messages stay
        lost."""
        self._healed = True
        self._touches_batches = False
        self.pending.void.update(
            entry[1]
            for entry in self.pending.heap
            if isinstance(entry[2], happenings.NodeFailed | happenings.Outage | happenings.Crashed)
        )
        self._nodes.heal(now_ns)

    def _plan_crash(self, now_ns: int, id: ReplicaId, replica: SimulatedReplica) -> None:
        """Schedule the crash of a replica that is ready now."""
        mean_s = self._rates.crash_mtbf_s
        if mean_s > 0.0 and not self._healed:
            self._push(now_ns + replica.truths.faults.after_ns("crash", mean_s), happenings.Crashed(id))

    def _start_with_faults(self, now_ns: int, order: StartBatch, replica: SimulatedReplica, service_ns: int) -> None:
        """`start_batch` for worlds with faults in batches or in their completion messages."""
        rates, faults = self._rates, replica.truths.faults
        if faults.strikes("straggler", rates.straggler):
            service_ns = round(service_ns * rates.straggler_factor)
        if rates.background:
            service_ns = round(service_ns * self._truths.faults.slowed(now_ns, on_device=bool(replica.spec.device)))
        replica.batch_end = None
        if replica.sharing is not None:
            self._devices.join(now_ns, replica, service_ns, EndsLater(now_ns, order.batch, None))
        if rates.touches_requests and faults.strikes_any("deadly_request", rates.deadly_request, order):
            self._push(now_ns + faults.within_ns("deadly_request", service_ns), happenings.Crashed(order.replica))
            return
        is_bad = rates.touches_requests and faults.strikes_any("bad_request", rates.bad_request, order)
        if is_bad or faults.strikes("failed_batch", rates.failed_batch):
            at_ns = now_ns + faults.within_ns("failed_batch", service_ns)
            self._push(at_ns, events.BatchFailed(order.batch, order.replica, "the model raised"))
            return
        if faults.strikes("lost_finished", rates.lost_finished):
            self._fall_silent(now_ns + service_ns, order.batch, order.replica)
            return
        finished = self._finished(order, replica, service_ns)
        late_ns, again_ns = 0, None
        if faults.strikes("late_finished", rates.late_finished):
            late_ns = faults.within_ns("late_finished", rates.late_finished_ns)
        if faults.strikes("repeated_finished", rates.repeated_finished):
            again_ns = faults.within_ns("repeated_finished", rates.late_finished_ns)
        if replica.ends is not None:
            replica.batch_end = FOREVER_NS, -1, finished
            replica.ends.finished, replica.ends.late_ns, replica.ends.again_ns = finished, late_ns, again_ns
            return
        end_ns = now_ns + service_ns + late_ns
        replica.batch_end = (end_ns, self._push(end_ns, finished), finished)
        if again_ns is not None:
            self._push(end_ns + again_ns, finished)

    def _start(self, now_ns: int, order: actions.StartWorker) -> None:
        spec, id = order.spec, order.worker
        truths = self._truths.stages[spec.stage]
        self._replicas[id] = replica = SimulatedReplica(spec, truths)
        self._is_special = self._is_special or replica.sharing is not None
        if order.pipeline is not None:
            replica.has_files = order.transfer is None
            self._join_pipeline(id, replica, order.pipeline, order.place)
        node = self._nodes.get(spec.node or "")
        if node is not None and node.state is not NodeState.READY:
            self._lose(now_ns, id, f"node {spec.node} is not ready")
            return
        length_ns, crash_ns = self._start_ns(now_ns, order, truths), None
        if not self._healed:
            if truths.faults.strikes("slow_start", self._rates.slow_start):
                length_ns = round(length_ns * self._rates.slow_start_factor)
            if truths.faults.strikes("failed_start", self._rates.failed_start):
                crash_ns = truths.faults.within_ns("failed_start", length_ns)
        start, weights, transfers = LocalStart(length_ns, crash_ns), self._truths.weights, self._transfers
        is_provided = order.transfer is not None or order.pipeline is not None
        if weights is None or transfers is None or not (weights.has_network or is_provided):
            start = self._with_spare(now_ns, id, start)
            self._load(now_ns, id, start, [(LOADING, start.length_ns - start.saved_ns)])
            return
        if order.transfer is not None and transfers.has_failed(order.transfer, spec.node or ""):
            self._lose(now_ns, id, NO_WEIGHTS)
            return
        is_warm = self._truths.is_warm and now_ns < WARM_NS
        if is_warm and not is_provided:
            weights.place(spec.node or "", weights.of(spec))
        waits = order.transfer is not None and weights.is_coming(order.transfer, spec.node or "")
        if is_warm or (not waits if is_provided else weights.fetch(now_ns, id, spec)):
            self._load_there(now_ns, id, start, is_warm=is_warm)
            return
        self._replicas[id].start = start
        self._push(now_ns, events.WorkerProgressed(id, FETCHING))
        transfers.wait(now_ns, id, order.transfer, spec.node or "")

    def _load_there(self, now_ns: int, id: ReplicaId, start: LocalStart, *, is_warm: bool = False) -> None:
        """A replica starts whose weights are on its node."""
        replica = self._replicas[id]
        start = self._with_spare(now_ns, id, start)
        steps: Sequence[tuple[str, int]] = replica.truths.cold_start.steps(replica.spec, start.length_ns)
        if start.saved_ns:
            steps = [(step, length_ns) for step, length_ns in steps if step != SPAWNING]
        weights = self._truths.weights
        assert weights is not None
        if replica.part is not None:
            self._load_part(now_ns, id, start, dict(steps))
            return
        self._load(now_ns, id, start, [] if is_warm else steps)

    def _load(self, now_ns: int, id: ReplicaId, start: LocalStart, steps: Iterable[tuple[str, int]]) -> None:
        """A replica whose weights are on its node goes through these steps, each with its length, and is ready."""
        crash_ns, ready_ns = start.crash_ns, start.length_ns - start.saved_ns
        if crash_ns is not None and not self._healed:
            self._push(now_ns + crash_ns * ready_ns // max(1, start.length_ns), happenings.Crashed(id))
        at_ns = now_ns
        for step, length_ns in steps:
            if length_ns:
                self._push(at_ns, events.WorkerProgressed(id, step))
            at_ns += length_ns
        self._push(now_ns + ready_ns, events.WorkerReady(id))

    def _with_spare(self, now_ns: int, id: ReplicaId, start: LocalStart) -> LocalStart:
        """The start, without the process if a spare worker of the node is there for it."""
        replica = self._replicas[id]
        saved_ns = replica.truths.cold_start.process_ns(replica.spec, start.length_ns)
        if not saved_ns or not self._truths.spares.take(now_ns, replica.spec.node or ""):
            return start
        return structs.replace(start, saved_ns=saved_ns)

    def _go_on(self, now_ns: int, id: ReplicaId) -> None:
        """The weights of a replica that waited are on its node."""
        replica = self._replicas[id]
        start, replica.start = replica.start, None
        if start is None:  # a part has the files of the other layers
            self._load_rest(now_ns, id, replica)
        else:
            self._load_there(now_ns, id, start)

    # Pipelines

    def _join_pipeline(self, id: ReplicaId, replica: SimulatedReplica, first: WorkerId, place: int) -> None:
        """A replica starts as a part of a pipeline."""
        pipeline, shape = self._pipelines.get(first), replica.spec.shape
        if pipeline is None:
            has_rests = replica.truths.cold_start.loads_on_cores(replica.spec)
            pipeline = self._pipelines[first] = SimulatedPipeline(len(shape), has_rests=has_rests)
        replica.part = shape[place]
        if pipeline.is_broken:
            return
        pipeline.members[id] = None
        replica.pipeline = pipeline
        weights, service, spec = self._truths.weights, replica.truths.service, replica.spec
        link_mbps = weights.node_mbps if weights is not None else 0.0

        def stations_ns(busy_ns: int) -> list[float]:
            line_ns = service.line_ns(spec.stage, spec.variant, replica.slot, bounds_of(shape), link_mbps)[replica.size]
            factor = busy_ns / replica.speed.means_ns[replica.size]
            return [own_ns if place % 2 else own_ns * factor for place, own_ns in enumerate(line_ns)]

        replica.quota = PipelinePart(pipeline, stations_ns)

    def _load_part(self, now_ns: int, id: ReplicaId, start: LocalStart, lengths_ns: dict[str, int]) -> None:
        """A part loads and sends its layers, and is ready. The rest takes as much longer as the rest is larger."""
        replica = self._replicas[id]
        assert replica.part is not None, f"replica {id} has all layers"
        share = replica.truths.cold_start.share(replica.spec, replica.part.span)
        spawning_ns = lengths_ns.pop(SPAWNING, 0)
        own_ns = {step: round(length_ns * share) for step, length_ns in lengths_ns.items()}
        length_ns, rest_ns = spawning_ns + sum(own_ns.values()), sum(lengths_ns.values()) - sum(own_ns.values())
        crash_ns = start.crash_ns
        if crash_ns is not None and start.length_ns:
            crash_ns = crash_ns * length_ns // start.length_ns
        replica.rest = LocalStart(rest_ns)
        self._load(now_ns, id, LocalStart(length_ns, crash_ns), [(SPAWNING, spawning_ns), *own_ns.items()])
        if replica.has_files:
            self._load_rest(now_ns + length_ns, id, replica)

    def _load_rest(self, from_ns: int, id: ReplicaId, replica: SimulatedReplica) -> None:
        """From an instant on, a part loads the other layers, whose files are on its node."""
        assert replica.rest is not None, f"replica {id} waits for nothing"
        length_ns = replica.truths.cold_start.rest_ns(replica.spec, replica.slot, replica.rest.length_ns)
        replica.rest_load = loads = RestLoad(from_ns, length_ns)
        if replica.pipeline is not None and replica.part is not None:
            replica.pipeline.load_rest(replica.spec.shape.index(replica.part), loads)
        self._push(loads.end_ns, events.WorkerCompleted(id))

    def _complete(
        self, now_ns: int, replica: SimulatedReplica, event: events.WorkerCompleted
    ) -> events.WorkerCompleted | None:
        """A part has all layers, unless batches delayed it. When all parts have, each runs batches of its own."""
        if replica.part is None:
            return None  # told already: its pipeline broke, and it was sooner than expected
        if replica.rest_load is not None and replica.rest_load.end_ns > now_ns:
            self._push(replica.rest_load.end_ns, event)
            return None
        assert replica.rest is not None, f"replica {event.worker} has not loaded its part"
        pipeline, replica.part = replica.pipeline, None
        if pipeline is None:
            return event
        pipeline.complete[event.worker] = None
        if pipeline.is_complete:
            after_ns = round(pipeline.left_ns[-1]) if pipeline.left_ns else now_ns
            for member in [self._replicas[each] for each in pipeline.members]:
                self._leave_pipeline(member)
                member.quota = FormerPart(after_ns, member.quota)
        return event

    def _leave_pipeline(self, replica: SimulatedReplica) -> None:
        spec = replica.spec
        replica.pipeline = None
        replica.quota = replica.truths.service.quota(spec.stage, spec.variant, replica.slot)

    def _break_pipeline(self, now_ns: int, id: ReplicaId, replica: SimulatedReplica, *, is_lost: bool) -> None:
        """A part is gone. If it is lost, so are the batches of the others, which serve no more as a pipeline."""
        pipeline, replica.pipeline = replica.pipeline, None
        if pipeline is None:
            return
        pipeline.members.pop(id)
        pipeline.is_broken = True
        for other in list(pipeline.members):
            member = self._replicas[other]
            self._leave_pipeline(member)
            if member.rest_load is not None and member.part is not None:
                member.rest_load.stops_computing(now_ns)
                self._push(max(now_ns, member.rest_load.end_ns), events.WorkerCompleted(other))
            end = member.batch_end
            if is_lost and end is not None and end[0] > now_ns:
                self._abandon_batch(now_ns, member)
                self._push(now_ns, events.BatchLost(end[2].batch, other, f"replica {id}, another part of it, is lost"))

    # Shadows

    def _start_shadow(self, now_ns: int, order: actions.StartWorker, body: SimulatedReplica) -> None:
        """A spare worker of the node loads the blocks of a shadow."""
        truths, wanted = body.truths, order.spec.shadow
        assert wanted is not None, f"worker {order.worker} is no shadow"
        body.shadow = self._shadows[order.worker] = shadow = SimulatedShadow(order.worker, body, wanted)
        waits_ns = self._truths.spares.take_ns(now_ns, body.spec.node or "")
        length_ns = waits_ns + truths.cold_start.shadow_ns(body.spec, wanted)
        if not self._healed and truths.faults.strikes("failed_shadow", self._rates.failed_shadow):
            self._push(now_ns + truths.faults.within_ns("failed_shadow", length_ns), happenings.Crashed(order.worker))
        shadow.pending = self._push(now_ns + length_ns, events.WorkerReady(order.worker))

    def _stop_shadow(self, now_ns: int, shadow: SimulatedShadow) -> None:
        """Batches do not use the shadow any more; it stops when the running one is over."""
        stops_ns, body = now_ns, shadow.body
        if shadow.is_used(now_ns) and body.batch_end is not None:
            ends = body.ends  # on a shared device: as it looks now
            stops_ns = body.batch_end[0] if ends is None else self._devices.end_ns(body, ends.batch)
        if shadow.pending >= 0:  # it still loads
            self.pending.void.add(shadow.pending)
        shadow.is_ready, shadow.is_stopping = False, True
        body.update_speed()
        shadow.pending = self._push(stops_ns, events.WorkerStopped(shadow.id))

    def _shadow_ready(self, now_ns: int, shadow: SimulatedShadow) -> None:
        """A shadow has loaded its blocks."""
        shadow.is_ready, shadow.pending, body = True, -1, shadow.body
        if body.batch_end is not None and body.batch_end[0] > now_ns:
            shadow.alone = body.batch_end[2].batch
        body.update_speed()
        mean_s = self._rates.shadow_mtbf_s
        if mean_s > 0.0 and not self._healed:
            self._push(now_ns + body.truths.faults.after_ns("shadow", mean_s), happenings.Crashed(shadow.id))

    def _lose_shadow(self, now_ns: int, shadow: SimulatedShadow) -> None:
        """A shadow dies. What is left of a batch that uses it takes the body as long as alone."""
        body = shadow.body
        before_ns, is_used = body.speed.means_ns, shadow.is_used(now_ns)
        self._forget_shadow(shadow)
        body.update_speed()
        if is_used and body.batch_end is not None:
            ratio = body.speed.means_ns[body.size] / before_ns[body.size]
            self._rescale(now_ns, body, body.batch_end, ratio)
        self._push(now_ns, events.WorkerLost(shadow.id, "the shadow's process died"))

    def _forget_shadow(self, shadow: SimulatedShadow) -> None:
        """A shadow is gone."""
        if shadow.pending >= 0:
            self.pending.void.add(shadow.pending)
        del self._shadows[shadow.id]
        shadow.body.shadow = None

    def _start_ns(self, now_ns: int, order: actions.StartWorker, truths: Truths) -> int:
        """How long a replica takes to start."""
        weights, spec = self._truths.weights, order.spec
        is_local = weights is not None and order.transfer is None and weights.has(spec.node or "", spec)
        return truths.cold_start.draw_ns(now_ns, spec, is_local=is_local)

    def _stop(self, now_ns: int, id: ReplicaId) -> None:
        replica = self._replicas.pop(id, None)
        if replica is not None:
            if replica.shadow is not None:
                self._forget_shadow(replica.shadow)
            self._abandon_batch(now_ns, replica)
            if self._transfers is not None:
                self._transfers.leave(now_ns, id)
            self._push(now_ns, events.WorkerStopped(id))
            self._break_pipeline(now_ns, id, replica, is_lost=False)

    def _lose(self, now_ns: int, id: ReplicaId, error: str) -> None:
        """Lose a replica that was not ordered to stop."""
        replica = self._replicas.pop(id, None)
        if replica is not None:
            if replica.shadow is not None:
                self._forget_shadow(replica.shadow)
            self._abandon_batch(now_ns, replica)
            if self._transfers is not None:
                self._transfers.leave(now_ns, id)
            self._push(now_ns, events.WorkerLost(id, error))
            self._break_pipeline(now_ns, id, replica, is_lost=True)

    def _lose_all_on(self, now_ns: int, node: str) -> None:
        """A node went down with all that it had."""
        for id in [id for id, replica in self._replicas.items() if replica.spec.node == node]:
            self._lose(now_ns, id, f"node {node} went down")
        self._lose_weights(now_ns, node)

    def _lose_weights(self, now_ns: int, node: str) -> None:
        """A node that fails or is released keeps no weights, sends none, and has no spare workers."""
        self._truths.spares.lose(node)
        if self._transfers is not None:
            self._transfers.lose_node(now_ns, node)

    def _abandon_batch(self, now_ns: int, replica: SimulatedReplica) -> None:
        if replica.ends is not None:
            self._devices.leave(now_ns, replica)
        elif replica.batch_end is not None and replica.batch_end[0] > now_ns:
            self.pending.void.add(replica.batch_end[1])
        replica.batch_end = None

    def _resize_now(self, now_ns: int, replica: SimulatedReplica, event: events.WorkerResized) -> events.WorkerResized:
        truths = replica.truths
        if not self._healed and truths.faults.strikes("refused_resize", self._rates.refused_resize):
            return events.WorkerResized(event.worker, replica.slot.cores)
        before_ns = replica.speed.means_ns
        before, replica.slot = replica.slot, structs.replace(replica.slot, cores=event.cores)
        if replica.rest_load is not None and replica.part is not None:
            rest_ns, whole_ns = truths.cold_start.rest_ns, s(1)
            ratio = rest_ns(replica.spec, replica.slot, whole_ns) / rest_ns(replica.spec, before, whole_ns)
            replica.rest_load.rescale(now_ns, ratio)
            self._push(replica.rest_load.end_ns, events.WorkerCompleted(event.worker))
        if replica.pipeline is None:
            replica.quota = truths.service.quota(replica.spec.stage, replica.spec.variant, replica.slot)
        replica.update_speed()
        after_ns = replica.speed.means_ns
        if (
            replica.pipeline is None
            and truths.resize.rescales
            and replica.batch_end is not None
            and replica.batch_end[0] > now_ns
        ):
            self._rescale(now_ns, replica, replica.batch_end, after_ns[replica.size] / before_ns[replica.size])
        return event

    def _rescale(
        self, now_ns: int, replica: SimulatedReplica, end: tuple[int, int, Finished | events.BatchFailed], ratio: float
    ) -> None:
        """Multiply the remaining time of the running batch by `ratio`."""
        if replica.ends is not None:
            self._devices.scale(now_ns, replica, replica.ends.batch, ratio)
            return
        end_ns, sequence, finished = end
        remaining_ns = end_ns - now_ns
        longer_ns = round(remaining_ns * ratio) - remaining_ns
        self.pending.void.add(sequence)
        if isinstance(finished, Finished):
            finished = structs.replace(finished, service_ns=finished.service_ns + longer_ns)
        replica.batch_end = (end_ns + longer_ns, self._push(end_ns + longer_ns, finished), finished)


def _no_answer(now_ns: int, asked: actions.RequestSimulation) -> tuple[int, events.Simulated]:
    return now_ns + 1, events.Simulated(asked.number, error="a simulation cannot simulate itself here")
