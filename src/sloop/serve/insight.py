"""`/v2/sloop/state`, `/v2/sloop/decisions` and readiness: the state of the run as JSON, for people and scripts.

Instants are seconds since the server began. Traffic is the same input that the scaling policies receive, so that a
decision can be compared with its input.
"""

import asyncio
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, Protocol

import msgspec

from sloop.actions import Decided, Rollout
from sloop.app.graph import declared_name
from sloop.core import Core
from sloop.core.ledger import cores_by_hardware
from sloop.core.rollout import ENDING_STATES, SERVING_STATES
from sloop.core.views import DeviceView, NodeView, StageView
from sloop.runlog.replicas import ReplicaRecord
from sloop.runlog.run import RunState
from sloop.runlog.versions import VersionRecord
from sloop.serve.messages import Ask, Topic
from sloop.serve.metrics import Metrics, Total, VersionRows
from sloop.serve.protocols import ModelState, Readiness, ServerReadiness
from sloop.systems.system import System
from sloop.text import counted, listed
from sloop.units import NS_PER_MS, NS_PER_S, to_ms, to_s
from sloop.vocabulary import Outcome, Plan, kind_of

TRAFFIC_NS: Final = 10 * NS_PER_S
"""Rates and utilisation are means over this time: long enough to read, short enough to see a burst."""


BLOCKED_STATES: Final = (ModelState.FAILING, ModelState.WAITING)
"""States of models for which a server that starts does not wait."""


LEAVING: Final = "the server is shutting down"


class Repository(Protocol):
    """Answers the questions about the model repository; `sloop.serve.control.repository.ModelRepository`."""

    def index(self) -> bytes:
        """The answer about `Topic.INDEX`."""
        ...

    def change(self, name: str, is_loaded: bool, then: Callable[[bytes], None]) -> None:
        """Load or end a model (`Topic.LOAD`), and call `then` with its answer."""
        ...


