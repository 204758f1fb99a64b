"""The only fold over the event log: the state of a run, and its measurements so far.

`DeploymentState` takes one event or action at a time, from the simulator, the live driver or a log that is read back. A
server's `/metrics` and `/v2/sloop/state`, the summary of a simulated run, tables, pages and `explain` all read it. None
of them tracks replicas, requests or counts separately, so that two of them cannot disagree.

It has a `RunState` (`run`) for each version (`versions`) of each application: `requests`, stages, `replicas`, batches
and their cost. What they share it keeps itself: nodes, `weights`, rollouts, decisions.

Measurements, which grow with a run, are kept as `samples`. A server moves them into histograms and keeps only the last
few seconds. Everything else is bounded by the open requests and live replicas.

As long as there is only one application, in one version, its records go straight to its `RunState`.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final

from sloop import actions, events
from sloop.actions import End, StartBatch, VersionState
from sloop.app.graph import Graph, GraphStage
from sloop.events import Finished
from sloop.runlog import Record, Unlogged
from sloop.runlog.cost import CostAccount, NodeAccount
from sloop.runlog.replicas import DeviceName, DeviceUse
from sloop.runlog.run import Kept, Observer, RunState
from sloop.runlog.samples import new_samples
from sloop.runlog.versions import Build, VersionParts, VersionRecord
from sloop.runlog.weights import WeightAccount
from sloop.vocabulary import Node, NodeState, ReplicaId, Request, RequestId


class DeploymentState:
    """The state of a run after the records appended so far: all applications in all their versions, and the nodes.

    `parts` describe the applications that are there from the start. Versions that are deployed later are described by
    `build`; a fold that never gets one needs none, and is quicker for a single application. `nodes` is the cluster.
    `start_ns` is the start of the run, by default the instant of the first record. `on_second` is called with a version
    at its first record after the end of a second.
    """

    def __init__(
        self,
        parts: Iterable[VersionParts],
        *,
        nodes: Iterable[Node] = (),
        build: Build | None = None,
        start_ns: int | None = None,
        kept: Kept = Kept(),  # noqa: B008  # frozen
        on_second: Callable[[VersionRecord], None] | None = None,
    ) -> None:
        self.records: list[VersionRecord] = []
        """Every version that there was, in the order of deployment."""
        self.versions: dict[str, VersionRecord] = {}
        """By key. A version that was deployed again has replaced the earlier one."""
        self.nodes = NodeAccount(nodes, steps_kept=kept.seconds)
        self.weights = WeightAccount()
        self.uses: dict[DeviceName, DeviceUse] = {}
        """Of accelerators, and of the cores of nodes whose replicas have no cap."""
        self.draining = False
        """Whether the server is shutting down."""
        self.decisions: Counter[tuple[str, str]] = Counter()
        """By key of the version, or "" for the cluster, and kind of decision."""
        self.last_decisions: deque[tuple[int, actions.Decided | actions.Rollout]] = deque(maxlen=kept.decisions)
        self.rollouts: Counter[tuple[str, VersionState]] = Counter()
        """By application, how often a version has entered each state."""
        self.plan_ns = new_samples()
        """Times in ns from the request of a plan to the plan."""
        self.unserved: RunState | None = None
        """Requests for applications that were not deployed; None if there were none."""
        self._build = build
        self._kept = kept
        self._observer = Observer(on_second)
        self._start_ns = start_ns
        self._now_ns = start_ns or 0
        self._has_begun = self._nodes_begun = False
        self._requested: tuple[int, int] | None = None
        """The number of the last plan request, and its instant."""
        self._deployed: dict[tuple[str, str], events.Deployed] = {}
        """Deployments that the core has not yet announced."""
        self._ordered: events.SystemChanged | None = None
        """The last order of another system."""
        self._run_of_stage: dict[str, RunState] = {}
        self._run_of_replica: dict[ReplicaId, RunState] = {}
        self._run_of_request: dict[RequestId, RunState] = {}
        self._unassigned: dict[RequestId, Request] = {}
        """Requests of an application with several versions, until their version is known."""
        self._only_run: dict[str, RunState | None] = {}
        """By application, the run of its only version; None if it has several."""
        shared = self._shared_handlers()
        self._handlers = shared | {
            Request: self._arrive,
            End: self._end,
            Unlogged: self._count_unlogged,
            actions.StartWorker: self._start_worker,
            actions.AdoptWorker: self._start_worker,
            **dict.fromkeys((StartBatch, Finished, events.BatchFailed, events.BatchLost), self._pass_on),
            **dict.fromkeys(_ABOUT_WORKERS, self._pass_on_worker),
        }
        self._plain: RunState | None = None
        """The only run there is, which takes all records itself."""
        found = list(parts)
        for each in found:
            self._add(each, VersionState.SERVING, 1.0, others=shared if len(found) == 1 else None)
        if len(found) == 1:
            self._plain = self.records[0].run
        self._append: Callable[[int, Any], None] = self._plain.append if self._plain is not None else self._route
        self.append: Callable[[int, Any], None] = self._append if build is None else self._append_any
        """Adds one record; instants never decrease."""

    def _shared_handlers(self) -> dict[type, Callable[[int, Any], None]]:
        """The records that are about several versions or about none, by type."""
        return {
            actions.Assigned: self._assign,
            actions.Decided: self._decide,
            events.Deployed: self._deploy,
            events.SystemChanged: self._order_system,
            actions.Rollout: self._roll_out,
            actions.AcquireNode: self._acquire,
            actions.ReleaseNode: self._release,
            events.NodeReady: self._node_ready,
            events.NodeLost: self._node_lost,
            events.NodeReleased: self._node_released,
            actions.Transfer: self.weights.order,
            actions.CancelTransfer: self.weights.cancel,
            events.Transferred: self.weights.arrive,
            events.TransferFailed: self.weights.fail,
            actions.Evict: self.weights.evict,
            actions.RequestPlan: self._request_plan,
            events.Planned: self._planned,
            events.Draining: self._begin_draining,
        }

    def extend(self, records: Iterable[tuple[int, Record]]) -> None:
        """Add records with their instants, in order."""
        rest = iter(records)
        if self._plain is not None:
            self._plain.extend(rest)  # up to the record that adds the second version
        for now_ns, record in rest:
            self._append(now_ns, record)

    def advance(self) -> None:
        """Bring all runs and accounts to the instant of the last record. Call it before reading versions that may have
        had no records for a while."""
        self.advance_nodes()
        for record in self.records:
            if not record.has_ended:
                record.run.advance(self.now_ns)

    def advance_nodes(self) -> None:
        """Bring the accounts of the nodes to the instant of the last record."""
        self._begin_nodes()
        self.nodes.charge(self.now_ns)

    # Derived values

    @property
    def build(self) -> Build | None:
        """Makes the parts of versions that are deployed later."""
        return self._build

    @property
    def start_ns(self) -> int | None:
        """The start of the run; None before the first record."""
        return self._plain.start_ns if self._plain is not None else self._start_ns

    @property
    def now_ns(self) -> int:
        """The instant of the last record."""
        return self._plain.now_ns if self._plain is not None else self._now_ns

    @property
    def runs(self) -> list[RunState]:
        """The runs of all versions, ended ones included, and of requests that no application has served."""
        runs = [record.run for record in self.records]
        return [*runs, self.unserved] if self.unserved is not None else runs

    @property
    def only(self) -> RunState:
        """The run of the only version. ValueError if there are, or were, several."""
        (record,) = self.records
        return record.run

    @property
    def applications(self) -> dict[str, list[VersionRecord]]:
        """All versions that there were, by application."""
        found: dict[str, list[VersionRecord]] = {}
        for record in self.records:
            found.setdefault(record.application, []).append(record)
        return found

    def run_of_replica(self, id: ReplicaId) -> RunState | None:
        """The run of the version that has this replica."""
        if self._plain is not None:
            return self._plain if id in self._plain.replicas else None
        return self._run_of_replica.get(id)

    def run_of_request(self, id: RequestId) -> RunState | None:
        """The run of the version that an open request belongs to; None also while its version is not known."""
        if self._plain is not None:
            return self._plain if id in self._plain.open else None
        return self._run_of_request.get(id)

    def version_of(self, run: RunState) -> VersionRecord | None:
        """The version that a run is of."""
        return next((record for record in self.records if record.run is run), None)

    def version_for(self, decided: actions.Decided) -> VersionRecord | None:
        """The version that a decision is about; None for the nodes."""
        if decided.kind == "node":
            return None
        return self.records[0] if len(self.records) == 1 else self.versions.get(decided.application)

    def keep(self, kept: Kept) -> None:
        """Keep so many seconds and decisions from now on, and times of passes or not; those that are gone do not come
        back."""
        self._kept = kept
        self.last_decisions = deque(self.last_decisions, maxlen=kept.decisions)
        for run in self.runs:
            run.keep(kept)

    def forget(self, record: VersionRecord) -> None:
        """Drop a version that has ended, with all its measurements."""
        assert record.has_ended, record.key
        self.records.remove(record)
        if self.versions.get(record.key) is record:
            del self.versions[record.key]
        for stage in record.run.stages:
            if self._run_of_stage.get(stage) is record.run:
                del self._run_of_stage[stage]

    # Several applications or versions

    def _append_any(self, now_ns: int, record: Any) -> None:  # noqa: ANN401  # any record
        self._append(now_ns, record)

    def _route(self, now_ns: int, record: Any) -> None:  # noqa: ANN401  # any record
        """Pass a record to the version that it is about."""
        if not self._has_begun:
            self._begin(now_ns)
        self._now_ns = now_ns
        take = self._handlers.get(type(record))
        if take is not None:
            take(now_ns, record)

    def _pass_on(self, now_ns: int, record: StartBatch | Finished | events.BatchFailed | events.BatchLost) -> None:
        run = self._run_of_replica.get(record.replica)
        if run is not None:
            run.extend(((now_ns, record),))

    def _pass_on_worker(self, now_ns: int, record: Any) -> None:  # noqa: ANN401  # one of _ABOUT_WORKERS
        worker = record.worker
        run = self._run_of_replica.get(worker) or next(
            (run for run in self.runs if worker in run.workers.shadows.bodies), None
        )
        if run is not None:
            run.append(now_ns, record)
            if worker not in run.replicas:
                self._run_of_replica.pop(worker, None)

    def _start_worker(self, now_ns: int, start: actions.StartWorker | actions.AdoptWorker) -> None:
        run = self._run_of_stage.get(start.spec.stage)
        if run is not None:
            run.append(now_ns, start)
            if start.worker in run.replicas:
                self._run_of_replica[start.worker] = run

    def _begin(self, now_ns: int) -> None:
        """The first record: all runs have the same start."""
        self._has_begun = True
        if self._start_ns is None:
            self._start_ns = now_ns
        for record in self.records:
            if not record.run.seconds:
                record.run.begin(self._start_ns, self._start_ns)

    def _begin_nodes(self) -> None:
        """Charge nodes from the start of the run, as soon as it is known."""
        start_ns = self.start_ns
        if not self._nodes_begun and start_ns is not None:
            self._nodes_begun = True
            self.nodes.begin(start_ns)
            for record in self.records:
                record.since_ns = max(record.since_ns, start_ns)

    def _add(
        self,
        parts: VersionParts,
        state: VersionState,
        share: float,
        *,
        others: Mapping[type, Callable[[int, Any], None]] | None = None,
    ) -> VersionRecord:
        """Add a version."""
        accuracies = {(stage, variant): belief.accuracy for (stage, variant, _), belief in parts.beliefs.items()}
        run = RunState(
            parts.graph,
            cost=CostAccount(self.nodes.nodes),
            accuracies=accuracies,
            start_ns=self._start_ns,
            kept=self._kept,
            others=others,
            uses=self.uses,
        )
        record = VersionRecord(parts, run, state, share, self.now_ns)
        if self._observer.on_second is not None:
            run.observer.on_second = partial(self._observer.on_second, record)
        self.records.append(record)
        self.versions[parts.key] = record
        self._run_of_stage |= dict.fromkeys(run.stages, run)
        self._count_versions()
        return record

    def _count_versions(self) -> None:
        """Which applications have only one version. As in the core, a request without a name is for the only
        application."""
        present: dict[str, list[RunState]] = {}
        for record in self.records:
            if not record.has_ended:
                present.setdefault(record.application, []).append(record.run)
        self._only_run = {name: runs[0] if len(runs) == 1 else None for name, runs in present.items()}
        if len(present) == 1:
            (self._only_run[""],) = self._only_run.values()

    def _several(self) -> None:
        """There is a second version: route records from now on."""
        plain = self._plain
        if plain is None:
            return
        self._start_ns, self._now_ns, self._has_begun = plain.start_ns, plain.now_ns, True
        self._run_of_request = dict.fromkeys(plain.open, plain)
        self._run_of_replica = dict.fromkeys(plain.replicas, plain)
        plain.is_alone, self._plain = False, None
        self._append = self._route

    def _arrive(self, now_ns: int, request: Request) -> None:
        """Count a request at the only version of its application. If there are several, `Assigned` tells which."""
        name = request.application
        if name in self._only_run:
            run = self._only_run[name]
            if run is None:
                self._unassigned[request.id] = request
                return
        else:
            run = self._last_run(name)
        self._run_of_request[request.id] = run
        run.extend(((now_ns, request),))

    def _assign(self, now_ns: int, assigned: actions.Assigned) -> None:
        request, record = self._unassigned.pop(assigned.request, None), self.versions.get(assigned.application)
        if request is not None and record is not None:
            self._run_of_request[request.id] = record.run
            record.run.append(now_ns, request)

    def _end(self, now_ns: int, end: End) -> None:
        run = self._run_of_request.pop(end.request, None)
        if run is None:
            request = self._unassigned.pop(end.request, None)
            if request is None:
                return
            run = self._last_run(request.application)
            run.append(now_ns, request)
        run.extend(((now_ns, end),))

    def _count_unlogged(self, now_ns: int, unlogged: Unlogged) -> None:
        record = self.versions.get(unlogged.application)
        if record is not None:
            record.run.append(now_ns, unlogged)

    def _last_run(self, name: str) -> RunState:
        """Where requests are counted that no version serves: at the newest version of their application."""
        runs = [record.run for record in self.records if record.application == name]
        if runs:
            return runs[-1]
        if self.unserved is None:
            start_ns = self._start_ns or 0
            self.unserved = RunState(Graph([GraphStage("")]), start_ns=start_ns, kept=self._kept)
            self.unserved.begin(start_ns, self._now_ns)
        return self.unserved

    # Rollouts

    def _deploy(self, now_ns: int, deployed: events.Deployed) -> None:
        self._deployed[deployed.application, deployed.version] = deployed

    def _order_system(self, now_ns: int, ordered: events.SystemChanged) -> None:
        self._ordered = ordered

    def _roll_out(self, now_ns: int, rollout: actions.Rollout) -> None:
        """A version enters a state. It is added when the core announces it, because the core refuses definitions that
        it cannot build."""
        self._note(now_ns, rollout, (rollout.application, "rollout"))
        self.rollouts[rollout.application, rollout.state] += 1
        deployed = self._deployed.pop((rollout.application, rollout.version), None)
        if deployed is not None and rollout.state is not VersionState.RETIRED:
            self._add_deployed(now_ns, deployed)
        record = next(
            (
                each
                for each in reversed(self.records)
                if (each.application, each.version) == (rollout.application, rollout.version) and not each.has_ended
            ),
            None,
        )
        if record is None:
            return
        record.state, record.share, record.why, record.since_ns = rollout.state, rollout.share, rollout.why, now_ns
        present = [each for each in self.records if each.application == record.application]
        canaries = math.fsum(each.share for each in present if each.state is VersionState.CANARY)
        for each in present:
            if each.state is VersionState.SERVING:
                each.share = 1.0 - canaries
        if record.has_ended:
            record.run.advance(now_ns)
            self._count_versions()
            self._assign_rest(now_ns)

    def _add_deployed(self, now_ns: int, deployed: events.Deployed) -> None:
        assert self._build is not None, "this fold cannot learn versions that are deployed later; give it `build`"
        parts = self._build(deployed.application, deployed.version, deployed.definition)
        self._several()
        record = self._add(parts, VersionState.STARTING, 0.0)
        record.definition = deployed.definition
        record.run.begin(self._start_ns or 0, now_ns)

    def _assign_rest(self, now_ns: int) -> None:
        """The last version but one has ended in answer to the arrival of a request, which is then not assigned."""
        for request in list(self._unassigned.values()):
            if self._only_run.get(request.application) is not None:
                del self._unassigned[request.id]
                self._arrive(now_ns, request)

    # Decisions and plans

    def _note(self, now_ns: int, decision: actions.Decided | actions.Rollout, key: tuple[str, str]) -> None:
        self.decisions[key] += 1
        self.last_decisions.append((now_ns, decision))

    def _decide(self, now_ns: int, decided: actions.Decided) -> None:
        record = self.version_for(decided)
        self._note(now_ns, decided, (record.key if record is not None else "", decided.kind))
        if record is not None:
            record.run.decide(now_ns, decided)
            if decided.kind == "planner":
                record.planner_error = decided.why
            elif decided.kind == "system" and self._ordered is not None:
                record.definition, record.choice = self._ordered.definition, ""
            elif decided.choice:
                record.choice = decided.choice

    def _request_plan(self, now_ns: int, request: actions.RequestPlan) -> None:
        self._requested = request.number, now_ns

    def _planned(self, now_ns: int, planned: events.Planned) -> None:
        if self._requested is not None and self._requested[0] == planned.number:
            self.plan_ns.append(now_ns - self._requested[1])
            self._requested = None

    def _begin_draining(self, now_ns: int, _: events.Draining) -> None:
        self.draining = True

    # Nodes

    def _acquire(self, now_ns: int, order: actions.AcquireNode) -> None:
        self._change_node(now_ns, order.node, NodeState.ACQUIRING)

    def _release(self, now_ns: int, order: actions.ReleaseNode) -> None:
        self._change_node(now_ns, order.node, NodeState.RELEASING)

    def _node_lost(self, now_ns: int, event: events.NodeLost) -> None:
        self.weights.lose(event.node)
        self._change_node(now_ns, event.node, NodeState.LOST)

    def _node_released(self, now_ns: int, event: events.NodeReleased) -> None:
        self.weights.lose(event.node)
        self._change_node(now_ns, event.node, NodeState.RELEASED)

    def _change_node(self, now_ns: int, node: str, state: NodeState) -> None:
        self._begin_nodes()
        self.nodes.change(now_ns, node, state)

    def _node_ready(self, now_ns: int, event: events.NodeReady) -> None:
        self._begin_nodes()
        self.nodes.ready(now_ns, event.node)


_ABOUT_WORKERS: Final = frozenset(
    {
        events.WorkerCompleted,
        events.WorkerProgressed,
        events.WorkerReady,
        events.WorkerLost,
        events.WorkerStopped,
        events.WorkerResized,
        actions.StopWorker,
        actions.ResizeWorker,
    }
)
"""Records with a worker that has been started before."""
