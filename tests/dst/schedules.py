"""Randomised test of the core: a seed gives arrivals, faults and changes, and invariants are checked after each event.

A seed gives a *scene* (nodes, applications, policies, speeds) and a list of *operations*: requests, faults of every
kind (`agents.FaultKind`), changes of plans, and deployments, promotions and removals. `play` simulates them with the
core behind `RemoteCluster`. After each event, `Checkers` check the log and `Audit` the core's state. When the last
operation is over, faults stop, and every application gets a plan that fits. The core must then become whole within
`WHOLE_NS`: every request has ended, every planned replica is ready, nothing is left of what was lost; and a further
request to each application must be served. Then all applications are removed, and everything that was acquired must be
released within `RELEASED_NS`.

The same operations of the same seed always give the same run. Each operation draws its own random numbers, so leaving
one out does not change the others: this is how a schedule that fails is shrunk (`shrink`).
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import count
from random import Random
from typing import Any, ClassVar, Final, cast

from msgspec import Struct, structs

from sloop.actions import Action, Assigned, End, StartBatch, VersionState
from sloop.app.application import Application, Stage, SystemChoice, Variant
from sloop.app.scenario import TopologyTruth
from sloop.core import ApplicationParts, Core
from sloop.core.application import ApplicationState
from sloop.core.controlled import PlanProgress
from sloop.core.ledger import millicores
from sloop.core.protocols import BatchDecision, CoreInterface, Policies, Scale
from sloop.core.rates import DeviceKey
from sloop.core.replica import Replica
from sloop.core.stage import StageState
from sloop.core.state import State
from sloop.core.views import BatchDevice, ClusterView, PlanInput, QueueView
from sloop.events import WOKE, BatchFailed, Cancelled, Deployed, Event, Finished, Promoted, Removed, SystemChanged, Woke
from sloop.policies.admit import Bounded, Open, PredictiveAdmit
from sloop.policies.provision import CheapestStart
from sloop.profile.profile import Amdahl, LayerBlock, LayerProfile, ParametricLatency, Profile
from sloop.serve.node.node import START_S_MAX
from sloop.sim.checkers import Checkers, Rules, Violation
from sloop.sim.cluster import ClusterTruths
from sloop.sim.engine import Ingress
from sloop.sim.engine import play as run
from sloop.sim.replicas import Truths
from sloop.sim.truth.branches import BranchSampler
from sloop.sim.truth.cold_start import AcquisitionSampler, ColdStartSampler, ResizeSampler
from sloop.sim.truth.failure import FaultSampler
from sloop.sim.truth.flows import Topology
from sloop.sim.truth.service import ServiceSampler
from sloop.sim.truth.weights import WeightPlaces
from sloop.sim.worlds import (
    BRANCHING,
    CHOICES,
    GRAPHS,
    PATHS,
    PROVISIONS,
    Edges,
    with_sharing,
    with_uncapped,
    with_weights,
)
from sloop.streams import stream
from sloop.systems.registry import POLICIES
from sloop.systems.setup import beliefs_of, starts_of, weights_of
from sloop.units import FOREVER_NS, ms, s, to_ms
from sloop.vocabulary import (
    ALONE,
    BatchId,
    Canary,
    Device,
    Group,
    Life,
    Node,
    NodeState,
    Outcome,
    Path,
    Plan,
    ReplicaSpec,
    Request,
    RequestId,
    Slot,
    StagePlan,
    Visit,
    Worker,
    shadow_in,
)
from tests.dst.agents import (
    EDGE_HUNG_NS,
    ERA,
    OF_FETCHES,
    OF_REQUESTS,
    AllHealed,
    CoreBegun,
    CoreDied,
    FaultBegins,
    FaultKind,
    OpenRequests,
    RemoteCluster,
)

REQUESTS: Final = (205, 260)
"""How many requests a schedule has, at least and at most."""
FAULTS: Final = (5, 14)
"""How many faults."""
DURATION_S: Final = (3.0, 9.0)
"""Over how many seconds."""
WHOLE_NS: Final = s(START_S_MAX + 200)
"""How long after the last fault the core may take to be whole: a worker that hangs while it starts, a response timeout,
the longest delay of a restart, a plan that never came, each 30 s, and versions that wait 60 s for room, one after
another."""
PROBE_NS: Final = s(80)
"""How long a request may take after that; its deadline is half of it. It may meet a worker that hangs, and wait for its
response timeout, 30 s at most."""
RELEASED_NS: Final = s(200)
"""How long after the removal of all applications until nodes are released: a minute after the last replica is gone."""
EVENTS_MAX: Final = 20_000
"""A schedule with more events is in a loop: most have fewer than 2,000."""
LOOK_NS: Final = s(1)
"""How often that is looked at."""

HOME: Final = Node("node-0", "cpu", 32.0, 1 << 40)
"""Always there at first, with room for a small plan of every application."""
OTHERS: Final = (
    Node("", "cpu", 8.0, 32 << 30),
    Node("", "cpu", 2.0, 8 << 30),
    Node("", "gpu", 8.0, 32 << 30, (Device("gpu-0", "T4", 16 << 30, 3), Device("gpu-1", "T4", 16 << 30))),
)
SLOW_BATCH_NS: Final = s(1)
SMALL: Final = "a small plan of one replica for each stage"
CORES: Final = (0.5, 1.0, 1.0, 2.0, 3.7, 8.0)
SLOWDOWNS: Final = (0.3, 1.0, 1.0, 1.0, 2.0)
"""True over believed durations."""


class Doing(StrEnum):
    """What an operation does, besides faults."""

    REQUEST = "request"
    PLAN = "plan"
    DEPLOY = "deploy"
    PROMOTE = "promote"
    REMOVE = "remove"
    SYSTEM = "system"


class Operation(Struct, frozen=True, omit_defaults=True):
    """One thing that happens. `target` chooses the application, node or edge among those that there are; everything
    else is taken from `detail`."""

    at_ns: int
    kind: Doing | FaultKind
    target: int = 0
    span_ns: int = 0
    detail: int = 0

    def __str__(self) -> str:
        span = f" for {to_ms(self.span_ns):g} ms" if self.span_ns else ""
        return f"{to_ms(self.at_ns):10.3f} ms  {self.kind} {self.target}{span} ({self.detail})"


class Unkept(CheapestStart):
    """No node keeps files: each start has a transfer, which is cancelled with the last start that waits for it."""

    keeps: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class ScriptedPlans(Scale):
    """A scaling policy that gives the plans of a schedule, each from its time on."""

    steps: tuple[tuple[int, Plan], ...]
    period_ns: int
    is_quick: bool

    def plan(self, now_ns: int, view: ClusterView, memory: None) -> tuple[Plan | None, None]:
        found = None
        for at_ns, plan in self.steps:
            if at_ns <= now_ns:
                found = plan
        return found, None


@dataclass(frozen=True, slots=True)
class TwoAtATime:
    """A batch policy under which at most two batches of a stage run together on a device, each of half the size."""

    def decide(self, now_ns: int, queue: QueueView, device: BatchDevice) -> BatchDecision:
        if sum(batch.stage == queue.stage for batch in device.running) >= 2:
            return BatchDecision()
        return BatchDecision(min(len(queue.visits), (device.batch_max + 1) // 2))


@dataclass(frozen=True)
class Scene:
    """What is there before anything happens."""

    seed: int
    nodes: tuple[Node, ...]
    applications: tuple[Application, ...]
    policies: Mapping[str, str]
    """The policies of all applications, by verb."""
    queue_max: int
    is_quick: bool
    """Whether plans are made within the event loop."""
    delay_ns: int
    """Of a message between the core and an agent."""
    edges: int
    truth: Mapping[str, float]
    """Options of the true speeds."""
    has_shadows: bool
    """Whether plans have shadows, which may die."""
    provision: Mapping[str, Any]
    """The name and the parameters of the provision policy."""
    waits: bool
    """Whether batches wait although replicas are idle."""
    has_uncapped: bool
    """Whether plans have replicas whose cores are only reserved."""

    @cached_property
    def hosts(self) -> dict[str, list[str]]:
        """Names of the nodes by kind of hardware."""
        found: dict[str, list[str]] = {}
        for node in self.nodes:
            found.setdefault(node.hardware, []).append(node.name)
        return found

    def admission(self) -> Bounded | Open | PredictiveAdmit:
        """The admit policy."""
        made: dict[str, Callable[[], Bounded | Open | PredictiveAdmit]] = {
            "bounded": lambda: Bounded(self.queue_max),
            "open": Open,
            "predictive": PredictiveAdmit,
        }
        return made[self.policies["admit"]]()


@dataclass(frozen=True)
class Schedule:
    """The operations of a seed, or some of them, in order of time. `numbers` are their places among all."""

    scene: Scene
    operations: tuple[Operation, ...]
    numbers: tuple[int, ...]
    heals_ns: int
    """When faults stop."""

    def only(self, numbers: Sequence[int]) -> "Schedule":
        """The same with these operations alone."""
        kept = set(numbers)
        pairs = [(op, at) for op, at in zip(self.operations, self.numbers, strict=True) if at in kept]
        return replace(self, operations=tuple(op for op, _ in pairs), numbers=tuple(at for _, at in pairs))

    @property
    def faults(self) -> int:
        """How many of the operations are faults."""
        return sum(isinstance(each.kind, FaultKind) for each in self.operations)

    @property
    def requests(self) -> int:
        """How many are requests."""
        return sum(each.kind is Doing.REQUEST or each.kind in OF_REQUESTS for each in self.operations)

    def __str__(self) -> str:
        scene = self.scene
        lines = [
            f"seed {scene.seed}: nodes {', '.join(map(_node_text, scene.nodes))}; "
            f"{'; '.join(map(_application_text, scene.applications))}",
            f"policies {dict(scene.policies)}, queue_max {scene.queue_max}, "
            f"plans {'at once' if scene.is_quick else 'beside the loop'}, links {to_ms(scene.delay_ns):g} ms",
            *(f"{number:4} {each}" for number, each in zip(self.numbers, self.operations, strict=True)),
            f"     {to_ms(self.heals_ns):10.3f} ms  no more faults",
        ]
        return "\n".join(lines)


def _node_text(node: Node) -> str:
    return f"{node.name} ({node.hardware}, {node.cores:g} cores{', on demand' if node.on_demand else ''})"


def _application_text(application: Application) -> str:
    stages = [
        f"{stage.name} after {'+'.join(stage.after)}" if stage.after else stage.name for stage in application.stages
    ]
    return f"{application.name}: {', '.join(stages)}, SLO {application.slo_ms:g} ms"


# The schedule of a seed


def schedule_of(seed: int) -> Schedule:
    """The scene and the operations of a seed."""
    random = stream(seed, "schedule")
    scene = _scene(seed, random)
    duration_ns = s(random.uniform(*DURATION_S))
    made: list[Operation] = []

    def add(kind: Doing | FaultKind, at_ns: int, targets: int, span_ns: int = 0) -> None:
        made.append(Operation(at_ns, kind, random.randrange(targets), span_ns, random.getrandbits(30)))

    def some_time() -> int:
        return random.randrange(duration_ns)

    applications = len(scene.applications)
    for at_ns in _arrival_times(random, duration_ns):
        add(Doing.REQUEST, at_ns, applications)
    usual = [kind for kind in FaultKind if kind not in (FaultKind.CORE_DOWN, FaultKind.SHADOW_CRASH, *OF_FETCHES)]
    kinds = random.sample(usual, random.randint(2, 8))
    for _ in range(random.randint(*FAULTS)):
        kind = random.choice(kinds)
        add(kind, some_time(), _targets(kind, scene), s(random.choice((0.05, 0.5, 1.5, 3.0, 6.0))))
    for _ in range(random.randint(0, 6)):
        add(Doing.PLAN, some_time(), applications)
    for _ in range(random.choice((0, 0, 0, 1, 2, 4))):
        add(random.choice((Doing.DEPLOY, Doing.DEPLOY, Doing.PROMOTE, Doing.REMOVE)), some_time(), applications)
    for _ in range(random.choice((0, 0, 0, 1, 1, 2))):
        add(FaultKind.CORE_DOWN, some_time(), 1, s(random.choice((0.001, 0.3, 1.5, 3.0))))
    random = stream(seed, "shadow_crashes")
    for _ in range(random.randint(0, 4) if scene.has_shadows else 0):
        add(FaultKind.SHADOW_CRASH, some_time(), len(scene.nodes))
    random = stream(seed, "refusals")  # by itself, so that many resizes are refused; there are few in a schedule
    for _ in range(random.choice((0, 0, 3))):
        add(FaultKind.REFUSED_RESIZES, some_time(), len(scene.nodes), s(6.0))
    random = stream(seed, "systems")
    for _ in range(random.choice((0, 0, 1, 2, 4))):
        add(Doing.SYSTEM, some_time(), applications)
    random = stream(seed, "fetches")
    for _ in range(random.choice((0, 1, 2))):
        add(random.choice(OF_FETCHES), some_time(), len(scene.nodes), s(random.choice((0.5, 3.0, 6.0))))
    made.sort(key=lambda each: each.at_ns)
    heals_ns = max(duration_ns, *(each.at_ns + each.span_ns for each in made)) + ms(1)
    return Schedule(scene, tuple(made), tuple(range(len(made))), heals_ns)


def _targets(kind: FaultKind, scene: Scene) -> int:
    """Among how many things a fault chooses its target."""
    if kind in OF_REQUESTS:
        return len(scene.applications)
    return scene.edges if kind in (FaultKind.EDGE_DOWN, FaultKind.EDGE_HANG) else len(scene.nodes)


def _arrival_times(random: Random, duration_ns: int) -> list[int]:
    """Evenly spread requests, and some bursts at one instant or within a few milliseconds."""
    count = random.randint(*REQUESTS)
    times = [random.randrange(duration_ns) for _ in range(count // 2)]
    while len(times) < count:
        at_ns, within_ns = random.randrange(duration_ns), random.choice((0, ms(5), ms(300)))
        times += [at_ns + random.randint(0, within_ns) for _ in range(min(count - len(times), random.randint(3, 60)))]
    return times


def _scene(seed: int, random: Random) -> Scene:
    nodes = [HOME]
    for number in range(1, random.choice((1, 2, 3, 4))):
        kind, on_demand = random.choice(OTHERS), random.random() < 0.4
        nodes.append(Node(f"node-{number}", kind.hardware, kind.cores, kind.memory_bytes, kind.devices, 1.0, on_demand))
    kinds = list(dict.fromkeys(node.hardware for node in nodes))
    count = random.choice((1, 1, 1, 1, 1, 2, 2, 3))
    applications = [
        _application(random, name, kinds, tuple(nodes), is_alone=count == 1)
        for name in ("red", "green", "blue")[:count]
    ]
    policies = {verb: random.choice(names) for verb, names in CHOICES.items()}
    own = stream(seed, "provision")  # a separate stream, so that schedules without it stay as they were
    provision: dict[str, Any] = {"name": "as_placed"}
    if own.random() < 0.4:
        provision = {"name": own.choice(("cheapest_start", "unkept")), **own.choice(PROVISIONS)}
        applications = [with_weights(application, own) for application in applications]
    own = stream(seed, "sharing")
    if own.random() < 0.5:
        applications = [with_sharing(application, own) for application in applications]
    waits = own.random() < 0.5
    own = stream(seed, "uncapped")
    has_uncapped = own.random() < 0.3
    if has_uncapped:
        cores = {"cpu": own.choice((2.0, 8.0, 32.0)), "gpu": 8.0}
        applications = [with_uncapped(application, own, cores) for application in applications]
    return Scene(
        seed,
        tuple(nodes),
        tuple(applications),
        policies,
        queue_max=random.choice((5, 40, 200)),
        is_quick=random.random() < 0.6,
        delay_ns=random.choice((0, 0, ms(0.2), ms(3))),
        edges=random.choice((1, 2, 3)),
        truth={
            "slowdown": random.choice(SLOWDOWNS),
            "resize_ms": random.choice((0.0, 10.0, 700.0)),
            "plan_ms": random.choice((0.0, 5.0, 400.0)),
            "acquire_s": random.choice((0.2, 3.0)),
            "warm": random.random() < 0.6,
        },
        has_shadows=stream(seed, "shadows").random() < 0.5,
        provision=provision,
        waits=waits,
        has_uncapped=has_uncapped,
    )


def _application(
    random: Random, name: str, kinds: Sequence[str], nodes: tuple[Node, ...], *, is_alone: bool
) -> Application:
    # Small applications: they take less time, and nearly every mistake shows itself in them.
    graph = random.choice(
        (GRAPHS[0], GRAPHS[0], *GRAPHS) if is_alone else (GRAPHS[0], GRAPHS[0], GRAPHS[0], GRAPHS[0], *GRAPHS[2:5])
    )
    edges: dict[str, Edges] = {stage: {"after": after} for stage, after in graph.items()}
    if len(graph) > 1 and random.random() < 0.5:
        edges = random.choice(BRANCHING)
    paths: tuple[Path, ...] = ()
    slo_ms = random.choice((60.0, 300.0, 1000.0, 5000.0))
    if len(graph) > 1 and random.random() < 0.2:
        edges = {"a": {}, "b": {}, "c": {"after": ("a", "b")}, "d": {"after": ("c",)}}
        paths = tuple(Path(path, ms(slo_ms * random.choice((0.7, 1.0, 1.5))), 1 / 3) for path in PATHS)
    timeout_s = random.choice((0.0, 2.0, 5.0))
    stages = tuple(
        Stage(
            stage,
            tuple(Variant(variant, profiles=_profiles(random, kinds)) for variant in ("large", "small")),
            response_timeout_s=timeout_s,
            **own,
        )
        for stage, own in edges.items()
    )
    made = Application(
        name,
        slo_ms,
        stages,
        SystemChoice("static"),
        nodes,
        declared_paths=paths,
        weight=random.choice((1.0, 3.0)),
        rest_after_s=random.choice((0.0, 0.0, 0.0, 1.0)),
    )
    return replace(made, wake_s=8.0 * made.rest_after_s)


def _profiles(random: Random, kinds: Sequence[str]) -> dict[str, Profile]:
    latency = Amdahl(random.uniform(1.0, 30.0), random.uniform(0.0, 10.0), random.uniform(0.0, 5.0), 1.0)
    made = Profile(
        latency_ms=latency,
        max_batch=random.choice((1, 2, 4, 8)),
        max_cores=8.0,
        load_s=random.choice((0.01, 0.1, 1.0, 3.0)),
        memory_bytes=random.choice((0, 1 << 30, 4 << 30)),
        layers=_layers(latency),
    )
    found = {"cpu": made}
    if "gpu" in kinds:
        memory_bytes = random.choice((0, 4 << 30, 9 << 30))
        found["gpu"] = Profile(
            latency_ms=latency,
            max_batch=made.max_batch,
            max_cores=8.0,
            load_s=made.load_s,
            memory_bytes=made.memory_bytes,
            accelerator="T4",
            device_memory_bytes=memory_bytes,
            layers=made.layers,
        )
    return found


def _layers(whole: Amdahl) -> LayerProfile:
    """Three blocks: the first computes half and weighs little, the last weighs most."""
    blocks = []
    for place, (part, mib) in enumerate(((0.5, 1), (0.3, 300), (0.2, 3000))):
        latency = ParametricLatency(
            part * (whole.epsilon + whole.eta), part * whole.gamma, 0.0, part * whole.delta, 1.0
        )
        blocks.append(
            LayerBlock(
                end=f"block-{place}",
                operators="Conv",
                layers=1,
                param_bytes=mib << 20,
                output_bytes=10_000,
                crossing_bytes=10_000,
                load_ms=5.0 + mib / 2,
                latency_ms=latency,
            )
        )
    return LayerProfile(
        blocks=tuple(blocks),
        load_ms=5.0 + 3301 / 2,
        latency_ms=ParametricLatency(whole.epsilon + whole.eta, whole.gamma, 0.0, whole.delta, 1.0),
        input_bytes=100_000,
        move_ms_per_mb=0.5,
        difference=0.0,
    )


# Plans


def _random_plan(scene: Scene, application: Application, detail: int) -> Plan:
    """A plan of up to six replicas for each stage, in one group or two, perhaps of more than there is room for."""
    random, of_shadows, of_caps = Random(detail), Random(~detail), stream(detail, "caps")
    stages = []
    for stage in application.stages:
        groups = tuple(_random_group(random, scene, stage) for _ in range(random.choice((0, 1, 1, 1, 2))))
        if scene.has_uncapped:
            groups = tuple(_without_cap(group) if of_caps.random() < 0.5 else group for group in groups)
        if scene.has_shadows:
            groups = tuple(each for group in groups for each in _with_shadows(of_shadows, group))
        in_place, wait_ns = random.random() < 0.6, random.choice((0, ms(20)))
        stages.append(StagePlan(stage.name, groups, random.choice((1, 2, 4, 8)), in_place, wait_ns))
    return Plan(tuple(stages), f"random plan {detail}", feasible=random.random() < 0.8)


def _random_group(random: Random, scene: Scene, stage: Stage) -> Group:
    variant = random.choice(stage.variants)
    hardware = random.choice(list(variant.profiles))
    accelerator = variant.profiles[hardware].accelerator
    share = random.choice((0.0, 0.3, 0.5, 1.0)) if accelerator else 1.0
    node = random.choice(scene.hosts[hardware]) if random.random() < 0.15 else None
    spec = ReplicaSpec(stage.name, variant.name, Slot(random.choice(CORES), hardware, accelerator, share), node)
    return Group(spec, random.choice((0, 1, 1, 2, 3, 5)), random.choice((0, 0, 2)))


def _without_cap(group: Group) -> Group:
    slot = structs.replace(group.spec.slot, is_capped=False)
    return structs.replace(group, spec=structs.replace(group.spec, slot=slot))


def _with_shadows(random: Random, group: Group) -> list[Group]:
    """Perhaps some of the replicas of a group with shadows."""
    if random.random() < 0.3:
        return [group]
    shadow = Worker(random.choice(CORES), random.choice(((0,), (0, 1), (0, 2), (1,))))
    pairs, rest = min(group.count, random.choice((1, 2, 5))), random.choice((0, 0, 2))
    with_shadow = Group(structs.replace(group.spec, shape=(shadow,)), pairs, rest)
    return [structs.replace(group, count=group.count - pairs), with_shadow]


def _small_plan(application: Application) -> Plan:
    """One small replica for each stage, for which there is always room on `HOME`."""
    stages = []
    for stage in application.stages:
        spec = ReplicaSpec(stage.name, stage.variants[0].name, Slot(0.5, "cpu"))
        stages.append(StagePlan(stage.name, (Group(spec, 1),), 4))
    return Plan(tuple(stages), SMALL)


# What is simulated


class Setting:
    """A schedule made ready to be played: fresh policies and beliefs, and every version that it deploys."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        scene = schedule.scene
        self.plans = [(op, op.target % len(scene.applications)) for op in schedule.operations if op.kind is Doing.PLAN]
        made = [application.qualified() for application in scene.applications]
        self.first = [(application, self._policies(application, at)) for at, application in enumerate(made)]
        self.later: dict[str, tuple[Application, Policies, Operation]] = {}
        """The versions that are deployed, by number of their operation."""
        for number, op in zip(schedule.numbers, schedule.operations, strict=True):
            if op.kind is Doing.DEPLOY:
                self.later[str(number + 2)] = (*self._version(op, str(number + 2)), op)

    def _version(self, op: Operation, version: str) -> tuple[Application, Policies]:
        applications = self.schedule.scene.applications
        at = op.target % len(applications)
        made = replace(applications[at], name=_deployed_name(op, applications)).qualified(version)
        return made, self._policies(made, at)

    def under_another(self, application: Application, at: int, detail: int) -> Policies:
        """Fresh policies of another system for a version of the application at this place. Provision, admission and
        whether batches wait are those of the scene: replicas depend on the first, the audit on the others."""
        random, scene = Random(detail), self.schedule.scene
        made = self._policies(application, at, scene.seed * 8 + detail)
        waiting = ("slack", "deadline")
        batches = [name for name in CHOICES["batch"] if (name in waiting) == (scene.policies["batch"] in waiting)]
        chosen = {
            verb: POLICIES[verb][random.choice(names)]()
            for verb, names in (CHOICES | {"batch": batches}).items()
            if verb not in ("admit", *(("batch",) if scene.waits else ()))
        }
        assert isinstance(made.scale, ScriptedPlans)
        scale = replace(made.scale, period_ns=random.choice((ms(300), s(1))), is_quick=random.random() < 0.6)
        return replace(made, scale=scale, **chosen)

    def _policies(self, application: Application, at: int, detail: int | None = None) -> Policies:
        """Fresh policies for a version of the application at this place. `made_at` is the first one's."""
        scene = self.schedule.scene
        first = _random_plan(scene, application, scene.seed * 8 + at if detail is None else detail)
        steps = [(0, first)]
        for op, target in self.plans:
            if target == at:
                steps.append((op.at_ns, _random_plan(scene, application, op.detail)))
        steps.append((self.schedule.heals_ns, _small_plan(application)))
        chosen: dict[str, Any] = {
            verb: POLICIES[verb][name]() for verb, name in scene.policies.items() if verb != "admit"
        }
        if scene.waits:
            chosen["batch"] = TwoAtATime()
        name = scene.provision["name"]
        provision = Unkept if name == "unkept" else POLICIES["provision"][name]
        return Policies(
            admit=scene.admission(),
            forecast=POLICIES["forecast"]["last"](),
            divide=POLICIES["divide"]["max_min"](),
            scale=ScriptedPlans(tuple(steps), s(1) if scene.seed % 3 else ms(500), scene.is_quick),
            provision=provision(**{key: value for key, value in scene.provision.items() if key != "name"}),
            **chosen,
        )

    def core(self, first_worker: int = 0) -> Core:
        """The core with the first versions."""
        parts = [parts_of(*each) for each in self.first]
        return Core(parts, self.schedule.scene.nodes, self._build, first_worker=first_worker)

    def _build(self, name: str, version: str, definition: Mapping[str, Any]) -> ApplicationParts:
        return parts_of(*self._made(definition))

    def _made(self, definition: Mapping[str, Any]) -> tuple[Application, Policies]:
        """What a definition stands for: a version as it is deployed, or as it is under another system."""
        if "system" not in definition:
            application, policies, _ = self.later[definition["operation"]]
            return application, policies
        application = next(each for each in self.versions if each.key == definition["key"])
        return application, self.under_another(application, definition["at"], definition["system"])

    @property
    def versions(self) -> list[Application]:
        """All application versions."""
        return [*(application for application, _ in self.first), *(each[0] for each in self.later.values())]

    def checkers(self) -> Checkers:
        """Checkers of the log."""
        return Checkers(
            [rules(*each) for each in self.first],
            self.schedule.scene.nodes,
            later=[rules(application, policies) for application, policies, _ in self.later.values()],
            rules_under=lambda event: rules(*self._made(event.definition)),
        )

    def cluster(self, opened: OpenRequests) -> RemoteCluster:
        """The cluster, with all faults of the schedule."""
        scene, truth = self.schedule.scene, self.schedule.scene.truth
        none, stages = FaultSampler(scene.seed), dict[str, Truths]()
        for application in self.versions:
            profiles = {
                (stage.name, variant.name, hardware): profile
                for stage in application.stages
                for variant in stage.variants
                for hardware, profile in variant.profiles.items()
            }
            truths = Truths(
                service=ServiceSampler(scene.seed, profiles, cv=0.0, errors=dict.fromkeys(profiles, truth["slowdown"])),
                cold_start=ColdStartSampler(scene.seed, profiles, warm=bool(truth["warm"])),
                resize=ResizeSampler(scene.seed, delay_ns=ms(truth["resize_ms"])),
                faults=none,
                branches=BranchSampler(scene.seed, application.graph),
            )
            stages |= {stage.name: truths for stage in application.stages}
        kinds = {node.hardware for node in scene.nodes}
        acquisition = AcquisitionSampler(scene.seed, dict.fromkeys(kinds, truth["acquire_s"]), warm=bool(truth["warm"]))
        weights = {key: each for application in self.versions for key, each in weights_of(application).items()}
        has_network = scene.provision["name"] != "as_placed"
        topology = Topology(TopologyTruth(3.2e4, "shared", 6.4e4, 2, 8e4), scene.nodes) if has_network else None
        truths_of_all = ClusterTruths(
            stages, acquisition, none, ms(truth["plan_ms"]), bool(truth["warm"]), WeightPlaces(topology, weights)
        )
        made = RemoteCluster(
            *(self.versions, truths_of_all, scene.nodes, opened), known=len(self.first), delay_ns=scene.delay_ns
        )
        for op in self.schedule.operations:
            if isinstance(op.kind, FaultKind) and op.kind not in OF_REQUESTS:
                made.schedule(op.at_ns, _fault(op, scene))
        made.schedule(self.schedule.heals_ns, AllHealed())
        return made


