"""A small scene for core tests: a belief with round numbers, a system of plain policies, and a core to talk to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sloop.actions import Action, StartReplica
from sloop.app.application import Application, Stage, SystemChoice, Variant
from sloop.core import ApplicationParts, Core
from sloop.core.protocols import Batch, Drop, Forecast, Order, Policies
from sloop.core.views import ClusterView
from sloop.events import WOKE, ReplicaReady
from sloop.policies.admit import Bounded
from sloop.policies.batch import WorkConserving
from sloop.policies.divide import MaxMin
from sloop.policies.drop import PredictiveDrop
from sloop.policies.forecast import Last
from sloop.policies.order import Edf
from sloop.policies.place import BestFit
from sloop.policies.route import FirstIdle
from sloop.units import ms, s
from sloop.vocabulary import Group, Node, Plan, ReplicaId, ReplicaSpec, Request, RequestId, Slot, StagePlan


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
    observed: list[tuple[int, float, int]] = field(default_factory=list)

    def slot(self, cores: float) -> Slot:
        return Slot(cores, self.hardware, self.accelerator)

    def latency_ms(self, batch: int, slot: Slot) -> float:
        return self.times * (10 + batch) / slot.cores

    def costs_ns(self, slot: Slot) -> Sequence[int]:
        return (0, *(ms(self.latency_ms(n, slot)) for n in range(1, self.batch_max + 1)))

    def observe(self, batch: int, slot: Slot, taken_ns: int) -> None:
        self.observed.append((batch, slot.cores, taken_ns))


@dataclass
class Script:
    """A scaling policy that returns what the test has put in `target`."""

    target: Plan | None = None
    is_quick: bool = True
    period_ns: int = s(1)
    seen: list[ClusterView] = field(default_factory=list)

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        self.seen.append(view)
        return self.target


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
    id: int, *, at_ms: float = 0, slo_ms: float = 1000, elapsed_ms: float = 0, enters: tuple[str, ...] = ()
) -> Request:
    sent = ms(at_ms - elapsed_ms)
    return Request(RequestId(id), sent, ms(at_ms), sent + ms(slo_ms), enters)


APPLICATION = Application(
    name="scene", slo_ms=1000, stages=(Stage("only", (Variant("a"), Variant("b"))),), system=SystemChoice("static")
)
NODE = Node("n0", "local", cores=4, memory_bytes=1000)


class Scene:
    """A core and its actions so far. `act` hands it events and returns the new actions."""

    def __init__(
        self,
        target: Plan | None = None,
        *,
        application: Application = APPLICATION,
        nodes: Sequence[Node] = (NODE,),
        order: Order | None = None,
        batch: Batch | None = None,
        drop: Drop | None = None,
        forecast: Forecast | None = None,
        queue_max: int = 100,
        times: Mapping[str, float] | None = None,
    ) -> None:
        self.script = Script(target)
        slow = times or {}
        self.beliefs = {
            (s.name, v.name, ""): Belief(v.name, times=slow.get(v.name, 1.0))
            for s in application.stages
            for v in s.variants
        }
        policies = Policies(
            order=order or Edf(),
            batch=batch or WorkConserving(),
            route=FirstIdle(),
            drop=drop or PredictiveDrop(),
            admit=Bounded(queue_max=queue_max),
            place=BestFit(),
            forecast=forecast or Last(),
            scale=self.script,
            divide=MaxMin(),
        )
        parts = ApplicationParts(graph=application.graph, beliefs=self.beliefs, policies=policies)
        self.core = Core([parts], nodes)
        (self.application,) = self.core.state.applications.values()
        self.actions: list[Action] = []

    def act(self, at_ms: float, *events: object) -> list[Action]:
        new: list[Action] = []
        for event in events:
            new += self.core.handle(ms(at_ms), event)  # type: ignore[arg-type]
        self.actions += new
        return new

    def warm_up(self) -> None:
        """The first tick; every replica that it starts is ready at once."""
        started = [a.replica for a in self.act(0, WOKE) if isinstance(a, StartReplica)]
        for id in started:
            self.act(0, ReplicaReady(ReplicaId(id)))
