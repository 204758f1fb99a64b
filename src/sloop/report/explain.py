"""`sloop explain`: why a request ended as it did, why a decision was taken, and why requests missed their deadlines.

Everything comes from the log, live or simulated: the state at that instant, the estimates, and the outcome. A
`DeploymentState` that is passed in must be fresh. Its beliefs are updated from the log as the core's were, so that each
step shows what the core expected at that instant.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import takewhile, zip_longest
from typing import Final

from msgspec import Struct

from sloop.actions import (
    AdoptReplica,
    Assigned,
    Decided,
    End,
    RequestPlan,
    Rollout,
    StartBatch,
    StopReplica,
    VersionState,
)
from sloop.app.graph import Graph
from sloop.app.hardware import LOCAL
from sloop.core import ApplicationParts
from sloop.core.planner import cores_by_hardware
from sloop.errors import InputError
from sloop.events import (
    BatchFailed,
    BatchLost,
    Cancelled,
    Finished,
    NodeReady,
    Planned,
    ReplicaCompleted,
    ReplicaLost,
    ReplicaProgressed,
    ReplicaReady,
    ShadowReady,
)
from sloop.runlog import EVENTS, Record, RecordedLog
from sloop.runlog.fold import DeploymentState
from sloop.runlog.replicas import BatchGroup
from sloop.runlog.requests import GraphRequestRecord, Place
from sloop.runlog.run import Kept, RunState
from sloop.runlog.versions import StaticEstimate, VersionRecord
from sloop.systems.replay import beginning_of
from sloop.systems.setup import Setup, build
from sloop.text import counted, in_ms, listed, number, numbered, quoted
from sloop.units import NS_PER_S, to_ms, to_s
from sloop.vocabulary import (
    BatchId,
    Group,
    Life,
    NodeState,
    Outcome,
    Plan,
    ReplicaId,
    Request,
    RequestId,
    Shadow,
    Slot,
    StagePlan,
)

RECENT_S: Final = 10
"""Seconds of traffic listed with a decision: about as far as most scaling policies look back."""
NUMBER: Final = re.compile(r"(?<![\w.-])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")
"""A number in a reason, but not the digits of a name such as `stage2`."""
TOGETHER_MAX: Final = 8
"""How many versions are named with the cores that they have by their plans: those with the most."""
QUEUED: Final = "queued"
"""The step of a replica that was ordered to start and has reported none."""
MEANWHILE: Final = {
    "shortage": "the cluster fell short of the plan",
    "provision": "replicas were started",
    "shadow": "a replica had no shadow",
    "pipeline": "a pipeline was lost",
}
"""Decisions that are told of a request that waits, besides new plans and nodes."""
_EndOfBatch = Finished | BatchFailed | BatchLost | ReplicaLost | StopReplica
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
    application: str
    version: str
    """Of the application; empty if no version has taken the request."""
    outcome: str
    why: str
    slo_ms: float
    total_ms: float | None
    network_ms: float
    """From sending to arrival, as reported by the client or the simulator."""
    edge_ms: float
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
    """The last plan of an application version at or before an instant, its reasons, and the state at that instant."""

    at_s: float
    application: str
    version: str
    summary: str
    why: str
    steps: tuple[StoryStep, ...]


class VersionStory(Struct, frozen=True, kw_only=True):
    """One version of an application at an instant."""

    application: str
    version: str
    state: str
    share: float
    """Fraction of the application's requests that it gets."""
    state_why: str
    plan: str
    since_s: float
    """When the plan was decided."""
    why: str
    """The reason of the plan."""
    replicas: str
    waiting: int
    """Visits in its queues."""


class DeploymentStory(Struct, frozen=True, kw_only=True):
    """All versions at an instant, the nodes, and how the plans share the nodes' cores."""

    at_s: float
    versions: tuple[VersionStory, ...]
    nodes: str
    together: str


class RolloutStep(Struct, frozen=True):
    """A version of an application enters a state."""

    at_s: float
    application: str
    version: str
    state: str
    share: float
    """Fraction of the application's requests that it gets from then on."""
    why: str


class MissReason(Struct, frozen=True):
    """Requests of one application with the same outcome and the same reason; numbers in the reason are ignored."""

    application: str
    """Empty if the deployment has only one application."""
    outcome: str
    why: str
    count: int
    first_request: int
    """An example request, for `explain_request`."""
    first_s: float


KEPT: Final = Kept(seconds=RECENT_S + 1, routes=False)


def fresh_state(setup: Setup) -> DeploymentState:
    """The state to explain the log of a setup, which must be fresh too."""
    return DeploymentState(setup.parts(), nodes=setup.deployment.cluster, build=build, kept=KEPT)


def state_of(log: RecordedLog) -> DeploymentState:
    """The state at the start of a log, to explain it."""
    return beginning_of(log, KEPT).fold


