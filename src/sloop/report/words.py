"""Short phrases for plans, replicas and recent seconds: how reports speak of what the core decides about."""

from collections.abc import Sequence

from sloop.report.situation import RECENT_S, Situation
from sloop.units import NS_PER_S, to_ms
from sloop.vocabulary import Group, Life, Plan, StagePlan

IDS_SHOWN = 8


def amount(count: float, noun: str) -> str:
    """`no request`, `1 request`, `2.5 cores`."""
    if count == 0:
        return f"no {noun}"
    return f"{count:g} {noun}{'' if count == 1 else 's'}"


def ids(noun: str, numbers: Sequence[int]) -> str:
    """`request 3`, `requests 3, 4 and 5`, `requests 1, 2, … (20 in all)`."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if len(numbers) > IDS_SHOWN:
        return f"{noun}s {', '.join(map(str, numbers[:IDS_SHOWN]))}, … ({len(numbers)} in all)"
    return f"{noun}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


def target(plan: Plan) -> str:
    """A plan's stages: `classify: 2 × small on 4 cores, batches up to 8`."""
    return "; ".join(_stage(stage) for stage in plan.stages) or "nothing"


def _stage(stage: StagePlan) -> str:
    groups = " + ".join(_group(group) for group in stage.groups) or "no replica"
    return f"{stage.stage}: {groups}, batches up to {stage.batch_max}"


def _group(group: Group) -> str:
    spec = group.spec
    device = f" and {spec.share:.0%} of {spec.device}" if spec.device else ""
    return f"{group.count} × {spec.variant} on {amount(spec.cores, 'core')}{device}"


def difference(before: Plan | None, after: Plan) -> str:
    """What changed from one plan to the next."""
    if before is None:
        return "the first plan"
    old = {stage.stage: stage for stage in before.stages}
    changes = [f"was {_stage(old[stage.stage])}" for stage in after.stages if stage != old.get(stage.stage, stage)]
    changes += [f"new: {stage.stage}" for stage in after.stages if stage.stage not in old]
    return "; ".join(changes) or "nothing changed"


def cluster_now(now: Situation) -> str:
    """Replicas by state of life, and how much longer busy ones are believed to run."""
    lives = {life: now.count(life) for life in Life}
    parts = [f"{amount(lives[Life.READY], 'replica')} ready"]
    parts += [f"{lives[life]} {life.value}" for life in (Life.STARTING, Life.DRAINING) if lives[life]]
    busy = [running for running in now.batches.values() if running.batch.replica in now.replicas]
    if busy:
        left_ns = [running.since_ns + running.believed_ns - now.now_ns for running in busy if running.believed_ns]
        until = f", the first for another {max(0.0, to_ms(min(left_ns))):.1f} ms by belief" if left_ns else ""
        parts.append(f"{len(busy)} busy{until}")
    return ", ".join(parts)


def lately(now: Situation) -> str:
    """Arrivals and ends of the last seconds."""
    known = [second for second in now.lately if second.start_s >= now.now_ns // NS_PER_S - RECENT_S]
    arrivals = ", ".join(str(second.arrivals) for second in known) or "none"
    missed = sum(second.missed for second in known)
    ended = missed + sum(second.served for second in known)
    misses = f"{missed} of {ended} that ended were missed" if ended else "none ended"
    return f"arrivals per second lately: {arrivals}; {misses}"
