"""Why a plan is infeasible: which stage, path or node lacks what, and how much.

The reasons follow from the plan, the beliefs and the cluster alone, so they have the same form for all systems. They
distinguish a goal that no plan could reach from a plan that misses it: a deadline is impossible if a single request on
each stage's fastest configuration takes longer; a rate, if the cheapest configurations need more cores than the cluster
has. Replicas are placed on the empty cluster one after another, by the system's place policy, as in the core.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from msgspec import Struct

from sloop.app.hardware import ANY_BYTES, GIB
from sloop.core.ledger import Ledger, Reservation, fits
from sloop.core.protocols import Place
from sloop.core.views import Belief, NodeView
from sloop.systems.planning.prediction import PathPrediction, PlanPrediction, StagePrediction
from sloop.systems.setup import Setup
from sloop.text import chain, counted, number
from sloop.units import ROUNDING
from sloop.vocabulary import Group, Node, Plan, ReplicaId, ReplicaSpec

NAMED_MAX: Final = 3
"""Paths that are explained one by one; the others are only counted."""
CORE_FRACTIONS: Final = (0.1, 0.25, 0.5)
"""What the search for the cheapest configuration tries besides whole cores: where beliefs gain less than linearly from
cores, a fraction of one is the cheapest, and a tenth is about the least that container runtimes are asked for."""


class PlanShortfall(Struct, frozen=True):
    """One reason why a goal cannot be reached: at which stage or on which path, and by how much."""

    kind: Literal["throughput", "deadline", "cores", "memory"]
    why: str
    stage: str = ""
    path: tuple[str, ...] = ()
    needs: float = 0.0
    has: float = 0.0
    unit: str = ""

    @property
    def missing(self) -> float:
        """The difference between `needs` and `has`, in `unit`."""
        return abs(self.needs - self.has)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A stage's variant, cores and batch, with the figure by which it was chosen."""

    variant: str
    cores: float
    batch: int
    value: float
    """Milliseconds of a lone request (`fastest`), or core-seconds per request (`cheapest`)."""


def fastest(stage: StagePrediction, cores_max: float) -> Configuration:
    """The configuration on which a lone request spends the least time, in ms."""
    tried = (
        Configuration(name, cores, 1, belief.latency_ms(1, cores))
        for name, belief in stage.beliefs.items()
        for cores in _core_counts(belief, cores_max)
    )
    return min(tried, key=lambda configuration: configuration.value)


def cheapest(stage: StagePrediction, cores_max: float) -> Configuration:
    """The configuration that spends the fewest core-seconds per request, whatever its latency."""
    tried = (
        Configuration(name, cores, batch, cores * belief.latency_ms(batch, cores) / batch / 1e3)
        for name, belief in stage.beliefs.items()
        for cores in (*CORE_FRACTIONS, *_core_counts(belief, cores_max))
        if cores <= cores_max
        for batch in range(1, belief.batch_max + 1)
    )
    return min(tried, key=lambda configuration: configuration.value)


def _core_counts(belief: Belief, cores_max: float) -> list[float]:
    """1, 2, … up to what a node has and the variant gains from, and that maximum itself."""
    most = min(cores_max, belief.cores_max) if math.isfinite(min(cores_max, belief.cores_max)) else 1.0
    return [*map(float, range(1, int(most) + 1)), most]


def shortfalls_of(setup: Setup, prediction: PlanPrediction, placement: "Placement") -> list[PlanShortfall]:
    """Everything that the plan lacks; empty if it keeps up, every path is in time and every replica has room."""
    found = [*_too_slow(setup, prediction)]
    keeps_up = not found
    found += _too_late(setup, prediction, keeps_up=keeps_up)
    if found or placement.shortfalls:
        found += beyond_cluster(setup, prediction)
    return [*found, *placement.shortfalls]


