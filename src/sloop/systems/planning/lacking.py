"""Why a goal cannot be met: which stage or path lacks what, and by how much.

Works from a plan and from beliefs alone, so that every system's failures are explained alike, beside what the system
says itself. A stage's fastest setting is a lone request on the best variant and as many cores as one node has, or the
variant takes: no plan is quicker. Its thriftiest is the one of those tried that spends the fewest core-seconds on a
request, whatever its latency.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from sloop.core.views import Belief
from sloop.solvers.targets import amount
from sloop.systems.planning.answer import Lack
from sloop.systems.planning.predict import Outlook, PathOutlook, StageOutlook
from sloop.systems.planning.words import figure, shown
from sloop.systems.setup import Setup
from sloop.units import to_ms
from sloop.vocabulary import Path

NAMED_MAX: Final = 3
"""Paths that are explained one by one; the others are like them."""
FINE: Final = (0.1, 0.25, 0.5)
"""Parts of a core that the thriftiest setting may have, beside whole ones."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A stage's variant, cores and batch, and what it is chosen for: milliseconds, or core-seconds a request."""

    variant: str
    cores: float
    batch: int
    value: float


def fastest(stage: StageOutlook, cores_max: float) -> Setting:
    """The least time one request can spend at a stage."""
    return min(
        (
            Setting(name, cores, 1, belief.latency_ms(1, cores))
            for name, belief in stage.beliefs.items()
            for cores in _core_counts(belief, cores_max)
        ),
        key=lambda setting: setting.value,
    )


def thriftiest(stage: StageOutlook, cores_max: float) -> Setting:
    """The fewest core-seconds a request can cost at a stage."""
    return min(
        (
            Setting(name, cores, batch, cores * belief.latency_ms(batch, cores) / batch / 1e3)
            for name, belief in stage.beliefs.items()
            for cores in (*FINE, *_core_counts(belief, cores_max))
            if cores <= cores_max
            for batch in range(1, belief.batch_max + 1)
        ),
        key=lambda setting: setting.value,
    )


def lacks_of(setup: Setup, outlook: Outlook) -> list[Lack]:
    """Everything the plan lacks but room on nodes (see `placed`); empty if it keeps up and every path is in time."""
    plan = outlook.plan
    found = [Lack("plan", plan.why)] if not plan.feasible else []
    found += [
        Lack("throughput", f"{name} gets more than the system can ever provide for", name) for name in plan.saturated
    ]
    found += _too_slow(outlook)
    keeps_up = len(found) == (not plan.feasible) + len(plan.saturated)
    late = [way for way in outlook.ways if way.slack_ms < -1e-9]
    found += _too_late(setup, outlook, late, keeps_up=keeps_up)
    if found:
        found += too_large(setup, outlook)
    return found


def _too_slow(outlook: Outlook) -> Iterator[Lack]:
    """Stages whose replicas cannot do what comes."""
    why = f"the plan cannot keep up with {outlook.rate_rps:g} requests/s: "
    for stage in outlook.stages.values():
        if math.isinf(stage.predicted_ms):
            has, comes = stage.rate_max_rps, stage.rate_rps
            if not stage.groups:
                why += f"{stage.name} has no replicas"
            elif has >= comes:
                why += f"{stage.name} waits for batches that never fill"
            else:
                why += f"{stage.name} keeps up with {figure(has)} of {figure(comes)} a second: "
                why += f"{figure(comes - has)} too few"
            yield Lack("throughput", why, stage.name, needs=comes, has=has, unit="requests/s")
            why = ""  # said once


