"""Why plans are infeasible: which application, stage, path or kind of hardware lacks what, and how much.

The reasons follow from the plans, the beliefs and the cluster alone, so they have the same form for all systems. They
distinguish a goal that no plan could reach from a plan that misses it: a deadline is impossible if a single request on
each stage's fastest configuration takes longer; a rate, if the cheapest configurations need more cores than the cluster
has. `placement` says why replicas have no room.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from msgspec import structs

from sloop.app.hardware import local_limit
from sloop.core.views import Belief, BeliefKey
from sloop.systems.planning.placement import PlanShortfall, Room
from sloop.systems.planning.timing import PathPrediction, PlanPrediction, StagePrediction, stage_beliefs
from sloop.systems.setup import ApplicationSetup
from sloop.text import arrows, counted, listed, number
from sloop.units import ROUNDING, at_least
from sloop.vocabulary import Node, Slot

NAMED_MAX: Final = 3
"""Paths that are explained one by one; the others are only counted."""
CORE_FRACTIONS: Final = (0.1, 0.25, 0.5)
"""What the search for the cheapest configuration tries besides whole cores: where beliefs gain less than linearly from
cores, a fraction of one is the cheapest, and a tenth is about the least that container runtimes are asked for."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A stage's variant, slot and batch, with the figure by which it was chosen."""

    variant: str
    slot: Slot
    batch: int
    value: float
    """Milliseconds of a lone request (`fastest`), or core-seconds per request (`cheapest`)."""

    def text(self, nodes: Sequence[Node]) -> str:
        """Its slot: `4 cores`, `1 core and a T4 of g4dn.xlarge`; the kind only if the nodes are of several kinds."""
        device = f" and a {self.slot.accelerator}" if self.slot.accelerator else ""
        several = len({node.hardware for node in nodes}) > 1
        return counted(self.slot.cores, "core") + device + (f" of {self.slot.hardware}" if several else "")


def largest_nodes(nodes: Iterable[Node]) -> dict[str, float]:
    """The cores of the largest node of each kind of hardware, in the order of declaration; {"": ∞} without nodes."""
    most: dict[str, float] = {}
    for node in nodes:
        most[node.hardware] = max(node.cores, most.get(node.hardware, 0.0))
    return most or {"": math.inf}


class BestConfigurations:
    """The best configurations of an application's stages, whatever its plan and its rate; each is searched once."""

    def __init__(self, setup: ApplicationSetup) -> None:
        self._beliefs = {stage.name: stage_beliefs(setup, stage.name) for stage in setup.application.stages}
        self._cores_max = largest_nodes(setup.application.cluster)

    @cached_property
    def fastest(self) -> dict[str, Configuration]:
        """By stage, the configuration on which a lone request spends the least time, in ms."""
        return {name: self._fastest(beliefs) for name, beliefs in self._beliefs.items()}

    def _fastest(self, beliefs: Mapping[BeliefKey, Belief]) -> Configuration:
        tried = (
            Configuration(variant, slot, 1, belief.latency_ms(1, slot))
            for (variant, hardware), belief in beliefs.items()
            for slot in map(belief.slot, _core_counts(belief, self._cores_max[hardware]))
        )
        return min(tried, key=lambda configuration: configuration.value)

    @cached_property
    def cheapest(self) -> dict[str, dict[str, Configuration]]:
        """By stage and kind of hardware, the configuration that spends the fewest core-seconds per request, whatever
        its latency."""
        return {name: self._cheapest(beliefs) for name, beliefs in self._beliefs.items()}

    def _cheapest(self, beliefs: Mapping[BeliefKey, Belief]) -> dict[str, Configuration]:
        best: dict[str, Configuration] = {}
        for (variant, hardware), belief in beliefs.items():
            most = self._cores_max[hardware]
            for slot in map(belief.slot, (*CORE_FRACTIONS, *_core_counts(belief, most))):
                for batch in range(1, belief.batch_max + 1) if slot.cores <= most else ():
                    value = slot.cores * belief.latency_ms(batch, slot) / batch / 1e3
                    if hardware not in best or value < best[hardware].value:
                        best[hardware] = Configuration(variant, slot, batch, value)
        return best


def _core_counts(belief: Belief, cores_max: float) -> list[float]:
    """1, 2, … up to what a node has and the variant gains from, and that maximum itself."""
    most = min(cores_max, belief.cores_max) if math.isfinite(min(cores_max, belief.cores_max)) else 1.0
    return [*map(float, range(1, int(most) + 1)), most]


