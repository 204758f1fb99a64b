"""Early binding: a batch is given to a replica when it begins to form, and may wait there for the batches before it.

The route policy says so (`binds_early`). The replica is chosen before the batch is full, because it decides how large
the batch may be; the batch policy then says when the batch is closed. The batch of an idle replica begins at once. That
of a busy one waits in the replica's *lane*, in which nothing overtakes; it gets its number when it begins. What has
become hopeless by then, or has ended, is left out. A replica that drains or is lost gives its lane back to the queue.

With late binding, the default, batches form when a replica is idle. They are never smaller, and no replica is idle
while a batch waits for another one. Early binding is how the published router of the colocation thesis works (Elvinger,
ETH Zurich 2024, section 4.3), and where workers can fetch the inputs of their next batch beforehand.
"""

from collections.abc import Callable, Iterator

from sloop.actions import Action, BindBatch
from sloop.core.dispatch import SWEEP_NS_MIN, SWEEP_NS_PER_VISIT, DataPath, next_look_ns
from sloop.core.protocols import Policies
from sloop.core.state import ApplicationState, BoundBatch, DeviceKey, DeviceLoad, Replica, ReplicaLane, StageState
from sloop.events import BatchFailed, BatchLost, Finished
from sloop.units import FOREVER_NS
from sloop.vocabulary import BatchId, Life, ReplicaId, Visit


