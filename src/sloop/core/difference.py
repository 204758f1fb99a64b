"""What leads a stage to its plan: `diff` compares its replicas with the plan, and says what to resize, start, stop."""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from sloop.core.ledger import millicores
from sloop.core.views import ReplicaView
from sloop.units import ROUNDING
from sloop.vocabulary import ALONE, Life, ReplicaId, ReplicaSpec, StagePlan, Worker

Resizes = tuple[tuple[ReplicaId, float], ...]
"""Replicas with the cores to resize them to."""
Attachments = tuple[tuple[ReplicaId, Worker], ...]
"""Replicas with the shadows that they get."""
Matches = list[tuple[ReplicaView, ReplicaSpec]]
"""Replicas with what the plan wants of them."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The orders that lead one stage to its plan, each list in order of execution."""

    grow: Resizes
    """Replicas that get more cores."""
    grown: tuple[ReplicaSpec, ...]
    """What the plan wants instead of each of them: it may name their node or device."""
    shrink: Resizes
    """Replicas that may get fewer cores now."""
    hold_shrink: Resizes
    """Replicas that keep more cores than planned until enough others are ready."""
    start: tuple[ReplicaSpec, ...]
    stop: tuple[ReplicaId, ...]
    """Replicas that may be stopped now."""
    hold: tuple[ReplicaId, ...]
    """Replicas outside the plan that are kept until enough others are ready."""
    attach: Attachments = ()
    detach: tuple[ReplicaId, ...] = ()
    """Replicas that lose their shadow now, also those that get another one afterwards."""
    hold_detach: tuple[ReplicaId, ...] = ()
    """Replicas that keep a shadow that is not in the plan until enough others are ready."""

    @property
    def holds(self) -> bool:
        """Whether any replica is kept, or kept large or with its shadow, until others are ready."""
        return bool(self.hold or self.hold_shrink or self.hold_detach)

    def keeping(self, kept: Container[ReplicaId]) -> "Difference":
        """The same, but these replicas are kept, and as large as they are."""
        return replace(
            self,
            shrink=tuple(each for each in self.shrink if each[0] not in kept),
            hold_shrink=tuple(each for each in self.shrink if each[0] in kept) + self.hold_shrink,
            stop=tuple(id for id in self.stop if id not in kept),
            hold=tuple(id for id in self.stop if id in kept) + self.hold,
            detach=tuple(id for id in self.detach if id not in kept),
            hold_detach=tuple(id for id in self.detach if id in kept) + self.hold_detach,
        )


Preference = Callable[[ReplicaView], tuple[int, ...]]
"""Which replicas stay: those with the smallest keys."""


def oldest_first(replica: ReplicaView) -> tuple[int, ...]:
    """Ready replicas stay before starting ones, and older ones before newer ones."""
    return replica.life is Life.STARTING, replica.id


def fullest_nodes_first(replicas: Sequence[ReplicaView]) -> Preference:
    """Ready replicas stay before starting ones, busy before idle ones, then those on nodes with the most replicas: so
    the nodes that have their weights keep room for more of them (Flashpoint, section 2.14 of our specification)."""
    on = Counter(replica.node for replica in replicas)
    return lambda replica: (replica.life is Life.STARTING, not replica.running, -on[replica.node], replica.id)


def diff(
    replicas: Sequence[ReplicaView],
    plan: StagePlan,
    present_rps: Callable[[ReplicaId], float],
    rate_rps: Callable[[ReplicaSpec], float],
    refused: Container[ReplicaId] = (),
    prefers: Preference = oldest_first,
) -> Difference:
    """Which replicas of a stage to keep, resize, start and stop. A pure function of the replicas and the stage's plan.

    `replicas` are starting or ready, not draining. `present_rps` gives the visits per second that a replica can serve
    on its present cores, `rate_rps` those of a replica of the plan. Stops and shrinks are held back while they would
    leave less ready capacity than both the plan and the present replicas have: replacements come first. Replicas in
    `refused` did not get the cores that were ordered, and will not: nothing waits for their missing capacity.

    It keeps exact matches first, then changes shadows of replicas that differ only in that: both for the specs that
    name a node or a device, then both for the others. Then it resizes replicas that differ only in cores, or in cores
    and shadow, if the plan allows it. Of equal replicas those stay that it `prefers`, and the
    others are stopped in the opposite order, by default the newest first. A shadow is attached to a running replica; a
    replica that gets another one serves alone for as long as that takes to load.
    """
    wanted = [group.spec for group in plan.groups for _ in range(group.count)]
    spare = sorted(replicas, key=prefers)

    exact, reformed, missing = _match_placed_first(wanted, spare)
    resized: Matches = []
    if plan.in_place:
        resized, missing = _match(missing, spare, _but_cores)

    if not reformed and not resized and not spare:
        return Difference((), (), (), (), tuple(missing), (), ())
    left_rps = sum(present_rps(replica.id) for replica in replicas if replica.life is Life.READY)
    missing_rps = sum(rate_rps(spec) - present_rps(replica.id) for replica, spec in exact if replica.id in refused)
    # Relative: the same rates, summed in another order, differ by some units in the last place.
    needed_rps = min(left_rps, sum(map(rate_rps, wanted)) - missing_rps) * (1 - ROUNDING)

    def may_lose(rps: float) -> bool:
        nonlocal left_rps
        if left_rps - rps < needed_rps:
            return False
        left_rps -= rps
        return True

    grow: list[tuple[ReplicaId, float]] = []
    grown: list[ReplicaSpec] = []
    shrink: list[tuple[ReplicaId, float]] = []
    hold_shrink: list[tuple[ReplicaId, float]] = []
    for replica, wanted_spec in resized:
        cores = wanted_spec.cores
        if cores >= replica.spec.cores:
            grow.append((replica.id, cores))
            grown.append(wanted_spec)
            continue
        spec = replica.spec.with_cores(cores)
        loses_rps = present_rps(replica.id) - rate_rps(spec) if replica.life is Life.READY else 0.0
        (shrink if may_lose(loses_rps) else hold_shrink).append((replica.id, cores))
    attach, detach, hold_detach = _other_shadows((*reformed, *resized), present_rps, rate_rps, may_lose)
    stop = [replica.id for replica in reversed(spare) if replica.life is Life.STARTING]
    hold: list[ReplicaId] = []
    for replica in reversed(spare):
        if replica.life is Life.READY:
            (stop if may_lose(present_rps(replica.id)) else hold).append(replica.id)
    shadows = tuple(attach), tuple(detach), tuple(hold_detach)
    return Difference(
        tuple(grow), tuple(grown), tuple(shrink), tuple(hold_shrink), tuple(missing), tuple(stop), tuple(hold), *shadows
    )