def parts_of(application: Application, policies: Policies) -> ApplicationParts:
    """What a core needs of an application version, with fresh beliefs."""
    return ApplicationParts(
        graph=application.graph,
        beliefs=beliefs_of(application),
        policies=policies,
        name=application.name,
        version=application.version,
        weight=application.weight,
        rest_after_ns=s(application.rest_after_s),
        wake_ns=s(application.wake_s),
        response_timeouts_ns={
            stage.name: s(stage.response_timeout_s) for stage in application.stages if stage.response_timeout_s
        },
        starts=starts_of(application),
    )


def rules(application: Application, policies: Policies) -> Rules:
    """What the log of an application version is checked against."""
    return Rules(application, policies.order, policies.drop.is_hopeless, provides=policies.provision.brings_weights)


OF_DEPLOYMENT: Final = frozenset(
    {
        FaultKind.GHOSTS,
        FaultKind.SLOW_PLANS,
        FaultKind.LOST_PLANS,
        FaultKind.FAILED_PLANS,
        FaultKind.FAILED_ACQUIRES,
        FaultKind.STRAY_WAKES,
        FaultKind.CANCEL,
        FaultKind.CORE_DOWN,
    }
)
"""Faults of no single node."""


def _fault(op: Operation, scene: Scene) -> FaultBegins:
    assert isinstance(op.kind, FaultKind)
    if op.kind in (FaultKind.EDGE_DOWN, FaultKind.EDGE_HANG):
        return FaultBegins(op.kind, "", op.target, op.span_ns)
    node = "" if op.kind in OF_DEPLOYMENT else scene.nodes[op.target % len(scene.nodes)].name
    return FaultBegins(op.kind, node, op.detail, op.span_ns)


