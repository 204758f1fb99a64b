"""The data path: a request's way from arrival through queues and batches to its end. It must stay lean.

All decisions are the policies'; this file keeps the promises no policy may break: a replica runs one batch, a batch
goes to a ready replica, a request ends exactly once, the requests of a lost batch are tried again or answered.
"""

from collections.abc import Sequence
from typing import Final

from sloop.actions import Action, End, StartBatch, StopReplica
from sloop.app.journey import Entered
from sloop.core.protocols import Policies
from sloop.core.state import Flight, Replica, Running, Stage, State
from sloop.events import BatchFailed, Cancelled, Finished
from sloop.units import FOREVER_NS, ms, s, to_ms
from sloop.vocabulary import Life, Outcome, Request, RequestId, Visit

ATTEMPTS_MAX = 2
"""A request whose batch was lost twice fails: it may be what kills the replicas."""

SWEEP_NS_MIN = ms(10)
SWEEP_NS_PER_VISIT = 10_000
"""Queues are searched for passed deadlines at most this often, and long ones less, to bound what it costs."""

OVERDUE_PARTS = 8
"""What a drop rule lets wait beyond its deadline is looked at again whenever it has become so many parts of its age
older: soon enough for the rule to hold, and ever more seldom where it never gives up."""

SERVED: Final = Outcome.SERVED
DRAINING: Final = Life.DRAINING
"""Bound here once: looking a member up in its enumeration costs as much as making an action."""

CROWDED = "the batch it would force is too small for those behind it"