def _too_late(setup: Setup, outlook: Outlook, late: list[PathOutlook], *, keeps_up: bool) -> Iterator[Lack]:
    """Paths beyond their deadline: those that no setting could save, else those the plan is too slow for."""
    cores_max = max((node.cores for node in setup.application.cluster), default=math.inf)
    best = {name: fastest(stage, cores_max) for name, stage in outlook.stages.items()}
    hopeless = []
    for way in outlook.ways:
        least_ms = math.fsum(best[name].value for name in way.path.stages)
        if least_ms > to_ms(way.path.slo_ns):
            hopeless.append((least_ms - to_ms(way.path.slo_ns), way))
    hopeless.sort(key=lambda each: -each[0])
    for by_ms, way in hopeless[:NAMED_MAX]:
        yield _hopeless(way.path, by_ms, best)
    if len(hopeless) > NAMED_MAX:
        yield Lack("deadline", f"{len(hopeless) - NAMED_MAX} more paths need more time than they have")
    if not hopeless and keeps_up:
        for way in late[:NAMED_MAX]:
            yield _late(outlook, way)
        if len(late) > NAMED_MAX:
            yield Lack("deadline", f"{len(late) - NAMED_MAX} more paths exceed their deadlines")


def _hopeless(path: Path, by_ms: float, best: dict[str, Setting]) -> Lack:
    """A path whose stages cannot be quick enough however they are run."""
    slo_ms = to_ms(path.slo_ns)
    name = max(path.stages, key=lambda each: best[each].value)
    setting = best[name]
    own = f"{figure(setting.value)} ms on its fastest setting ({setting.variant}, {amount(setting.cores, 'core')})"
    if len(path.stages) == 1:
        why = f"{name} alone takes {own} of {figure(slo_ms)} ms: {figure(by_ms)} ms too many, even unloaded"
    else:
        why = (
            f"{name} alone takes {own}; the path {shown(path)} needs at least {figure(slo_ms + by_ms)} ms "
            f"of {figure(slo_ms)} ms: {figure(by_ms)} ms too many, even unloaded"
        )
    return Lack("deadline", why, name, path.stages, needs=slo_ms + by_ms, has=slo_ms, unit="ms")


def _late(outlook: Outlook, way: PathOutlook) -> Lack:
    """A path that the plan is too slow for."""
    slo_ms = to_ms(way.path.slo_ns)
    stages = [outlook.stages[name] for name in way.path.stages]
    slow = max(stages, key=lambda stage: stage.predicted_ms)
    alone_ms = math.fsum(stage.alone_ms for stage in stages)
    of = f" of {shown(way.path)}" if len(stages) > 1 else ""
    why = f"the predicted {figure(way.predicted_ms)} ms{of} exceed the deadline of {figure(slo_ms)} ms "
    why += f"by {figure(-way.slack_ms)} ms"
    if len(stages) > 1:
        why += f", most of it at {slow.name}"
    if slow.slowest is not None:
        why += f" ({figure(slow.slowest.service_ms)} ms service, {figure(slow.slowest.wait_ms)} ms wait)"
    if alone_ms > slo_ms:
        why += f"; unloaded, on these variants and cores, a request takes {figure(alone_ms)} ms"
    return Lack("deadline", why, slow.name, way.path.stages, needs=way.predicted_ms, has=slo_ms, unit="ms")


def too_large(setup: Setup, outlook: Outlook) -> Iterator[Lack]:
    """Whether the cluster could hold the rate at all, were every stage run as thriftily as it can be."""
    nodes = setup.application.cluster
    if not nodes or not outlook.rate_rps:
        return
    has, most = sum(node.cores for node in nodes), max(node.cores for node in nodes)
    best = {name: thriftiest(stage, most) for name, stage in outlook.stages.items() if stage.rate_rps}
    each = {name: setting.value * outlook.stages[name].rate_rps for name, setting in best.items()}
    needs = math.fsum(each.values())
    if needs > has:
        name = max(each, key=lambda stage: each[stage])
        setting = best[name]
        why = (
            f"{outlook.rate_rps:g} requests/s take {figure(needs)} cores even on the thriftiest settings, the cluster "
            f"has {figure(has)}: {figure(needs - has)} too few; {name} alone takes {figure(each[name])} "
            f"({setting.variant}, batches of {setting.batch} on {amount(setting.cores, 'core')})"
        )
        yield Lack("cores", why, name, needs=needs, has=has, unit="cores")


def _core_counts(belief: Belief, cores_max: float) -> list[float]:
    """1, 2, … up to what a node has and the variant takes, and that itself."""
    most = min(cores_max, belief.cores_max) if math.isfinite(min(cores_max, belief.cores_max)) else 1.0
    return [*map(float, range(1, int(most) + 1)), most]
