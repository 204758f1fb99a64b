"""Values that scaling policies share: one kind of hardware, equal replicas, core counts that fit a node, hysteresis,
Kubernetes' stabilisation.

Unlike a solver, each reads a view.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import truediv
from typing import Final, TypeVar

import numpy as np

from sloop.core.views import Belief, ClusterView, NodeView, StageView
from sloop.errors import InputError
from sloop.profile.pairs import Floats
from sloop.solvers.budget import IndexedPath
from sloop.text import counted, in_s, listed
from sloop.units import NS_PER_MS, to_ms
from sloop.vocabulary import CLIENTS_MAX, Group, NodeState, Plan, ReplicaSpec, StagePlan

V = TypeVar("V")

AS_FAST: Final = 0.95
"""A batch counts as serving as many rows per second as another if it serves this part of them."""


def on_one_kind(view: ClusterView, hardware: str = "") -> ClusterView:
    """The view with the nodes and beliefs of one kind of hardware only, without lost nodes.

    The kind is `hardware`; if that is "", the first kind of the cluster on which every stage has a variant. InputError
    if there is no such kind.
    """
    kind = kind_of(view, hardware, view.stages)
    if all(node.node.hardware == kind and node.state is not NodeState.LOST for node in view.nodes) and all(
        key[1] == kind for stage in view.stages for key in stage.beliefs
    ):
        return view
    stages = tuple(
        replace(stage, beliefs={key: belief for key, belief in stage.beliefs.items() if key[1] == kind})
        for stage in view.stages
    )
    return replace(view, stages=stages, nodes=usable([node for node in view.nodes if node.node.hardware == kind]))


def kind_of(view: ClusterView, hardware: str, stages: Sequence[StageView]) -> str:
    """`hardware`, or if that is "" the first kind of the cluster on which each of these stages has a variant.

    InputError if the cluster has no such kind.
    """
    for kind in (hardware,) if hardware else kinds_of(view):
        if all(stage.on(kind) for stage in stages):
            return kind
    kinds = all_kinds(view)
    if hardware:
        check_kind(view, hardware)
        missing = next(stage for stage in stages if not stage.on(hardware))
        what = f"stage {missing.name} has no profile for hardware {hardware!r}"
        own = _listed([kind for _, kind in missing.beliefs])
        raise InputError(what, help=f"it has one for {own}; name one of these, or add a profile")
    for kind in kinds:
        if all(stage.on(kind) for stage in stages):
            return kind
    each = "; ".join(f"{stage.name} has {_listed([kind for _, kind in stage.beliefs])}" for stage in stages)
    raise InputError(
        f"no kind of hardware has a profile for every stage: {each}",
        help="add profiles, or choose a system that uses several kinds, such as `mixed`",
    )


def check_kind(view: ClusterView, hardware: str) -> None:
    """InputError if the cluster has no node of this kind."""
    kinds = all_kinds(view)
    if hardware not in kinds:
        raise InputError(f"no node has hardware {hardware!r}", help=f"the cluster has {_listed(kinds)}")


def kinds_of(view: ClusterView) -> tuple[str, ...]:
    """The kinds of hardware of the cluster, in its order; one kind without a name if no node is known."""
    return tuple(dict.fromkeys([node.node.hardware for node in view.nodes])) or ("",)


def all_kinds(view: ClusterView) -> tuple[str, ...]:
    """The kinds of hardware, those included of which the view has no node, because other applications need all."""
    believed = [kind for stage in view.stages for _, kind in stage.beliefs]
    return tuple(dict.fromkeys([*kinds_of(view), *believed]))


def usable(nodes: Sequence[NodeView]) -> tuple[NodeView, ...]:
    """The nodes that are not lost; all of them if all are lost, because a plan must name some."""
    return tuple(node for node in nodes if node.state is not NodeState.LOST) or tuple(nodes)


def _listed(kinds: Sequence[str]) -> str:
    return listed([kind or "no named kind" for kind in dict.fromkeys(kinds)])


def one_stage(view: ClusterView, policy: str) -> StageView:
    """The only stage of the application. InputError for a graph, which the scale policy of this name cannot serve."""
    if len(view.stages) != 1:
        raise InputError(
            f"scale policy {policy} serves one model, and the application has {len(view.stages)} stages",
            help="choose a system for pipelines, or serve each stage as an application of its own",
        )
    return view.stages[0]


def by_variant(stage: StageView) -> dict[str, Belief]:
    """The variants of a stage on one kind of hardware (`on_one_kind`), by name."""
    return {variant: belief for (variant, _), belief in stage.beliefs.items()}


def belief_of(stage: StageView, wanted: str = "", hardware: str = "") -> Belief:
    """The variant named `wanted`, or the first one if that is "", of a stage on one kind of hardware (`on_one_kind`),
    or on `hardware`. InputError if the stage does not have it."""
    known = stage.on(hardware) if hardware else by_variant(stage)
    variant = wanted or next(iter(known), "")
    if variant not in known:
        on = f" on {hardware}" if hardware else ""
        help = (
            f"use one of {', '.join(known)}"
            if known
            else f"it has profiles for {_listed([k for _, k in stage.beliefs])}"
        )
        raise InputError(f"stage {stage.name} has no variant {variant!r}{on}", help=help)
    return known[variant]


def check_stages(view: ClusterView, declared: Mapping[str, V], key: str) -> None:
    """InputError if the option `key` declares a value for a stage that the application does not have.

    In a deployment of several applications, stages are called `APPLICATION/STAGE`, and values for the stages of other
    applications are ignored.
    """
    if not declared:  # as in most applications, at every plan
        return
    names = [stage.name for stage in view.stages]
    known = {name for stage in names for name in _names(stage)}
    application = names[0].rpartition("/")[0].partition("@")[0]
    for name in declared:
        of = name.rpartition("/")[0]
        if name not in known and not (application and of not in ("", application)):
            raise InputError(f"{key}: no stage {name!r}", help=f"the application's stages are {', '.join(names)}")


def declared_for(stage: StageView, declared: Mapping[str, V]) -> V | None:
    """The value that is declared for a stage, under its full name or without its application or version."""
    if not declared:
        return None
    return next((declared[name] for name in _names(stage.name) if name in declared), None)


def _names(stage: str) -> tuple[str, ...]:
    """The names under which a user may declare values for a stage: `shop@2/detect`, `shop/detect`, `detect`."""
    application, _, name = stage.rpartition("/")
    return (stage, f"{application.partition('@')[0]}/{name}", name)


def equal_replicas(
    stage: StageView, belief: Belief, *, count: int, cores: float, batch_max: int, in_place: bool = True
) -> StagePlan:
    """A stage plan: `count` replicas of the belief's variant and hardware with `cores` each.

    `batch_max` 0: see `largest_batch`.
    """
    largest = largest_batch(stage, belief, cores, batch_max)
    group = Group(ReplicaSpec(stage.name, belief.variant, belief.slot(cores)), count)
    return StagePlan(stage.name, (group,), largest, in_place)


def largest_batch(stage: StageView, belief: Belief, cores: float, batch_max: int) -> int:
    """`batch_max` within the profile's limit. If it is 0, the largest batch within half the SLO, so that a request that
    just missed a batch is still in time with the next (Nexus' rule). Of these, only batches count that serve about as
    many rows per second as any: where CPU quotas bound a replica, larger ones may serve fewer."""
    if batch_max:
        return min(batch_max, belief.batch_max)
    costs_ns = belief.costs_ns(belief.slot(cores))
    most = max(1, bisect_right(costs_ns, stage.slo_ns // 2, 1) - 1)
    rates = list(map(truediv, range(1, most + 1), costs_ns[1 : most + 1]))
    least, size = AS_FAST * max(rates), most
    while rates[size - 1] < least:
        size -= 1
    return size


def table_ms(belief: Belief, cores_max: int, batch_max: int) -> Floats:
    """Durations of batches in ms, shape (cores + 1, batch + 1): both from 0."""
    slots = [belief.slot(cores) for cores in range(1, cores_max + 1)]
    return np.array(
        [[0.0] * (batch_max + 1), *(np.array(belief.costs_ns(each)[: batch_max + 1]) / NS_PER_MS for each in slots)]
    )


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


def largest(recent: tuple[V, ...], newest: V, decisions: int, size: Callable[[V], float]) -> tuple[V, tuple[V, ...]]:
    """Hysteresis: the largest of the last `decisions` decisions; among equals, the newest. And these decisions, which
    are to be given as `recent` the next time.

    So a policy scales up at once, and never goes below any of these decisions.
    """
    recent = (*recent, newest)[-decisions:]
    return max(reversed(recent), key=size), recent


ByStage = tuple[tuple[str, V], ...]
"""What a policy remembers of each stage, by name."""


def remembered(decided: Sequence[tuple[str, StagePlan, str, V]]) -> tuple[Plan, ByStage[V]]:
    """The plan of stages that are decided one by one, each with its name, its reason and what is remembered of it."""
    stages, whys = tuple(target for _, target, _, _ in decided), [why for _, _, why, _ in decided]
    return Plan(stages, "; ".join(whys)), tuple((name, past) for name, _, _, past in decided)


UP_REPLICAS: Final = 4
UP_FACTOR: Final = 2
"""The default scale-up policy of Kubernetes: at most 4 replicas or a doubling per period, whichever is more."""


@dataclass(frozen=True, slots=True)
class CountHistory:
    """The numbers of replicas that were decided for one stage, and how Kubernetes' autoscaler lets them change
    (Kubernetes documentation, "Horizontal Pod Autoscaling", configurable scaling behaviour)."""

    count: int
    """Replicas of the last decision."""
    recommendations: tuple[tuple[int, int], ...] = ()
    """(instant, replicas), oldest first, within the stabilisation window."""
    added: tuple[tuple[int, int], ...] = ()
    """(instant, replicas added), oldest first, within a scale-up period."""

    def decide(
        self, now_ns: int, proposed: int, *, stabilisation_ns: int, up_period_ns: int, replicas_max: int
    ) -> tuple["CountHistory", str]:
        """The history with the number of replicas for a proposed one, and as text how that differs from the proposed
        and from the last one.

        Down only to the largest proposal of the stabilisation window; up at most by the scale-up policy in each
        `up_period_ns` (0: without a limit).
        """
        since_ns = now_ns - stabilisation_ns
        recommendations = tuple(each for each in (*self.recommendations, (now_ns, proposed)) if each[0] >= since_ns)
        most = max(count for _, count in recommendations)
        stable = max(proposed, min(self.count, most))  # up at once; down to the largest recommendation of the window
        desired, added = min(stable, replicas_max), self.added
        if up_period_ns:
            added = tuple(each for each in added if each[0] > now_ns - up_period_ns)
            start = self.count - sum(replicas for _, replicas in added)
            desired = min(desired, max(start + UP_REPLICAS, start * UP_FACTOR, self.count))
        note = f" (were {self.count})" if desired != self.count else ""
        if stable > proposed:
            note += f", {proposed} only after {in_s(stabilisation_ns)}"
        elif desired < stable:
            note += f", limited from {stable}"
        if desired > self.count and up_period_ns:
            added = (*added, (now_ns, desired - self.count))
        return CountHistory(desired, recommendations, added), note


def together_max(memory_bytes: int, each_bytes: int, *, clients_max: int = CLIENTS_MAX) -> int:
    """How many replicas fit into the memory of a device or node, at most its clients; 0 if none fits. With `each_bytes`
    0, which means unknown, the clients alone limit them."""
    return min(clients_max, memory_bytes // each_bytes) if each_bytes > 0 else clients_max
