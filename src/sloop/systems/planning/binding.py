"""Which constraint binds a stage of a plan: what would break if it had less, or if more came.

A stage is asked what it would do with one replica fewer or, where it has only one, with one core fewer, if that leaves
any; and what it would do as it is with one more request per second at the ingress. Nothing here knows how the system
decided: a constraint binds if the plan stands against it, whether or not the system looked. A stage may be bound by
several, or by nothing: one replica of one core is the least there can be.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sloop.core.views import Belief
from sloop.solvers.targets import amount
from sloop.systems.planning.answer import Bound
from sloop.systems.planning.placed import Placed
from sloop.systems.planning.predict import Outlook, StageOutlook, keeping_up, rate_max_rps
from sloop.systems.planning.words import figure, shown
from sloop.units import to_ms
from sloop.vocabulary import Group


@dataclass(frozen=True, slots=True)
class Less:
    """The stage with a little less than it has, in numbers and in words."""

    replicas: int
    cores: float
    words: str


def bounds_of(outlook: Outlook, stage: StageOutlook, room: Placed) -> tuple[Bound, ...]:
    """What binds one stage of a plan that is believed to keep up; what it lacks is `lacking`'s to say."""
    if not stage.groups:
        return ()
    group = max(stage.groups, key=lambda group: group.count)
    less = _less(stage, group)
    found = list(_against_less(outlook, stage, group, less)) if less is not None and stage.rate_rps else []
    kinds = {bound.kind for bound in found}
    found += [bound for bound in _against_more(outlook, stage, group) if bound.kind not in kinds]
    if group.spec in room.crowded:
        found.append(Bound("cores", room.crowded[group.spec]))
    return tuple(found)


def _against_more(outlook: Outlook, stage: StageOutlook, group: Group) -> Iterator[Bound]:
    """Why it cannot take one more request per second as it is."""
    belief, limit = stage.beliefs[group.spec.variant], stage.largest(group.spec.variant)
    more_rps = stage.rate_rps + stage.visits
    if stage.rate_max_rps < more_rps:
        able = figure(stage.rate_max_rps)
        yield Bound("throughput", f"it keeps up with {able} a second; one more request makes {figure(more_rps)}")
        yield from _no_larger(group, belief, group.spec.cores, limit)
        return
    load = replace(stage.loads[group.spec], rate_rps=more_rps)
    own_ms = stage.would(belief, group.spec.cores, limit, stage.replicas, load).ms
    yield from _too_late(outlook, stage, own_ms, "with one more request per second")


def _against_less(outlook: Outlook, stage: StageOutlook, group: Group, less: Less) -> Iterator[Bound]:
    """Why it cannot do with less."""
    belief, limit = stage.beliefs[group.spec.variant], stage.largest(group.spec.variant)
    load, rate_rps = stage.loads[group.spec], stage.rate_rps
    needed = keeping_up(belief, less.cores, belief.batch_max, rate_rps / less.replicas)
    if needed is not None and needed <= limit:
        own_ms = stage.would(belief, less.cores, limit, less.replicas, load).ms
        yield from _too_late(outlook, stage, own_ms, f"with {less.words}")
        return
    able_rps = rate_max_rps(belief, less.cores, limit) * less.replicas
    yield Bound(
        "throughput",
        f"{less.words} would keep up with {figure(able_rps)} of {figure(rate_rps)} a second in batches of {limit}",
    )
    if needed is None:
        yield from _no_larger(group, belief, less.cores, limit)
        return
    own_ms = stage.would(belief, less.cores, needed, less.replicas, load).ms
    if not load.patience_ms:
        own_ms = max(own_ms, 2 * belief.latency_ms(needed, less.cores))  # its batch, and the one before it
    late = list(_too_late(outlook, stage, own_ms, f"with {less.words} in batches of {needed}"))
    yield from late or [
        Bound("batch", f"{less.words} would keep up in batches of {needed}, and the plan allows {limit}")
    ]


def _no_larger(group: Group, belief: Belief, cores: float, limit: int) -> Iterator[Bound]:
    """That the variant has no larger batches, where they would help and the plan would allow them."""
    if limit == belief.batch_max and _still_gains(belief, cores):
        yield Bound("batch", f"{group.spec.variant} takes batches of {limit} at most, and larger ones would do more")


def _too_late(outlook: Outlook, stage: StageOutlook, own_ms: float, words: str) -> Iterator[Bound]:
    """The tightest path through the stage, if it would be too slow were the stage to take so long."""
    way = outlook.tightest(stage.name)
    if way is None or math.isinf(way.predicted_ms):
        return
    total_ms, slo_ms = way.predicted_ms - stage.predicted_ms + own_ms, to_ms(way.path.slo_ns)
    on = shown(way.path) if len(way.path.stages) > 1 else "a request"
    if way.slack_ms < 0:
        yield Bound("deadline", f"as it is, {on} takes {figure(way.predicted_ms)} of {figure(slo_ms)} ms")
    elif total_ms > slo_ms:
        yield Bound("deadline", f"{words} {on} would take {figure(total_ms)} of {figure(slo_ms)} ms")


def _less(stage: StageOutlook, group: Group) -> Less | None:
    """A replica or a core fewer; None where there is only one of either."""
    cores = group.spec.cores
    if stage.replicas > 1:
        return Less(stage.replicas - 1, cores, amount(stage.replicas - 1, "replica"))
    return Less(1, cores - 1, f"1 replica of {amount(cores - 1, 'core')}") if cores > 1 else None


def _still_gains(belief: Belief, cores: float) -> bool:
    """Whether throughput still rises at the largest batch."""
    most = belief.batch_max
    if most == 1:
        return False
    return most / belief.latency_ms(most, cores) > (most - 1) / belief.latency_ms(most - 1, cores)