def _deployed_name(op: Operation, applications: Sequence[Application]) -> str:
    """The application of which an operation deploys a version: one that is there, or a new one."""
    name = applications[op.target % len(applications)].name
    return f"{name}-new" if op.detail % 7 == 0 else name


# Playing


class Played(Struct, frozen=True):
    """What a schedule came to."""

    requests: int
    """That arrived."""
    faults: int
    events: int
    whole_ns: int
    """How long after the last fault the core was whole."""
    outcomes: Mapping[Outcome, int]
    met: Mapping[str, int]
    """See `RemoteCluster.met`."""


def play(schedule: Schedule, *, core: Callable[[Core], CoreInterface] | None = None) -> Played:
    """Simulate a schedule. Raises Violation, or what the core raised, if anything is wrong.

    `core` may replace the core by one that is broken on purpose.
    """
    setting, opened, eras = Setting(schedule), OpenRequests(), count()

    def make() -> tuple[CoreInterface, Core, Checkers]:
        """A core that knows nothing, whose log begins with it."""
        own = Setting(schedule)  # with policies of its own
        made = own.core(next(eras) * ERA)
        return made if core is None else core(made), made, own.checkers()

    audit = Audit(make, opened, schedule.scene)
    course = Course(setting, audit, opened)
    cluster = setting.cluster(opened)
    given = audit, cast(Any, cluster), course.ingress()
    try:
        totals = run(*given, until_ns=0, appends=[audit.append], patience_ns=LOOK_NS)
    finally:
        cluster.close()
    audit.checkers.finish()
    if opened.by_id:
        raise Violation(f"requests {list(opened.by_id)} never ended")
    return Played(audit.requests, schedule.faults, totals.events, course.whole_ns, audit.outcomes, cluster.met)


