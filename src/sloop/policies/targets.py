"""Values that scaling policies share: plans of equal replicas, core counts that fit a node, hysteresis, paths by index.

Unlike a solver, each reads a view.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from sloop.core.views import Belief, ClusterView, StageView
from sloop.errors import InputError
from sloop.solvers.budget import IndexedPath
from sloop.text import counted
from sloop.units import to_ms
from sloop.vocabulary import Group, ReplicaSpec, StagePlan

V = TypeVar("V")


def one_stage(view: ClusterView, system: str) -> StageView:
    """The only stage of the application. InputError for a graph, which `system` cannot serve."""
    if len(view.stages) != 1:
        raise InputError(
            f"system {system} serves one model, and the application has {len(view.stages)} stages",
            help="choose a system for pipelines, or serve each stage as an application of its own",
        )
    return view.stages[0]


def variant_of(stage: StageView, wanted: str) -> str:
    """The variant named `wanted`, or the first variant if `wanted` is "". InputError if the stage does not have it."""
    variant = wanted or next(iter(stage.variants))
    if variant not in stage.variants:
        known = ", ".join(stage.variants)
        raise InputError(f"stage {stage.name} has no variant {variant!r}", help=f"use one of {known}")
    return variant


def equal_replicas(
    stage: StageView, variant: str, *, count: int, cores: float, batch_max: int, in_place: bool = True
) -> StagePlan:
    """A stage plan: `count` replicas of `variant` with `cores` each.

    `batch_max` 0 means the largest batch within half the SLO, so that a request that just missed a batch is still in
    time with the next (Nexus' rule).
    """
    belief = stage.variants[variant]
    largest = min(batch_max, belief.batch_max) if batch_max else batch_within(belief, cores, stage.slo_ns // 2)
    group = Group(ReplicaSpec(stage=stage.name, variant=variant, cores=cores), count)
    return StagePlan(stage.name, (group,), largest, in_place)


def batch_within(belief: Belief, cores: float, limit_ns: int) -> int:
    """The largest batch believed to take at most `limit_ns`; at least 1."""
    return max(1, bisect_right(belief.costs_ns(cores), limit_ns, 1) - 1)


def node_cores_max(view: ClusterView) -> float:
    """Cores of the largest node, the most that one replica can have; infinite if no node is known."""
    return max((node.node.cores for node in view.nodes), default=float("inf"))


def core_choices(view: ClusterView, offered: Sequence[float], whole_max: int, system: str) -> list[float]:
    """Core counts that a replica may have, ascending: `offered`, or else 1, 2, … `whole_max`, up to the largest node.

    If the largest node has less than one core, its cores are the only choice. InputError if no count in `offered` fits.
    """
    most = node_cores_max(view)
    choices = sorted({cores for cores in offered or range(1, whole_max + 1) if cores <= most})
    if offered and not choices:
        raise InputError(
            f"system {system}: no core count of {tuple(offered)} fits", help=f"a node has {counted(most, 'core')}"
        )
    return choices or [most]


def indexed_paths(view: ClusterView, margin: float) -> tuple[IndexedPath, ...]:
    """The graph's paths, with stages as indices into `view.stages` and deadlines multiplied by `margin`."""
    index = {stage.name: place for place, stage in enumerate(view.stages)}
    return tuple(
        IndexedPath(tuple(index[name] for name in path.stages), margin * to_ms(path.slo_ns)) for path in view.paths
    )


def largest(recent: deque[V], newest: V, decisions: int, size: Callable[[V], float]) -> V:
    """Hysteresis: the largest of the last `decisions` decisions; among equals, the newest. Updates `recent`.

    So a policy scales up at once, and down only when all recent decisions agree.
    """
    recent.append(newest)
    while len(recent) > decisions:
        recent.popleft()
    return max(reversed(recent), key=size)