class EarlyDataPath(DataPath):
    """The data path of an application whose route policy binds early. `remind` asks to be called at a time, for
    `watch_lanes`."""

    def __init__(  # one more than `DataPath`
        self,
        state: ApplicationState,
        policies: Policies,
        batch_ids: Iterator[BatchId],
        devices: dict[DeviceKey, DeviceLoad],
        remind: Callable[[int], None],
    ) -> None:
        super().__init__(state, policies, batch_ids, devices)
        self._remind = remind

    def finish(self, now_ns: int, event: Finished, out: list[Action]) -> None:
        """A batch is done: the next one of its replica's lane begins."""
        super().finish(now_ns, event, out)
        self._begin_bound(now_ns, event.replica, out)

    def fail(self, now_ns: int, event: BatchFailed, out: list[Action]) -> None:
        """A batch failed: its halves wait in the queue; the next one of its replica's lane begins."""
        super().fail(now_ns, event, out)
        self._begin_bound(now_ns, event.replica, out)

    def lose_batch(self, now_ns: int, event: BatchLost, out: list[Action]) -> None:
        """A batch is lost with another part of its pipeline."""
        super().lose_batch(now_ns, event, out)
        self._begin_bound(now_ns, event.replica, out)

    def dispatch(self, now_ns: int, stage: StageState, out: list[Action]) -> int:
        """Close and bind batches while there are waiting visits and ready replicas and the batch policy does not wait.

        Returns the time until which the batch policy waits, or at which to look at lanes if that is earlier.
        """
        queue, times = stage.queue, stage.times
        visits, wait_until_ns = queue.visits, FOREVER_NS
        while visits:
            replica = self._opened(now_ns, stage)
            if replica is None:
                break
            rate = replica.service_rate
            limit = rate.batch_max
            alone_ns, full_ns = rate.least_alone_ns + times.remaining_ns, rate.least_full_ns + times.remaining_full_ns
            self._prune(now_ns, stage, limit, alone_ns, full_ns, "", out)
            if not visits:
                break
            if visits[0].group:
                count = queue.group_size(limit)
            else:
                take = self._batch.decide(
                    now_ns, visits, limit, rate.costs_ns, stage.limits.wait_ns, times.remaining_ns
                )
                if take.skip:
                    self._skip(now_ns, stage, take.skip, alone_ns, out)
                    continue
                count, wait_until_ns = take.count, take.wait_until_ns
                if not count:
                    assert wait_until_ns > now_ns, f"a batch policy waits at {stage.name} until now"
                    break
            assert count <= limit, f"batch of {count} at {stage.name}, whose limit is {limit}"
            self._bind(now_ns, stage, replica, queue.take(count), out)
            wait_until_ns = FOREVER_NS
        if stage.lanes_ns <= now_ns:  # of lanes that are gone: nobody looks at an idle stage
            self.watch_lanes(now_ns, stage, out)
        return min(wait_until_ns, stage.lanes_ns)

    def watch_lanes(self, now_ns: int, stage: StageState, out: list[Action]) -> None:
        """Drop the bound visits that have become hopeless, if it is time to look for them; ask to be called again."""
        if now_ns >= stage.lanes_ns:
            self._sweep_lanes(now_ns, stage, out)
        self._remind(stage.lanes_ns)

    def _sweep_lanes(self, now_ns: int, stage: StageState, out: list[Action]) -> None:
        times, look_ns = stage.times, FOREVER_NS
        ended: list[Visit] = []

        def stays(visit: Visit) -> bool:
            nonlocal look_ns
            if self._has_ended(visit):
                return False
            if self._is_hopeless(now_ns, visit, times.remaining_ns, times.remaining_full_ns):
                ended.append(visit)
                return False
            look_ns = min(look_ns, next_look_ns(now_ns, visit))
            return True

        stage.monitor.queue(now_ns, -stage.keep_bound(stays))
        for visit in ended:
            self._drop_visit(now_ns, visit, times.remaining_ns, "the replica of its batch was busy", out)
        if look_ns < FOREVER_NS:
            look_ns = max(look_ns, now_ns + SWEEP_NS_MIN + SWEEP_NS_PER_VISIT * stage.monitor.waiting)
        stage.lanes_ns = look_ns

    def _opened(self, now_ns: int, stage: StageState) -> Replica | None:
        """The replica for which the next batch forms; None if none is ready."""
        if stage.opened is None:
            pool = stage.pool
            ready = pool.ready
            if not ready:
                return None
            stage.opened = ready[self._route.choose(now_ns, ready, pool.last) if len(ready) > 1 else 0]
            pool.last = stage.opened.id
        return stage.opened

    def _bind(self, now_ns: int, stage: StageState, replica: Replica, visits: list[Visit], out: list[Action]) -> None:
        """The batch is closed: it begins, or waits in the replica's lane."""
        stage.opened = None
        if replica.batch is None:
            self._begin(now_ns, stage, replica, visits, out)
            return
        if replica.lane is None:
            replica.lane = ReplicaLane()
        replica.lane.add(BoundBatch(visits, replica.service_rate.costs_ns[len(visits)]))
        stage.pool.note_change(replica)
        look_ns = min(max(visit.deadline_ns, now_ns) for visit in visits) + 1
        if look_ns < stage.lanes_ns:
            stage.lanes_ns = look_ns
            self._remind(look_ns)
        parts = tuple([visit.part for visit in visits]) if stage.runs_for_parts else ()
        out.append(BindBatch(replica.id, stage.name, tuple([visit.request.id for visit in visits]), parts))

    def _begin_bound(self, now_ns: int, id: ReplicaId, out: list[Action]) -> None:
        """If a replica is idle, begin the first batch of its lane that has visits left which are not hopeless."""
        replica = self._state.replicas.get(id)
        while replica is not None and replica.lane is not None and replica.batch is None:
            assert replica.life is Life.READY, f"replica {id} has a lane and is {replica.life}"
            stage, visits = replica.stage, replica.lane.take()
            if not replica.lane.batches:
                replica.lane = None
            rate, times, kept = replica.service_rate, stage.times, list[Visit]()
            alone_ns, full_ns = rate.least_alone_ns + times.remaining_ns, rate.least_full_ns + times.remaining_full_ns
            for visit in visits:
                if not self._has_ended(visit) and not self._is_hopeless(now_ns, visit, alone_ns, full_ns):
                    kept.append(visit)
                    continue
                stage.monitor.queue(now_ns, -1)
                if not self._has_ended(visit):
                    self._drop_visit(now_ns, visit, alone_ns, "the replica of its batch was busy", out)
            if kept:
                self._begin(now_ns, stage, replica, kept, out)
        if replica is not None:
            replica.stage.pool.note_change(replica)

    def _has_ended(self, visit: Visit) -> bool:
        """Whether a request in a graph has ended on another branch."""
        open_requests = self._state.open_requests
        return open_requests is not None and visit.request.id not in open_requests