class Insight:
    """What the edges show of a run, from the state that `metrics` keeps, and from `core` for traffic and free room.

    `clock` returns the core's time in ns; `answered_rows` how many rows the requests had that a version of a model has
    served; `failure` why the server cannot serve at all, empty if it can; `edges` all edges, to be shown as they are.
    """

    def __init__(
        self,
        core: Core,
        metrics: Metrics,
        *,
        deployment: str,
        system: System,
        clock: Callable[[], int],
        answered_rows: Callable[[str, str], int],
        failure: Callable[[], str] = str,
        edges: Callable[[], Sequence[Any]] = tuple,
    ) -> None:
        self._core, self._metrics, self._run = core, metrics, metrics.state
        self._deployment, self._system = deployment, system
        self._clock, self._failure, self._answered_rows = clock, failure, answered_rows
        self._edges = edges
        self.repository: Repository | None = None
        """What loads and ends models as clients order."""
        self._is_leaving = False
        self.refused: dict[str, Readiness] = {}
        """By name, the models that the server was to serve from its start, and could not load."""
        self._was_ready = False
        """Whether the server has been ready."""
        self._scrapes: list[Callable[[bytes], None]] = []
        """Who waits for the metrics."""

    def ask(self, question: Ask[Topic], then: Callable[[bytes], None]) -> None:
        """Call `then` with the answer to a question (`PageSource`). The metrics are written in steps, one in each turn
        of the event loop."""
        if question.about in (Topic.LOAD, Topic.UNLOAD):
            assert self.repository is not None, "no repository"
            self.repository.change(question.model, question.about is Topic.LOAD, then)
            return
        if question.about is not Topic.METRICS:
            then(self.answer(question))
            return
        self._scrapes.append(then)
        if len(self._scrapes) == 1:
            self._scrape(self._metrics.steps())

    def _scrape(self, steps: Generator[None, None, bytes]) -> None:
        """Write the next part of the metrics; those who ask meanwhile get the same text."""
        try:
            next(steps)
        except StopIteration as end:
            waiting, self._scrapes = self._scrapes, []
            for then in waiting:
                then(end.value)
        except Exception:
            self._scrapes = []  # so that the next scrape begins anew
            raise
        else:
            asyncio.get_running_loop().call_soon(self._scrape, steps)

    def answer(self, question: Ask[Topic]) -> bytes:
        """The answer to a question of an edge."""
        found = b""
        match question:
            case Ask(Topic.READY):
                found = msgspec.json.encode(self.server_readiness())
            case Ask(Topic.MODELS, model, version):
                names = [model] if model else self._names
                states = {name: self.readiness(name, version) for name in names}
                found = msgspec.json.encode({name: state for name, state in states.items() if state is not None})
            case Ask(Topic.METRICS):
                found = self._metrics.exposition()
            case Ask(Topic.STATE, model):
                found = self.state(model)
            case Ask(Topic.DECISIONS, model, limit=limit):
                found = self.decisions(limit, model)
            case Ask(Topic.STATISTICS, model, version):
                found = self.statistics(model, version)
            case Ask(Topic.INDEX):
                assert self.repository is not None, "no repository"
                found = self.repository.index()
        return found

    def versions(self, model: str) -> Sequence[str]:
        """The versions of a model that serve requests, the one with most of them first."""
        serving = [version for version in self._core.versions(model) if version.state in SERVING_STATES]
        return [version.name for version in sorted(serving, key=lambda version: -version.share)]

    # Readiness

    def withdraw(self) -> None:
        """Say from now on that the server is not ready, for it was told to stop: load balancers must not choose it."""
        self._is_leaving = True

    def readiness(self, model: str, version: str = "") -> Readiness | None:
        """What clients are told of `state_of`: of a server that was told to stop, no model is ready."""
        found = self.state_of(model, version)
        return Readiness(ModelState.STOPPING, self._withdrawn) if found is not None and self._withdrawn else found

    def state_of(self, model: str, version: str = "") -> Readiness | None:
        """The state of a model, which is that of the version with most of its requests, or of one of its versions. None
        for a version that neither serves nor starts."""
        if not version:
            serving = self.versions(model)
            if not serving:
                return self.refused.get(model)
            version = serving[0]
        for each in self._core.versions(model):
            if each.name == version and each.state not in ENDING_STATES:
                return self._readiness(self._run.versions[each.application.key])
        return None

    def server_readiness(self) -> ServerReadiness:
        """Whether the server can serve what it has. It is ready if any model answers requests; before it was ready for
        the first time, only when each other model is known to be unable to start, and not just starting. So a model
        that cannot start, dies in a loop or is deployed later never takes the others out of a load balancer."""
        if self._withdrawn:
            return ServerReadiness(self._withdrawn)
        found = {name: readiness for name in self._names if (readiness := self.readiness(name))} | self.refused
        missing = {name: readiness for name, readiness in found.items() if readiness.why}
        unclear = missing
        if len(missing) < len(found):
            is_starting = not self._was_ready
            unclear = {name: each for name, each in missing.items() if is_starting and each.state not in BLOCKED_STATES}
        if not unclear:
            self._was_ready = True
            return ServerReadiness(models=missing)
        name, first = next(iter(unclear.items()))
        more = f" (and {counted(len(unclear) - 1, 'more model')})" if len(unclear) > 1 else ""
        why = first.why if len(found) == 1 else f"model {name!r}: {first.why}{more}"
        return ServerReadiness(why, missing)

    @property
    def _names(self) -> Sequence[str]:
        """All models that have versions, in the order in which they came."""
        return list(dict.fromkeys(record.application for record in self._run.versions.values()))

    @property
    def _outage(self) -> str:
        """Why no model can serve."""
        return self._failure() or (LEAVING if self._run.draining else "")

    @property
    def _withdrawn(self) -> str:
        """Why clients should go elsewhere."""
        return self._outage or (LEAVING if self._is_leaving else "")

    def _readiness(self, record: VersionRecord) -> Readiness:
        run = record.run
        if self._outage:
            return Readiness(ModelState.STOPPING, self._outage)
        if run.plan is None:
            return Readiness(ModelState.STARTING, "there is no plan yet")
        application = self._core.state.applications.get(record.key)
        is_waking = application is not None and application.is_waking and application.has_been_awake
        if run.plan.has_replicas:
            return self._started(record.key, run.plan, is_waking=is_waking)
        if not run.plan.feasible or (run.open and not is_waking):
            return Readiness(ModelState.WAITING, f"no replicas are planned: {run.plan.why}")
        return Readiness(ModelState.WAKING if run.open else ModelState.RESTING)

    def _started(self, key: str, plan: Plan, *, is_waking: bool) -> Readiness:
        """The state of a version that is to have replicas."""
        now_ns, planned = self._clock(), [target.stage for target in plan.stages if target.has_replicas]
        missing = [declared_name(target.stage) for target in plan.stages if not target.has_replicas]
        if missing and not plan.feasible:  # a feasible plan starts them when requests come there
            return Readiness(ModelState.WAITING, f"no replicas are planned of {listed(missing)}: {plan.why}")
        gaps = [gap for stage in planned if (gap := self._core.service_gap(now_ns, key, stage)) is not None]
        if not gaps:
            return Readiness(ModelState.READY)
        known = dict.fromkeys(gap.why for gap in gaps if gap.is_known)
        if known:
            return Readiness(ModelState.FAILING, "; ".join(known))
        return Readiness(ModelState.WAKING) if is_waking else Readiness(ModelState.STARTING, gaps[0].why)

    # Pages

    def decisions(self, limit: int, model: str = "") -> bytes:
        """The last `limit` decisions and changes of rollouts, oldest first, of one model or of all, and the number of
        all there were."""
        run = self._run
        rows: list[dict[str, Any]] = []
        for now_ns, decided in reversed(run.last_decisions):
            if len(rows) == limit:
                break
            name, _, version = decided.application.partition("@")
            if model in ("", name):
                rows.append({"at_s": to_s(now_ns), **_decision(decided, name, version)})
        total = sum(count for (key, _), count in run.decisions.items() if model in ("", key.partition("@")[0]))
        return msgspec.json.encode({"total": total, "decisions": rows[::-1]})

    def statistics(self, model: str = "", version: str = "") -> bytes:
        """What the requests and batches of the versions that there are have taken, as Triton's statistics extension has
        it: `$stats_model_response`."""
        epoch_ns = time.time_ns() - self._clock()
        rows = [
            rows
            for rows in self._metrics.totals()
            if model in ("", rows.version[0]) and version in ("", rows.version[1])
        ]
        found = [_statistics(each, self._answered_rows(*each.version), epoch_ns) for each in rows]
        return msgspec.json.encode({"model_stats": found})

    def state(self, model: str = "") -> bytes:
        """The versions of one model or of all that have not ended, each with its plan, stages, queues, traffic and
        replicas; the nodes with their free room; and the edges."""
        run, now_ns = self._run, self._clock()
        # The core forgets a version when it ends, the run state does so at the next scrape or later.
        known = self._core.state.applications
        records = [record for key, record in run.versions.items() if key in known and model in ("", record.application)]
        return msgspec.json.encode(
            {
                "deployment": self._deployment,
                "system": self._system.name,
                "divide": self._system.slots["divide"],
                "now_s": to_s(now_ns),
                "draining": run.draining,
                "applications": [self._version(record, now_ns) for record in records],
                "nodes": [_node(view) for view in self._core.state.ledger.views()],
                "edges": self._edges(),
            }
        )

    def _version(self, record: VersionRecord, now_ns: int) -> dict[str, Any]:
        run, parts = record.run, self._core.state.applications[record.key].parts
        readiness = self._readiness(record)
        return {
            "name": record.application,
            "version": record.version,
            "state": readiness.state,
            "why": readiness.why,
            "rollout": record.state,
            "system": parts.system,
            "share": record.share,
            "slo_ms": to_ms(run.graph.slo_ns),
            "weight": parts.weight,
            "rest_after_s": to_s(parts.rest_after_ns),
            "open": len(run.open),
            "cores_planned": cores_by_hardware(run.plan),
            "plan": run.plan and msgspec.to_builtins(run.plan),
            "stages": [_stage(view, run, now_ns) for view in self._core.stage_views(record.key)],
        }


