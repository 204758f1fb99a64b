"""`sloop explain`: why a request ended as it did, why a decision was taken, and why requests missed their deadlines.

Everything comes from the log, live or simulated: the state at that instant, the estimates, and the outcome. Estimates,
if given, must be fresh: they are updated from the log as the core's were, so that each step shows what the core
expected at that instant.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Final

from msgspec import Struct

from sloop.actions import Decided, End, StartBatch, StopReplica
from sloop.app.graph import Graph
from sloop.core.views import Belief
from sloop.errors import InputError
from sloop.events import BatchFailed, Cancelled, Finished, ReplicaLost, ReplicaReady
from sloop.runlog import Record
from sloop.runlog.fold import GraphRequestRecord, Place, RunState
from sloop.text import counted, in_ms, number, numbered
from sloop.units import NS_PER_S, to_ms, to_s
from sloop.vocabulary import BatchId, Group, Life, Outcome, Plan, Request, RequestId, StagePlan

Estimates = Mapping[tuple[str, str], Belief]
"""By stage and variant."""

RECENT_S: Final = 10
"""Seconds of traffic listed with a decision: about as far as most scaling policies look back."""
NUMBER: Final = re.compile(r"(?<![\w.-])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")
"""A number in a reason, but not the digits of a name such as `stage2`."""
UNACCOUNTED_NS_MIN: Final = 50_000
"""Durations that round to less than 0.1 ms are not mentioned."""


class StoryStep(Struct, frozen=True):
    """One event: its time in the run, its description, and the reason if it was decided."""

    at_s: float
    what: str
    why: str = ""


class VisitStory(Struct, frozen=True, kw_only=True):
    """One visit of the request, or of one of its parts, to a stage."""

    stage: str
    part: int
    """The part of the request, at a stage that runs for each part; otherwise 0."""
    entered_s: float
    wait_ms: float
    """Time in the queue, before each of its batches."""
    service_ms: float
    """Forward pass, measured by the replica; the whole time in the batch if it failed or had not finished."""
    transport_ms: float
    """The rest of the time in its batch: transport to the replica and back, and waiting for its process."""
    lost_ms: float
    """Time in batches whose replica was lost or stopped as stuck."""
    critical: bool
    """Whether it lies on the critical path: the chain of visits that ends with the request's end and in which each
    visit begins when the previous one finishes. Other visits ran in parallel."""


class RequestStory(Struct, frozen=True, kw_only=True):
    """The history of a request. `total_ms` is None until it has ended; it is the sum of the seven durations below it.
    `wait_ms` to `lost_ms` are sums over the visits of the critical path."""

    request: int
    outcome: str
    why: str
    slo_ms: float
    total_ms: float | None
    network_ms: float
    """From sending to arrival, as reported by the client or the simulator."""
    gateway_ms: float
    """From arrival until the core receives it: reading, checking, and the rest of the event loop's turn."""
    wait_ms: float
    service_ms: float
    transport_ms: float
    lost_ms: float
    unaccounted_ms: float
    """Time that no visit covers; 0 in a complete log."""
    summary: str
    visits: tuple[VisitStory, ...]
    steps: tuple[StoryStep, ...]


class DecisionStory(Struct, frozen=True, kw_only=True):
    """The last decision at or before an instant, its reasons, and the state at that instant."""

    at_s: float
    summary: str
    why: str
    steps: tuple[StoryStep, ...]


class MissReason(Struct, frozen=True):
    """Requests with the same outcome and the same reason; numbers in the reason are ignored."""

    outcome: str
    why: str
    count: int
    first_request: int
    """An example request, for `explain_request`."""
    first_s: float