def shortfalls_of(
    setup: ApplicationSetup, prediction: PlanPrediction, room: Room, best: BestConfigurations
) -> list[PlanShortfall]:
    """Everything that an application's plan lacks; empty if it keeps up, every path is in time and every replica has
    room."""
    application, nodes = setup.application.name, setup.application.cluster
    shortfalls = [*_too_slow(setup, prediction)]
    shortfalls += _too_late(setup, prediction, best.fastest, keeps_up=not shortfalls)
    if shortfalls or room.shortfalls:
        shortfalls += beyond_cluster([(prediction, best)], nodes)
    if any(shortfall.kind in ("cores", "memory", "device") for shortfall in (*shortfalls, *room.shortfalls)):
        shortfalls += unused_kinds(prediction, nodes)
    shortfalls, named = [*shortfalls, *room.shortfalls], set[str]()
    for index, shortfall in enumerate(shortfalls):
        limit = local_limit(nodes, shortfall.kind)
        if limit and limit not in named:
            named.add(limit)
            shortfalls[index] = structs.replace(shortfall, why=f"{shortfall.why}; this machine is limited to {limit}")
    return [structs.replace(shortfall, application=application) for shortfall in shortfalls]


def _too_slow(setup: ApplicationSetup, prediction: PlanPrediction) -> Iterator[PlanShortfall]:
    """Stages whose replicas cannot serve what arrives there."""
    start = f"the plan cannot keep up with {number(prediction.rate_rps)} requests/s: "
    for stage in prediction.stages.values():
        if math.isinf(stage.slowest.total_ms):
            serves, arrives = stage.rate_max_rps, stage.rate_rps
            if not stage.groups:
                why = f"{stage.name} has no replicas"
            elif serves + ROUNDING >= arrives:
                why = f"{stage.name} waits for batches that never fill"
            else:
                why = f"{stage.name} serves {number(serves)} of {number(arrives)} requests/s, "
                why += f"{number(arrives - serves)} too few"
            yield PlanShortfall("throughput", start + why, stage.name, needs=arrives, has=serves, unit="requests/s")
            start = ""  # the rate is named once
        elif stage.name in prediction.plan.saturated:
            why = f"{setup.system.name} has no plan that provides for what arrives at {stage.name}"
            yield PlanShortfall("throughput", why, stage.name)


def _too_late(
    setup: ApplicationSetup, prediction: PlanPrediction, best: Mapping[str, Configuration], *, keeps_up: bool
) -> Iterator[PlanShortfall]:
    """Paths beyond their deadlines: those that no configuration could save; else those that the plan is too slow for,
    unless it cannot keep up, where every path through the stage is late without end."""
    nodes = setup.application.cluster
    least_ms = [math.fsum(best[name].value for name in path.path.stages) for path in prediction.paths]
    pairs = zip(least_ms, prediction.paths, strict=True)
    impossible = [(least, path) for least, path in pairs if least > path.slo_ms + ROUNDING]
    impossible.sort(key=lambda pair: pair[1].slo_ms - pair[0])
    for least, path in impossible[:NAMED_MAX]:
        yield _impossible(path, least, best, nodes)
    if len(impossible) > NAMED_MAX:
        yield PlanShortfall("deadline", f"{len(impossible) - NAMED_MAX} more paths have impossible deadlines")
    if impossible or not keeps_up:
        return
    late = [path for path in prediction.paths if path.slack_ms < -ROUNDING]
    for path in late[:NAMED_MAX]:
        yield _late(path)
    if len(late) > NAMED_MAX:
        yield PlanShortfall("deadline", f"{len(late) - NAMED_MAX} more paths are too slow")


def _impossible(
    path: PathPrediction, least_ms: float, best: Mapping[str, Configuration], nodes: Sequence[Node]
) -> PlanShortfall:
    """A path whose deadline cannot be met however its stages are run."""
    stages = path.path.stages
    name = max(stages, key=lambda stage: best[stage].value)
    fast = best[name]
    on = f"variant {fast.variant} on {fast.text(nodes)}"
    why = f"{arrows(stages)} takes at least {number(least_ms)} ms even without load, and the deadline is "
    why += f"{number(path.slo_ms)} ms: {number(least_ms - path.slo_ms)} ms too long; "
    if len(stages) > 1:
        why += f"{name} alone takes {number(fast.value)} ms at best, with "
    why += on if len(stages) > 1 else f"{on} is the fastest there is"
    return PlanShortfall("deadline", why, name, stages, needs=least_ms, has=path.slo_ms, unit="ms")


