"""Why a request ended as it did, and where its time went."""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from sloop.actions import AdoptWorker, Assigned, Decided, End, Piece, Rollout, StartBatch, StopWorker, VersionState
from sloop.app.graph import Graph
from sloop.core import ApplicationParts
from sloop.errors import InputError
from sloop.events import (
    BatchFailed,
    BatchLost,
    Cancelled,
    Finished,
    NodeReady,
    WorkerCompleted,
    WorkerLost,
    WorkerProgressed,
    WorkerReady,
)
from sloop.report.explain import StoryStep
from sloop.report.explain.estimates import QUEUED, Estimator
from sloop.report.explain.texts import plan_text, rollout_text, shadow_text, slot_text
from sloop.runlog import Record
from sloop.runlog.fold import DeploymentState
from sloop.runlog.requests import GraphRequestRecord, Place
from sloop.runlog.run import RunState
from sloop.runlog.versions import VersionRecord
from sloop.text import counted, in_ms, number, numbered, quoted
from sloop.units import to_ms, to_s
from sloop.vocabulary import Life, Outcome, ReplicaId, ReplicaSpec, Request, RequestId, shadow_in

MEANWHILE: Final = {
    "shortage": "the cluster fell short of the plan",
    "provision": "replicas were started",
    "shadow": "a replica had no shadow",
    "pipeline": "a pipeline was lost",
    "system": "another system began to decide",
}
"""Decisions that are told of a request that waits, besides new plans and nodes."""
_EndOfBatch = Finished | BatchFailed | BatchLost | WorkerLost | StopWorker
UNACCOUNTED_NS_MIN: Final = 50_000
"""Durations that round to less than 0.1 ms are not mentioned."""


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
    batch_rows: int
    """How many rows its last batch had, all requests together; 0 if it was in none."""
    batch_size: int
    """The class of the size of these rows, named by its largest; 0 if all rows are equally large."""
    padding: float
    """The fraction of what that batch computed that was padding, 0 to 1."""
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
    rows: int
    size: int
    """Of each of its rows; 0 if all rows are equally large."""
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