class _Estimator:
    """Estimated durations of batches at their start; the estimates are updated as the core's were."""

    def __init__(self, estimates: Estimates | None, state: RunState) -> None:
        self._estimates = estimates or {}
        self._state = state
        self._running: dict[BatchId, tuple[float, int]] = {}
        """Per batch, the cores on which it started and its estimated duration on them in ns."""
        self._finished = BatchId(-1), 0
        """The last finished batch and its estimated duration in ns."""

    def observe(self, now_ns: int, record: Record) -> None:
        """Add a record; call this before `RunState.append`."""
        if not isinstance(record, StartBatch | Finished):
            return
        replica = self._state.replicas.get(record.replica)
        estimate = self._estimates.get(replica.group.key) if replica is not None else None
        if replica is None or estimate is None:
            return
        if isinstance(record, StartBatch):
            size = len(record.requests)
            expected_ns = estimate.costs_ns(replica.cores)[size] if size <= estimate.batch_max else 0
            self._running[record.batch] = replica.cores, expected_ns
        elif replica.running is not None and replica.running.batch == record.batch:
            cores, expected_ns = self._running.pop(record.batch)
            self._finished = record.batch, expected_ns
            estimate.observe(len(replica.running.requests), cores, now_ns - replica.running_ns)

    def expected_ns(self, batch: BatchId) -> int:
        """Estimated duration of a running batch or of the last finished one; 0 without an estimate."""
        finished, expected_ns = self._finished
        return expected_ns if batch == finished else self._running.get(batch, (0.0, 0))[1]

    def compared(self, batch: BatchId, taken_ns: int) -> str:
        """`150.0 ms, 36% longer than estimated`."""
        expected_ns = self.expected_ns(batch)
        if not expected_ns:
            return in_ms(taken_ns)
        off = taken_ns / expected_ns - 1
        if abs(off) < 0.005:
            return f"{in_ms(taken_ns)}, as long as the estimated P99"
        return f"{in_ms(taken_ns)}, {abs(off):.0%} {'longer' if off > 0 else 'shorter'} than the estimated P99"

    def cluster(self, now_ns: int) -> str:
        """Replicas by life-cycle state, and the estimated remaining time of the next batch to finish."""
        state = self._state
        parts = [f"{counted(state.count(Life.READY), 'replica')} ready"]
        parts += [f"{n} {life.value}" for life in (Life.STARTING, Life.DRAINING) if (n := state.count(life))]
        ends_ns = [
            replica.running_ns + expected_ns
            for replica in state.batches()
            if replica.running and (expected_ns := self.expected_ns(replica.running.batch))
        ]
        if state.batches():
            parts.append(f"{len(state.batches())} busy{_next_free(min(ends_ns) - now_ns) if ends_ns else ''}")
        return ", ".join(parts)


def _next_free(left_ns: int) -> str:
    """When the first of the busy replicas is estimated to finish its batch, `left_ns` from now."""
    if left_ns <= 0:
        return " (the next one free at any moment: its batch has run as long as estimated)"
    return f" (the next one free in an estimated {in_ms(left_ns)})"


class _Visit:
    """One visit of the traced request."""

    def __init__(self, place: Place, now_ns: int, cause: "_Visit | None") -> None:
        self.place = place
        self.cause = cause
        """The visit whose end started this one; None for a first visit."""
        self.entered_ns = self.since_ns = now_ns
        """When the visit began, and when its current wait or run began."""
        self.batch: StartBatch | None = None
        self.over_ns: int | None = None
        self.wait_ns = self.service_ns = self.transport_ns = self.lost_ns = 0

    def story(self, critical: bool) -> VisitStory:
        spent_ms = {
            "wait_ms": to_ms(self.wait_ns),
            "service_ms": to_ms(self.service_ns),
            "transport_ms": to_ms(self.transport_ns),
            "lost_ms": to_ms(self.lost_ns),
        }
        stage, part = self.place
        return VisitStory(stage=stage, part=part, entered_s=to_s(self.entered_ns), critical=critical, **spent_ms)


