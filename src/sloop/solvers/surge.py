"""What replicas carry as they are, and how larger and further ones share what room there is: arithmetic for Biscale.

Promises plans within the cores that there are wherever any are, and small replicas before large ones where not both
fit, because they give the most throughput for a core (Amdahl; dissertation chapter P4, on why to scale horizontally).
Groups are (replicas, units of each).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sloop.core.views import ClusterView, NodeView, StageView
from sloop.solvers.biscale import SLACK, Choice, Model, Program
from sloop.vocabulary import Life, ReplicaSpec

Groups = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Have:
    """A stage's replicas, in units of cores, most first. While none is ready, those that start stand for ready ones."""

    ready: tuple[int, ...]
    starting: tuple[int, ...]

    @property
    def count(self) -> int:
        """Replicas that serve; one at least, as there will be."""
        return max(1, len(self.ready))

    @property
    def most(self) -> int:
        """Units of the largest."""
        return self.ready[0] if self.ready else 1

    @property
    def least(self) -> int:
        """Units of the smallest."""
        return self.ready[-1] if self.ready else 1

    @property
    def largest(self) -> int:
        """How many are as large as the largest."""
        return max(1, self.ready.count(self.most))


def have_of(stage: StageView, unit: float) -> Have:
    """The stage's replicas that are ready and that start, sizes rounded to whole units."""
    sizes = {
        life: tuple(
            sorted((max(1, round(one.spec.cores / unit)) for one in stage.replicas if one.life is life), reverse=True)
        )
        for life in (Life.READY, Life.STARTING)
    }
    if not sizes[Life.READY]:
        return Have(sizes[Life.STARTING], ())
    return Have(sizes[Life.READY], sizes[Life.STARTING])


def carry(program: Program, rate_rps: float, have: Sequence[Have]) -> bool:
    """Whether the replicas that serve carry the rate: the largest of each stage alone, or all as if the smallest."""
    large = tuple((one.largest, one.most) for one in have)
    alike = tuple((one.count, one.least) for one in have)
    for view in dict.fromkeys((large, alike)):
        found = program.vertical(rate_rps, [count for count, _ in view])
        if found is not None and all(choice.cores <= units for choice, (_, units) in zip(found, view, strict=True)):
            return True
    return False


def most(program: Program, rate_rps: float) -> tuple[Choice, ...]:
    """Small replicas for the rate, or for the highest below it that the cores there are allow.

    The program must hold without any requests.
    """
    found = program.horizontal(rate_rps)
    if found is not None:
        return found
    best, low, high = program.horizontal(0), 0, int(rate_rps) + 1
    assert best is not None, "no rate at all can be kept"
    while high - low > 1:
        middle = (low + high) // 2
        found = program.horizontal(middle)
        if found is None:
            high = middle
        else:
            best, low = found, middle
    return best


def units_of(groups: Sequence[Groups]) -> int:
    """All of them together."""
    return sum(count * units for group in groups for count, units in group)


def kept(have: Have, choice: Choice) -> Groups:
    """The replicas as they are, and small ones beside them until there are as many as chosen."""
    there = Counter((*have.ready, *have.starting))
    there[choice.cores] += max(0, choice.replicas - there.total())
    return [(count, units) for units, count in there.items()]


def beside(
    program: Program, rate_rps: float, have: Sequence[Have], goal: Sequence[Choice]
) -> tuple[list[Groups], tuple[Choice, ...]]:
    """Where not all has room: the small replicas of the goal that are missing, and the others as the rest allows.

    The others carry what they can of the rate until the small ones are ready; the choices are theirs.
    """
    counts = [min(one.count, choice.replicas) for one, choice in zip(have, goal, strict=True)]
    further = [choice.replicas - count for count, choice in zip(counts, goal, strict=True)]
    reserved = sum(count * choice.cores for count, choice in zip(further, goal, strict=True))
    split = replace(program, cores_total=program.cores_total - reserved).split(rate_rps, counts)
    choices = split.choices if split else tuple(goal)
    groups = [
        [(count, choice.cores), (missing, small.cores)]
        for count, choice, missing, small in zip(counts, choices, further, goal, strict=True)
    ]
    return groups, choices


def on_their_nodes(program: Program, view: ClusterView, unit: float) -> Program:
    """The program with replicas no larger than their own nodes let them grow; where there is one node, its total is
    limit enough."""
    if len(view.nodes) < 2:
        return program
    nodes = {node.node.name: node for node in view.nodes}
    models = [
        _cut(model, [_room(one.spec, nodes, unit) for one in stage.replicas])
        for model, stage in zip(program.models, view.stages, strict=True)
    ]
    return replace(program, models=tuple(models))


def _room(spec: ReplicaSpec, nodes: dict[str, NodeView], unit: float) -> int:
    """Units that a replica could have where it is."""
    node = nodes.get(spec.node or "")
    return int((spec.cores + (node.free_cores if node else 0.0)) / unit + SLACK)


def _cut(model: Model, rooms: Sequence[int]) -> Model:
    rows = max(1, min((model.latency_ms.shape[0], *rooms)))
    return replace(model, latency_ms=model.latency_ms[:rows])