def _other_shadows(
    matches: Sequence[tuple[ReplicaView, ReplicaSpec]],
    present_rps: Callable[[ReplicaId], float],
    rate_rps: Callable[[ReplicaSpec], float],
    may_lose: Callable[[float], bool],
) -> tuple[list[tuple[ReplicaId, Worker]], list[ReplicaId], list[ReplicaId]]:
    """The replicas that get a shadow, that lose theirs now, and that keep it until others are ready."""
    attach: list[tuple[ReplicaId, Worker]] = []
    detach: list[ReplicaId] = []
    hold: list[ReplicaId] = []
    for replica, wanted in matches:
        if replica.spec.shadow == wanted.shadow:
            continue
        if wanted.shadow is None:
            alone = structs.replace(replica.spec, shape=ALONE)
            loses_rps = present_rps(replica.id) - rate_rps(alone) if replica.life is Life.READY else 0.0
            (detach if may_lose(loses_rps) else hold).append(replica.id)
        elif replica.spec.shadow is None:
            attach.append((replica.id, wanted.shadow))
        else:  # nothing takes its place before it is gone
            detach.append(replica.id)
    return attach, detach, hold


def _match_placed_first(
    wanted: list[ReplicaSpec], spare: list[ReplicaView]
) -> tuple[Matches, Matches, list[ReplicaSpec]]:
    """The replicas that are as wanted, those that differ only in their shadow, and the specs without a match, in the
    order of the plan. Specs that name a node or a device choose first: the others match replicas anywhere."""
    placed = [spec for spec in wanted if spec.node is not None or spec.device is not None]
    others = [spec for spec in wanted if spec.node is None and spec.device is None] if placed else wanted
    exact: Matches = []
    reformed: Matches = []
    missing: list[ReplicaSpec] = []
    for group in (placed, others):
        as_wanted, left = _match(group, spare, _exactly) if group else ([], [])
        exact += as_wanted
        if [1 for spec in left if spec.shape] or (left and [1 for replica in spare if replica.spec.shape]):
            but_shadow, left = _match(left, spare, _but_shadow)
            reformed += but_shadow
        missing += left
    if missing and placed and others:
        rank = {spec: place for place, spec in enumerate(wanted)}
        missing.sort(key=rank.__getitem__)
    return exact, reformed, missing


def _match(
    wanted: list[ReplicaSpec], spare: list[ReplicaView], kind: Callable[[ReplicaSpec], tuple[object, ...]]
) -> tuple[Matches, list[ReplicaSpec]]:
    """Move a replica of the same kind out of `spare` for each wanted spec. Returns the replicas with their specs, and
    the specs without a match."""
    by_kind: dict[tuple[object, ...], list[ReplicaView]] = {}
    for replica in reversed(spare):
        by_kind.setdefault(kind(replica.spec), []).append(replica)
    matched: Matches = []
    missing: list[ReplicaSpec] = []
    for spec in wanted:
        found = _pop(by_kind.get(kind(spec), []), spec)
        if found is None:
            missing.append(spec)
        else:
            matched.append((found, spec))
    taken = {replica.id for replica, _ in matched}
    spare[:] = [replica for replica in spare if replica.id not in taken]
    return matched, missing


# Keys that are equal for replicas that can replace each other.


def _exactly(spec: ReplicaSpec) -> tuple[object, ...]:
    slot = spec.slot
    device = slot.hardware, slot.accelerator, slot.share, slot.is_capped
    return (spec.variant, device, millicores(slot.cores), spec.shape)


def _but_shadow(spec: ReplicaSpec) -> tuple[object, ...]:
    slot = spec.slot
    return (spec.variant, slot.hardware, slot.accelerator, slot.share, slot.is_capped, millicores(slot.cores))


def _but_cores(spec: ReplicaSpec) -> tuple[object, ...]:
    slot = spec.slot
    return (spec.variant, slot.hardware, slot.accelerator, slot.share, slot.is_capped)


def _pop(candidates: list[ReplicaView], spec: ReplicaSpec) -> ReplicaView | None:
    """The last candidate; if the spec names a node or a device, the last one there. A spec that names neither matches a
    replica anywhere, so that replicas are not replaced only because of where they were placed."""
    if spec.node is None and spec.device is None:
        return candidates.pop() if candidates else None
    for index in range(len(candidates) - 1, -1, -1):
        if spec.node in (None, candidates[index].node) and spec.device in (None, candidates[index].device):
            return candidates.pop(index)
    return None
