"""Why: why a request ended as it did, why a decision was taken, and for what reasons requests were missed.

Promises answers made of what the log says, live or simulated alike: what was known, what was believed and what came of
it. Beliefs, where given, must be fresh: they learn from the log as the core's did. Knows no truth.
"""

import re
from collections.abc import Iterable, Mapping

from msgspec import Struct

from sloop.actions import Decided, End, StartBatch
from sloop.core.views import Belief
from sloop.errors import InputError
from sloop.events import BatchFailed, Cancelled, Finished, ReplicaLost, ReplicaReady
from sloop.report.situation import Situation
from sloop.report.words import amount, cluster_now, difference, ids, lately, target
from sloop.runlog import Record
from sloop.units import to_ms, to_s
from sloop.vocabulary import Outcome, Request, RequestId

Beliefs = Mapping[tuple[str, str], Belief]


class Step(Struct, frozen=True):
    """One thing that happened: when in the run, what, and why where somebody decided it."""

    at_s: float
    what: str
    why: str = ""


class RequestStory(Struct, frozen=True, kw_only=True):
    """A request's life. The four durations add up to its latency; `total_ms` is None while it has not ended."""

    request: int
    outcome: str
    why: str
    slo_ms: float
    total_ms: float | None
    way_ms: float
    """From the client's first byte to its arrival here."""
    queue_ms: float
    service_ms: float
    """In batches that finished or failed."""
    lost_ms: float
    """In batches whose replica was lost."""
    summary: str
    steps: tuple[Step, ...]


class DecisionStory(Struct, frozen=True, kw_only=True):
    """What was decided at or before an instant, on what grounds, and what was in force."""

    at_s: float
    summary: str
    why: str
    steps: tuple[Step, ...]


class Reason(Struct, frozen=True):
    """Requests that ended the same way for the same reason, numbers aside."""

    outcome: str
    why: str
    count: int
    first_request: int
    """An example: ask `explain_request` about it."""
    first_s: float


def explain_request(
    records: Iterable[tuple[int, Record]], request: int, beliefs: Beliefs | None = None
) -> RequestStory:
    """Why request `request` ended as it did. InputError where the log has no such request."""
    teller, low, high = _Teller(RequestId(request), Situation(beliefs)), None, None
    for now_ns, record in records:
        if isinstance(record, Request):
            low, high = min(record.id, record.id if low is None else low), max(record.id, high or 0)
        teller.append(now_ns, record)
        if teller.end is not None:
            break
    if teller.request is None:
        there = "no requests at all" if low is None else f"requests {low} to {high}"
        raise InputError(f"request {request} is not in this log", help=f"the log has {there}")
    return teller.story()