class _Follower:
    """Follows one request through the log."""

    def __init__(self, id: RequestId, graph: Graph, estimates: Estimates | None) -> None:
        self.request: Request | None = None
        self.end: tuple[int, End] | None = None
        self._id = id
        self._graph = graph
        self._state = RunState(graph)
        self._estimator = _Estimator(estimates, self._state)
        self._known_ns = 0
        """When the core received the request."""
        self._steps: list[StoryStep] = []
        self._visits: list[_Visit] = []
        self._last: _Visit | None = None
        """The visit that finished last."""

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        self._estimator.observe(now_ns, record)
        if isinstance(record, Request):
            if record.id == self._id:
                self._arrive(now_ns, record)
        elif self.request is not None:
            self._take(now_ns, record)
        self._state.append(now_ns, record)
        if self.request is not None and isinstance(record, Request | Finished):
            self._enter(now_ns)

    def _take(self, now_ns: int, record: Record) -> None:
        if isinstance(record, StartBatch):
            self._start(now_ns, record)
        elif isinstance(record, Finished | BatchFailed | ReplicaLost | StopReplica):
            for visit in self._visits:
                if visit.batch is not None and visit.batch.replica == record.replica:
                    self._leave(now_ns, visit, record)
        elif isinstance(record, End):
            if record.request == self._id:
                self._finish(now_ns, record)
        elif isinstance(record, Cancelled):
            if record.request == self._id:
                self._add(now_ns, "the client went away")
        else:
            self._note_changes(now_ns, record)

    def _add(self, at_ns: int, what: str, why: str = "") -> None:
        self._steps.append(StoryStep(to_s(at_ns), what, why))

    def _waiting(self) -> list[_Visit]:
        return [visit for visit in self._visits if visit.over_ns is None and visit.batch is None]

    def _arrive(self, now_ns: int, request: Request) -> None:
        self.request, self._known_ns, state = request, now_ns, self._state
        self._add(request.sent_ns, f"sent; an answer is due within {in_ms(request.slo_ns)}")
        self._add(
            now_ns,
            f"arrived after {in_ms(request.elapsed_ns)} in the network and {in_ms(now_ns - request.arrived_ns)} in the "
            f"gateway, {in_ms(request.deadline_ns - now_ns)} left; {counted(state.waiting, 'request')} waiting, "
            f"{self._estimator.cluster(now_ns)}",
        )
        if state.plan is not None:
            since = f"plan in force since {to_s(state.plan_ns):.3f} s"
            self._add(now_ns, f"{since}: {plan_text(state.plan)}", state.plan.why)

    def _enter(self, now_ns: int) -> None:
        """Add the visits that the last record started."""
        request = self._state.open.get(self._id)
        if isinstance(request, GraphRequestRecord):
            known = {visit.place for visit in self._visits}
            begun = [place for place in request.waiting if place not in known]
        else:
            begun = [(next(iter(self._graph.stages)), 0)] if request is not None and not self._visits else []
        self._visits += [_Visit(place, now_ns, self._last) for place in begun]

    def _where(self, visit: _Visit) -> str:
        """The place of a visit, as text."""
        stage, part = visit.place
        return f"{stage}, part {part}" if self._graph.scopes[stage] else stage

    def _start(self, now_ns: int, batch: StartBatch) -> None:
        mine = [part for id, part in batch.visits if id == self._id]
        for visit in [visit for visit in self._waiting() if visit.place[0] == batch.stage and visit.place[1] in mine]:
            waited_ns = now_ns - visit.since_ns
            visit.wait_ns += waited_ns
            visit.batch, visit.since_ns = batch, now_ns
            replica = self._state.replicas.get(batch.replica)
            on = f" ({replica.spec.variant} on {counted(replica.cores, 'core')})" if replica else ""
            others = sorted({id for id in batch.requests if id != self._id})
            alone = "alone" if len(batch.requests) == 1 else "with other parts of it"
            beside = f"with {numbered('request', others)}" if others else alone
            expected_ns = self._estimator.expected_ns(batch.batch)
            estimate = f"; estimated P99 {in_ms(expected_ns)}" if expected_ns else ""
            self._add(
                now_ns,
                f"started {beside}, in batch no. {batch.batch} at {self._where(visit)} on replica {batch.replica}{on} "
                f"after {in_ms(waited_ns)} in the queue{estimate}",
            )

    def _leave(self, now_ns: int, visit: _Visit, record: Finished | BatchFailed | ReplicaLost | StopReplica) -> None:
        """A visit's batch has ended, or its replica is gone."""
        batch, taken_ns = visit.batch, now_ns - visit.since_ns
        assert batch is not None
        if isinstance(record, Finished | BatchFailed) and record.batch != batch.batch:
            return
        visit.batch, visit.since_ns = None, now_ns
        if isinstance(record, Finished):
            visit.service_ns += min(record.service_ns, taken_ns)
            visit.transport_ns += taken_ns - min(record.service_ns, taken_ns)
            visit.over_ns, self._last = now_ns, visit
            at = f" at {self._where(visit)}" if len(self._graph.stages) > 1 else ""
            self._add(now_ns, f"the batch{at} finished after {self._estimator.compared(batch.batch, taken_ns)}")
        elif isinstance(record, BatchFailed):
            visit.service_ns += taken_ns
            self._add(now_ns, "the model raised on the batch", record.error)
        else:
            visit.lost_ns += taken_ns
            what, why = ("lost", record.error) if isinstance(record, ReplicaLost) else ("given up", record.why)
            self._add(now_ns, f"replica {record.replica} was {what}, and the batch with it", why)

    def _note_changes(self, now_ns: int, record: Record) -> None:
        """Changes of the cluster while the request waits."""
        if not self._waiting():
            return
        if isinstance(record, Decided) and record.plan is not None:
            self._add(now_ns, f"while it waited, a new plan: {plan_text(record.plan)}", record.plan.why)
        elif isinstance(record, Decided) and record.kind == "shortage":
            self._add(now_ns, "while it waited, the cluster fell short of the plan", record.why)
        elif isinstance(record, ReplicaReady):
            self._add(now_ns, f"while it waited, replica {record.replica} became ready")

    def _finish(self, now_ns: int, end: End) -> None:
        waiting = self._waiting()
        for visit in self._visits:
            if visit.over_ns is None:
                if visit.batch is None:
                    visit.wait_ns += now_ns - visit.since_ns
                else:
                    visit.service_ns += now_ns - visit.since_ns
        self.end = now_ns, end
        around = f" while it waited; {self._estimator.cluster(now_ns)}" if waiting else ""
        dropped = end.outcome is Outcome.DROPPED
        self._add(now_ns, f"{end.outcome.value}{around if dropped else ''}", end.why)

    def _critical(self) -> list[_Visit]:
        """The visits on the critical path, in order; up to the end of the log if the request has not ended."""
        last, stage = self._last, self.end[1].stage if self.end else ""
        unfinished = [visit for visit in self._visits if visit.over_ns is None]
        if unfinished and (last is None or last.place[0] != stage or last.over_ns != (self.end and self.end[0])):
            last = next((visit for visit in unfinished if visit.place[0] == stage), unfinished[0])
        found: list[_Visit] = []
        while last is not None:
            found.append(last)
            last = last.cause
        return found[::-1]

    def story(self) -> RequestStory:
        """The history of the request so far."""
        request, end = self.request, self.end
        assert request is not None
        critical = self._critical()
        gateway_ns = self._known_ns - request.arrived_ns
        spent_ns = {
            "network": request.elapsed_ns,
            "gateway": gateway_ns,
            "wait": sum(visit.wait_ns for visit in critical),
            "service": sum(visit.service_ns for visit in critical),
            "transport": sum(visit.transport_ns for visit in critical),
            "lost": sum(visit.lost_ns for visit in critical),
        }
        total_ns = end[0] - request.sent_ns if end else None
        spent_ns["unaccounted"] = total_ns - sum(spent_ns.values()) if total_ns is not None else 0
        outcome, why = (end[1].outcome.value, end[1].why) if end else ("open", "the log ends before it")
        where = _spent(request, total_ns, spent_ns, len(self._visits), critical)
        return RequestStory(
            request=self._id,
            outcome=outcome,
            why=why,
            slo_ms=to_ms(request.slo_ns),
            total_ms=to_ms(total_ns) if total_ns is not None else None,
            summary=f"{outcome}{f': {why}' if why else ''}. {where}",
            visits=tuple(visit.story(visit in critical) for visit in self._visits),
            steps=tuple(self._steps),
            **{f"{name}_ms": to_ms(value_ns) for name, value_ns in spent_ns.items()},
        )