def request_named(records: Iterable[tuple[int, Record]], name: str) -> tuple[int, list[int]]:
    """The number of the request with this number, or else of the last one that its client calls so (`x-request-id`,
    `id`, the trace's id), and the numbers of the others that it calls so. InputError if there is none."""
    found: list[int] = []
    for _, record in records:
        if isinstance(record, Request):
            if str(record.id) == name:
                return record.id, []
            if name in (record.client_id, record.trace.partition("-")[0]):
                found.append(record.id)
    if not found and name.isdecimal():
        return int(name), []  # the error names the numbers that there are
    if not found:
        what = f"no client has called a request {quoted(name)} in this log"
        raise InputError(what, help="give its number, or the x-request-id, id or trace that it was sent with")
    return found[-1], found[:-1]


class _Estimator:
    """Estimated durations of batches at their start; the beliefs are updated as the core's were."""

    def __init__(self, state: DeploymentState) -> None:
        self._state = state
        self._beliefs: dict[tuple[str, str, str], StaticEstimate] = {}
        self._versions = 0
        self._running: dict[BatchId, tuple[BatchGroup, int]] = {}
        """Per batch, the slot and the form in which it started, and its estimated duration there in ns."""
        self._finished = BatchId(-1), 0
        """The last finished batch and its estimated duration in ns."""

    def observe(self, now_ns: int, record: Record) -> None:
        """Add a record; call this before `DeploymentState.append`."""
        if not isinstance(record, StartBatch | Finished):
            return
        run = self._state.run_of_replica(record.replica)
        if run is None:
            return
        replica = run.replicas[record.replica]
        belief = self._belief(replica.group.variant_key)
        if belief is None:
            return
        if isinstance(record, StartBatch):
            size, group = len(record.requests), replica.group
            expected_ns = belief.of(group.form).costs_ns(group.slot)[size] if size <= belief.batch_max else 0
            self._running[record.batch] = group, expected_ns
        elif replica.running is not None and replica.running.batch == record.batch:
            group, expected_ns = self._running.pop(record.batch)
            self._finished = record.batch, expected_ns
            if not record.faults:
                own = belief.of(group.form)
                own.observe(len(replica.running.requests), group.slot, now_ns - replica.running_ns)

    def _belief(self, key: tuple[str, str, str]) -> StaticEstimate | None:
        records = self._state.records
        if self._versions != len(records):
            self._versions = len(records)
            self._beliefs = {key: belief for record in records for key, belief in record.parts.beliefs.items()}
        return self._beliefs.get(key)

    def expected_ns(self, batch: BatchId) -> int:
        """Estimated duration of a running batch or of the last finished one; 0 without an estimate."""
        finished, expected_ns = self._finished
        running = self._running.get(batch)
        return expected_ns if batch == finished else running[1] if running is not None else 0

    def compared(self, batch: BatchId, taken_ns: int) -> str:
        """`150.0 ms, 36% longer than estimated`."""
        expected_ns = self.expected_ns(batch)
        if not expected_ns:
            return in_ms(taken_ns)
        off = taken_ns / expected_ns - 1
        if abs(off) < 0.005:
            return f"{in_ms(taken_ns)}, as long as the estimated P99"
        return f"{in_ms(taken_ns)}, {abs(off):.0%} {'longer' if off > 0 else 'shorter'} than the estimated P99"

    def replicas(self, run: RunState, now_ns: int) -> str:
        """A version's replicas by life-cycle state, and the estimated remaining time of the next batch to finish."""
        parts = [f"{counted(run.count(Life.READY), 'replica')} ready"]
        if run.count(Life.STARTING):
            steps = Counter(r.step or QUEUED for r in run.replicas.values() if r.life is Life.STARTING)
            named = [f"{count} {step}" for step, count in steps.items()] if len(steps) > 1 else list(steps)
            parts.append(f"{run.count(Life.STARTING)} starting ({', '.join(named)})")
        if run.count(Life.DRAINING):
            parts.append(f"{run.count(Life.DRAINING)} {Life.DRAINING.value}")
        ends_ns = [
            replica.running_ns + expected_ns
            for replica in run.batches()
            if replica.running and (expected_ns := self.expected_ns(replica.running.batch))
        ]
        if run.batches():
            parts.append(f"{len(run.batches())} busy{_next_free(min(ends_ns) - now_ns) if ends_ns else ''}")
        return ", ".join(parts)


def _next_free(left_ns: int) -> str:
    """When the first of the busy replicas is estimated to finish its batch, `left_ns` from now."""
    if left_ns <= 0:
        return " (the next one free at any moment: its batch has run as long as estimated)"
    return f" (the next one free in an estimated {in_ms(left_ns)})"