def _too_slow(setup: Setup, prediction: PlanPrediction) -> Iterator[PlanShortfall]:
    """Stages whose replicas cannot serve what arrives there."""
    why = f"the plan cannot keep up with {number(prediction.rate_rps)} requests/s: "
    for stage in prediction.stages.values():
        if math.isinf(stage.slowest.total_ms):
            serves, arrives = stage.rate_max_rps, stage.rate_rps
            if not stage.groups:
                why += f"{stage.name} has no replicas"
            elif serves + ROUNDING >= arrives:
                why += f"{stage.name} waits for batches that never fill"
            else:
                why += f"{stage.name} serves {number(serves)} of {number(arrives)} requests/s, "
                why += f"{number(arrives - serves)} too few"
            yield PlanShortfall("throughput", why, stage.name, needs=arrives, has=serves, unit="requests/s")
            why = ""  # the rate is named once
        elif stage.name in prediction.plan.saturated:
            why = f"{setup.system.name} has no plan that provides for what arrives at {stage.name}"
            yield PlanShortfall("throughput", why, stage.name)


def _too_late(setup: Setup, prediction: PlanPrediction, *, keeps_up: bool) -> Iterator[PlanShortfall]:
    """Paths beyond their deadlines: those that no configuration could save; else those that the plan is too slow for,
    unless it cannot keep up, where every path through the stage is late without end."""
    cores_max = max((node.cores for node in setup.application.cluster), default=math.inf)
    best = {name: fastest(stage, cores_max) for name, stage in prediction.stages.items()}
    impossible = []
    for path in prediction.paths:
        least_ms = math.fsum(best[name].value for name in path.path.stages)
        if least_ms > path.slo_ms + ROUNDING:
            impossible.append((least_ms, path))
    impossible.sort(key=lambda each: each[1].slo_ms - each[0])
    for least_ms, path in impossible[:NAMED_MAX]:
        yield _impossible(path, least_ms, best)
    if len(impossible) > NAMED_MAX:
        yield PlanShortfall("deadline", f"{len(impossible) - NAMED_MAX} more paths have impossible deadlines")
    if impossible or not keeps_up:
        return
    late = [path for path in prediction.paths if path.slack_ms < -ROUNDING]
    for path in late[:NAMED_MAX]:
        yield _late(path)
    if len(late) > NAMED_MAX:
        yield PlanShortfall("deadline", f"{len(late) - NAMED_MAX} more paths are too slow")


def _impossible(path: PathPrediction, least_ms: float, best: dict[str, Configuration]) -> PlanShortfall:
    """A path whose deadline cannot be met however its stages are run."""
    stages = path.path.stages
    name = max(stages, key=lambda each: best[each].value)
    fast = best[name]
    on = f"variant {fast.variant} on {counted(fast.cores, 'core')}"
    why = f"{chain(stages)} takes at least {number(least_ms)} ms even without load, and the deadline is "
    why += f"{number(path.slo_ms)} ms: {number(least_ms - path.slo_ms)} ms too long; "
    if len(stages) > 1:
        why += f"{name} alone takes {number(fast.value)} ms at best, with "
    why += on if len(stages) > 1 else f"{on} is the fastest there is"
    return PlanShortfall("deadline", why, name, stages, needs=least_ms, has=path.slo_ms, unit="ms")


def _late(path: PathPrediction) -> PlanShortfall:
    """A path that the plan is too slow for."""
    stages = path.path.stages
    slow = max(path.visits, key=lambda visit: visit.total_ms)
    why = f"{chain(stages)} is predicted to take {number(path.predicted_ms)} ms, and the deadline is "
    why += f"{number(path.slo_ms)} ms: {number(-path.slack_ms)} ms too long"
    if slow.slowest is not None:
        where = f"at {slow.stage.name}, the slowest stage, " if len(stages) > 1 else ""
        why += f"; {where}{number(slow.slowest.service_ms)} ms service and {number(slow.slowest.wait_ms)} ms wait"
    alone_ms = math.fsum(visit.stage.alone_ms for visit in path.visits)
    if alone_ms > path.slo_ms + ROUNDING:
        why += f"; even without load it takes {number(alone_ms)} ms on these variants and cores"
    name = slow.stage.name
    return PlanShortfall("deadline", why, name, stages, needs=path.predicted_ms, has=path.slo_ms, unit="ms")