def _took(request: Request, total_ns: int | None) -> str:
    """How long a request took, compared with its deadline; `total_ns` is None while it has not ended."""
    slo = f"{number(to_ms(request.slo_ns))} ms"
    if total_ns is None:
        return f"So far, of its {slo}"
    if total_ns > request.slo_ns:
        return f"It took {in_ms(total_ns)}, {in_ms(total_ns - request.slo_ns)} more than its {slo}"
    return f"It took {in_ms(total_ns)} of its {slo}"


def _spent(
    request: Request, total_ns: int | None, spent_ns: Mapping[str, int], visits: int, critical: list[_Visit]
) -> str:
    """One sentence on how the time was spent."""
    places = {
        "network": "in the network",
        "gateway": "in the gateway",
        "wait": "in queues",
        "service": "in service",
        "transport": "in transport",
        "lost": "in batches that were lost",
    }
    parts = [f"{in_ms(spent_ns[name])} {place}" for name, place in places.items() if to_ms(spent_ns[name]) >= 0.05]
    took = _took(request, total_ns)
    text = f"{took}: {', '.join(parts)}" if parts else took
    beside = visits - len(critical)
    if beside:
        text += f" on its critical path; {counted(beside, 'visit')} ran at the same time"
    if abs(spent_ns["unaccounted"]) >= UNACCOUNTED_NS_MIN:
        text += f"; {in_ms(spent_ns['unaccounted'])} are not accounted for: the log does not say where it was"
    return text


