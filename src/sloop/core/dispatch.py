"""The data path: how requests move from arrival through queues and batches to their end. It must stay lean.

Policies make all decisions; this file guarantees what no policy may break: a replica runs one batch at a time, a batch
goes to a ready replica, a request ends exactly once, the requests of a failed or lost batch are tried again or
answered. Some lines repeat a function inline to save a call for every request; tests/core/test_cost.py counts calls and
instructions.

**Bad requests fail alone.** If a batch of several requests fails, its two halves are tried again, each as a batch of
its own, until a request that fails is alone: at most ⌈log₂ n⌉ further tries for each of n requests. If a replica is
lost while it runs a batch, each request is tried again alone: one that loses a second replica fails. Requests that are
tried again come first, as they did before; the drop policy removes those that would be late. Estimates learn nothing
from failed and lost batches.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Final

from msgspec import structs

from sloop.actions import Action, End, Piece, StartBatch, StopWorker
from sloop.app.progress import Entered, RequestProgress
from sloop.core.application import ApplicationState
from sloop.core.batching import OfferedDevice, fitting
from sloop.core.lanes import DueLanes, Lane, LaneKey, MixedQueue
from sloop.core.protocols import BatchDecision, Policies, choosing, deciding
from sloop.core.queue import Queue, group_size, rows_of
from sloop.core.rates import DeviceKey, DeviceLoad, LoadedBatch, ServiceRate, SlowedCosts
from sloop.core.replica import Replica, RunningBatch
from sloop.core.stage import QUIET_NS, StageState
from sloop.events import BatchFailed, BatchLost, Cancelled, Finished
from sloop.text import in_ms
from sloop.units import FOREVER_NS, ms, s
from sloop.vocabulary import BatchId, Life, Outcome, Request, RequestId, Visit

ATTEMPTS_MAX = 2
"""A request fails if two replicas are lost while they run it. The second one ran nothing else, so the request is the
cause: with more attempts, one request could stop a whole stage."""

SWEEP_NS_MIN = ms(10)
SWEEP_NS_PER_VISIT = 10_000
"""The shortest time between two searches of a queue for passed deadlines; a long queue is searched less often. Checking
a visit takes a few hundred nanoseconds, so the searches take a few per cent of the time at most."""

OVERDUE_PARTS = 8
"""A visit that the drop policy keeps after its deadline is checked again when its age has grown by 1/8: soon enough for
a rule that drops at a multiple of the SLO, and less and less often under a rule that never drops."""

DUE_LANES = 64
"""So many lanes at most are asked when their first visits are due: this bounds the time of a decision."""

SERVED: Final = Outcome.SERVED
READY: Final = Life.READY
DRAINING: Final = Life.DRAINING
"""Looked up here once: to look up a member of an enumeration costs as much as to make an action."""

RETRY_NS_MIN = s(1)
"""The smallest `Retry-After`: the header has whole seconds. Sent by a server that shuts down, and with requests that a
plan refuses."""


class _Hopeless:
    """What a scan of a queue has found."""

    __slots__ = ("ended", "hopeless", "kept")

    def __init__(self) -> None:
        self.ended: list[int] = []
        """The indices of visits whose request has ended."""
        self.hopeless: list[tuple[int, Visit, int]] = []
        """The index, the visit, and the believed time that it would take at least."""
        self.kept = 0
        """How many others there were."""


class DataPath:
    """Moves the requests of one application through queues and batches. In all methods, `out` collects the actions.

    `batch_ids` numbers the batches of all applications, `devices` has what runs on the devices of all of them.
    """

    def __init__(
        self,
        state: ApplicationState,
        policies: Policies,
        batch_ids: Iterator[BatchId],
        devices: dict[DeviceKey, DeviceLoad],
    ) -> None:
        self._state = state
        self._devices = devices
        self._retry_after_ns = policies.admit.retry_after_ns
        self._decide = deciding(policies.batch)
        self._open_requests = state.open_requests
        self._entries = state.entries
        self._replicas = state.replicas
        self._choose = choosing(policies.route)
        self._drop = policies.drop
        self._is_hopeless = policies.drop.is_hopeless
        self._batch_ids = batch_ids

    def bind(self, stage: StageState) -> None:
        """Make this data path start the batches of a stage from now on."""
        stage.dispatch = self._dispatch_lanes if stage.queue.is_mixed else self.dispatch
        if self._drop.proactive and self._state.graph.edges[stage.name]:
            stage.dispatch = self._dispatch_proactively

    def arrive(self, now_ns: int, request: Request, out: list[Action]) -> None:
        """A request arrives: refuse it, or queue it at the first stages."""
        patient = request
        if self._state.is_special:
            state = self._state
            if state.refuses:
                out.append(End(request.id, Outcome.REJECTED, state.refuses, RETRY_NS_MIN))
                return
            if state.shed and state.sheds_next():
                state.ingress.refuse(request.deadline_ns - now_ns, request.rows)
                why = f"the plan refuses {state.shed:.1%} of all requests, so that the others are in time"
                out.append(End(request.id, Outcome.REJECTED, why, RETRY_NS_MIN))
                return
            patient = state.wait_for_start(request)
        for stage in self._entries_of(request) if request.enters else self._entries:
            queued = stage.monitor.waiting
            if stage.queue.is_mixed:
                visit = Visit(request, stage.name, now_ns, patient.deadline_ns, 0, 0, 0, request.rows, request.size)
                drain_ns = stage.until_served_ns(now_ns, visit, self._drop)
            else:
                drain_ns = stage.times.startup_ns + queued * stage.times.row_ns
            retry_ns = self._retry_after_ns(now_ns, patient, queued, drain_ns)
            if retry_ns:
                if self._state.is_waking:
                    self._state.forget_woken(request.id)
                unit = "rows" if stage.queue.is_mixed else "requests"
                why = f"{queued} {unit} wait at {stage.name}, about {in_ms(drain_ns, 0)} of work"
                out.append(End(request.id, Outcome.REJECTED, why, retry_ns, stage.name))
                return
        if self._open_requests is not None:
            assert request.id not in self._open_requests, f"request {request.id} arrived twice"
            state = self._state
            state.ingress.arrive(now_ns, request.deadline_ns - now_ns)
            if request.rows != 1:
                state.ingress.arrive_more(now_ns, request.rows - 1)
            if state.visit_rates is not None:
                state.visit_rates.begin(request.enters)
            self._open_requests[request.id] = progress = RequestProgress(state.graph, request)
            self._enter(now_ns, progress, progress.begin(), out, request.rows, request.size)
            return
        stage.monitor.arrive(now_ns, request.deadline_ns - now_ns)  # as `_enter` does; there is only this stage
        if request.size or request.rows != 1:
            visit = Visit(request, stage.name, now_ns, patient.deadline_ns, 0, 0, 0, request.rows, request.size)
            self._push_mixed(now_ns, stage, visit, out)
            return
        stage.queue.push(now_ns, Visit(request, stage.name, now_ns, patient.deadline_ns))

    def _entries_of(self, request: Request) -> list[StageState]:
        """The entry stages that a request names."""
        names = self._state.graph.entries_of(request.enters)
        entries = [stage for stage in self._entries if stage.name in names]
        assert entries, f"request {request.id} begins at {request.enters}, which are no entry stages"
        return entries

    def finish(self, now_ns: int, event: Finished, out: list[Action]) -> None:
        """A batch is done: answer its requests or pass them on, and make the replica idle."""
        replica = self._replicas.get(event.replica)
        if replica is None:
            return
        stage = replica.stage
        pool = stage.pool
        batch = pool.running.pop(event.replica, None)  # as `_release` does, and below, as `_reuse` does
        if batch is None or batch.id != event.batch:
            if batch is not None:
                pool.put_back(event.replica, batch)
            return
        rate = batch.rate
        stage.monitor.finish(now_ns, batch.rows, rate.millicores)
        if stage.finishes_each or event.faults:
            self._finish_each(now_ns, replica, event, batch, out)
        else:
            rate.belief.observe(batch.rows, rate.slot, now_ns - batch.started_ns)
            for visit in batch.visits:
                if now_ns <= visit.deadline_ns:
                    out.append(End(visit.request.id, SERVED))
                else:
                    out.append(_answer(now_ns, visit.request.id, visit.deadline_ns))
        if replica.life is READY:
            pool.add_idle(replica)
        else:
            self._reuse(replica, out)

    def fail(self, now_ns: int, event: BatchFailed, out: list[Action]) -> None:
        """The model raised an exception: try the two halves of the batch again; a request that was alone fails, or is
        rejected if the model refused it. The replica stays up."""
        replica = self._state.replicas.get(event.replica)
        if replica is None or replica.batch is None or replica.batch.id != event.batch:
            return
        batch = self._release(now_ns, replica)
        requests, size = self._open_requests_of(batch), batch.requests
        if size == 1:
            outcome = Outcome.REJECTED if event.is_refusal else Outcome.FAILED
            for id in requests:
                self._end(now_ns, id, outcome, event.error, out, replica.stage.name)
        else:
            visits, half = list(requests.values()), (size + 1) // 2
            self._try_again(now_ns, replica.stage, list(chain.from_iterable(visits[:half])))
            self._try_again(now_ns, replica.stage, list(chain.from_iterable(visits[half:])))
        self._reuse(replica, out)

    def lose_batch(self, now_ns: int, event: BatchLost, out: list[Action]) -> None:
        """A batch is lost with another part of its pipeline, whose own batch is to blame: queue its requests as they
        were."""
        replica = self._state.replicas[event.replica]
        self.lose(now_ns, replica, event.error, out, is_blamed=False)
        self._reuse(replica, out)

    def lose(self, now_ns: int, replica: Replica, error: str, out: list[Action], *, is_blamed: bool = True) -> None:
        """A replica and its batch are lost: try each request again alone, and fail those with `ATTEMPTS_MAX` attempts.
        If the batch is not to blame (`is_blamed`), queue its requests as they were."""
        if replica.batch is None:
            return
        stage, batch = replica.stage, self._release(now_ns, replica)
        requests = self._open_requests_of(batch)
        if not is_blamed:
            visits = list(chain.from_iterable(requests.values()))
            if batch.visits[0].group:
                self._try_again(now_ns, stage, visits)
            else:
                for visit in visits:
                    stage.queue.push(now_ns, visit)
                stage.monitor.queue(now_ns, rows_of(visits))
            return
        for id, visits in requests.items():
            for visit in visits:
                visit.attempts += 1
            if visits[0].attempts < ATTEMPTS_MAX:
                self._try_again(now_ns, stage, visits)
            else:
                why = f"{ATTEMPTS_MAX} replicas were lost while they ran it, the last one with nothing else: {error}"
                self._end(now_ns, id, Outcome.FAILED, why, out, stage.name)

    def expire(self, now_ns: int, replica: Replica, out: list[Action]) -> int:
        """A replica's batch is stalled: drop those of its requests that the drop policy finds hopeless, as if they
        waited. The batch goes on with the others. Returns when to call this again."""
        batch, stage = replica.batch, replica.stage
        assert batch is not None, f"replica {replica.id} runs no batch"
        least_ns, full_ns = stage.queue.remaining_ns, stage.queue.remaining_full_ns
        why = f"its batch has run for {in_ms(now_ns - batch.started_ns, 0)}, where {in_ms(batch.cost_ns)} are expected"
        ended, look_ns = set[RequestId](), FOREVER_NS
        for id, (visit, *_) in self._open_requests_of(batch).items():
            if self._is_hopeless(now_ns, visit, least_ns, full_ns):
                self._drop_visit(now_ns, visit, least_ns, why, out)
                ended.add(id)
            else:
                look_ns = min(look_ns, next_look_ns(now_ns, visit))
        if ended and self._open_requests is None:
            stage.pool.running[replica.id] = structs.replace(batch, ended=batch.ended | ended)
            stage.disturb()
        return max(look_ns, now_ns + SWEEP_NS_MIN)

    def cancel(self, now_ns: int, event: Cancelled, out: list[Action]) -> None:
        """The client disconnected: remove the request from all queues, and end it. A running batch goes on,
        and with one stage it ends its requests as usual."""
        request, is_graph = event.request, self._open_requests is not None
        removed = 0
        for stage in self._state.stages.values():
            waiting = stage.queue.remove_request(request)
            stage.monitor.queue(now_ns, -waiting)
            removed += waiting
        if removed or is_graph:
            self._end(now_ns, request, Outcome.DROPPED, "the client went away", out)

    def dispatch(self, now_ns: int, stage: StageState, out: list[Action]) -> int:
        """Start batches while there are waiting visits and idle replicas and the batch policy does not wait. Where it
        starts nothing on a device without saying until when, the idle replicas there stay idle, and it is asked about
        those on other devices.

        Returns the time until which the batch policy waits; `FOREVER_NS` if it does not wait.
        """
        queue = stage.queue
        pool = stage.pool
        visits = queue.visits
        idle = pool.idle
        is_hopeless = self._is_hopeless
        open_requests = self._open_requests
        aside: list[Replica] = []
        while visits and idle:
            index = self._choose(now_ns, idle, pool.last) if len(idle) > 1 else 0
            replica = idle[index]
            rate = replica.service_rate
            costs_ns = self._costs_beside(replica, rate) if rate.is_shared else rate.costs_ns
            limit = rate.batch_max
            alone_ns = rate.least_alone_ns + queue.remaining_ns
            full_ns = rate.least_full_ns + queue.remaining_full_ns
            for visit in visits[:limit]:
                if is_hopeless(now_ns, visit, alone_ns, full_ns) or (
                    open_requests is not None and visit.request.id not in open_requests
                ):
                    self._prune(now_ns, stage, queue, limit, rate, out)
                    if not visits:
                        return pool.end_round(aside)
                    break
            if visits[0].group:
                count = group_size(visits, limit)
            else:
                decision = self._decide(now_ns, queue, OfferedDevice(replica, rate, limit, costs_ns, self._devices))
                count = decision.count
                if not count:
                    if decision.skip:
                        # A negative number would take nothing, and the policy would be asked for ever.
                        assert decision.skip > 0, f"a batch policy drops {decision.skip} requests at {stage.name}"
                        self._skip(now_ns, stage, queue.take(decision.skip), alone_ns, out)
                        continue  # the new head of the queue is not pruned yet
                    assert decision.wait_until_ns > now_ns, f"a batch policy waits at {stage.name} until now"
                    if decision.wait_until_ns < FOREVER_NS:
                        return pool.end_round(aside, decision.wait_until_ns)
                    aside += pool.set_aside(replica.device_key)
                    continue
            assert count <= limit, f"batch of {count} at {stage.name}, whose limit is {limit}"
            del idle[index]
            taken = queue.take(count)  # from here on as `_start` does
            batch = next(self._batch_ids)
            id = replica.id
            pool.running[id] = (
                RunningBatch(batch, taken, now_ns, rate, count)
                if not rate.is_shared
                else self._beside(now_ns, replica, rate, batch, taken, count)
            )
            replica.batches += 1
            pool.last = id
            stage.monitor.start(now_ns, count, rate.millicores)
            # A batch of one avoids the comprehension, which costs a call.
            ids = (taken[0].request.id,) if count == 1 else tuple([visit.request.id for visit in taken])
            if stage.runs_for_parts:
                out.append(StartBatch(batch, id, stage.name, ids, tuple([visit.part for visit in taken])))
            else:
                out.append(StartBatch(batch, id, stage.name, ids))
        return pool.end_round(aside) if aside else FOREVER_NS

    def _dispatch_lanes(self, now_ns: int, stage: StageState, out: list[Action]) -> int:
        """As `dispatch`, for a mixed queue. The batch policy is asked about the lanes in the order of their first
        visits, until it waits with each of them. Costs and limits are those of the lane's class of sizes, by number of
        its visits."""
        pool, queue, wake_ns, asked = stage.pool, stage.queue, FOREVER_NS, set[LaneKey]()
        assert isinstance(queue, MixedQueue)
        aside: list[Replica] = []
        lanes, is_due_known = queue.in_order(), False
        while pool.idle and (lane := next(lanes, None)) is not None:
            waiting = len(queue.visits)
            replica = pool.idle[self._choose(now_ns, pool.idle, pool.last) if len(pool.idle) > 1 else 0]
            rate = replica.service_rate.at(lane.size, stage.limits)
            self._prune(now_ns, stage, lane, rate.batch_max, rate, out)
            if len(queue.visits) < waiting:  # another lane may come first now
                lanes, is_due_known = queue.in_order(asked), False
                continue
            if not is_due_known:
                queue.lanes.due = self._due(now_ns, stage, queue) if len(pool.idle) == 1 else DueLanes()
                is_due_known = True
            costs_ns = self._costs_beside(replica, rate) if rate.is_shared else rate.costs_ns
            limit, costs_ns = fitting(lane.visits, rate.batch_max, costs_ns)
            if not queue.fills(limit):
                limit = len(lane.visits)
            if lane.visits[0].group:
                decision = BatchDecision(group_size(lane.visits, limit))
            else:
                decision = self._decide(now_ns, lane, OfferedDevice(replica, rate, limit, costs_ns, self._devices))
            if decision.count:
                assert decision.count <= limit, f"batch of {decision.count} at {stage.name}, whose limit is {limit}"
                pool.remove_idle(replica)
                self._start(now_ns, replica, rate, lane.take(decision.count), out)
            elif decision.skip:
                assert decision.skip > 0, f"a batch policy drops {decision.skip} requests at {stage.name}"
                alone_ns = rate.least_alone_ns + lane.remaining_ns
                self._skip(now_ns, stage, lane.take(decision.skip), alone_ns, out)
            elif decision.wait_until_ns < FOREVER_NS:
                assert decision.wait_until_ns > now_ns, f"a batch policy waits at {stage.name} until now"
                asked.add(lane.key)
                wake_ns = min(wake_ns, decision.wait_until_ns)
                continue
            else:
                aside += pool.set_aside(replica.device_key)
            lanes, is_due_known = queue.in_order(asked), False
        return pool.end_round(aside, wake_ns)

    def _dispatch_proactively(self, now_ns: int, stage: StageState, out: list[Action]) -> int:
        """As `dispatch` or `_dispatch_lanes`, with the expected times of later stages instead of lower bounds."""
        self._state.expect_remaining(now_ns, stage)
        start = self._dispatch_lanes if stage.queue.is_mixed else self.dispatch
        return start(now_ns, stage, out)

    def _start(self, now_ns: int, replica: Replica, rate: ServiceRate, visits: list[Visit], out: list[Action]) -> None:
        """Start a batch of these visits."""
        stage, rows, batch = replica.stage, rows_of(visits), next(self._batch_ids)
        stage.pool.running[replica.id] = (
            RunningBatch(batch, visits, now_ns, rate, rows)
            if not rate.is_shared
            else self._beside(now_ns, replica, rate, batch, visits, rows)
        )
        replica.batches += 1
        stage.pool.last = replica.id
        stage.monitor.start(now_ns, rows, rate.millicores)
        ids = tuple([visit.request.id for visit in visits])
        parts = tuple([visit.part for visit in visits]) if stage.runs_for_parts else ()
        together, size = 0 if rows == len(visits) else rows, stage.size_classes.class_of(visits[0].size)
        pieces: tuple[Piece | None, ...] = ()
        if any(visit.of for visit in visits):
            pieces = tuple([Piece(each.first, each.rows, each.of) if each.of else None for each in visits])
        stage.ran_ns[size] = now_ns
        out.append(StartBatch(batch, replica.id, stage.name, ids, parts, together, size, pieces))

    def _due(self, now_ns: int, stage: StageState, queue: MixedQueue) -> DueLanes:
        """When the only idle replica must begin with the first visits of the lanes, so that these are in time. Visits
        that cannot be in time do not count."""
        rate, due = stage.pool.idle[0].service_rate, DueLanes()
        for lane in islice(queue.in_order(), DUE_LANES):
            visit = lane.visits[0]
            taken_ns = rate.at(lane.size, stage.limits).least_ns(visit.rows) + lane.remaining_ns
            due_ns = visit.deadline_ns - taken_ns
            if now_ns <= due_ns < due.first_ns:
                due = DueLanes(lane, due_ns, due.first_ns)
            elif now_ns <= due_ns < due.next_ns:
                due = due._replace(next_ns=due_ns)
        return due

    def _skip(self, now_ns: int, stage: StageState, visits: Sequence[Visit], alone_ns: int, out: list[Action]) -> None:
        """Drop the first visits, as the batch policy says."""
        for visit in visits:
            stage.monitor.queue(now_ns, -visit.rows)
            why = "it would force a batch that is too small for the requests behind it"
            if not self._has_ended(stage, visit):
                self._drop_visit(now_ns, visit, alone_ns, why, out)

    def sweep(self, now_ns: int, stage: StageState, out: list[Action]) -> None:
        """Drop visits that no replica could serve in time, even while no replica is idle."""
        if self._state.woken and self._state.is_waking:
            self._end_patience(now_ns, stage, out)
        queue = stage.queue
        found = self._look_for_hopeless(now_ns, stage, queue, len(queue.visits))
        self._remove(now_ns, stage, queue, found, "no replica was free", out)
        earliest_ns = FOREVER_NS
        for visit in queue.visits:
            earliest_ns = min(earliest_ns, next_look_ns(now_ns, visit))
        if earliest_ns < FOREVER_NS:
            earliest_ns = max(earliest_ns, now_ns + SWEEP_NS_MIN + SWEEP_NS_PER_VISIT * len(queue.visits))
        queue.sweep_ns = earliest_ns

    def _end_patience(self, now_ns: int, stage: StageState, out: list[Action]) -> None:
        """Reject the visits that have waited for a start for as long as they may, whatever the drop policy says."""
        woken, visits = self._state.woken, stage.queue.visits
        over = [at for at, visit in enumerate(visits) if woken.get(visit.request.id, FOREVER_NS) < now_ns]
        ended = [visits[at] for at in over]
        stage.queue.remove(over)
        stage.monitor.queue(now_ns, -rows_of(ended))
        for visit in ended:
            if not self._has_ended(stage, visit):
                self._drop_visit(now_ns, visit, 0, "", out)

    def _prune(
        self, now_ns: int, stage: StageState, queue: Queue | Lane, keep: int, rate: ServiceRate, out: list[Action]
    ) -> None:
        """A replica with this `rate` is idle: drop hopeless visits until the first `keep` ones are not. If all are
        hopeless, the request of the newest one may be tried (`_may_try`): then its visits stay, each to run in a batch
        of its own."""
        found = self._look_for_hopeless(now_ns, stage, queue, keep, rate)
        if found.hopeless and not found.kept and self._may_try(now_ns, stage, queue):
            tried = found.hopeless[-1][1].request.id
            for _, visit, _ in found.hopeless:
                if visit.request.id == tried:
                    stage.queue.set_apart(visit)
            found.hopeless = [each for each in found.hopeless if each[1].request.id != tried]
        self._remove(now_ns, stage, queue, found, "", out)

    def _look_for_hopeless(
        self, now_ns: int, stage: StageState, queue: Queue | Lane, keep: int, rate: ServiceRate | None = None
    ) -> _Hopeless:
        """Scan the queue from its head until `keep` visits stay. Without a rate, visits are hopeless that have too
        little time even for the later stages."""
        is_hopeless, found = self._is_hopeless, _Hopeless()
        alone_ns, full_ns = queue.remaining_ns, queue.remaining_full_ns
        if rate is not None:
            alone_ns, full_ns = alone_ns + rate.least_alone_ns, full_ns + rate.least_full_ns
        for index, visit in enumerate(queue.visits):
            least_ns, most_ns = alone_ns, full_ns
            if visit.rows != 1 and rate is not None:
                least_ns = rate.least_ns(stage.rows_left(visit)) + queue.remaining_ns
                most_ns = max(full_ns, least_ns)
            if self._has_ended(stage, visit):
                found.ended.append(index)
            elif is_hopeless(now_ns, visit, least_ns, most_ns):
                found.hopeless.append((index, visit, least_ns))
            else:
                found.kept += 1
                if found.kept == keep:
                    break
        return found

    def _remove(
        self, now_ns: int, stage: StageState, queue: Queue | Lane, found: _Hopeless, why: str, out: list[Action]
    ) -> None:
        """Remove what a scan has found, and drop the hopeless ones."""
        for _, visit, least_ns in found.hopeless:
            if not self._has_ended(stage, visit):  # with another of its visits
                self._drop_visit(now_ns, visit, least_ns, why, out)
        removed = sorted([*found.ended, *(index for index, _, _ in found.hopeless)])
        stage.monitor.queue(now_ns, -sum([queue.visits[index].rows for index in removed]))
        queue.remove(removed)

    def _may_try(self, now_ns: int, stage: StageState, queue: Queue | Lane) -> bool:
        """Whether to serve a request although all that waits is hopeless, because the stage has had nothing to do for a
        while: it harms no other, its client gets an answer, and an estimate that is too high is corrected. Not under a
        drop policy that is `strict` or does not go by beliefs.

        In a lane of a class of sizes, one is tried at once if the class has never run: nothing is known of it yet.
        Later one is tried if the class has not run for a while and no visit of another lane waits."""
        if self._drop.strict:
            return False
        if isinstance(queue, Lane) and queue.size:
            ran_ns, waits_alone = stage.ran_ns.get(queue.size), len(queue.visits) == len(stage.queue.visits)
            return ran_ns is None or (waits_alone and now_ns - ran_ns >= QUIET_NS)
        return stage.monitor.is_quiet(now_ns, QUIET_NS)

    def _has_ended(self, stage: StageState, visit: Visit) -> bool:
        """Whether the request of a waiting visit has ended: on another branch of the graph, or with another piece."""
        open_requests = self._open_requests
        return (open_requests is not None and visit.request.id not in open_requests) or (
            visit.of > 0 and stage.has_ended(visit)
        )

    def _release(self, now_ns: int, replica: Replica) -> RunningBatch:
        """Take the batch off a replica."""
        batch = replica.stage.pool.running.pop(replica.id, None)
        assert batch is not None, f"replica {replica.id} runs no batch"
        replica.stage.monitor.finish(now_ns, batch.rows, batch.rate.millicores)
        if batch.load is not None:
            self._leave(now_ns, replica, batch)
        return batch

    # Batches beside each other on a device

    def _costs_beside(self, replica: Replica, rate: ServiceRate) -> Sequence[int]:
        """Believed durations of the replica's next batch at this rate beside what runs on its device now."""
        load = self._devices.get(replica.device_key)
        return rate.costs_ns if load is None else SlowedCosts(rate, load)

    def _beside(
        self, now_ns: int, replica: Replica, rate: ServiceRate, id: BatchId, visits: list[Visit], rows: int
    ) -> RunningBatch:
        """A batch begins on a device that it may share with others."""
        load = self._devices.setdefault(replica.device_key, DeviceLoad(now_ns))
        load.join(now_ns, id, LoadedBatch(rate, rows, replica.stage.name, now_ns))
        return RunningBatch(id, visits, now_ns, rate, rows, load=load)

    def _leave(self, now_ns: int, replica: Replica, batch: RunningBatch) -> int:
        """A batch on a shared device is over; returns how long in ns it would have taken alone."""
        assert batch.load is not None, f"batch {batch.id} is on no shared device"
        alone_ns = batch.load.leave(now_ns, batch.id)
        if not batch.load.batches:
            del self._devices[replica.device_key]
        return round(alone_ns)

    def _try_again(self, now_ns: int, stage: StageState, visits: Sequence[Visit]) -> None:
        """Queue visits to be tried again in a batch of their own."""
        if visits:
            stage.queue.push_again(now_ns, visits)
            stage.monitor.queue(now_ns, rows_of(visits))

    def _open_requests_of(self, batch: RunningBatch) -> dict[RequestId, list[Visit]]:
        """The requests of a batch that have not ended, each with its visits; several if they are for parts of it."""
        open_requests = self._open_requests
        found: dict[RequestId, list[Visit]] = {}
        stage = self._state.stages[batch.visits[0].stage]
        for visit in batch.visits:
            id = visit.request.id
            is_open = id not in batch.ended if open_requests is None else id in open_requests
            if is_open and not stage.has_ended(visit):
                found.setdefault(id, []).append(visit)
        return found

    def _reuse(self, replica: Replica, out: list[Action]) -> None:
        """A replica has finished a batch: make it idle, or stop it if it drains; a part of a pipeline when no other one
        runs a batch. One that has lost its pipeline waits for the other layers."""
        if replica.life is READY:
            replica.stage.pool.add_idle(replica)
        elif replica.life is DRAINING:
            out += stops_of(replica, "drained")

    def _finish_each(  # takes what the caller has already looked up
        self, now_ns: int, replica: Replica, event: Finished, batch: RunningBatch, out: list[Action]
    ) -> None:
        """End the requests of a batch or pass them on, one by one: in a graph, on a shared device, or if some failed or
        have ended."""
        stage = replica.stage
        taken_ns = now_ns - batch.started_ns if batch.load is None else self._leave(now_ns, replica, batch)
        if stage.is_disturbed:
            stage.recover()
        if not event.faults:
            batch.rate.belief.observe(batch.rows, batch.rate.slot, taken_ns, event.padded_to(batch.rows))
        if event.sizes:
            self._note_sizes(stage, event, batch)
        why = f"its tensors do not fit stage {stage.name!r}, or the stage's outputs for it fit no later one"
        visits, ended = batch.visits, batch.ended
        for index in event.faults:
            if visits[index].request.id not in ended and not stage.has_ended(visits[index]):
                self._end(now_ns, visits[index].request.id, Outcome.FAILED, why, out, stage.name)
        for visit, edge_counts in event.continuing(visits):
            if visit.of and not stage.completes(visit):
                continue
            if self._open_requests is not None:
                self._pass_on(now_ns, stage, visit, edge_counts, out)
            elif visit.request.id not in ended:
                out.append(_answer(now_ns, visit.request.id, visit.request.deadline_ns))
                if self._state.woken:
                    self._state.forget_woken(visit.request.id)
        if stage.queue.is_mixed and not stage.split and any(visit.of for visit in visits):
            stage.choose_finish()

    def _note_sizes(self, stage: StageState, event: Finished, batch: RunningBatch) -> None:
        """Remember the rows and sizes that the worker reported for later visits, until these stages are entered."""
        edges = self._state.graph.edges[stage.name]
        all_counts = event.edge_counts or repeat(())
        for visit, sizes, counts in zip(batch.visits, event.sizes, all_counts, strict=bool(event.edge_counts)):
            progress = self._open_requests.get(visit.request.id) if self._open_requests is not None else None
            if progress is not None:
                taken = counts or repeat(1)
                for edge, (rows, size), count in zip(edges, sizes, taken, strict=False):
                    if count:
                        progress.expect(edge, 0 if visit.of else rows, size)

    def _pass_on(
        self, now_ns: int, stage: StageState, visit: Visit, edge_counts: Sequence[int], out: list[Action]
    ) -> None:
        """A visit in a graph is over: enter the next stages, or answer the request."""
        state = self._state
        open_requests, request = state.open_requests, visit.request
        assert open_requests is not None
        progress = open_requests.get(request.id)
        if progress is None:
            return
        entered = progress.finish(stage.name, visit.part, edge_counts)
        if progress.fault:
            self._end(now_ns, request.id, Outcome.FAILED, progress.fault, out, stage.name)
            return
        if state.visit_rates is not None:
            state.visit_rates.finish(stage.name, edge_counts)
            if state.edge_history is not None:
                state.edge_history.finish(stage.name, edge_counts)
        if progress.open_visits:
            self._enter(now_ns, progress, entered, out, visit.of or visit.rows)
            return
        del open_requests[request.id]
        if state.woken:
            state.forget_woken(request.id)
        state.ingress.queue(now_ns, -request.rows)
        out.append(_answer(now_ns, request.id, progress.deadline_ns(ended=True)))

    def _enter(
        self, now_ns: int, progress: RequestProgress, entered: Entered, out: list[Action], rows: int, size: int = 0
    ) -> None:
        """Queue a request in a graph, or its parts, at the stages that it enters now. A visit has the rows and the size
        that a worker reported for it (`_note_sizes`), otherwise `rows` and `size`; a part has one row."""
        request, stages, woken = progress.request, self._state.stages, self._state.woken
        deadline_ns = progress.deadline_ns()
        patient_ns = max(deadline_ns, woken.get(request.id, 0)) if woken else deadline_ns
        for name, part in entered:
            stage = stages[name]
            stage.monitor.arrive(now_ns, deadline_ns - now_ns)
            own, own_size = progress.expected(name) if progress.sizes is not None else (0, size)
            own = own or (1 if stage.runs_for_parts else rows)
            visit = Visit(request, name, now_ns, patient_ns, 0, part, 0, own, own_size)
            if own_size or own != 1:
                self._push_mixed(now_ns, stage, visit, out)
            else:
                stage.queue.push(now_ns, visit)

    def _push_mixed(self, now_ns: int, stage: StageState, visit: Visit, out: list[Action]) -> None:
        """Queue a visit with several rows, or with a size other than 0; split it if it has too many rows for a pass.
        It is dropped at once if it would be late even on idle replicas. This needs an estimate that can be relied on,
        so it holds only if rows of its class of sizes have run within `QUIET_NS`."""
        if not stage.queue.is_mixed:
            stage.mix()
            self.bind(stage)
        if visit.rows != 1:
            stage.monitor.arrive_more(now_ns, visit.rows - 1)
        size = stage.size_classes.class_of(visit.size)
        if stage.ran_lately(now_ns, size):
            rows = -(-visit.rows // max(1, len(stage.pool.replicas))) if stage.is_divided else visit.rows
            least_ns = stage.pool.least_ns(size, rows)[0] + stage.queue.remaining_ns
            if self._is_hopeless(now_ns, visit, least_ns, least_ns):
                stage.monitor.queue(now_ns, -visit.rows)
                self._drop_visit(now_ns, visit, least_ns, "", out)
                return
        for piece in stage.pieces_of(visit) if visit.rows != 1 else (visit,):
            stage.queue.push(now_ns, piece)

    def _drop_visit(self, now_ns: int, visit: Visit, least_ns: int, why: str, out: list[Action]) -> None:
        """Drop the request of a visit; reject it if no replica has started for it."""
        state = self._state
        if visit.size:
            stage = state.stages[visit.stage]
            for belief in stage.beliefs.values():
                belief.at(stage.size_classes.class_of(visit.size)).miss(visit.rows)
        if state.is_waking and visit.request.id in state.woken:
            gap = state.longest_gap(now_ns)
            state.expected_ns = max(state.expected_ns, now_ns + gap.wait_ns + RETRY_NS_MIN)
            why = f"{gap.why}; it has waited for {in_ms(now_ns - visit.request.arrived_ns, 0)}"
            self._end(now_ns, visit.request.id, Outcome.REJECTED, why, out, visit.stage, gap.wait_ns)
            return
        detail = f"slack {in_ms(visit.deadline_ns - now_ns)} at {visit.stage}"
        if least_ns:
            alone = "a batch of one takes" if visit.rows == 1 else "its rows alone take"
            which = "expected" if self._drop.proactive else "least"
            needed = alone if self._open_requests is None else f"the {which} time to the answer is"
            detail = f"{detail}, where {needed} {in_ms(least_ns)}"
        self._end(now_ns, visit.request.id, Outcome.DROPPED, f"{detail}; {why}" if why else detail, out, visit.stage)

    def _end(
        self,
        now_ns: int,
        request: RequestId,
        outcome: Outcome,
        why: str,
        out: list[Action],
        stage: str = "",
        retry_after_ns: int = 0,
    ) -> None:
        """End a request that was not served. In a graph it may have ended on another branch: then do nothing."""
        for each in self._state.all_stages:
            if each.split.pop(request, None) is not None and not each.split:
                each.choose_finish()
        open_requests = self._open_requests
        if open_requests is not None:
            progress = open_requests.pop(request, None)
            if progress is None:
                return
            self._state.ingress.queue(now_ns, -progress.request.rows)
        if self._state.woken:
            self._state.forget_woken(request)
        out.append(End(request, outcome, why, retry_after_ns, stage))


def stops_of(replica: Replica, why: str) -> list[Action]:
    """The order to stop a replica that drains and runs no batch. The parts of a pipeline stop together, when none of
    them does."""
    pipeline = replica.pipeline
    if pipeline is None:
        return [StopWorker(replica.id, why)]
    return [] if pipeline.has_batch else [StopWorker(member.id, why) for member in pipeline.members]


def _answer(now_ns: int, request: RequestId, deadline_ns: int) -> End:
    """The `End` of a request that has passed all its stages: served or late."""
    if now_ns <= deadline_ns:
        return End(request, SERVED)
    return End(request, Outcome.LATE, f"finished {in_ms(now_ns - deadline_ns)} after its deadline")


def next_look_ns(now_ns: int, visit: Visit) -> int:
    """When a visit that the drop policy keeps now may be hopeless: after its deadline, and then ever less often."""
    if visit.deadline_ns >= now_ns:
        return visit.deadline_ns + 1
    return now_ns + (now_ns - visit.request.sent_ns) // OVERDUE_PARTS