def _late(path: PathPrediction) -> PlanShortfall:
    """A path that the plan is too slow for."""
    stages = path.path.stages
    slow = max(path.visits, key=lambda visit: visit.total_ms)
    why = f"{arrows(stages)} is predicted to take {number(path.predicted_ms)} ms, and the deadline is "
    why += f"{number(path.slo_ms)} ms: {number(-path.slack_ms)} ms too long"
    if slow.slowest is not None:
        where = f"at {slow.stage.name}, the slowest stage, " if len(stages) > 1 else ""
        why += f"; {where}{number(slow.slowest.service_ms)} ms service and {number(slow.slowest.wait_ms)} ms wait"
    alone_ms = math.fsum(visit.stage.alone_ms for visit in path.visits)
    if alone_ms > path.slo_ms + ROUNDING:
        why += f"; even without load it takes {number(alone_ms)} ms on these variants and cores"
    name = slow.stage.name
    return PlanShortfall("deadline", why, name, stages, needs=path.predicted_ms, has=path.slo_ms, unit="ms")


def beyond_cluster(
    applications: Sequence[tuple[PlanPrediction, BestConfigurations]], nodes: Sequence[Node]
) -> Iterator[PlanShortfall]:
    """Whether the rates need more cores than the cluster has, even if every stage runs its cheapest configuration.

    On several kinds of hardware each stage may use the kind that suits it best. Let a core of a kind be worth the part
    of the rates that it could serve if all stages ran on that kind. The rates are impossible if all cores together are
    worth less than what the stages take, each on the kind where it takes least: every way to divide the stages among
    the kinds then needs too much of one (weak duality of linear programs). With one kind, or one stage, this is exact.
    """
    predictions, has = [prediction for prediction, _ in applications], dict[str, float]()
    for node in nodes:
        has[node.hardware] = has.get(node.hardware, 0.0) + node.cores
    best = [
        (stage, configurations.cheapest[stage.name])
        for prediction, configurations in applications
        for stage in prediction.stages.values()
        if stage.rate_rps
    ]
    needs = {kind: math.fsum(_cores(stage, by_kind, kind) for stage, by_kind in best) for kind in has}
    needs = {kind: cores for kind, cores in needs.items() if cores}
    if not nodes or not needs:
        return
    takes = math.fsum(min(_cores(stage, by_kind, kind) / needs[kind] for kind in by_kind) for stage, by_kind in best)
    worth = math.fsum(has[kind] / cores for kind, cores in needs.items())
    if at_least(worth, takes):
        return
    if len(predictions) == 1:
        what = f"{number(predictions[0].rate_rps)} requests/s need"
    else:
        what = f"the rates of all {len(predictions)} applications together need"
    (kind, cores), *others = needs.items()
    if not others:
        stage, by_kind = max(best, key=lambda pair: _cores(pair[0], pair[1], kind))
        configuration = by_kind[kind]
        why = (
            f"{what} {number(cores)} cores even on the cheapest configurations, and the cluster has "
            f"{number(has[kind])}: {number(cores - has[kind])} too few; {stage.name} alone needs "
            f"{number(_cores(stage, by_kind, kind))} ({configuration.variant}, batches of {configuration.batch} on "
            f"{configuration.text(nodes)})"
        )
        yield PlanShortfall("cores", why, stage.name, needs=cores, has=has[kind], unit="cores")
        return
    needed = listed([f"{number(cores)} of {kind}" for kind, cores in needs.items()], "or")
    there = listed([f"{number(has[kind])} of {kind}" for kind in needs])
    part = f"{100 * worth / takes:.3g} %"
    why = f"{what} {needed} cores even on the cheapest configurations, and the cluster has {there}: enough for {part}"
    rate_rps = math.fsum(prediction.rate_rps for prediction in predictions)
    yield PlanShortfall("cores", why, needs=rate_rps, has=rate_rps * worth / takes, unit="requests/s")


def _cores(stage: StagePrediction, by_kind: Mapping[str, Configuration], kind: str) -> float:
    """The cores that the rate of a stage takes on a kind of hardware; 0 if it cannot run there."""
    return by_kind[kind].value * stage.rate_rps if kind in by_kind else 0.0


def unused_kinds(prediction: PlanPrediction, nodes: Sequence[Node]) -> Iterator[PlanShortfall]:
    """The kinds of hardware that a stage cannot use, because none of its variants has a profile for them."""
    for name, stage in prediction.stages.items():
        usable = {kind for _, kind in stage.beliefs}
        for kind in dict.fromkeys(node.hardware for node in nodes if usable and node.hardware not in usable):
            idle = [node for node in nodes if node.hardware == kind]
            why = f"{name} cannot use the {counted(len(idle), 'node')} of {kind}: it has no profile for {kind}"
            yield PlanShortfall("hardware", why, name, hardware=kind)