def beyond_cluster(setup: Setup, prediction: PlanPrediction) -> Iterator[PlanShortfall]:
    """Whether the rate needs more cores than the cluster has, even if every stage runs its cheapest configuration."""
    nodes = setup.application.cluster
    if not nodes or not prediction.rate_rps:
        return
    has, most = sum(node.cores for node in nodes), max(node.cores for node in nodes)
    best = {name: cheapest(stage, most) for name, stage in prediction.stages.items() if stage.rate_rps}
    each = {name: found.value * prediction.stages[name].rate_rps for name, found in best.items()}
    needs = math.fsum(each.values())
    if needs > has:
        name = max(each, key=lambda stage: each[stage])
        found = best[name]
        why = (
            f"{number(prediction.rate_rps)} requests/s need {number(needs)} cores even on the cheapest configurations, "
            f"and the cluster has {number(has)}: {number(needs - has)} too few; {name} alone needs "
            f"{number(each[name])} ({found.variant}, batches of {found.batch} on {counted(found.cores, 'core')})"
        )
        yield PlanShortfall("cores", why, name, needs=needs, has=has, unit="cores")


Scarce = Literal["cores", "memory"]


@dataclass(slots=True)
class Placement:
    """Where the replicas of a plan are on an empty cluster."""

    nodes: set[str] = field(default_factory=set)
    """Nodes with a replica."""
    shortfalls: list[PlanShortfall] = field(default_factory=list)
    full: dict[ReplicaSpec, tuple[Scarce, str]] = field(default_factory=dict)
    """Kinds of replicas of which no node can hold one more once all are placed: what is scarce, and why."""


def place(plan: Plan, setup: Setup) -> Placement:
    """Place every replica of the plan, one after another, where the place policy chooses."""
    policy, nodes = setup.system.policies.place, setup.application.cluster
    classes, found, next_id = NodeClasses(nodes), Placement(), 0
    groups = [
        (group, setup.beliefs[target.stage, group.spec.variant].memory_bytes)
        for target in plan.stages
        for group in target.groups
    ]
    for group, memory_bytes in groups:
        for count in range(group.count):
            name = group.spec.node or _chosen(policy, group.spec, memory_bytes, classes)
            reservation = Reservation.of(group.spec, memory_bytes, name or "")
            if not classes.reserve(ReplicaId(next_id), reservation):
                found.shortfalls.append(_no_room(plan, group, group.count - count, memory_bytes, classes))
                break
            found.nodes.add(reservation.node)
            next_id += 1
    views = classes.representatives()
    for group, memory_bytes in groups:
        spec = group.spec
        allowed = views if spec.node is None else [view for view in classes.every() if view.node.name == spec.node]
        if not any(fits(spec, memory_bytes, view) for view in allowed):
            scarce, why = _scarce(spec, memory_bytes, allowed)
            found.full[spec] = scarce, f"no node has room for one more replica of {counted(spec.cores, 'core')}: {why}"
    return found


def _chosen(policy: Place, spec: ReplicaSpec, memory_bytes: int, classes: "NodeClasses") -> str | None:
    """The node that the place policy chooses, from one node per class; a policy that wants none of those sees all."""
    return policy.choose(0, spec, memory_bytes, classes.representatives()) or policy.choose(
        0, spec, memory_bytes, classes.every()
    )


def _scarce(spec: ReplicaSpec, memory_bytes: int, views: Sequence[NodeView]) -> tuple[Scarce, str]:
    """The scarce resource because of which no node has room for one more replica of `spec`, and a text."""
    free = max((view.free_cores for view in views), default=0.0)
    if not free:
        return "cores", "all cores are taken"
    if spec.cores > free + ROUNDING:
        return "cores", f"at most {counted(free, 'core')} of a node are free"
    if not any(view.free_memory_bytes >= memory_bytes for view in views if spec.cores <= view.free_cores + ROUNDING):
        return "memory", f"nodes with enough free cores have less than {memory_bytes / GIB:.3g} GiB of memory free"
    return "cores", f"device {spec.device!r} is taken"


