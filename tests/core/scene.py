"""A small scene for core tests: a belief with round numbers, a system of plain policies, and a core to talk to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from sloop.actions import Action, RequestPlan, StartWorker
from sloop.app.application import Application, Stage, SystemChoice, Variant
from sloop.core import ApplicationParts, Core
from sloop.core.nodes import UNUSED_NS
from sloop.core.protocols import Policies, Scale
from sloop.core.stage import StageState
from sloop.core.views import ClusterView
from sloop.events import WOKE, WorkerReady
from sloop.policies.admit import Bounded
from sloop.policies.batch import WorkConserving
from sloop.policies.divide import MaxMin
from sloop.policies.drop import PredictiveDrop
from sloop.policies.forecast import Last
from sloop.policies.order import Edf
from sloop.policies.place import BestFit
from sloop.policies.route import FirstIdle
from sloop.profile.interference import NO_SLOWDOWN, DeviceDemand, Interference
from sloop.profile.profile import DeviceSharing
from sloop.profile.size_law import NO_LESSONS, SizeLessons
from sloop.units import ms, s
from sloop.vocabulary import (
    ALONE,
    Group,
    Node,
    Plan,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Shape,
    Slot,
    StagePlan,
)


@dataclass
class Belief:
    """A batch of n on c cores takes `times` × (10 + n)/c ms."""

    variant: str = "a"
    hardware: str = ""
    accelerator: str = ""
    batch_max: int = 8
    cores_max: float = 16.0
    startup_ns: int = s(5)
    memory_bytes: int = 100
    device_memory_bytes: int = 0
    accuracy: float | None = None
    times: float = 1.0
    correction: float = 1.0
    prior_weight: float = 1.0
    mean_ratio: float = 1.0
    observed: list[tuple[int, float, int]] = field(default_factory=list)
    missed: int = 0
    shapes: dict[Shape, "Belief"] = field(default_factory=dict)
    sizes: dict[int, "Belief"] = field(default_factory=dict)
    size_lessons: SizeLessons = NO_LESSONS
    layer_count: int = 0
    multiply_adds: float = 0.0
    sharing: DeviceSharing | None = None

    def slot(self, cores: float) -> Slot:
        return Slot(cores, self.hardware, self.accelerator)

    def latency_ms(self, batch: int, slot: Slot) -> float:
        return self.times * (10 + batch) / slot.cores

    def costs_ns(self, slot: Slot) -> Sequence[int]:
        return (0, *(ms(self.latency_ms(n, slot)) for n in range(1, self.batch_max + 1)))

    def best_size(self, cores: float, limit_ns: int, batch_max: int) -> float:
        return cores

    def miss(self, rows: int) -> None:
        self.missed += rows

    def observe(self, batch: int, slot: Slot, taken_ns: int, size: int = 0) -> None:
        self.observed.append((batch, slot.cores, taken_ns))

    def measured_as(self, other: object) -> None:
        assert isinstance(other, Belief)
        self.memory_bytes = other.memory_bytes

    def blocks(self, body_cores: float, shadow_cores: float, *, corrected: bool = True) -> None:
        """Without layers."""

    @property
    def shares_device(self) -> bool:
        return self.sharing is not None

    @property
    def shared_cores(self) -> float:
        return 0.0 if self.sharing is None else self.sharing.cores

    def shares(self, slot: Slot) -> bool:
        return self.sharing is not None and self.sharing.holds_on(slot)

    def demand(self, batch: int, slot: Slot) -> DeviceDemand:
        if self.sharing is None or not self.shares(slot):
            return DeviceDemand(self.variant, batch)
        return self.sharing.demand(batch, share=slot.share, is_capped=slot.is_capped, variant=self.variant)

    @property
    def interference(self) -> Interference:
        return NO_SLOWDOWN if self.sharing is None else self.sharing.law

    def of(self, shape: Shape) -> "Belief":
        return self if shape == ALONE else self.shapes.setdefault(shape, self._other())

    def at(self, size: int) -> "Belief":
        return self.sizes.setdefault(size, self._other()) if size else self

    def _other(self) -> "Belief":
        return replace(self, observed=[], shapes={}, sizes={})


@dataclass
class Script(Scale):
    """A scaling policy that returns what the test has put in `target`."""

    target: Plan | None = None
    is_quick: bool = True
    period_ns: int = s(1)
    seen: list[ClusterView] = field(default_factory=list)
    obeys: bool = False
    """Whether replicas get at most as many cores as the cluster has."""
    error: Exception | None = None
    unit: float = 0.0
    """If positive, replicas have whole multiples of it."""
    release_after_ns: int = UNUSED_NS

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[Plan | None, None]:
        if self.error is not None:
            raise self.error
        self.seen.append(view)
        if not self.obeys or self.target is None:
            return self.target, None
        cores = sum(node.node.cores for node in view.nodes)
        if self.unit:
            cores = max(1, int(cores / self.unit + 1e-9)) * self.unit
        stages = [
            structs.replace(
                target,
                groups=tuple(
                    structs.replace(group, spec=group.spec.with_cores(min(cores, group.spec.cores)))
                    for group in target.groups
                ),
            )
            for target in self.target.stages
        ]
        return structs.replace(self.target, stages=tuple(stages)), None


def plan_of(
    count: int = 1, cores: float = 1.0, batch_max: int = 4, *, variant: str = "a", in_place: bool = True
) -> Plan:
    """A plan for the stage `only`."""
    group = Group(ReplicaSpec("only", variant, Slot(cores)), count)
    return Plan((StagePlan("only", (group,), batch_max, in_place),), why="the test says so")


def one_each(application: Application, *, cores: float = 1.0, batch_max: int = 4) -> Plan:
    """A plan of one replica for each stage, of its first variant."""
    stages = [
        StagePlan(stage.name, (Group(ReplicaSpec(stage.name, stage.variants[0].name, Slot(cores)), 1),), batch_max)
        for stage in application.stages
    ]
    return Plan(tuple(stages), why="one each")


def graph(**edges: dict[str, Any]) -> Application:
    """An application of these stages, each of one variant; the values are the options of `Stage`."""
    stages = tuple(Stage(name, (Variant("a"),), **options) for name, options in edges.items())
    return Application(name="graph", slo_ms=1000, stages=stages, system=SystemChoice("static"))


def request(
    id: int,
    *,
    at_ms: float = 0,
    slo_ms: float = 1000,
    elapsed_ms: float = 0,
    enters: tuple[str, ...] = (),
    application: str = "",
    version: str = "",
) -> Request:
    sent = ms(at_ms - elapsed_ms)
    return Request(RequestId(id), sent, ms(at_ms), sent + ms(slo_ms), enters, application, version)


APPLICATION = Application(
    name="scene", slo_ms=1000, stages=(Stage("only", (Variant("a"), Variant("b"))),), system=SystemChoice("static")
)
NODE = Node("n0", "local", cores=4, memory_bytes=1000)


def policies_of(script: Script, **others: Any) -> Policies:
    """A plain policy for each verb, unless `others` has one."""
    plain: dict[str, Any] = {
        "order": Edf(),
        "batch": WorkConserving(),
        "route": FirstIdle(),
        "drop": PredictiveDrop(),
        "admit": Bounded(queue_max=100),
        "place": BestFit(),
        "forecast": Last(),
        "divide": MaxMin(),
    }
    return Policies(scale=script, **plain | others)


def beliefs_of(
    application: Application, times: Mapping[str, float] | None = None
) -> dict[tuple[str, str, str], Belief]:
    """A belief for each stage and variant; `times` has the factors of variants that are slower."""
    return {
        (s.name, v.name, ""): Belief(v.name, times=(times or {}).get(v.name, 1.0))
        for s in application.stages
        for v in s.variants
    }


class Acting:
    """A core and its actions so far. `act` hands it events and returns the new actions."""

    core: Core

    def __init__(self) -> None:
        self.actions: list[Action] = []

    def act(self, at_ms: float, *events: object) -> list[Action]:
        new: list[Action] = []
        for event in events:
            new += self.core.handle(ms(at_ms), event)  # type: ignore[arg-type]
        self.actions += new
        return new

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs."""
        return all(application.is_idle for application in self.core.state.applications.values())

    def is_resting(self, key: str) -> bool:
        return self.core._control.of(key).is_resting

    def warm_up(self) -> None:
        """The first tick; every replica that it starts is ready at once."""
        actions = self.act(0, WOKE)
        if any(isinstance(action, RequestPlan) for action in actions):
            actions += self.act(0, self.core.planner.plan(self.core.plan_input))  # type: ignore[arg-type]
        for id in [a.worker for a in actions if isinstance(a, StartWorker)]:
            self.act(0, WorkerReady(ReplicaId(id)))