def _decision(decided: Decided | Rollout, name: str, version: str) -> dict[str, Any]:
    """A decision as plain values, with the model's name and its version, if it is not the first."""
    row: dict[str, Any] = msgspec.to_builtins(decided)
    row.pop("type")
    if isinstance(decided, Rollout):
        return {"kind": "rollout", **row}
    return {**row, "application": name, **({"version": version} if version else {})}


def _statistics(rows: VersionRows, inferences: int, epoch_ns: int) -> dict[str, Any]:
    """`$model_stat`. Each request counts the whole duration of its batches, as in Triton. Copying of inputs and outputs
    is part of a batch, so its own counters have no time."""
    answered, missed = Total(), Total()
    for outcome, total in rows.spent.items():
        into = answered if outcome in (Outcome.SERVED, Outcome.LATE) else missed
        into.count += total.count
        into.ns += total.ns
    groups = rows.run.workers.groups.values()
    visits = sum(group.visits for group in groups)
    name, version = rows.version
    return {
        "name": name,
        "version": version,
        "last_inference": 0 if rows.last_ns is None else (epoch_ns + rows.last_ns) // NS_PER_MS,
        "inference_count": inferences,
        "execution_count": sum(group.passes for group in groups),
        "inference_stats": {
            "success": answered,
            "fail": missed,
            "queue": rows.queued,
            "compute_input": Total(visits),
            "compute_infer": Total(visits, sum(group.visits_ns for group in groups)),
            "compute_output": Total(visits),
            "cache_hit": Total(),
            "cache_miss": Total(),
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": Total(total.count),
                "compute_infer": total,
                "compute_output": Total(total.count),
            }
            for size, total in sorted(rows.batches.items())
        ],
        "memory_usage": [],
    }