class _Teller:
    """Follows one request through the log."""

    def __init__(self, number: RequestId, situation: Situation) -> None:
        self.request: Request | None = None
        self.end: tuple[int, End] | None = None
        self._number = number
        self._now = situation
        self._steps: list[Step] = []
        self._mine: StartBatch | None = None
        self._begun_ns = 0
        self._queue_ns = 0
        self._service_ns = 0
        self._lost_ns = 0

    def append(self, now_ns: int, record: Record) -> None:
        """Take one record."""
        self._now.now_ns = now_ns
        waited_since_ns = self._now.waiting.get(self._number)
        self._tell(now_ns, record, waited_since_ns)
        self._now.append(now_ns, record)

    def _tell(self, now_ns: int, record: Record, since_ns: int | None) -> None:
        if isinstance(record, Request):
            if record.id == self._number:
                self._arrive(now_ns, record)
        elif self.request is None:
            return
        elif isinstance(record, StartBatch):
            if self._number in record.requests:
                self._start(now_ns, record, since_ns)
        elif isinstance(record, Finished | BatchFailed | ReplicaLost):
            self._leave(now_ns, record)
        elif isinstance(record, End):
            if record.request == self._number:
                self._finish(now_ns, record, since_ns)
        elif isinstance(record, Cancelled):
            if record.request == self._number:
                self._say(now_ns, "the client went away")
        else:
            self._look_around(now_ns, record, since_ns)

    def _say(self, at_ns: int, what: str, why: str = "") -> None:
        self._steps.append(Step(to_s(at_ns), what, why))

    def _arrive(self, now_ns: int, request: Request) -> None:
        self.request, now = request, self._now
        self._say(request.sent_ns, f"sent; an answer is due within {to_ms(request.slo_ns):.1f} ms")
        left_ms = to_ms(request.deadline_ns - now_ns)
        ahead = amount(len(now.waiting), "request")
        self._say(
            now_ns,
            f"arrived after {to_ms(now_ns - request.sent_ns):.1f} ms on the way, {left_ms:.1f} ms left; "
            f"{ahead} waiting, {cluster_now(now)}",
        )
        if now.plan is not None:
            self._say(now_ns, f"plan in force since {to_s(now.plan_ns):.3f} s: {target(now.plan)}", now.plan.why)

    def _start(self, now_ns: int, batch: StartBatch, since_ns: int | None) -> None:
        waited_ns = now_ns - since_ns if since_ns is not None else 0
        self._queue_ns += waited_ns
        self._mine, self._begun_ns = batch, now_ns
        hosted = self._now.replicas.get(batch.replica)
        on = f"{hosted.spec.variant} on {amount(hosted.cores, 'core')}" if hosted else "unknown to the log"
        others = [number for number in batch.requests if number != self._number]
        company = f"with {ids('request', others)}" if others else "alone"
        believed_ns = self._now.believed_ns(batch.replica, len(batch.requests))
        belief = f"; believed to take {to_ms(believed_ns):.1f} ms" if believed_ns else ""
        self._say(
            now_ns,
            f"started {company} in batch {batch.batch} at {batch.stage} on replica {batch.replica} ({on}) "
            f"after {to_ms(waited_ns):.1f} ms in the queue{belief}",
        )

    def _leave(self, now_ns: int, record: Finished | BatchFailed | ReplicaLost) -> None:
        mine = self._mine
        if mine is None:
            return
        if isinstance(record, ReplicaLost):
            if record.replica != mine.replica:
                return
            self._lost_ns += now_ns - self._begun_ns
            self._say(now_ns, f"replica {record.replica} was lost and the batch with it", record.error)
        elif record.batch != mine.batch:
            return
        else:
            self._service_ns += now_ns - self._begun_ns
            if isinstance(record, BatchFailed):
                self._say(now_ns, "the model raised on the batch", record.error)
            else:
                self._say(now_ns, f"the batch finished after {self._compare(mine, now_ns - self._begun_ns)}")
        self._mine = None

    def _compare(self, mine: StartBatch, taken_ns: int) -> str:
        running = self._now.batches.get(mine.batch)
        took = f"{to_ms(taken_ns):.1f} ms"
        if running is None or not running.believed_ns:
            return took
        off = taken_ns / running.believed_ns - 1
        if abs(off) < 0.005:
            return f"{took}, as believed"
        return f"{took}, {abs(off):.0%} {'longer' if off > 0 else 'shorter'} than believed"

    def _look_around(self, now_ns: int, record: Record, since_ns: int | None) -> None:
        """What happened to the cluster while the request waited."""
        if since_ns is None:
            return
        if isinstance(record, Decided) and record.plan is not None:
            self._say(now_ns, f"while it waited, a new plan: {target(record.plan)}", record.plan.why)
        elif isinstance(record, Decided) and record.kind == "short":
            self._say(now_ns, "while it waited, the cluster fell short of the plan", record.why)
        elif isinstance(record, ReplicaReady):
            self._say(now_ns, f"while it waited, replica {record.replica} became ready")

    def _finish(self, now_ns: int, end: End, since_ns: int | None) -> None:
        if since_ns is not None:
            self._queue_ns += now_ns - since_ns
        elif self._mine is not None:
            self._service_ns += now_ns - self._begun_ns
        self.end = now_ns, end
        around = f" while it waited; {cluster_now(self._now)}" if end.outcome is Outcome.DROPPED and since_ns else ""
        self._say(now_ns, f"{end.outcome.value}{around}", end.why)

    def story(self) -> RequestStory:
        """What was followed so far."""
        assert self.request is not None
        total_ms = to_ms(self.end[0] - self.request.sent_ns) if self.end else None
        outcome, why = (self.end[1].outcome.value, self.end[1].why) if self.end else ("open", "the log ends before it")
        parts = {
            "on the way here": to_ms(self.request.elapsed_ns),
            "in queues": to_ms(self._queue_ns),
            "in service": to_ms(self._service_ns),
            "in batches that were lost": to_ms(self._lost_ns),
        }
        spent = ", ".join(f"{value:.1f} ms {name}" for name, value in parts.items() if value)
        slo_ms = to_ms(self.request.slo_ns)
        return RequestStory(
            request=self._number,
            outcome=outcome,
            why=why,
            slo_ms=slo_ms,
            total_ms=total_ms,
            way_ms=parts["on the way here"],
            queue_ms=parts["in queues"],
            service_ms=parts["in service"],
            lost_ms=parts["in batches that were lost"],
            summary=f"{outcome}{f': {why}' if why else ''}. Of {slo_ms:.1f} ms it spent {spent or 'nothing'}",
            steps=tuple(self._steps),
        )