def explain_request(
    records: Iterable[tuple[int, Record]], request: int, graph: Graph, estimates: Estimates | None = None
) -> RequestStory:
    """Explain why `request` ended as it did; `graph` is the application's. InputError if the log has no such
    request."""
    follower, low, high = _Follower(RequestId(request), graph, estimates), None, None
    for now_ns, record in records:
        if isinstance(record, Request):
            low, high = min(record.id, record.id if low is None else low), max(record.id, high or 0)
        follower.append(now_ns, record)
        if follower.end is not None:
            break
    if follower.request is None:
        there = "no requests at all" if low is None else f"requests {low} to {high}"
        raise InputError(f"request {request} is not in this log", help=f"the log has {there}")
    return follower.story()


def explain_decision(
    records: Iterable[tuple[int, Record]], at_ns: int, graph: Graph, estimates: Estimates | None = None
) -> DecisionStory:
    """The decision in force at `at_ns` and its reasons. InputError if there was no decision before."""
    state = RunState(graph, seconds_kept=RECENT_S + 1)
    estimator = _Estimator(estimates, state)
    last: tuple[int, Decided] | None = None
    before: Plan | None = None
    notes: list[tuple[int, Decided]] = []
    grounds = ""
    for now_ns, record in records:
        if now_ns > at_ns:
            break
        estimator.observe(now_ns, record)
        if isinstance(record, Decided):
            if record.plan is not None:
                last, before, notes = (now_ns, record), state.plan, []
                waiting = counted(state.waiting, "request")
                grounds = f"{_traffic(state, now_ns)}; {waiting} waiting; {estimator.cluster(now_ns)}"
            notes.append((now_ns, record))
        state.append(now_ns, record)
    if last is None:
        seen = f"the log runs from {to_s(state.start_ns):.3f} s" if state.start_ns is not None else "the log is empty"
        raise InputError(f"nothing had been decided by {to_s(at_ns):.3f} s", help=f"{seen}; ask for a later instant")
    decided_ns, decided = last
    assert decided.plan is not None
    change = f"decided: {plan_text(decided.plan)} ({_difference(before, decided.plan)})"
    decided_s = to_s(decided_ns)
    steps = [StoryStep(decided_s, f"what was known: {grounds}"), StoryStep(decided_s, change, decided.why)]
    steps += [StoryStep(to_s(ns), f"{each.kind}{_about(each)}", each.why) for ns, each in notes if each.plan is None]
    now = f"in force at the instant asked for: {estimator.cluster(state.now_ns)}; {_traffic(state, state.now_ns)}"
    steps.append(StoryStep(to_s(at_ns), now))
    summary = f"since {decided_s:.3f} s: {plan_text(decided.plan)}"
    if not decided.plan.feasible:
        summary += "; no plan met every deadline, this was the best one found"
    return DecisionStory(at_s=to_s(at_ns), summary=summary, why=decided.why, steps=tuple(steps))