def _stage(view: StageView, run: RunState, now_ns: int) -> dict[str, Any]:
    replicas = [replica for replica in run.replicas.values() if replica.spec.stage == view.name]
    return {
        "name": declared_name(view.name),
        "after": list(map(declared_name, view.after)),
        "queued": run.queued(view.name),
        "running": sum(replica.rows for replica in replicas if replica.running),
        "rate_rps": view.rate_rps(TRAFFIC_NS),
        "utilisation": view.utilisation(TRAFFIC_NS),
        "batch_max": _batch_max(run.plan, view.name),
        "replicas": [_replica(replica, now_ns) for replica in replicas],
    }


def _batch_max(plan: Plan | None, stage: str) -> int:
    """The largest batch in the plan of a stage; 0 without a plan."""
    for target in plan.stages if plan else ():
        if target.stage == stage:
            return max((target.batch_max_of(group) for group in target.groups), default=target.batch_max)
    return 0


def _replica(replica: ReplicaRecord, now_ns: int) -> dict[str, Any]:
    """One replica, with its cores in effect and as last ordered, and the layers that it has if it has not all: the
    first one, and the one behind the last."""
    spec = replica.spec
    return {
        "id": replica.id,
        "variant": spec.variant,
        "hardware": spec.slot.hardware,
        "node": spec.node,
        "device": spec.device,
        "life": replica.life.value,
        "for_s": to_s(now_ns - replica.since_ns),
        "cores": replica.cores,
        "cores_wanted": replica.wanted_cores,
        "shadow_cores": replica.all_cores(0.0),
        "form": kind_of(replica.group.shape),
        "layers": replica.part and (replica.part.span.first, replica.part.span.end),
        "running": replica.rows if replica.running else 0,
        "batches": replica.batches,
    }


def _node(view: NodeView) -> dict[str, Any]:
    """One node and its free room; a node that is released must be acquired before it can be used."""
    node = view.node
    return {
        "name": node.name,
        "hardware": node.hardware,
        "state": view.state.value,
        "on_demand": node.on_demand,
        "usd_per_h": node.usd_per_h,
        "cores": node.cores,
        "free_cores": view.free_cores,
        "memory_bytes": node.memory_bytes,
        "free_memory_bytes": view.free_memory_bytes,
        "devices": _devices(view.devices),
    }


def _devices(views: Iterable[DeviceView]) -> list[dict[str, Any]]:
    return [
        {
            "name": view.device.name,
            "kind": view.device.kind,
            "free_share": view.free_share,
            "memory_bytes": view.device.memory_bytes,
            "free_memory_bytes": view.free_memory_bytes,
            "clients_max": view.device.clients_max,
            "free_clients": view.free_clients,
        }
        for view in views
    ]
