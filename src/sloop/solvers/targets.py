"""Plans for stages made of equal replicas, and the limits of what can be asked for: shared by the scaling policies."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from sloop.core.views import Belief, ClusterView, StageView
from sloop.errors import InputError
from sloop.solvers.graph import Way
from sloop.units import to_ms
from sloop.vocabulary import Group, ReplicaSpec, StagePlan

V = TypeVar("V")


def variant_of(stage: StageView, wanted: str) -> str:
    """The variant called `wanted`, or the first declared for "". `InputError` where the stage has no such variant."""
    variant = wanted or next(iter(stage.variants))
    if variant not in stage.variants:
        known = ", ".join(stage.variants)
        raise InputError(f"stage {stage.name} has no variant {variant!r}", help=f"use one of {known}")
    return variant


def equal_replicas(
    stage: StageView, variant: str, *, count: int, cores: float, batch_max: int, in_place: bool = True
) -> StagePlan:
    """`count` replicas of `variant`, `cores` each; `batch_max` 0 becomes the largest sensible, see `batch_within`."""
    belief = stage.variants[variant]
    largest = min(batch_max, belief.batch_max) if batch_max else batch_within(belief, cores, stage.slo_ns // 2)
    group = Group(ReplicaSpec(stage=stage.name, variant=variant, cores=cores), count)
    return StagePlan(stage.name, (group,), largest, in_place)


def batch_within(belief: Belief, cores: float, limit_ns: int) -> int:
    """The largest batch believed to take at most `limit_ns`, at least 1.

    With half the SLO as limit, a request that just missed a batch is still in time with the next (Nexus' rule).
    """
    return max(1, bisect_right(belief.costs_ns(cores), limit_ns, 1) - 1)


def node_cores_max(view: ClusterView) -> float:
    """Cores of the largest node: what one replica can ever have. Infinite where no node is known."""
    return max((node.node.cores for node in view.nodes), default=float("inf"))


def ways(view: ClusterView, margin: float) -> tuple[Way, ...]:
    """The ways through the graph, each within `margin` of its deadline; stages by their index in the view."""
    place = {stage.name: index for index, stage in enumerate(view.stages)}
    return tuple(Way(tuple(place[name] for name in path.stages), margin * to_ms(path.slo_ns)) for path in view.paths)


def core_choices(view: ClusterView, offered: Sequence[float], whole_max: int, system: str) -> list[float]:
    """What a replica's cores may be, ascending: those `offered`, else 1, 2, … `whole_max`, as far as a node has them.

    All of a node that has less than one core. `InputError` where no node has any of those offered.
    """
    most = node_cores_max(view)
    choices = sorted({cores for cores in offered or range(1, whole_max + 1) if cores <= most})
    if offered and not choices:
        raise InputError(
            f"system {system}: no core count of {tuple(offered)} fits", help=f"a node has {amount(most, 'core')}"
        )
    return choices or [most]


def largest(recent: deque[V], newest: V, decisions: int, size: Callable[[V], float]) -> V:
    """Hysteresis: the largest of the last `decisions`, the newest among equals; up at once, down when they agree.

    `recent` remembers them from call to call.
    """
    recent.append(newest)
    while len(recent) > decisions:
        recent.popleft()
    return max(reversed(recent), key=size)


def one_stage(view: ClusterView, system: str) -> StageView:
    """The only stage of the application. `InputError` for a pipeline, which `system` cannot serve."""
    if len(view.stages) != 1:
        raise InputError(
            f"system {system} serves one model, and the application has {len(view.stages)} stages",
            help="choose a system for pipelines, or serve each stage as an application of its own",
        )
    return view.stages[0]


def amount(count: float, noun: str) -> str:
    """`1 core`, `0.5 cores`, `12 replicas`: for reasons that people read."""
    return f"{count:g} {noun}" if count == 1 else f"{count:g} {noun}s"