class Course:
    """All that comes to the core from outside: requests and changes, then the questions whether it is whole."""

    def __init__(self, setting: Setting, audit: "Audit", opened: OpenRequests) -> None:
        self._setting, self._audit, self._opened = setting, audit, opened
        self.whole_ns = 0

    @property
    def _core(self) -> Core:
        """The one that decides now."""
        return self._audit.state_of

    def ingress(self) -> Ingress:
        """The events, in order of time. The end is looked at by what comes between two of them."""
        schedule = self._setting.schedule
        yield from sorted(self._events(), key=lambda pair: pair[0])
        healed_ns = whole_ns = schedule.heals_ns
        for whole_ns in self._until(healed_ns, WHOLE_NS, lambda: unfinished(self._core, self._opened)):
            yield whole_ns, WOKE
        answered_ns, self.whole_ns = whole_ns, whole_ns - healed_ns
        yield from list(self._probes(whole_ns))
        for answered_ns in self._until(whole_ns, PROBE_NS, lambda: "a request waits" if self._opened.by_id else ""):
            yield answered_ns, WOKE
        for name in dict.fromkeys(application.name for application in self._setting.versions):
            yield answered_ns, Removed(name)
        for at_ns in self._until(answered_ns, RELEASED_NS, lambda: unreleased(self._core)):
            yield at_ns, WOKE

    def _until(self, from_ns: int, most_ns: int, question: Callable[[], str]) -> Iterator[int]:
        """The instants from now on until the question has no answer. Violation if that takes too long after the last
        slow batch."""
        at_ns = since_ns = from_ns
        while True:
            at_ns += LOOK_NS
            yield at_ns
            why = question() if not self._audit.is_down else "there is no deciding process"
            if not why:
                return
            if at_ns <= slow_until_ns(self._core):
                since_ns = at_ns
            if at_ns - since_ns > most_ns:
                raise Violation(f"{to_ms(at_ns):g} ms: after {to_ms(most_ns) / 1e3:g} s and more, {why}")

    def _events(self) -> Iterator[tuple[int, Event]]:
        schedule = self._setting.schedule
        scene = schedule.scene
        names = [application.name for application in scene.applications]
        samplers = {
            application.name: BranchSampler(scene.seed, application.qualified().graph)
            for application in scene.applications
            if application.declared_paths
        }
        new = {op.target % len(names): op.at_ns for _, _, op in self._setting.later.values() if op.detail % 7 == 0}
        for number, op in zip(schedule.numbers, schedule.operations, strict=True):
            at = op.target % len(names)
            if op.kind is Doing.REQUEST or op.kind in OF_REQUESTS:
                is_for_new = new.get(at, FOREVER_NS) < op.at_ns and op.detail % 5 == 0
                arrival = self._arrival(number, op, at, f"{names[at]}-new" if is_for_new else names[at])
                sampler = samplers.get(names[at])
                yield from [arrival] if sampler is None else sampler.entering([arrival])
            elif op.kind is Doing.DEPLOY:
                canary = Canary((0.1, 0.5)[op.detail // 7 % 2], op.detail // 14 % 3, 0.05, 20)
                version = str(number + 2)
                name = self._setting.later[version][0].name
                yield op.at_ns, Deployed(name, version, {"operation": version}, canary if op.detail % 2 else None)
            elif op.kind is Doing.SYSTEM:
                for application in self._setting.versions:
                    if application.name == names[at]:
                        definition = {"key": application.key, "at": at, "system": op.detail}
                        yield op.at_ns, SystemChanged(application.name, application.version, definition)
            elif op.kind in (Doing.PROMOTE, Doing.REMOVE):
                versions = [each.version for each in self._setting.versions if each.name == names[at]]
                version = versions[op.detail % len(versions)]
                if op.kind is Doing.PROMOTE:
                    yield op.at_ns, Promoted(names[at], version)
                else:
                    yield op.at_ns, Removed(names[at], "" if op.detail % 11 == 0 else version)

    def _arrival(self, number: int, op: Operation, at: int, name: str) -> tuple[int, Request]:
        """A request, when it reaches the core."""
        scene, id = self._setting.schedule.scene, RequestId(number)
        edge, sent_ns, at_ns = op.detail % scene.edges, op.at_ns, op.at_ns
        for hang in self._hangs:
            until_ns = hang.at_ns + min(hang.span_ns, EDGE_HUNG_NS)
            if hang.target == edge and hang.at_ns <= at_ns < until_ns:
                at_ns = until_ns
                if hang.span_ns > EDGE_HUNG_NS:  # its client sends it again
                    at_ns = sent_ns = until_ns + 1
        if op.kind in OF_REQUESTS:
            self._opened.faulty[id] = FaultKind(op.kind)
        self._opened.edge_of[id] = edge
        slo_ns = round(scene.applications[at].slo_ns * (0.3, 1.0, 1.0, 1.0, 3.0)[op.detail // 3 % 5])
        arrived_ns, sent_ns = sent_ns, sent_ns - min(sent_ns, (0, 0, ms(30))[op.detail // 15 % 3])
        return at_ns, Request(id, sent_ns, arrived_ns, sent_ns + slo_ns, (), name)

    @cached_property
    def _hangs(self) -> list[Operation]:
        """When edges hang."""
        return [op for op in self._setting.schedule.operations if op.kind is FaultKind.EDGE_HANG]

    def _probes(self, at_ns: int) -> Iterator[tuple[int, Request]]:
        """A request to every application that is served."""
        number = 1_000_000
        for application in self._setting.versions:
            if application.version == "1" and self._core.versions(application.name):
                number += 1
                self._opened.edge_of[RequestId(number)] = 0
                request = Request(RequestId(number), at_ns, at_ns, at_ns + PROBE_NS // 2, (), application.name)
                yield at_ns, request


class Audit:
    """A core whose state is checked after each event, against the events that it got and the actions that it gave.

    `make` gives a core that decides, the core whose state is looked at (the same, unless a test breaks one), and the
    checkers of its log. While there is no core, edges hold what arrives.
    """

    def __init__(
        self, make: Callable[[], tuple[CoreInterface, Core, Checkers]], opened: OpenRequests, scene: Scene
    ) -> None:
        self._make, self._opened = make, opened
        self._core, self.state_of, self.checkers = make()
        self.is_down = self._is_later = False
        """Whether there is no core, and whether there was an earlier one."""
        self._queue_max = scene.queue_max if scene.policies["admit"] == "bounded" else FOREVER_NS
        self._deadlines_ns: dict[RequestId, int] = {}
        self._of_visits_ns: dict[tuple[RequestId, str, int], int] = {}
        """Of visits in graphs where paths have deadlines of their own."""
        self._most_running: dict[str, int] = {}
        self._looks, self._ledger_is_due = 0, False
        # These two wait as long as the belief allows, and the truth may be slower.
        waits = scene.policies["batch"] in ("slack", "deadline")
        self._probes_end = ANSWERED if not waits else (*ANSWERED, Outcome.DROPPED)
        self.requests = self.events = 0
        self.outcomes: Counter[Outcome] = Counter()

    @property
    def wake_ns(self) -> int:
        """As the core says."""
        return FOREVER_NS if self.is_down else self._core.wake_ns

    @property
    def planner(self) -> Any:  # a planner
        """That of the core."""
        return self._core.planner

    @property
    def plan_input(self) -> PlanInput | None:
        """That of the core."""
        return self._core.plan_input

    def append(self, now_ns: int, record: Any) -> None:  # also those of the simulated cluster
        """Check a record of the log of the core that is there."""
        if type(record) is CoreDied:
            self.is_down = True
        elif type(record) is CoreBegun:
            self.is_down, self._is_later = False, True
            self._core, self.state_of, self.checkers = self._make()
            self._most_running.clear()
            for id, request in list(self._opened.by_id.items()):
                if request.deadline_ns < now_ns:
                    self._answer_without(id)
        elif not self._is_for_nobody(record):
            self.checkers.append(now_ns, record)

    def _is_for_nobody(self, record: object) -> bool:
        """Whether the core is not told: there is none, or it is a request for an application that was deployed before
        this core began, which the driver does not know."""
        if self.is_down or type(record) is CoreDied or type(record) is CoreBegun:
            return True
        return self._is_later and isinstance(record, Request) and not self.state_of.versions(record.application)

    def _hold(self, event: object) -> None:
        """What edges do while there is nobody to tell."""
        if isinstance(event, Request):
            self._arrived(event)
            if not self.is_down:
                self._answer_without(event.id)
        elif isinstance(event, Cancelled):
            self._answer_without(event.request)

    def _answer_without(self, id: RequestId) -> None:
        """An edge answers a request by itself, or its client has left."""
        if self._opened.by_id.pop(id, None) is not None:
            self.outcomes[Outcome.REJECTED] += 1

    def handle(self, now_ns: int, event: Any, more_at_this_instant: bool = False) -> Sequence[Action]:
        """The core's actions. Violation if they, or the core's state, are wrong."""
        if self._is_for_nobody(event):
            self._hold(event)
            return ()
        self.events += 1
        if self.events > EVENTS_MAX:
            _fail(now_ns, event, f"more than {EVENTS_MAX} events: the core goes round in a circle")
        if type(event) is Request:
            self._arrived(event)
        actions = self._core.handle(now_ns, event, more_at_this_instant)
        for action in actions:
            if type(action) is End:
                if action.request not in self._opened.by_id:
                    _fail(now_ns, event, f"request {action.request} is answered twice: {action}")
                del self._opened.by_id[action.request]
                self.outcomes[action.outcome] += 1
                if action.request > PROBES and action.outcome not in self._probes_end:
                    _fail(now_ns, event, f"after all faults a request is not served: {action}")
        if actions or type(event) is not Woke:
            why = self._wrong_state(self._touched(event, actions))
            if why:
                _fail(now_ns, event, why)
        return actions

    def _arrived(self, request: Request) -> None:
        """A request has come to an edge, or is submitted again."""
        if request.id not in self._opened.by_id:
            self.requests += 1
            self._opened.by_id[request.id] = request
            self._opened.last = request.id
        else:  # another core may not let it wait for a start
            self._of_visits_ns = {key: ns for key, ns in self._of_visits_ns.items() if key[0] != request.id}
        self._deadlines_ns[request.id] = request.deadline_ns

    def _touched(self, event: Event, actions: Sequence[Action]) -> Sequence[ApplicationState]:
        """The applications that an event can have changed: one, if it is a request or the end of a batch and nothing
        but batches and ends follow. Every 16th time, all of them, as after all other events."""
        self._looks += 1
        state = self.state_of.state
        if self._looks % 16 and QUICK_ACTIONS.issuperset(map(type, actions)):
            if isinstance(event, Request):
                served = {version.application.key for version in self.state_of.versions(event.application)}
                return [each for key, each in state.applications.items() if key in served]
            if isinstance(event, Finished | BatchFailed):
                replica = state.replicas.get(event.replica)
                return [replica.stage.application] if replica is not None else ()
        self._ledger_is_due = True
        return list(state.applications.values())

    def _wrong_state(self, applications: Sequence[ApplicationState]) -> str:
        """What is wrong with the core's state; empty if nothing is."""
        for application in applications:
            has_paths = application.graph.has_deadlines
            self._deadlines_ns |= application.woken  # until then they may wait
            for stage in application.all_stages:
                why = self._wrong_counts(stage)
                if not why and stage.queue.visits:
                    why = self._wrong_deadline(stage.queue.visits, has_paths)
                if why:
                    return f"stage {stage.name}: {why}"
            for stage in application.entries:
                most = self._queue_max + self._most_running.get(stage.name, 0)
                if len(stage.queue.visits) > most:
                    return f"{len(stage.queue.visits)} visits wait at {stage.name}, where at most {most} may"
            if application.open_requests and len(application.open_requests) > len(self._opened.by_id):
                return f"{application.key} keeps requests that have ended"
        if len(self.state_of._rollouts.counted) > len(self._opened.by_id):
            return "versions are compared by requests that have ended"
        is_due, self._ledger_is_due = self._ledger_is_due, False
        return wrong_devices(self.state_of) or (wrong_ledger(self.state_of) if is_due else "")

    def _wrong_counts(self, stage: StageState) -> str:
        """Whether a stage has counted its visits and cores rightly, and knows which of its replicas are idle."""
        monitor, running, busy, ready, idle = stage.monitor, 0, 0, 0, 0
        has_paths = stage.application.graph.has_deadlines
        for replica in stage.pool.replicas.values():
            batch = replica.batch
            if replica.life is Life.READY:
                ready += replica.millicores
                idle += batch is None
            if batch is not None:
                running += batch.rows
                busy += batch.rate.millicores
                if replica.life is Life.STARTING and not replica.completes:  # it may have lost its pipeline
                    return f"replica {replica.id} runs batch {batch.id} and is not ready"
                why = self._wrong_deadline(batch.visits, has_paths)
                if why:
                    return why
        if running > self._most_running.get(stage.name, 0):
            self._most_running[stage.name] = running
        counted = (monitor.waiting, monitor.running, monitor.busy_millicores, monitor.ready_millicores)
        found = (len(stage.queue.visits), running, busy, ready)
        if counted != found:
            return f"it counts {counted} waiting, running, busy and ready, where there are {found}"
        if len(stage.pool.idle) != idle:
            return f"{len(stage.pool.idle)} replicas count as idle, {idle} are"
        seen = tuple([each.view() for each in stage.pool.replicas.values() if each.life is not Life.DRAINING])
        if stage.pool.views() != seen:
            return f"policies see {stage.pool.views()}, where there are {seen}"
        return ""

    def _wrong_deadline(self, visits: Sequence[Visit], has_paths: bool) -> str:
        """Whether a visit has another deadline than before."""
        deadlines_ns = self._deadlines_ns
        if has_paths:
            for visit in visits:
                key = visit.request.id, visit.stage, visit.part
                if self._of_visits_ns.setdefault(key, visit.deadline_ns) != visit.deadline_ns:
                    return f"the deadline of request {visit.request.id} has moved"
            return ""
        for visit in visits:
            if deadlines_ns[visit.request.id] != visit.deadline_ns:
                return f"the deadline of request {visit.request.id} has moved"
        return ""


QUICK_ACTIONS: Final = frozenset({StartBatch, End, Assigned})
"""Actions that concern one application and no reservations."""
ANSWERED: Final = (Outcome.SERVED, Outcome.LATE)
PROBES: Final = 1_000_000
"""Requests with larger numbers come after all faults."""


def _fail(now_ns: int, event: Event, what: str) -> None:
    raise Violation(f"at {to_ms(now_ns):.6f} ms: {what}\nevent: {event}")


def wrong_devices(core: Core) -> str:
    """Whether what runs on shared devices is what replicas run that say how they share them; empty if so."""
    running: dict[DeviceKey, dict[BatchId, Replica]] = {}
    for replica in core.state.replicas.values():
        batch = replica.batch
        if batch is not None and batch.rate.is_shared:
            running.setdefault((replica.node, replica.device or ""), {})[batch.id] = replica
    found = {key: list(load.batches) for key, load in core.state.devices.items()}
    if found != {key: sorted(batches) for key, batches in running.items()}:
        return f"devices run {found}, where replicas run {running}"
    for key, load in core.state.devices.items():
        for id, loaded in load.batches.items():
            batch = running[key][id].batch
            if batch is None or batch.load is not load or loaded.size != len(batch.visits):
                return f"batch {id} on {key} is {loaded}"
            if not 0 <= loaded.done_ns <= load.now_ns - batch.started_ns:
                return f"{loaded.done_ns} ns of batch {id} are done, which began at {batch.started_ns} ns"
    return ""


def wrong_ledger(core: Core) -> str:
    """Whether reservations are those of the replicas that exist, what is free is the rest, and policies see it; empty
    if so."""
    state = core.state
    ledger = state.ledger
    workers = {worker.id for replica in state.replicas.values() for worker in replica.workers}
    if not ledger.reservations.keys() == state.workers.keys() == workers:
        return f"reservations of {list(ledger.reservations)}, workers {list(state.workers)}, of replicas {workers}"
    for id, replica in state.replicas.items():
        if shadow_in(replica.shape) and not replica.shadows:
            return f"replica {id} serves in a pair, without a shadow"
        reserved = ledger.reservations[id].millicores
        if reserved < millicores(replica.cores):
            return f"replica {id} has {replica.cores:g} cores, of which {reserved} m are reserved"
    used, memory_bytes = dict.fromkeys(ledger.nodes, 0), dict.fromkeys(ledger.nodes, 0)
    for reservation in ledger.reservations.values():
        used[reservation.node] += reservation.millicores
        memory_bytes[reservation.node] += reservation.memory_bytes
    for name, node in ledger.nodes.items():
        free = ledger.free_millicores(name)
        if free < 0 or free + used[name] != millicores(node.cores):
            return f"{name} has {node.cores:g} cores, of which {used[name]} m are reserved and {free} m free"
        why = _wrong_memory(state, name, memory_bytes[name])
        if why:
            return why
    views = tuple([ledger.view(name) for name in ledger.nodes])
    return f"policies see {ledger.views()}, where there are {views}" if ledger.views() != views else ""


def _wrong_memory(state: State, name: str, reserved_bytes: int) -> str:
    """Whether the memory of a node is all reserved, held for weights, or free, and weights that nobody uses fit into
    what is free; empty if so."""
    held_bytes, free_bytes = state.weights.held_bytes(name), state.ledger.free_memory_bytes(name)
    node_bytes, spare_bytes = state.ledger.nodes[name].memory_bytes, state.weights.spare_bytes(name)
    if free_bytes < 0 or free_bytes + reserved_bytes + held_bytes != node_bytes:
        parts = f"{reserved_bytes} are reserved, {held_bytes} held and {free_bytes} free"
        return f"{name} has {node_bytes} bytes, of which {parts}"
    if spare_bytes > free_bytes:
        return f"{name} keeps {spare_bytes} bytes of weights where {free_bytes} are free"
    for id, opened in state.weights.transfers.items():
        if not opened.order.is_kept and not all(opened.receivers.values()):
            return f"transfer {id} goes on, and no replica waits for it on one of {list(opened.receivers)}"
    strangers = state.weights.users - state.replicas.keys()
    return f"weights are used by replicas {list(strangers)}, which do not exist" if strangers else ""


def unfinished(core: Core, opened: OpenRequests) -> str:
    """Why the core is not whole, when there have been no faults for a while; empty if it is."""
    if opened.by_id:
        return f"requests {list(opened.by_id)[:5]} have not ended"
    if core.state.weights.transfers:
        return f"transfers {list(core.state.weights.transfers)} have not ended"
    partial = [id for id, each in core.state.replicas.items() if each.part is not None or each.pipeline is not None]
    if partial or core.state.dissolving:
        return f"replicas {partial} are still parts of pipelines"
    ledger = core.state.ledger
    for name, state in ledger.states.items():
        is_lost = state is NodeState.LOST and not ledger.nodes[name].on_demand
        if is_lost or state in (NodeState.ACQUIRING, NodeState.RELEASING):
            return f"{name} is {state}"
    return next(filter(None, (_unfinished_version(core, each) for each in core.state.applications.values())), "")


def _unfinished_version(core: Core, application: ApplicationState) -> str:
    """Why a version is not what its plan says; empty if it is."""
    version = next(each for each in core.versions(application.parts.name) if each.application is application)
    key, control = application.key, version.control
    if version.state in (VersionState.STARTING, VersionState.RETIRING):
        return f"{key} is {version.state}"
    if control.is_resting or control.is_frozen:
        return ""
    if control.plan is None or control.plan.why != SMALL:
        return f"the plan of {key} is {control.plan and control.plan.why}"
    if control.progress is not PlanProgress.MET:
        return f"{key} works on its plan: {control.progress.name}"
    for target in control.plan.stages:
        replicas = application.stages[target.stage].pool.replicas.values()
        found = [
            (each.life, each.spec.variant, each.target_cores, each.resizing, each.shape, len(each.workers))
            for each in replicas
        ]
        wanted = [(Life.READY, group.spec.variant, group.spec.cores, 0, ALONE, 1) for group in target.groups]
        if found != wanted:
            return f"replicas of {target.stage} are {found}"
    return ""


def slow_until_ns(core: Core) -> int:
    """Until when a batch may run that is believed to take more than a second, as on a replica with few thousandths of a
    core, which is what many applications on a small cluster get."""
    running = [(replica, replica.batch) for replica in core.state.replicas.values() if replica.batch is not None]
    return max(
        (replica.stage.give_up_ns(batch) for replica, batch in running if batch.cost_ns > SLOW_BATCH_NS), default=0
    )


def unreleased(core: Core) -> str:
    """What the core has not given back after the removal of all applications; empty if nothing."""
    state = core.state
    for what, left in (
        ("applications", state.applications),
        ("replicas", state.replicas),
        ("reservations", state.ledger.reservations),
        ("compared requests", core._rollouts.counted),
        ("policies", core.planner.policies),
    ):
        if left:
            return f"{what} {list(left)} are left"
    for name, node in state.ledger.nodes.items():
        if node.on_demand and state.ledger.states[name] is not NodeState.RELEASED:
            return f"{name} is {state.ledger.states[name]}"
        if not state.ledger.is_empty(name):
            return f"{name} is not empty"
    return ""


# Shrinking


def failure_of(schedule: Schedule, run_it: Callable[[Schedule], object] = play) -> str:
    """Which invariant a schedule breaks: the exception without its numbers and names. Empty if all hold."""
    try:
        run_it(schedule)
    except Exception as error:  # whatever the core raises is a bug
        return kind_of(error)
    return ""


def kind_of(error: Exception) -> str:
    """What kind of failure this is: its first line without numbers, names and lists."""
    text = re.sub(r"[\[(].*?[\])]|'.*?'|-?\d+(\.\d+)?", "#", str(error).split("\n", maxsplit=1)[0])
    return f"{type(error).__name__}: {text}"


def shrink(schedule: Schedule, run_it: Callable[[Schedule], object] = play, *, plays_max: int = 3_000) -> Schedule:
    """The schedule with as few operations as possible that still breaks the same invariant: delta debugging (Zeller and
    Hildebrandt, 2002), which leaves out ever smaller parts until no single operation can be left out."""
    wanted, kept, parts = failure_of(schedule, run_it), list(schedule.numbers), 2
    assert wanted, "the schedule breaks no invariant"
    while len(kept) > 1 and plays_max > 0:
        size = -(-len(kept) // parts)
        for begin in range(0, len(kept), size):
            fewer = kept[:begin] + kept[begin + size :]
            plays_max -= 1
            if fewer and failure_of(schedule.only(fewer), run_it) == wanted:
                kept, parts = fewer, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(kept), parts * 2)
    return schedule.only(kept)