class DataPath:
    """Moves requests. `out` is always the list of actions being collected."""

    __slots__ = ("_admit", "_batch", "_drop", "_route", "_state")

    def __init__(self, state: State, policies: Policies) -> None:
        self._state = state
        self._admit = policies.admit
        self._batch = policies.batch
        self._route = policies.route
        self._drop = policies.drop

    def arrive(self, now_ns: int, request: Request, out: list[Action]) -> None:
        """A request knocks: refuse it, or queue it at the first stages."""
        state = self._state
        if state.draining:
            out.append(End(request.id, Outcome.REJECTED, "the server is shutting down", s(1)))
            return
        retry_after_ns, sources = self._admit.retry_after_ns, state.sources
        if request.enters:
            sources = tuple([stage for stage in sources if stage.name in request.enters])
            assert sources, f"request {request.id} begins at {request.enters}, where none can"
        for stage in sources:
            queued = len(stage.queue.visits)
            drain_ns = stage.startup_ns + queued * stage.visit_ns
            retry_ns = retry_after_ns(now_ns, request, queued, drain_ns)
            if retry_ns:
                why = f"{queued} requests wait at {stage.name}, about {to_ms(drain_ns):.0f} ms of work"
                out.append(End(request.id, Outcome.REJECTED, why, retry_ns, stage.name))
                return
        if state.flights is not None:
            assert request.id not in state.flights, f"request {request.id} arrived twice"
            state.ingress.arrive(now_ns, request.deadline_ns - now_ns)
            if state.flows is not None:
                state.flows.begin(request.enters)
            state.flights[request.id] = flight = Flight(request, state.graph)
            self._enter(now_ns, flight, flight.journey.begin(request.enters))
            return
        deadline_ns = request.deadline_ns
        for stage in sources:
            # As `_enter`, which would be a call for each request.
            stage.monitor.arrive(now_ns, deadline_ns - now_ns)
            stage.queue.push(Visit(request, stage.name, now_ns, deadline_ns))
            if deadline_ns < stage.expire_ns:
                stage.expire_ns = (deadline_ns if deadline_ns > now_ns else now_ns) + 1

    def finish(self, now_ns: int, event: Finished, out: list[Action]) -> None:
        """A batch is done: answer or pass on its requests, and give the replica more."""
        replica = self._state.replicas.get(event.replica)
        if replica is None or (batch := replica.batch) is None or batch.id != event.batch:
            return
        stage, visits = replica.stage, batch.visits
        replica.batch = None
        stage.monitor.finish(now_ns, len(visits), batch.millicores)
        replica.service_rate.belief.observe(len(visits), batch.cores, now_ns - batch.started_ns)
        if stage.losses:
            stage.losses = 0
        if self._state.flights is None:
            for visit in visits:  # not a comprehension, which costs a call where most batches are small
                id, deadline_ns = visit.request.id, visit.deadline_ns
                out.append(End(id, SERVED) if now_ns <= deadline_ns else _late(id, now_ns, deadline_ns))
        else:
            edge_counts = event.edge_counts or ((),) * len(visits)
            for visit, way in zip(visits, edge_counts, strict=True):
                self._pass_on(now_ns, stage, visit, way, out)
        if replica.life is DRAINING:  # as `_reuse`, which would be a call for each batch
            out.append(StopReplica(replica.id, "drained"))
        else:
            stage.add_idle(replica)

    def fail(self, now_ns: int, event: BatchFailed, out: list[Action]) -> None:
        """The model raised: its requests fail, the replica goes on."""
        replica = self._state.replicas.get(event.replica)
        if replica is None or replica.batch is None or replica.batch.id != event.batch:
            return
        for visit in self._release(now_ns, replica).visits:
            self._end(now_ns, visit.request.id, Outcome.FAILED, event.error, out, visit.stage)
        self._reuse(replica, out)

    def give_up(self, now_ns: int, replica: Replica, error: str, out: list[Action]) -> None:
        """A replica is gone with its batch: queue the requests again, or fail those that have tried enough."""
        if replica.batch is None:
            return
        stage = replica.stage
        for visit in self._release(now_ns, replica).visits:
            visit.attempts += 1
            if visit.attempts >= ATTEMPTS_MAX:
                why = f"the replica it ran on was lost {visit.attempts} times, last by: {error}"
                self._end(now_ns, visit.request.id, Outcome.FAILED, why, out, stage.name)
            elif self._is_open(visit.request.id):
                stage.queue.push(visit)
                stage.monitor.queue(now_ns, 1)
                stage.expire_ns = min(stage.expire_ns, visit.deadline_ns + 1)

    def cancel(self, now_ns: int, event: Cancelled, out: list[Action]) -> None:
        """The client went away: forget the request if it waits; a batch that runs is not disturbed."""
        request = event.request
        for stage in self._state.stages.values():
            removed = stage.queue.remove_request(request)
            stage.monitor.queue(now_ns, -removed)
            if removed and self._state.flights is None:
                self._end(now_ns, request, Outcome.DROPPED, "the client went away", out)
        if self._state.flights is not None:
            self._end(now_ns, request, Outcome.DROPPED, "the client went away", out)

    def dispatch(self, now_ns: int, stage: Stage, out: list[Action]) -> int:
        """Give waiting visits to idle replicas for as long as there are both and the batch policy says so.

        Returns until when that policy would rather wait; `FOREVER_NS` where it does not.
        """
        visits, idle = stage.queue.visits, stage.idle
        is_hopeless, flights = self._drop.is_hopeless, self._state.flights
        while visits and idle:
            index = self._route.choose(now_ns, idle, stage.last) if len(idle) > 1 else 0
            replica = idle[index]
            costs_ns, limit = replica.service_rate.costs_ns, replica.service_rate.limit
            alone_ns, full_ns = costs_ns[1] + stage.remaining_ns, costs_ns[limit] + stage.remaining_full_ns
            for visit in visits[:limit]:
                if is_hopeless(now_ns, visit, alone_ns, full_ns) or (
                    flights is not None and visit.request.id not in flights
                ):
                    self._prune(now_ns, stage, limit, alone_ns, full_ns, out)
                    break
            if not visits:
                break
            take = self._batch.decide(now_ns, visits, limit, costs_ns, stage.wait_ns, stage.remaining_ns)
            if take.skip:
                for visit in stage.queue.take(take.skip):
                    stage.monitor.queue(now_ns, -1)
                    self._drop_visit(now_ns, visit, alone_ns, CROWDED, out)
                continue  # those behind have not been pruned yet
            count = take.count
            if not count:
                assert take.wait_until_ns > now_ns, f"a batch policy waits at {stage.name} until now"
                return take.wait_until_ns
            assert count <= limit, f"batch of {count} where {limit} is the limit at {stage.name}"
            del idle[index]
            taken, batch, id = stage.queue.take(count), next(self._state.batch_ids), replica.id
            millicores = replica.millicores
            replica.batch = Running(batch, taken, now_ns, replica.cores, millicores, costs_ns)
            replica.batches += 1
            stage.last = id
            stage.monitor.start(now_ns, count, millicores)
            # A comprehension is a call of its own, which a batch of one does without.
            ids = (taken[0].request.id,) if count == 1 else tuple([visit.request.id for visit in taken])
            if stage.runs_for_parts:
                out.append(StartBatch(batch, id, stage.name, ids, tuple([visit.part for visit in taken])))
            else:
                out.append(StartBatch(batch, id, stage.name, ids))
        return FOREVER_NS

    def sweep(self, now_ns: int, stage: Stage, out: list[Action]) -> None:
        """Drop what no replica could serve in time, without waiting for one to become free."""
        visits, flights, is_hopeless = stage.queue.visits, self._state.flights, self._drop.is_hopeless
        remaining_ns, full_ns = stage.remaining_ns, stage.remaining_full_ns
        earliest_ns, gone = FOREVER_NS, list[int]()
        for index, visit in enumerate(visits):
            if flights is not None and visit.request.id not in flights:
                gone.append(index)
            elif is_hopeless(now_ns, visit, remaining_ns, full_ns):
                gone.append(index)
                self._drop_visit(now_ns, visit, remaining_ns, "no replica was free", out)
            else:
                look_ns = visit.deadline_ns + 1
                if look_ns <= now_ns:
                    look_ns = now_ns + (now_ns - visit.request.sent_ns) // OVERDUE_PARTS
                earliest_ns = min(earliest_ns, look_ns)
        self._remove(now_ns, stage, gone)
        if earliest_ns < FOREVER_NS:
            earliest_ns = max(earliest_ns, now_ns + SWEEP_NS_MIN + SWEEP_NS_PER_VISIT * len(visits))
        stage.expire_ns = earliest_ns

    def _prune(  # what the caller has worked out is handed over
        self, now_ns: int, stage: Stage, limit: int, cost_ns: int, full_ns: int, out: list[Action]
    ) -> None:
        """Drop the hopeless among those that the next batch would be made of, and forget what ended elsewhere."""
        flights, is_hopeless = self._state.flights, self._drop.is_hopeless
        left, gone = limit, list[int]()
        for index, visit in enumerate(stage.queue.visits):
            if flights is not None and visit.request.id not in flights:
                gone.append(index)
            elif is_hopeless(now_ns, visit, cost_ns, full_ns):
                gone.append(index)
                self._drop_visit(now_ns, visit, cost_ns, "", out)
            else:
                left -= 1
                if not left:
                    break
        self._remove(now_ns, stage, gone)

    def _remove(self, now_ns: int, stage: Stage, indices: Sequence[int]) -> None:
        """Take visits out of a queue that have been dropped, or whose requests have ended: all at once, for they may be
        the thousands of parts of one request."""
        stage.queue.remove(indices)
        stage.monitor.queue(now_ns, -len(indices))

    def _release(self, now_ns: int, replica: Replica) -> Running:
        """Take the batch off a replica."""
        batch = replica.batch
        assert batch is not None, f"replica {replica.id} runs no batch"
        replica.batch = None
        replica.stage.monitor.finish(now_ns, len(batch.visits), batch.millicores)
        return batch

    def _reuse(self, replica: Replica, out: list[Action]) -> None:
        """A replica has finished a batch: stop it if it drains, else let it have the next."""
        if replica.life is DRAINING:
            out.append(StopReplica(replica.id, "drained"))
        else:
            replica.stage.add_idle(replica)

    def _pass_on(self, now_ns: int, stage: Stage, visit: Visit, edge_counts: Sequence[int], out: list[Action]) -> None:
        """A visit of a graph is over: enter the stages that follow from it, or answer."""
        flights = self._state.flights
        assert flights is not None
        request = visit.request
        flight = flights.get(request.id)
        if flight is None:
            return
        journey = flight.journey
        entered = journey.finish(stage.name, visit.part, edge_counts)
        if journey.fault:
            self._end(now_ns, request.id, Outcome.FAILED, journey.fault, out, stage.name)
            return
        if self._state.flows is not None:
            self._state.flows.passed(stage.name, edge_counts)
            if self._state.runs is not None:
                self._state.runs.passed(stage.name, edge_counts)
        if journey.open:
            self._enter(now_ns, flight, entered)
            return
        del flights[request.id]
        self._state.ingress.queue(now_ns, -1)
        deadline_ns = journey.deadline_ns(request, ended=True)
        out.append(End(request.id, SERVED) if now_ns <= deadline_ns else _late(request.id, now_ns, deadline_ns))

    def _enter(self, now_ns: int, flight: Flight, entered: Entered) -> None:
        """Queue a request of a graph, or parts of it, at the stages it has come to."""
        request, stages = flight.request, self._state.stages
        deadline_ns = flight.journey.deadline_ns(request)
        for name, part in entered:
            stage = stages[name]
            stage.monitor.arrive(now_ns, deadline_ns - now_ns)
            stage.queue.push(Visit(request, name, now_ns, deadline_ns, 0, part))
            if deadline_ns < stage.expire_ns:
                stage.expire_ns = max(deadline_ns, now_ns) + 1

    def _drop_visit(self, now_ns: int, visit: Visit, cost_ns: int, why: str, out: list[Action]) -> None:
        slack_ms = to_ms(visit.deadline_ns - now_ns)
        needed = "where a batch of one takes" if self._state.flights is None else "where the least to the answer is"
        detail = f"slack {slack_ms:.1f} ms at {visit.stage}, {needed} {to_ms(cost_ns):.1f} ms"
        self._end(now_ns, visit.request.id, Outcome.DROPPED, f"{detail}; {why}" if why else detail, out, visit.stage)

    def _is_open(self, request: RequestId) -> bool:
        """Whether the request has not ended. In an application of one stage whatever waits is open."""
        return self._state.flights is None or request in self._state.flights

    def _end(  # what an end says, in its order
        self, now_ns: int, request: RequestId, outcome: Outcome, why: str, out: list[Action], stage: str = ""
    ) -> None:
        """End a request other than by serving it; a request of a graph may have ended on another branch."""
        flights = self._state.flights
        if flights is not None:
            if flights.pop(request, None) is None:
                return
            self._state.ingress.queue(now_ns, -1)
        out.append(End(request, outcome, why, 0, stage))


def _late(request: RequestId, now_ns: int, deadline_ns: int) -> End:
    late_ms = to_ms(now_ns - deadline_ns)
    return End(request, Outcome.LATE, f"finished {late_ms:.1f} ms after its deadline")
