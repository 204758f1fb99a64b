"""From the cluster that is to the cluster that should be: which replicas to keep, resize, start and stop (law 3).

A pure function of a stage's replicas and its plan. What may be stopped or made smaller *now* is limited so that what
the ready replicas can do together never falls below what the plan's can, or what it was: replacements come first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sloop.core.ledger import millicores
from sloop.core.views import ReplicaView
from sloop.vocabulary import Life, ReplicaId, ReplicaSpec, StagePlan

Resizes = tuple[tuple[ReplicaId, float], ...]

TOLERANCE = 1e-9
"""Sums of the same rates in another order differ by less, relatively."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What to do about one stage, each list in the order to do it in."""

    grow: Resizes
    """Given more cores."""
    shrink: Resizes
    """May be made smaller now."""
    hold_shrink: Resizes
    """Larger than in the plan until enough others are ready."""
    start: tuple[ReplicaSpec, ...]
    stop: tuple[ReplicaId, ...]
    """May be stopped now."""
    hold: tuple[ReplicaId, ...]
    """Not in the plan, but kept until enough others are ready."""


def diff(
    replicas: Sequence[ReplicaView],
    plan: StagePlan,
    now_rps: Callable[[ReplicaId], float],
    rate_rps: Callable[[ReplicaSpec], float],
) -> Difference:
    """`replicas` are the stage's replicas that are starting or ready; draining ones are gone already. `now_rps` says
    what one of them can do on the cores it has, `rate_rps` what a replica of the plan could.

    Exact matches are kept first, then replicas that only differ in cores are resized in place where the plan allows it.
    Ready replicas are kept before starting ones and older before newer, so that what goes first is what started last.
    """
    wanted = [group.spec for group in plan.groups for _ in range(group.count)]
    spare = sorted(replicas, key=lambda r: (r.life is Life.STARTING, r.id))

    missing = _match(wanted, spare, same_cores=True)
    resized: list[tuple[ReplicaId, float]] = []
    if plan.in_place:
        missing = _match(missing, spare, same_cores=False, resized=resized)

    if not resized and not spare:
        return Difference((), (), (), tuple(missing), (), ())
    left_rps = sum(now_rps(replica.id) for replica in replicas if replica.life is Life.READY)
    needed_rps = min(left_rps, sum(map(rate_rps, wanted))) * (1 - TOLERANCE)

    found = {replica.id: replica for replica in replicas}

    def may_lose(rps: float) -> bool:
        nonlocal left_rps
        if left_rps - rps < needed_rps:
            return False
        left_rps -= rps
        return True

    grow: list[tuple[ReplicaId, float]] = []
    shrink: list[tuple[ReplicaId, float]] = []
    hold_shrink: list[tuple[ReplicaId, float]] = []
    for id, cores in resized:
        replica = found[id]
        if cores >= replica.spec.cores:
            grow.append((id, cores))
            continue
        spec = ReplicaSpec(plan.stage, replica.spec.variant, cores)
        loses_rps = now_rps(id) - rate_rps(spec) if replica.life is Life.READY else 0.0
        (shrink if may_lose(loses_rps) else hold_shrink).append((id, cores))
    stop = [replica.id for replica in reversed(spare) if replica.life is Life.STARTING]
    hold: list[ReplicaId] = []
    for replica in reversed(spare):
        if replica.life is Life.READY:
            (stop if may_lose(now_rps(replica.id)) else hold).append(replica.id)
    return Difference(tuple(grow), tuple(shrink), tuple(hold_shrink), tuple(missing), tuple(stop), tuple(hold))


def _match(
    wanted: list[ReplicaSpec],
    spare: list[ReplicaView],
    *,
    same_cores: bool,
    resized: list[tuple[ReplicaId, float]] | None = None,
) -> list[ReplicaSpec]:
    """Take from `spare` a replica for each wanted spec that has one; return the specs left without."""
    by_kind: dict[tuple[object, ...], list[ReplicaView]] = {}
    for replica in reversed(spare):
        by_kind.setdefault(_kind(replica.spec, same_cores), []).append(replica)
    missing: list[ReplicaSpec] = []
    taken: set[ReplicaId] = set()
    for spec in wanted:
        found = _pop(by_kind.get(_kind(spec, same_cores), []), spec.node)
        if found is None:
            missing.append(spec)
            continue
        taken.add(found.id)
        if resized is not None:
            resized.append((found.id, spec.cores))
    spare[:] = [replica for replica in spare if replica.id not in taken]
    return missing


def _kind(spec: ReplicaSpec, same_cores: bool) -> tuple[object, ...]:
    return (spec.variant, spec.device, spec.share, millicores(spec.cores) if same_cores else None)


def _pop(candidates: list[ReplicaView], node: str | None) -> ReplicaView | None:
    """The last candidate, or the last on `node` where the spec names one."""
    if node is None:
        return candidates.pop() if candidates else None
    for index in range(len(candidates) - 1, -1, -1):
        if candidates[index].spec.node == node:
            return candidates.pop(index)
    return None