def explain_decision(
    records: Iterable[tuple[int, Record]], at_ns: int, beliefs: Beliefs | None = None
) -> DecisionStory:
    """The decision in force at `at_ns` and its grounds. InputError where nothing had been decided by then."""
    now, last, before = Situation(beliefs), None, None
    moment: list[tuple[int, Decided]] = []
    grounds = ""
    for now_ns, record in records:
        if now_ns > at_ns:
            break
        if isinstance(record, Decided):
            if record.plan is not None:
                last, before = (now_ns, record), now.plan
                grounds = f"{lately(now)}; {amount(len(now.waiting), 'request')} waiting; {cluster_now(now)}"
                moment = []
            moment.append((now_ns, record))
        now.append(now_ns, record)
    if last is None:
        seen = f"the log runs from {to_s(now.start_ns):.3f} s" if now.start_ns is not None else "the log is empty"
        raise InputError(f"nothing had been decided by {to_s(at_ns):.3f} s", help=f"{seen}; ask for a later instant")
    decided_ns, decided = last
    assert decided.plan is not None
    steps = [
        Step(to_s(decided_ns), f"what was known: {grounds}"),
        Step(to_s(decided_ns), f"decided: {target(decided.plan)} ({difference(before, decided.plan)})", decided.why),
    ]
    steps += [Step(to_s(ns), f"{each.kind}{_about(each)}", each.why) for ns, each in moment if each.plan is None]
    steps.append(Step(to_s(at_ns), f"in force at the instant asked for: {cluster_now(now)}; {lately(now)}"))
    summary = f"since {to_s(decided_ns):.3f} s: {target(decided.plan)}"
    if not decided.plan.feasible:
        summary += "; nothing met every deadline, this was the best there was"
    return DecisionStory(at_s=to_s(at_ns), summary=summary, why=decided.why, steps=tuple(steps))


def _about(decided: Decided) -> str:
    return f" replica {decided.replica}" if decided.replica is not None else f" at {decided.stage}"


def reasons(records: Iterable[tuple[int, Record]]) -> list[Reason]:
    """Why requests were not served in time, the commonest first."""
    counts: dict[tuple[Outcome, str], tuple[int, int, float]] = {}
    for now_ns, record in records:
        if isinstance(record, End) and record.outcome is not Outcome.SERVED:
            key = record.outcome, re.sub(r"-?\d[\d,.]*\d|-?\d", "#", record.why)
            count, first, first_s = counts.get(key, (0, record.request, to_s(now_ns)))
            counts[key] = count + 1, first, first_s
    found = [Reason(outcome.value, why, *rest) for (outcome, why), rest in counts.items()]
    return sorted(found, key=lambda reason: (-reason.count, reason.outcome, reason.why))