def cores_of(plan: Plan) -> float:
    """The cores of all replicas of the plan."""
    return sum(group.count * group.spec.cores for target in plan.stages for group in target.groups)


def _no_room(plan: Plan, group: Group, missing: int, memory_bytes: int, classes: "NodeClasses") -> PlanShortfall:
    """Why `missing` replicas of a group have no room: the first reason that applies, the most fundamental first."""
    spec, views = group.spec, classes.every()
    nodes = [view.node for view in views]
    what = (
        f"no node has room for {missing} of {counted(group.count, 'replica')} of {spec.stage}/{spec.variant} with "
        f"{counted(spec.cores, 'core')}"
    )
    stage, needs = spec.stage, cores_of(plan)
    if not nodes:
        return PlanShortfall("cores", f"{what}: the cluster has no nodes", stage, needs=needs, has=0.0, unit="cores")
    most = max(node.cores for node in nodes)
    if spec.cores > most:
        why = f"{what}: the largest node has {counted(most, 'core')}, {number(spec.cores - most)} too few"
        return PlanShortfall("cores", why, stage, needs=spec.cores, has=most, unit="cores")
    memory = max(node.memory_bytes for node in nodes)
    if memory < memory_bytes and memory < ANY_BYTES:
        why = f"{what}: each needs {memory_bytes / GIB:.3g} GiB of memory, and the largest node has {memory / GIB:.3g}"
        return PlanShortfall("memory", why, stage, needs=float(memory_bytes), has=float(memory), unit="bytes")
    if spec.device and not any(spec.device in node.devices for node in nodes):
        return PlanShortfall("cores", f"{what}: no node has a device {spec.device!r}", stage)
    has = sum(node.cores for node in nodes)
    if needs > has:
        why = f"{what}: the plan needs {number(needs)} cores, and the cluster has {number(has)}: "
        why += f"{number(needs - has)} too few"
        return PlanShortfall("cores", why, stage, needs=needs, has=has, unit="cores")
    scarce, why = _scarce(spec, memory_bytes, views)
    return PlanShortfall(scarce, f"{what}: {why}", stage)


class NodeClasses:
    """Nodes grouped into equivalence classes: equal in everything but their names, free resources included.

    A policy that chooses by resources chooses the same from one node per class, the one declared first, as from all
    nodes. So a cluster of thousands of equal nodes costs as much as one of a few.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._ledgers = [Ledger([node]) for node in nodes]
        self._index = {node.name: index for index, node in enumerate(nodes)}
        self._classes: dict[Hashable, list[int]] = {}
        """The indexes of the nodes in each class, ascending."""
        for index in range(len(nodes)):
            self._classes.setdefault(self._class(index), []).append(index)

    def representatives(self) -> list[NodeView]:
        """The first node of each class, in the order of declaration."""
        return [self._view(index) for index in sorted(members[0] for members in self._classes.values())]

    def every(self) -> list[NodeView]:
        """Every node, in the order of declaration."""
        return [self._view(index) for index in range(len(self._ledgers))]

    def reserve(self, replica: ReplicaId, reservation: Reservation) -> bool:
        """Take room for a new replica. False, and nothing taken, where the node is unknown or has too little."""
        index = self._index.get(reservation.node)
        if index is None or not self._ledgers[index].has_room(reservation):
            return False
        left = self._classes[self._class(index)]
        del left[bisect_left(left, index)]
        if not left:
            del self._classes[self._class(index)]
        self._ledgers[index].reserve(replica, reservation)
        insort(self._classes.setdefault(self._class(index), []), index)
        return True

    def _view(self, index: int) -> NodeView:
        (view,) = self._ledgers[index].views()
        return view

    def _class(self, index: int) -> Hashable:
        view, node = self._view(index), self._view(index).node
        kind = (node.hardware, node.cores, node.memory_bytes, node.devices, node.usd_per_h)
        return *kind, view.free_cores, view.free_memory_bytes, tuple(view.free_share.values())