class Scene(Acting):
    """A core for one application."""

    def __init__(
        self,
        target: Plan | None = None,
        *,
        application: Application = APPLICATION,
        nodes: Sequence[Node] = (NODE,),
        queue_max: int = 100,
        times: Mapping[str, float] | None = None,
        sharing: DeviceSharing | None = None,
        accelerator: str = "",
        first_worker: int = 0,
        **policies: Any,
    ) -> None:
        super().__init__()
        self.script = Script(target)
        self.beliefs = beliefs_of(application, times)
        for belief in self.beliefs.values():
            belief.sharing, belief.accelerator = sharing, accelerator
        chosen = {verb: policy for verb, policy in policies.items() if policy is not None}
        made = policies_of(self.script, **{"admit": Bounded(queue_max=queue_max)} | chosen)
        parts = ApplicationParts(graph=application.graph, beliefs=self.beliefs, policies=made)
        self.core = Core([parts], nodes, first_worker=first_worker)
        (self.application,) = self.core.state.applications.values()


class Deployment(Acting):
    """A core for several applications of one stage each, which want these cores at first. Their stages are `NAME/only`.

    Version 2 of an application is deployed by `deploy`; its script is under the key `NAME@2`.
    """

    def __init__(
        self,
        wanted: Mapping[str, float],
        *,
        cores: float = 4,
        nodes: Sequence[Node] = (),
        obeys: bool = False,
        is_quick: bool = True,
        period_s: float = 1,
        weights: Mapping[str, float] | None = None,
        rest_after_s: float = 0,
        wake_s: float = 0,
        release_after_s: float = 60,
        first_worker: int = 0,
        **policies: Any,
    ) -> None:
        super().__init__()
        self.node = Node("n0", "local", cores, 1000)
        self._script = Script(
            obeys=obeys, is_quick=is_quick, period_ns=s(period_s), release_after_ns=s(release_after_s)
        )
        self._weights, self._policies = weights or {}, policies
        self._rest_after_s, self._wake_s = rest_after_s, wake_s
        self.scripts: dict[str, Script] = {}
        for name, each in wanted.items():
            self.wants(**{name: each})
        parts = [self._parts(name, "1", {}) for name in wanted]
        self.core = Core(parts, [self.node, *nodes], build=self._parts, first_worker=first_worker)
        self._replace_scripts()

    def _parts(self, name: str, version: str, definition: Mapping[str, Any]) -> ApplicationParts:
        key = name if version == "1" else f"{name}@{version}"
        if definition.get("broken"):
            raise ValueError("a broken definition")
        application = replace(graph(**{f"{key}/only": {}}), slo_ms=definition.get("slo_ms", 1000))
        if key not in self.scripts or "policies" in definition:
            usual = {"target": self.plan(key, definition.get("cores", 1.0)), "seen": []}
            self.scripts[key] = replace(self._script, **usual | definition.get("script", {}))
        beliefs = beliefs_of(application)
        for belief in beliefs.values():
            belief.memory_bytes = definition.get("memory_bytes", belief.memory_bytes)
        return ApplicationParts(
            graph=application.graph,
            beliefs=beliefs,
            policies=policies_of(self.scripts[key], **self._policies | definition.get("policies", {})),
            name=name,
            version=version,
            system=definition.get("system", "the first"),
            weight=self._weights.get(name, 1.0),
            rest_after_ns=s(self._rest_after_s),
            wake_ns=s(self._wake_s),
        )

    def _replace_scripts(self) -> None:
        """Follow the planner, which replaces a policy by the copy that planned."""
        planner = self.core.planner
        self.scripts = {key: planner.policies[key].scale for key in planner.policies}  # type: ignore[misc]

    def act(self, at_ms: float, *events: object) -> list[Action]:
        new = super().act(at_ms, *events)
        self._replace_scripts()
        return new

    def plan(self, key: str, cores: float) -> Plan:
        """The plan for one replica with these cores; for none with 0 cores."""
        spec = ReplicaSpec(f"{key}/only", "a", Slot(cores))
        groups = (Group(spec, 1),) if cores else ()
        return Plan((StagePlan(spec.stage, groups, 4),), why="the test says so")

    def wants(self, **cores: float) -> None:
        """Change what the scripts plan."""
        for key, each in cores.items():
            script = self.scripts.setdefault(key, replace(self._script, seen=[]))
            script.target = self.plan(key, each)

    def application_stages(self, key: str) -> tuple[StageState, ...]:
        return self.core.state.applications[key].all_stages

    def planned_cores(self, key: str) -> float:
        """The cores of the plan in force."""
        plan = self.core.plan_of(key)
        return sum(group.count * group.spec.cores for target in plan.stages for group in target.groups) if plan else 0.0