class _ColdStarts:
    """The steps through which replicas that start have gone."""

    def __init__(self, state: DeploymentState) -> None:
        self._state = state
        self._ended: dict[ReplicaId, list[tuple[str, int]]] = {}
        """Of each replica that starts, its past steps with their lengths in ns."""

    def observe(self, now_ns: int, record: Record) -> None:
        """Add a record; call this before `DeploymentState.append`."""
        if isinstance(record, WorkerProgressed | WorkerReady):
            run = self._state.run_of_replica(record.worker)
            replica = run.replicas.get(record.worker) if run is not None else None
            if replica is not None and replica.life is Life.STARTING and replica.order_ns >= 0:
                ended = self._ended.setdefault(record.worker, [])
                if replica.step:
                    ended.append((replica.step, now_ns - replica.step_ns))
                elif isinstance(record, WorkerProgressed):
                    ended.append((QUEUED, now_ns - replica.order_ns))
        elif isinstance(record, WorkerLost | StopWorker):
            self._ended.pop(record.worker, None)

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
        self.piece: Piece | None = None
        """What it runs of the request, if that is split."""
        self.batch: StartBatch | None = None
        self.over_ns: int | None = None
        self.wait_ns = self.service_ns = self.transport_ns = self.lost_ns = 0
        self.batch_rows = self.batch_size = 0
        self.padding = 0.0

    def story(self, critical: bool) -> VisitStory:
        spent_ms = {
            "wait_ms": to_ms(self.wait_ns),
            "service_ms": to_ms(self.service_ns),
            "transport_ms": to_ms(self.transport_ns),
            "lost_ms": to_ms(self.lost_ns),
        }
        stage, part = self.place
        return VisitStory(
            stage=stage,
            part=part,
            entered_s=to_s(self.entered_ns),
            **spent_ms,
            batch_rows=self.batch_rows,
            batch_size=self.batch_size,
            padding=self.padding,
            critical=critical,
        )


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
        self._estimator = Estimator(state)
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
        if isinstance(record, StartBatch):
            self._note_kept(now_ns, record)

    def _shares(self, spec: ReplicaSpec) -> bool:
        """Whether the profile says how replicas like this one share their device."""
        parts = self._version.parts if self._version is not None else None
        key = spec.stage, spec.variant, spec.slot.hardware
        return isinstance(parts, ApplicationParts) and parts.beliefs[key].shares(spec.slot)

    def _note_kept(self, now_ns: int, batch: StartBatch) -> None:
        """A batch has begun at a stage: tell at the end of the instant if the request still waits there."""
        self._kept, run = None, self._run
        begun = run.replicas.get(batch.replica) if run is not None else None
        if run is None or begun is None or not any(visit.place[0] == batch.stage for visit in self._waiting()):
            return
        if not self._shares(begun.spec):
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
        why = f"the batch policy left {counted(idle, 'replica')} there idle" if idle else "all replicas there were busy"
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
        elif isinstance(record, Finished | BatchFailed | BatchLost | WorkerLost | StopWorker):
            replica = record.worker if isinstance(record, WorkerLost | StopWorker) else record.replica
            for visit in self._visits:
                if visit.batch is not None and visit.batch.replica == replica:
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
        self._add(request.sent_ns, f"sent{_brought(request)}; an answer is due within {in_ms(request.slo_ns)}")
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
        if visit.piece is not None:
            first, end = visit.piece.first, visit.piece.first + visit.piece.rows
            return f"{stage}, rows {first} to {end - 1} of {visit.piece.of}"
        return f"{stage}, part {part}" if self._graph.scopes[stage] else stage

    @property
    def _graph(self) -> Graph:
        assert self._version is not None
        return self._version.run.graph

    def _start(self, now_ns: int, batch: StartBatch) -> None:
        mine = {part for id, part in batch.visits if id == self._id}
        pairs = zip(batch.requests, batch.pieces, strict=False)
        pieces = [piece for id, piece in pairs if id == self._id and piece is not None]
        for piece in pieces:
            self._split(batch.stage, piece)
        for visit in self._waiting():
            if visit.place[0] != batch.stage or visit.place[1] not in mine or (pieces and visit.piece not in pieces):
                continue
            waited_ns = now_ns - visit.since_ns
            visit.wait_ns += waited_ns
            visit.batch, visit.since_ns = batch, now_ns
            visit.batch_rows, visit.batch_size = batch.rows, batch.size
            replica = self._run.replicas.get(batch.replica) if self._run is not None else None
            on = ""
            if replica is not None:
                group = replica.group
                on = f" ({replica.spec.variant} on {slot_text(group.slot)}{shadow_text(shadow_in(group.shape))})"
            others = _others(batch, self._id)
            alone = "alone" if len(batch.requests) == 1 else "with other parts of it"
            beside = f"with {numbered('request', others)}" if others else alone
            expected_ns = self._estimator.expected_ns(batch.batch)
            estimate = f"; estimated P99 {in_ms(expected_ns)}" if expected_ns else ""
            self._add(
                now_ns,
                f"started {beside}, in batch no. {batch.batch}{_rows_of(batch)} at {self._where(visit)} on replica "
                f"{batch.replica}{on} "
                f"after {in_ms(waited_ns)} in the queue{estimate}",
            )

    def _split(self, stage: str, piece: Piece) -> None:
        """A piece of the request begins at a stage. Each is a visit, and all have waited since the first one has."""
        own = [visit for visit in self._visits if visit.place[0] == stage]
        if not own or any(visit.piece == piece for visit in own):
            return
        found = own[0]
        if found.piece is not None:
            found = _Visit(found.place, found.entered_ns, found.cause)
            self._visits.append(found)
        found.piece = piece

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
            visit.padding = record.padded / (record.elements + record.padded) if record.padded else 0.0
            passes = f" in {record.passes} passes" if record.passes > 1 else ""
            padding = f"; {visit.padding:.0%} of it was padding" if visit.padding else ""
            compared = self._estimator.compared(batch.batch, taken_ns)
            self._add(now_ns, f"the batch{at} finished after {compared}{passes}{padding}")
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
            what, why = ("lost", record.error) if isinstance(record, WorkerLost) else ("given up", record.why)
            self._add(now_ns, f"replica {record.worker} was {what}, and the batch with it", why)

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
        elif isinstance(record, WorkerReady | WorkerCompleted | AdoptWorker):
            if self._run is not None and (
                record.worker in self._run.replicas or record.worker in self._run.workers.shadows.bodies
            ):
                self._add(now_ns, f"while it waited, {self._replica_change(record)}")
        elif isinstance(record, NodeReady):
            self._add(now_ns, f"while it waited, node {record.node.name} became ready")
        elif isinstance(record, Rollout) and record.application == self._version.application:
            self._add(now_ns, f"while it waited, {rollout_text(record)}", record.why)

    def _replica_change(self, record: WorkerReady | WorkerCompleted | AdoptWorker) -> str:
        pair = self._run.workers.shadows.bodies.get(record.worker) if self._run is not None else None
        if pair is not None:
            return f"a shadow of replica {pair.id} became ready"
        name = f"replica {record.worker}"
        if isinstance(record, WorkerCompleted):
            return f"{name} had all layers of its model"
        if isinstance(record, WorkerReady):
            replica = self._run.replicas.get(record.worker) if self._run is not None else None
            if replica is not None and replica.part is not None:
                which = f"layers {replica.part.layers[0]} to {replica.part.layers[-1]}"
                return f"{name} had {which} of its model{self._starts.end(record.worker)}"
            return f"{name} became ready{self._starts.end(record.worker)}"
        return f"{name} was taken over from an earlier server"

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
            rows=request.rows,
            size=request.size,
            total_ms=to_ms(total_ns) if total_ns is not None else None,
            summary=f"{outcome}{f': {why}' if why else ''}. {where}",
            visits=tuple(visit.story(visit in critical) for visit in self._visits),
            steps=tuple(self._steps),
            **{f"{name}_ms": to_ms(value_ns) for name, value_ns in spent_ns.items()},
        )


def _brought(request: Request) -> str:
    """` with 16 rows of size 37`; empty for one row of the only size."""
    if request.size:
        return f" with {counted(request.rows, 'row')} of size {request.size}"
    return f" with {counted(request.rows, 'row')}" if request.rows != 1 else ""


def _rows_of(batch: StartBatch) -> str:
    """` of 12 rows of sizes up to 48`; empty for one row of the only size for each request."""
    if not batch.size and batch.rows == len(batch.requests):
        return ""
    return f" of {counted(batch.rows, 'row')}{f' of sizes up to {batch.size}' if batch.size else ''}"


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