def _about(decided: Decided) -> str:
    return f" replica {decided.replica}" if decided.replica is not None else f" at {decided.stage}"


def miss_reasons(records: Iterable[tuple[int, Record]]) -> list[MissReason]:
    """Why requests were not served in time, the most frequent first."""
    found: dict[tuple[Outcome, tuple[str, ...]], _Reason] = {}
    for now_ns, record in records:
        if isinstance(record, End) and record.outcome is not Outcome.SERVED:
            words, numbers = tuple(NUMBER.split(record.why)), NUMBER.findall(record.why)
            reason = found.setdefault((record.outcome, words), _Reason(record.request, to_s(now_ns)))
            reason.add(numbers)
    reasons = [
        MissReason(outcome.value, reason.text(words), reason.count, reason.first_request, reason.first_s)
        for (outcome, words), reason in found.items()
    ]
    return sorted(reasons, key=lambda reason: (-reason.count, reason.outcome, reason.why))


class _Reason:
    """Requests that share a reason but for its numbers, of which the range is kept."""

    def __init__(self, first_request: int, first_s: float) -> None:
        self.first_request = first_request
        self.first_s = first_s
        self.count = 0
        self._low: list[str] = []
        self._high: list[str] = []

    def add(self, numbers: list[str]) -> None:
        """Count one more request, with the numbers in its reason as they are written there."""
        self.count += 1
        self._low = [min(pair, key=_value) for pair in zip(self._low or numbers, numbers, strict=True)]
        self._high = [max(pair, key=_value) for pair in zip(self._high or numbers, numbers, strict=True)]

    def text(self, words: tuple[str, ...]) -> str:
        """The reason, with a range for each number that differed: `11–14 requests wait at read`."""
        ranges = [_range(low, high) for low, high in zip(self._low, self._high, strict=True)]
        return "".join(map("".join, zip_longest(words, ranges, fillvalue="")))


def _range(low: str, high: str) -> str:
    """`11–14`, `-8.5 to -0.1`, or the number itself if both are the same."""
    return low if low == high else f"{low} to {high}" if low.startswith("-") else f"{low}–{high}"


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def plan_text(plan: Plan) -> str:
    """A plan's stages: `classify: 2 × small on 4 cores, batches up to 8`."""
    return "; ".join(_stage_text(stage) for stage in plan.stages) or "nothing"


def _stage_text(stage: StagePlan) -> str:
    groups = " + ".join(_group_text(group) for group in stage.groups) or "no replica"
    return f"{stage.stage}: {groups}, batches up to {stage.batch_max}"


def _group_text(group: Group) -> str:
    spec = group.spec
    device = f" and {spec.share:.0%} of {spec.device}" if spec.device else ""
    return f"{group.count} × {spec.variant} on {counted(spec.cores, 'core')}{device}"


def _difference(before: Plan | None, after: Plan) -> str:
    """The changes from one plan to the next, as text."""
    if before is None:
        return "the first plan"
    old = {stage.stage: stage for stage in before.stages}
    changes = [f"was {_stage_text(old[stage.stage])}" for stage in after.stages if stage != old.get(stage.stage, stage)]
    changes += [f"new: {stage.stage}" for stage in after.stages if stage.stage not in old]
    return "; ".join(changes) or "nothing changed"


def _traffic(state: RunState, now_ns: int) -> str:
    """Arrivals of the last seconds and how many of them missed, as text."""
    start_s = (now_ns - (state.start_ns or 0)) // NS_PER_S - RECENT_S
    known = [second for second in state.seconds if second.start_s >= start_s]
    arrivals = ", ".join(str(second.arrivals) for second in known) or "none"
    missed = sum(second.missed for second in known)
    ended = missed + sum(second.served for second in known)
    misses = f"{missed} of the {ended} that have ended were missed" if ended else "none has ended"
    return f"arrivals in the last seconds: {arrivals}; {misses}"
