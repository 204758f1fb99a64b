"""From the cluster that is to the cluster that should be: which replicas to keep, resize, start and stop (law 3).

A pure function of a stage's replicas and its plan. What may be stopped *now* is limited so that the number of ready
replicas never falls below what the plan asks for, or what there was: a replacement must be ready first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sloop.core.ledger import millicores
from sloop.core.views import ReplicaView
from sloop.vocabulary import Life, ReplicaId, ReplicaSpec, StagePlan


@dataclass(frozen=True, slots=True)
class Difference:
    """What to do about one stage, each list in the order to do it in."""

    resize: tuple[tuple[ReplicaId, float], ...]
    start: tuple[ReplicaSpec, ...]
    stop: tuple[ReplicaId, ...]
    """May be stopped now."""
    hold: tuple[ReplicaId, ...]
    """Not in the plan, but kept until enough others are ready."""


def diff(replicas: Sequence[ReplicaView], plan: StagePlan) -> Difference:
    """`replicas` are the stage's replicas that are starting or ready; draining ones are gone already.

    Exact matches are kept first, then replicas that only differ in cores are resized in place where the plan allows it.
    Ready replicas are kept before starting ones and older before newer, so that what goes first is what started last.
    """
    wanted = [group.spec for group in plan.groups for _ in range(group.count)]
    spare = sorted(replicas, key=lambda r: (r.life is Life.STARTING, r.id))

    missing = _match(wanted, spare, same_cores=True)
    kept_for_resize: list[tuple[ReplicaId, float]] = []
    if plan.in_place:
        missing = _match(missing, spare, same_cores=False, resized=kept_for_resize)

    ready = sum(replica.life is Life.READY for replica in replicas)
    may_stop = max(0, ready - len(wanted))
    surplus_ready = [replica.id for replica in reversed(spare) if replica.life is Life.READY]
    starting = [replica.id for replica in reversed(spare) if replica.life is Life.STARTING]
    return Difference(
        resize=tuple(kept_for_resize),
        start=tuple(missing),
        stop=(*starting, *surplus_ready[:may_stop]),
        hold=tuple(surplus_ready[may_stop:]),
    )


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
