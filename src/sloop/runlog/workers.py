"""What became of the workers of one version: replicas with their cold starts, shadows and pipelines.

`RunState` passes it the records that are about workers; it charges their cores to the account of the version.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from msgspec import structs

from sloop import actions, events
from sloop.runlog.cost import CostAccount
from sloop.runlog.replicas import (
    COLD_START,
    BatchGroup,
    DeviceName,
    DeviceUse,
    PipelineAccount,
    ReplicaRecord,
    ShadowAccount,
)
from sloop.runlog.samples import Samples, new_samples
from sloop.vocabulary import ALONE, BatchId, Life, ReplicaId, ReplicaSpec, Shape, Slot, WorkerId


class WorkerAccount:
    """The workers of one version. `uses` has the devices that all versions share; `requeue` is told that the batch of a
    replica will not finish, and why."""

    def __init__(
        self,
        cost: CostAccount,
        uses: dict[DeviceName, DeviceUse],
        requeue: Callable[[int, ReplicaRecord, str], None],
    ) -> None:
        self.cost, self.uses, self._requeue = cost, uses, requeue
        self.replicas: dict[ReplicaId, ReplicaRecord] = {}
        self.groups: dict[tuple[str, str, Slot, Shape], BatchGroup] = {}
        self.resized: set[BatchId] = set()
        """Running batches whose replica was resized after their start."""
        self.cold_starts = 0
        self.cold_start_ns: defaultdict[tuple[str, str, str], Samples[int]] = defaultdict(new_samples)
        """By stage, variant and step."""
        self.resize_ns: defaultdict[str, Samples[int]] = defaultdict(new_samples)
        """By stage, the times in ns from the order of a resize to its effect."""
        self.pipelines, self.shadows = PipelineAccount(), ShadowAccount()
        self.lost: Counter[tuple[str, str]] = Counter()
        """Replicas, by stage and variant."""
        self.adopted: Counter[tuple[str, str]] = Counter()

    def takers(self) -> dict[type, Callable[[int, Any], None]]:
        """What takes each kind of record."""
        return {
            actions.StartWorker: self._start_worker,
            actions.AdoptWorker: self._adopt_replica,
            actions.ResizeWorker: self._order_resize,
            actions.StopWorker: self._stop,
            events.WorkerProgressed: self._progress,
            events.WorkerReady: self._ready,
            events.WorkerCompleted: self._complete,
            events.WorkerResized: self._resize,
            events.WorkerStopped: self._stopped,
            events.WorkerLost: self._lost,
        }

    def _start_worker(self, now_ns: int, start: actions.StartWorker) -> None:
        if start.replica is None:
            self._start_replica(now_ns, start)
        elif start.replica in self.replicas:
            self._start_shadow(now_ns, self.replicas[start.replica], start)

    def _start_replica(self, now_ns: int, start: actions.StartWorker) -> None:
        self.cold_starts += 1
        made = self._add_replica(now_ns, start.worker, start.spec, now_ns)
        if start.pipeline is not None:
            self.pipelines.parts += 1
            made.part, made.pipeline = start.spec.shape[start.place], start.pipeline
            self._set_shape(made, start.spec.shape)
            if start.pipeline not in self.pipelines.open:
                self.pipelines.count += 1
                self.pipelines.open[start.pipeline] = {}
                self.pipelines.unanswered[start.pipeline] = now_ns
            self.pipelines.open[start.pipeline][made.id] = made

    def _adopt_replica(self, now_ns: int, adopted: actions.AdoptWorker) -> None:
        made = self._add_replica(now_ns, adopted.worker, adopted.spec, -1)
        self.adopted[made.group.key] += 1
        if adopted.is_ready:
            made.life = Life.READY

    def _add_replica(self, now_ns: int, id: ReplicaId, spec: ReplicaSpec, order_ns: int) -> ReplicaRecord:
        self.cost.allocate(now_ns, id, spec, spec.cores)
        made = ReplicaRecord(id, spec, self._group(spec, spec.slot), spec.cores, spec.cores, order_ns, now_ns)
        if spec.slot.accelerator or not spec.slot.is_capped:
            made.use = self.uses.setdefault((spec.slot.hardware, spec.node or "", spec.device or ""), DeviceUse())
        self.replicas[id] = made
        return made

    def _group(self, spec: ReplicaSpec, slot: Slot, shape: Shape = ALONE) -> BatchGroup:
        key = spec.stage, spec.variant, slot, shape
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = BatchGroup((spec.stage, spec.variant), slot, shape)
        return group

    def _progress(self, now_ns: int, event: events.WorkerProgressed) -> None:
        replica = self.replicas.get(event.worker)
        if replica is not None:
            self._end_step(now_ns, replica)
            replica.step, replica.step_ns = event.step, now_ns

    def _end_step(self, now_ns: int, replica: ReplicaRecord) -> None:
        if replica.step:
            self.cold_start_ns[(*replica.group.key, replica.step)].append(now_ns - replica.step_ns)
        replica.step = ""

    def _ready(self, now_ns: int, event: events.WorkerReady) -> None:
        replica, pair = self.replicas.get(event.worker), self.shadows.bodies.get(event.worker)
        if pair is not None and pair.shadow is not None:
            self._set_shape(pair, pair.shadow.spec.shape)
        if replica is not None and replica.life is Life.STARTING:
            self._end_step(now_ns, replica)
            replica.has_started = True
            if replica.part is None:
                self._serve(now_ns, replica)
                return
            pipeline = self.pipelines.open[replica.pipeline] if replica.pipeline is not None else {}
            if len(pipeline) == len(replica.spec.shape) and all(member.has_started for member in pipeline.values()):
                for member in pipeline.values():
                    self._serve(now_ns, member)

    def _serve(self, now_ns: int, replica: ReplicaRecord) -> None:
        """A replica takes batches from now on."""
        if replica.order_ns >= 0 and replica.life is Life.STARTING and not replica.has_served:
            self.cold_start_ns[(*replica.group.key, COLD_START)].append(now_ns - replica.order_ns)
        replica.life, replica.since_ns, replica.has_served = Life.READY, now_ns, True

    def _complete(self, now_ns: int, event: events.WorkerCompleted) -> None:
        """A part of a pipeline has all layers; when all parts have, they are replicas of their own."""
        replica = self.replicas.get(event.worker)
        if replica is None or replica.part is None or not replica.has_started:
            return
        number, replica.part = replica.pipeline, None
        self.pipelines.completion_ns[replica.group.key].append(now_ns - replica.order_ns)
        if number is None:
            if replica.life is Life.STARTING:
                self._serve(now_ns, replica)
        elif all(part.part is None and part.life is not Life.STARTING for part in self.pipelines.open[number].values()):
            self._dissolve(number)

    def first_answer(self, now_ns: int, replica: ReplicaRecord) -> None:
        """A replica has answered a batch: if that has passed a pipeline, count the first one."""
        number = replica.pipeline
        order_ns = self.pipelines.unanswered.pop(number, None) if number is not None else None
        if order_ns is not None:
            self.pipelines.answer_ns.append(now_ns - order_ns)

    def _dissolve(self, number: WorkerId) -> None:
        self.pipelines.unanswered.pop(number, None)
        for member in self.pipelines.open.pop(number).values():
            member.pipeline = None
            self._set_shape(member, ALONE)

    def break_pipeline(self, now_ns: int, replica: ReplicaRecord) -> None:
        """A replica is gone, or its batch is: its pipeline is lost, and the parts serve when they have all layers."""
        number = replica.pipeline
        if number is None:
            return
        members = list(self.pipelines.open[number].values())
        self._dissolve(number)
        self.pipelines.lost += replica.life is not Life.DRAINING
        for member in members:
            if member.part is None and member.life is Life.STARTING:
                self._serve(now_ns, member)
            elif member.part is not None and member.life is Life.READY:
                member.life, member.since_ns = Life.STARTING, now_ns

    def _order_resize(self, now_ns: int, order: actions.ResizeWorker) -> None:
        replica = self.replicas.get(order.worker)
        if replica is not None:
            replica.wanted_cores, replica.resize_ns = order.cores, now_ns
            self.cost.grow(now_ns, order.worker, replica.all_cores(order.cores))

    def _resize(self, now_ns: int, event: events.WorkerResized) -> None:
        replica = self.replicas.get(event.worker)
        if replica is None:
            return
        self.cost.allocate(now_ns, replica.id, replica.spec, replica.all_cores(event.cores))
        if replica.running is not None and event.cores != replica.cores:
            self.resized.add(replica.running.batch)
        slot = structs.replace(replica.spec.slot, cores=event.cores)
        replica.cores, replica.group = event.cores, self._group(replica.spec, slot, replica.group.shape)
        if replica.resize_ns:
            self.resize_ns[replica.spec.stage].append(now_ns - replica.resize_ns)
            replica.resize_ns = 0

    def _start_shadow(self, now_ns: int, replica: ReplicaRecord, order: actions.StartWorker) -> None:
        self.shadows.count += 1
        self.shadows.bodies[order.worker] = replica
        replica.shadow = order
        self._charge_shadow(now_ns, replica)

    def _shadow_gone(self, now_ns: int, id: WorkerId) -> bool:
        """Returns whether the worker that is gone was a shadow."""
        replica = self.shadows.bodies.pop(id, None)
        if replica is None:
            return False
        self._set_shape(replica, ALONE)
        replica.shadow = None
        self._charge_shadow(now_ns, replica)
        return True

    def _charge_shadow(self, now_ns: int, replica: ReplicaRecord) -> None:
        """Charge a replica for the cores that it has with its shadow from now on."""
        cores = max(replica.cores, replica.wanted_cores) if replica.resize_ns else replica.cores
        self.cost.allocate(now_ns, replica.id, replica.spec, replica.all_cores(cores))

    def _set_shape(self, replica: ReplicaRecord, shape: Shape) -> None:
        if replica.group.shape != shape:
            if replica.running is not None:
                self.resized.add(replica.running.batch)
            replica.group = self._group(replica.spec, replica.group.slot, shape)

    def _stop(self, now_ns: int, order: actions.StopWorker) -> None:
        replica, pair = self.replicas.get(order.worker), self.shadows.bodies.get(order.worker)
        if pair is not None:
            self._set_shape(pair, ALONE)
        if replica is not None:
            self.drain(now_ns, replica)
            # A stuck replica: its batch may run elsewhere before the replica has stopped.
            self._requeue(now_ns, replica, "worker")

    def drain(self, now_ns: int, replica: ReplicaRecord) -> None:
        if replica.life is not Life.DRAINING:
            replica.life, replica.since_ns = Life.DRAINING, now_ns

    def _stopped(self, now_ns: int, event: events.WorkerStopped) -> None:
        if not self._shadow_gone(now_ns, event.worker):
            self._forget(now_ns, event.worker)

    def _lost(self, now_ns: int, event: events.WorkerLost) -> None:
        if self._shadow_gone(now_ns, event.worker):
            self.shadows.lost += 1
            return
        replica = self._forget(now_ns, event.worker)
        if replica is not None:
            self.lost[replica.group.key] += 1

    def _forget(self, now_ns: int, id: ReplicaId) -> ReplicaRecord | None:
        self.cost.release(now_ns, id)
        replica = self.replicas.pop(id, None)
        if replica is not None:
            if replica.shadow is not None:
                del self.shadows.bodies[replica.shadow.worker]
            self._requeue(now_ns, replica, "worker")
            self.break_pipeline(now_ns, replica)
        return replica