class _ColdStarts:
    """The steps through which replicas that start have gone."""

    def __init__(self, state: DeploymentState) -> None:
        self._state = state
        self._ended: dict[ReplicaId, list[tuple[str, int]]] = {}
        """Of each replica that starts, its past steps with their lengths in ns."""

    def observe(self, now_ns: int, record: Record) -> None:
        """Add a record; call this before `DeploymentState.append`."""
        if isinstance(record, ReplicaProgressed | ReplicaReady):
            run = self._state.run_of_replica(record.replica)
            replica = run.replicas.get(record.replica) if run is not None else None
            if replica is not None and replica.life is Life.STARTING and replica.order_ns >= 0:
                ended = self._ended.setdefault(record.replica, [])
                if replica.step:
                    ended.append((replica.step, now_ns - replica.step_ns))
                elif isinstance(record, ReplicaProgressed):
                    ended.append((QUEUED, now_ns - replica.order_ns))
        elif isinstance(record, ReplicaLost | StopReplica):
            self._ended.pop(record.replica, None)

    def end(self, replica: ReplicaId) -> str:
        """The steps of a replica that is ready now, as text: ` (fetching 41.43 s, loading 14.14 s)`."""
        steps = [(step, taken_ns) for step, taken_ns in self._ended.pop(replica, []) if taken_ns > UNACCOUNTED_NS_MIN]
        return f" ({', '.join(f'{step} {number(to_s(taken_ns))} s' for step, taken_ns in steps)})" if steps else ""


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


def _others(batch: StartBatch, id: RequestId) -> list[RequestId]:
    """The requests of a batch besides this one."""
    return sorted({each for each in batch.requests if each != id})


class _Follower:
    """Follows one request through the log."""

    def __init__(self, id: RequestId, state: DeploymentState) -> None:
        self.request: Request | None = None
        self.end: tuple[int, End] | None = None
        self._id = id
        self._state = state
        self._estimator = _Estimator(state)
        self._starts = _ColdStarts(state)
        self._version: VersionRecord | None = None
        """The version that the request went to."""
        self._known_ns = 0
        """When the core received the request."""
        self._steps: list[StoryStep] = []
        self._visits: list[_Visit] = []
        self._last: _Visit | None = None
        """The visit that finished last."""
        self._kept: tuple[int, StoryStep] | None = None
        """What is to be told of the present instant: how many batches run together on a device for which it waits."""

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        if self._kept is not None and now_ns > self._kept[0]:
            self._tell_kept()
        self._estimator.observe(now_ns, record)
        self._starts.observe(now_ns, record)
        if isinstance(record, Request):
            if record.id == self._id:
                self.request, self._known_ns = record, now_ns
        elif self.request is not None:
            self._take(now_ns, record)
        self._state.append(now_ns, record)
        if self.request is not None and isinstance(record, Request | Assigned | Rollout | Finished):
            if self._version is None:
                self._arrive(now_ns, is_assigned=isinstance(record, Assigned))
            self._enter(now_ns)
        if isinstance(record, StartBatch) and self._shares:
            self._note_kept(now_ns, record)

    @property
    def _shares(self) -> bool:
        """Whether a share policy decides how many batches run together."""
        parts = self._version.parts if self._version is not None else None
        return isinstance(parts, ApplicationParts) and not parts.policies.share.takes_all

    def _note_kept(self, now_ns: int, batch: StartBatch) -> None:
        """A batch has begun at a stage: tell at the end of the instant if the request still waits there."""
        self._kept, run = None, self._run
        begun = run.replicas.get(batch.replica) if run is not None else None
        if run is None or begun is None or not any(visit.place[0] == batch.stage for visit in self._waiting()):
            return
        node, device = begun.spec.node or "", begun.spec.device or ""
        beside = [
            each
            for each in run.replicas.values()
            if each.life is Life.READY
            and (each.spec.stage, each.spec.node or "", each.spec.device or "") == (batch.stage, node, device)
        ]
        running = sum(each.running is not None for each in beside)
        where = f"{node}/{device}" if device else node
        ran = f"{counted(running, 'batch', 'batches')} of {batch.stage} ran together on {where}"
        kept = f"{counted(run.queued(batch.stage), 'request')} stayed queued"
        idle = len(beside) - running
        why = f"the share policy left {counted(idle, 'replica')} there idle" if idle else "all replicas there were busy"
        self._kept = now_ns, StoryStep(to_s(now_ns), f"while it waited, {ran}; {kept}", why)

    def _tell_kept(self) -> None:
        if self._kept is not None:
            self._steps.append(self._kept[1])
        self._kept = None

    @property
    def _run(self) -> RunState | None:
        return self._version.run if self._version is not None else None

    def _take(self, now_ns: int, record: Record) -> None:
        if isinstance(record, StartBatch):
            self._start(now_ns, record)
        elif isinstance(record, Finished | BatchFailed | BatchLost | ReplicaLost | StopReplica):
            for visit in self._visits:
                if visit.batch is not None and visit.batch.replica == record.replica:
                    self._leave(now_ns, visit, record)
        elif isinstance(record, End):
            if record.request == self._id:
                self._finish(now_ns, record)
        elif isinstance(record, Cancelled):
            if record.request == self._id:
                self._add(now_ns, "the client went away")
        elif self._waiting():
            self._note_change(now_ns, record)

    def _add(self, at_ns: int, what: str, why: str = "") -> None:
        self._steps.append(StoryStep(to_s(at_ns), what, why))

    def _waiting(self) -> list[_Visit]:
        return [visit for visit in self._visits if visit.over_ns is None and visit.batch is None]

    def _arrive(self, now_ns: int, *, is_assigned: bool) -> None:
        """The request has reached the version that serves it."""
        request, run = self.request, self._state.run_of_request(self._id)
        if request is None or run is None:
            return
        version = self._state.version_of(run)
        if version is None:
            return
        self._version = version
        self._add_arrival(
            f"{self._application()}; {counted(run.waiting - self._entered(), 'request')} waiting, "
            f"{self._estimator.replicas(run, now_ns)}"
        )
        if is_assigned or request.version:
            self._add(now_ns, f"goes to version {version.version}", _why_version(version, request))
        if run.plan is not None:
            since = f"plan in force since {to_s(run.plan_ns):.3f} s"
            self._add(now_ns, f"{since}: {plan_text(run.plan)}", run.plan.why)

    def _add_arrival(self, then: str) -> None:
        """The first two steps; `then` says what it met."""
        request, known_ns = self.request, self._known_ns
        assert request is not None
        edge_ns = known_ns - request.arrived_ns
        self._add(request.sent_ns, f"sent; an answer is due within {in_ms(request.slo_ns)}")
        self._add(
            known_ns,
            f"arrived after {in_ms(request.elapsed_ns)} in the network and {in_ms(edge_ns)} in the edge, "
            f"{in_ms(request.deadline_ns - known_ns)} left{then}",
        )

    def _application(self) -> str:
        """`, for application a`, if there are several."""
        several = len({record.application for record in self._state.records}) > 1
        return f", for application {self.request.application}" if several and self.request is not None else ""

    def _entered(self) -> int:
        """How many visits the request waits for now."""
        request = self._run.open.get(self._id) if self._run is not None else None
        return len(request.waiting) if isinstance(request, GraphRequestRecord) else int(request is not None)

    def _enter(self, now_ns: int) -> None:
        """Add the visits that the last record started."""
        run = self._run
        request = run.open.get(self._id) if run is not None else None
        if run is None or request is None:
            return
        if isinstance(request, GraphRequestRecord):
            known = {visit.place for visit in self._visits}
            begun = [place for place in request.waiting if place not in known]
        else:
            begun = [(next(iter(run.graph.stages)), 0)] if not self._visits else []
        self._visits += [_Visit(place, now_ns, self._last) for place in begun]

    def _where(self, visit: _Visit) -> str:
        """The place of a visit, as text."""
        stage, part = visit.place
        return f"{stage}, part {part}" if self._graph.scopes[stage] else stage

    @property
    def _graph(self) -> Graph:
        assert self._version is not None
        return self._version.run.graph

    def _start(self, now_ns: int, batch: StartBatch) -> None:
        mine = [part for id, part in batch.visits if id == self._id]
        for visit in [visit for visit in self._waiting() if visit.place[0] == batch.stage and visit.place[1] in mine]:
            waited_ns = now_ns - visit.since_ns
            visit.wait_ns += waited_ns
            visit.batch, visit.since_ns = batch, now_ns
            replica = self._run.replicas.get(batch.replica) if self._run is not None else None
            on = ""
            if replica is not None:
                group = replica.group
                on = f" ({replica.spec.variant} on {slot_text(group.slot)}{shadow_text(group.form.shadow)})"
            others = _others(batch, self._id)
            alone = "alone" if len(batch.requests) == 1 else "with other parts of it"
            beside = f"with {numbered('request', others)}" if others else alone
            expected_ns = self._estimator.expected_ns(batch.batch)
            estimate = f"; estimated P99 {in_ms(expected_ns)}" if expected_ns else ""
            self._add(
                now_ns,
                f"started {beside}, in batch no. {batch.batch} at {self._where(visit)} on replica {batch.replica}{on} "
                f"after {in_ms(waited_ns)} in the queue{estimate}",
            )

    def _leave(self, now_ns: int, visit: _Visit, record: _EndOfBatch) -> None:
        """A visit's batch has ended, or its replica is gone."""
        batch, taken_ns = visit.batch, now_ns - visit.since_ns
        assert batch is not None
        if isinstance(record, Finished | BatchFailed | BatchLost) and record.batch != batch.batch:
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
            is_alone = len(set(batch.requests)) == 1
            then = "" if is_alone else ": each half of its requests is tried again, in a batch of its own"
            self._add(now_ns, f"the batch failed{then}", record.detail or record.error)
        elif isinstance(record, BatchLost):
            visit.lost_ns += taken_ns
            self._add(now_ns, f"the batch was lost in the pipeline of replica {record.replica}", record.error)
        else:
            visit.lost_ns += taken_ns
            what, why = ("lost", record.error) if isinstance(record, ReplicaLost) else ("given up", record.why)
            self._add(now_ns, f"replica {record.replica} was {what}, and the batch with it", why)

    def _note_change(self, now_ns: int, record: Record) -> None:
        """A change of the cluster, or of the application's plan or versions, while the request waits."""
        assert self._version is not None
        if isinstance(record, Decided):
            if record.kind == "node":
                self._add(now_ns, "while it waited, nodes changed", record.why)
            elif record.application not in ("", self._version.key) and len(self._state.records) > 1:
                pass
            elif record.plan is not None:
                self._add(now_ns, f"while it waited, a new plan: {plan_text(record.plan)}", record.plan.why)
            elif record.kind in MEANWHILE:
                what = f"replica {record.replica} had no shadow" if record.kind == "shadow" else MEANWHILE[record.kind]
                self._add(now_ns, f"while it waited, {what}", record.why)
        elif isinstance(record, ReplicaReady | ReplicaCompleted | AdoptReplica | ShadowReady):
            if self._state.run_of_replica(record.replica) is self._run:
                self._add(now_ns, f"while it waited, {self._replica_change(record)}")
        elif isinstance(record, NodeReady):
            self._add(now_ns, f"while it waited, node {record.node.name} became ready")
        elif isinstance(record, Rollout) and record.application == self._version.application:
            self._add(now_ns, f"while it waited, {rollout_text(record)}", record.why)

    def _replica_change(self, record: ReplicaReady | ReplicaCompleted | AdoptReplica | ShadowReady) -> str:
        name = f"replica {record.replica}"
        if isinstance(record, ReplicaCompleted):
            return f"{name} had all layers of its model"
        if isinstance(record, ReplicaReady):
            replica = self._run.replicas.get(record.replica) if self._run is not None else None
            if replica is not None and replica.part is not None:
                first, end = replica.part.layers
                return f"{name} had layers {first} to {end - 1} of its model{self._starts.end(record.replica)}"
            return f"{name} became ready{self._starts.end(record.replica)}"
        if isinstance(record, AdoptReplica):
            return f"{name} was taken over from an earlier server"
        return f"a shadow of {name} became ready"

    def _finish(self, now_ns: int, end: End) -> None:
        waiting = self._waiting()
        for visit in self._visits:
            if visit.over_ns is None:
                if visit.batch is None:
                    visit.wait_ns += now_ns - visit.since_ns
                else:
                    visit.service_ns += now_ns - visit.since_ns
        self.end = now_ns, end
        run = self._run
        around = f" while it waited; {self._estimator.replicas(run, now_ns)}" if waiting and run is not None else ""
        if run is None:
            self._add_arrival(self._application())
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
        self._tell_kept()
        request, end = self.request, self.end
        assert request is not None
        critical = self._critical()
        edge_ns = self._known_ns - request.arrived_ns
        spent_ns = {
            "network": request.elapsed_ns,
            "edge": edge_ns,
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
            application=self._version.application if self._version is not None else request.application,
            version=self._version.version if self._version is not None else "",
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
        "edge": "in the edge",
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


def _why_version(version: VersionRecord, request: Request) -> str:
    """Why a request went to this version of its application."""
    if request.version:
        return "the client asked for this version"
    is_canary = version.state is VersionState.CANARY
    return f"it is {'a canary' if is_canary else 'the version'} that serves {version.share:.0%} of the requests"


def explain_request(records: Iterable[tuple[int, Record]], request: int, state: DeploymentState) -> RequestStory:
    """Explain why `request` ended as it did. InputError if the log has no such request."""
    follower, low, high = _Follower(RequestId(request), state), None, None
    for now_ns, record in records:
        if isinstance(record, Request):
            low, high = min(record.id, record.id if low is None else low), max(record.id, high or 0)
        follower.append(now_ns, record)
        if follower.end is not None:
            break
    if follower.request is None:
        there = "no requests at all" if low is None else f"requests {low} to {high}"
        between = low is not None and high is not None and low < request < high
        gaps = ", but not every number between them" if between else ""
        raise InputError(f"request {request} is not in this log", help=f"the log has {there}{gaps}")
    return follower.story()


# Decisions


class _Planning:
    """The plan of one version that is in force, and what has happened since it was decided."""

    def __init__(self) -> None:
        self.last: tuple[int, Decided] | None = None
        self.before: Plan | None = None
        self.known: tuple[int, str] = 0, ""
        """What was known when the plan was asked for, and when that was."""
        self.notes: list[tuple[int, Decided | Rollout]] = []

    def decide(self, now_ns: int, decided: Decided, before: Plan | None, known: tuple[int, str]) -> None:
        """A new plan is in force."""
        self.last, self.before, self.known, self.notes = (now_ns, decided), before, known, []


class _Decisions:
    """Follows the decisions about one application through the log."""

    def __init__(self, state: DeploymentState, name: str) -> None:
        self._state = state
        self._name = name
        self.estimator = _Estimator(state)
        self.plannings: dict[str, _Planning] = {}
        """By key of the version."""
        self._requested: dict[str, tuple[int, str]] = {}
        """By key, what was known when a plan was requested that is computed beside the event loop."""
        self._is_answer = False
        """Whether the last event was the answer to this request."""
        for record in state.records:  # of a log that begins in the middle of a run
            if record.application == name and record.run.plan is not None:
                decided = Decided("plan", record.run.plan.why, plan=record.run.plan, application=record.key)
                known = record.run.plan_ns, "not in this log, which begins later"
                self.plannings.setdefault(record.key, _Planning()).decide(record.run.plan_ns, decided, None, known)

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        self.estimator.observe(now_ns, record)
        if isinstance(record, EVENTS):
            self._is_answer = isinstance(record, Planned)
        elif isinstance(record, RequestPlan):
            self._requested = {key: (now_ns, self.known(run, now_ns)) for key, run in self._runs()}
        elif isinstance(record, Decided):
            self._decide(now_ns, record)
        elif isinstance(record, Rollout) and record.application == self._name:
            for planning in self.plannings.values():
                planning.notes.append((now_ns, record))
        self._state.append(now_ns, record)

    def _runs(self) -> list[tuple[str, RunState]]:
        return [(record.key, record.run) for record in self._state.records if record.application == self._name]

    def _decide(self, now_ns: int, decided: Decided) -> None:
        if decided.kind == "node":
            for planning in self.plannings.values():
                planning.notes.append((now_ns, decided))
            return
        version = self._state.version_for(decided)
        if version is None or version.application != self._name:
            return
        planning = self.plannings.setdefault(version.key, _Planning())
        if decided.plan is not None:
            at_request = self._requested.get(version.key) if self._is_answer else None
            known = at_request or (now_ns, self.known(version.run, now_ns))
            planning.decide(now_ns, decided, version.run.plan, known)
        planning.notes.append((now_ns, decided))

    def known(self, run: RunState, now_ns: int) -> str:
        """What a policy knows, as text."""
        waiting = counted(run.waiting, "request")
        return f"{_traffic(run, now_ns)}; {waiting} waiting; {self.estimator.replicas(run, now_ns)}"


def explain_decision(
    records: Iterable[tuple[int, Record]], at_ns: int, state: DeploymentState, application: str = ""
) -> DecisionStory:
    """The plan in force at `at_ns`, its reasons, and what has happened since.

    `application` is the name of an application, for the version that serves the most of its requests, or `NAME@2`; it
    may be empty if the deployment has only one. InputError if there is no such application, or nothing had been decided
    for it.
    """
    name, _, wanted = application.partition("@")
    name = name or next(iter(state.applications), "")
    decisions = _Decisions(state, name)
    for now_ns, record in records:
        if now_ns > at_ns:
            break
        decisions.append(now_ns, record)
    known = list(state.applications)
    if name not in known or (len(known) > 1 and not application):
        what = f"there is no application {name!r} at this time" if application else "there are several applications"
        raise InputError(what, help=f"name one of {listed(known)}")
    state.advance()
    versions = [each for each in state.applications[name] if wanted in ("", each.version)]
    found = sorted((each for each in versions if each.key in decisions.plannings), key=lambda each: each.share)
    planning = decisions.plannings[found[-1].key] if found else _Planning()
    if planning.last is None:
        seen = f"the log runs from {to_s(state.start_ns):.3f} s" if state.start_ns is not None else "the log is empty"
        of = f" for {application}" if application else ""
        what = f"nothing had been decided{of} by {to_s(at_ns):.3f} s"
        raise InputError(what, help=f"{seen}; ask for a later instant")
    return _decision_story(at_ns, state, found[-1], planning, decisions)


def _decision_story(
    at_ns: int, state: DeploymentState, version: VersionRecord, planning: _Planning, decisions: _Decisions
) -> DecisionStory:
    assert planning.last is not None
    decided_ns, decided = planning.last
    assert decided.plan is not None
    known_ns, known = planning.known
    change = f"decided: {plan_text(decided.plan)} ({_difference(planning.before, decided.plan)})"
    when = " when the plan was requested" if known_ns < decided_ns else ""
    steps = [
        StoryStep(to_s(known_ns), f"what was known{when}: {known}"),
        StoryStep(to_s(decided_ns), change, decided.why),
    ]
    steps += [StoryStep(to_s(ns), _note_text(note), note.why) for ns, note in planning.notes if not _is_plan(note)]
    now_s, run = to_s(at_ns), version.run
    now = f"{decisions.estimator.replicas(run, state.now_ns)}; {_traffic(run, state.now_ns)}"
    steps.append(StoryStep(now_s, f"in force at the instant asked for: {now}"))
    if nodes := _nodes_text(state):
        steps.append(StoryStep(now_s, f"nodes: {nodes}"))
    if weights := _transfers_text(state, at_ns):
        steps.append(StoryStep(now_s, f"weights under way: {weights}"))
    if together := _together_text(state):
        steps.append(StoryStep(now_s, f"the plans in force together: {together}"))
    summary = f"since {to_s(decided_ns):.3f} s: {plan_text(decided.plan)}"
    if not decided.plan.feasible:
        summary += "; no plan met every deadline, this was the best one found"
    return DecisionStory(
        at_s=now_s,
        application=version.application,
        version=version.version,
        summary=summary,
        why=decided.why,
        steps=tuple(steps),
    )


def explain_deployment(records: Iterable[tuple[int, Record]], at_ns: int, state: DeploymentState) -> DeploymentStory:
    """Every version, with its plan, and the nodes at `at_ns`."""
    estimator = _Estimator(state)
    for now_ns, record in records:
        if now_ns > at_ns:
            break
        estimator.observe(now_ns, record)
        state.append(now_ns, record)
    state.advance()
    versions = tuple(
        VersionStory(
            application=record.application,
            version=record.version,
            state=record.state.value,
            share=record.share,
            state_why=record.why,
            plan=plan_text(record.run.plan) if record.run.plan is not None else "",
            since_s=to_s(record.run.plan_ns),
            why=record.run.plan.why if record.run.plan is not None else "there is no plan yet",
            replicas=estimator.replicas(record.run, state.now_ns),
            waiting=record.run.waiting,
        )
        for record in state.records
        if not record.has_ended
    )
    together = _together_text(state)
    return DeploymentStory(at_s=to_s(at_ns), versions=versions, nodes=_nodes_text(state), together=together)


def rollouts(records: Iterable[tuple[int, Record]]) -> list[RolloutStep]:
    """The states that versions have entered, and why."""
    return [
        RolloutStep(to_s(now_ns), record.application, record.version, record.state.value, record.share, record.why)
        for now_ns, record in records
        if isinstance(record, Rollout)
    ]


def _transfers_text(state: DeploymentState, at_ns: int) -> str:
    """The transfers under way, up to `TOGETHER_MAX`, as text; empty if there are none."""
    opened = list(state.weights.open.values())
    parts = [
        f"{quoted(each.order.weights.name)} from {each.order.source or 'the store'} to {listed(list(each.receivers))} "
        f"since {number(to_s(at_ns - each.since_ns))} s"
        for each in opened[:TOGETHER_MAX]
    ]
    more = len(opened) - len(parts)
    return "; ".join([*parts, *([f"{more} more"] if more else [])])


def _is_plan(note: Decided | Rollout) -> bool:
    return isinstance(note, Decided) and note.plan is not None


def _note_text(note: Decided | Rollout) -> str:
    """What a decision without a plan is about."""
    if isinstance(note, Rollout):
        return rollout_text(note)
    if note.replica is not None:
        return f"{note.kind} replica {note.replica}"
    return f"{note.kind} at {note.stage}" if note.stage else note.kind


def rollout_text(rollout: Rollout) -> str:
    """`version 2 is canary with 10% of the requests`."""
    share = f" with {rollout.share:.0%} of the requests" if rollout.share else ""
    return f"version {rollout.version} is {rollout.state.value}{share}"


def _nodes_text(state: DeploymentState) -> str:
    """The nodes by kind and state, as text; empty for a cluster of one kind that is all ready."""
    counts: dict[str, dict[NodeState, int]] = {}
    for record in state.nodes.records.values():
        states = counts.setdefault(record.node.hardware, {})
        states[record.state] = states.get(record.state, 0) + 1
    if len(counts) < 2 and all(states.keys() == {NodeState.READY} for states in counts.values()):
        return ""
    return "; ".join(
        f"{hardware}: {', '.join(f'{count} {_state_text(each)}' for each, count in states.items())}"
        for hardware, states in counts.items()
    )


def _state_text(state: NodeState) -> str:
    return "not rented" if state is NodeState.RELEASED else state.value


def _together_text(state: DeploymentState) -> str:
    """The cores that all versions have by their plans, by kind of hardware; empty if there is only one version."""
    present = [record for record in state.records if not record.has_ended]
    if len(present) < 2:
        return ""
    parts = []
    totals: dict[str, float] = {}
    for record in state.nodes.records.values():
        if record.state is not NodeState.LOST:
            totals[record.node.hardware] = totals.get(record.node.hardware, 0.0) + record.node.cores
    for hardware, total in totals.items():
        wants = {each.key: cores_by_hardware(each.run.plan).get(hardware, 0.0) for each in present}
        most = sorted((key for key, cores in wants.items() if cores), key=lambda key: -wants[key])
        shares = [f"{key} {wants[key]:g}" for key in most[:TOGETHER_MAX]]
        if rest := most[TOGETHER_MAX:]:
            shares.append(f"{len(rest)} others {sum(wants[key] for key in rest):g}")
        if shares:
            parts.append(f"{listed(shares)} of at most {counted(total, 'core')}{f' of {hardware}' if hardware else ''}")
    return "; ".join(parts)


# Reasons of misses


class MissReasons:
    """Why requests were not served in time, as records come."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, Outcome, tuple[str, ...]], _Reason] = {}
        self._names: dict[RequestId, str] = {}
        """The applications of open requests."""

    def append(self, now_ns: int, record: Record) -> None:
        """Add the next record."""
        if isinstance(record, Request):
            if record.application:
                self._names[record.id] = record.application
        elif isinstance(record, End):
            name = self._names.pop(record.request, "")
            if record.outcome is not Outcome.SERVED:
                words, numbers = tuple(NUMBER.split(record.why)), NUMBER.findall(record.why)
                first = _Reason(record.request, to_s(now_ns))
                self._found.setdefault((name, record.outcome, words), first).add(numbers)

    @property
    def rows(self) -> list[MissReason]:
        """By application, the most frequent first."""
        reasons = [
            MissReason(name, outcome.value, reason.text(words), reason.count, reason.first_request, reason.first_s)
            for (name, outcome, words), reason in self._found.items()
        ]
        return sorted(reasons, key=lambda reason: (-reason.count, reason.application, reason.outcome, reason.why))


def miss_reasons(records: Iterable[tuple[int, Record]]) -> list[MissReason]:
    """Why requests of a log were not served in time."""
    found = MissReasons()
    for now_ns, record in records:
        found.append(now_ns, record)
    return found.rows


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
    at = f", {spec.device} of {spec.node}" if spec.device and spec.node else ""
    limits = [f"batches up to {group.batch_max}"] if group.batch_max else []
    limits += [f"{group.rate_rps:.4g} rps"] if group.rate_rps else []
    limited = f" ({', '.join(limits)})" if limits else ""
    return f"{group.count} × {spec.variant} on {slot_text(spec.slot)}{at}{shadow_text(spec.shadow)}{limited}"


def shadow_text(shadow: Shadow | None) -> str:
    """` with a shadow of 16 cores and 3 blocks`, or nothing."""
    if shadow is None:
        return ""
    return f" with a shadow of {counted(shadow.cores, 'core')} and {counted(len(shadow.blocks), 'block')}"


def slot_text(slot: Slot) -> str:
    """`2 cores`, `1 core reserved`, `4 cores and a T4 of g4dn.xlarge`, `4 cores and 50% of a T4`; with a share
    of 0, which reserves nothing, `4 cores and a shared T4`."""
    text = counted(slot.cores, "core")
    if not slot.is_capped and not slot.accelerator:
        text += " reserved"
    if slot.accelerator:
        part = {1.0: "a", 0.0: "a shared"}.get(slot.share, f"{100 * slot.share:.3g}% of a")
        text += f" and {part} {slot.accelerator}"
    return f"{text} of {slot.hardware}" if slot.hardware and slot.hardware != LOCAL else text


def _difference(before: Plan | None, after: Plan) -> str:
    """The changes from one plan to the next, as text."""
    if before is None:
        return "the first plan"
    old = {stage.stage: stage for stage in before.stages}
    changes = [f"was {_stage_text(old[stage.stage])}" for stage in after.stages if stage != old.get(stage.stage, stage)]
    changes += [f"new: {stage.stage}" for stage in after.stages if stage.stage not in old]
    return "; ".join(changes) or "nothing changed"


def _traffic(run: RunState, now_ns: int) -> str:
    """Arrivals of the last complete seconds, and how many of them and of the current second missed, as text."""
    now_s = (now_ns - (run.start_ns or 0)) // NS_PER_S
    known = list(takewhile(lambda second: second.start_s >= now_s - RECENT_S, reversed(run.seconds)))[::-1]
    complete = [str(second.arrivals) for second in known if second.start_s < now_s]
    arrivals = f"arrivals in the last seconds: {', '.join(complete) or 'none'}"
    if known and not complete:
        arrivals = f"arrivals in the first second so far: {known[-1].arrivals}"
    missed = sum(second.missed for second in known)
    ended = missed + sum(second.served for second in known)
    misses = f"{missed} of the {ended} that have ended were missed" if ended else "none has ended"
    return f"{arrivals}; {misses}"
