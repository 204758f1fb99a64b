"""How fast a stage's replicas are believed to be, and how large its batches may be.

Replicas that are equal share a `ServiceRate`. `DeviceLoad` follows the batches that run beside each other on one
device.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, overload

from sloop.core.views import Belief, BeliefKey
from sloop.profile.interference import DeviceDemand
from sloop.vocabulary import ALONE, BatchId, Group, Life, Shape, Slot, StagePlan, bounds_of

if TYPE_CHECKING:
    from sloop.core.replica import Replica

DeviceKey = tuple[str, str]
"""A device: the name of a node and that of its accelerator, or "" for the cores of the node."""

RateKey = tuple[str, Slot, Shape, DeviceKey | None]
"""A variant, a slot and a shape: replicas that are equal in them are equally fast. And their device, if the plan has
another limit or rate for equal replicas elsewhere; otherwise None."""

UNLIMITED = 1 << 30
"""The largest batch before the first plan, for replicas that were adopted; their profiles allow less."""


@dataclass(slots=True, eq=False)
class BatchLimits:
    """The largest batches and the planned rates that the current plan has for a stage."""

    default: int = UNLIMITED
    _groups: dict[RateKey, Group] = field(default_factory=dict)
    """The groups of the plan, those that name a node also without it."""
    _by_kind: dict[BeliefKey, int] = field(default_factory=dict)
    """The last limit of each variant on each kind of hardware."""
    placed: set[tuple[str, Slot, Shape]] = field(default_factory=set)
    """Those for which the plan has different limits or rates on different nodes or devices."""

    def follow(self, target: StagePlan) -> bool:
        """Adopt a new plan; returns whether limits or rates depend on the place for other replicas than before. A
        variant that the plan does not mention keeps its last limit until its replicas are replaced."""
        before, self.placed = self.placed, set()
        self.default = target.batch_max
        self._groups.clear()
        for group in target.groups:
            if group.count:
                spec = group.spec
                like = spec.variant, spec.slot, spec.shape
                other = self._groups.get((*like, None))
                if other is not None and _limits_of(other) != _limits_of(group):
                    self.placed.add(like)
                if other is None or other.spec.node is not None or spec.node is None:
                    self._groups[*like, None] = group
                if spec.node is not None:
                    self._groups[*like, (spec.node, spec.device or "")] = group
                self._by_kind[spec.variant, spec.slot.hardware] = target.batch_max_of(group)
        return self.placed != before

    def batch_max(self, variant: str, slot: Slot, shape: Shape = ALONE, where: DeviceKey | None = None) -> int:
        """The largest batch that the plan allows for a variant on a slot in a shape, on this device if one is named;
        the variant's profile may allow less.

        A replica on a slot or in a shape that is not in the plan, because it is being changed or replaced, keeps the
        limit of its variant on its kind of hardware.
        """
        like = variant, slot, shape
        group = self._groups.get((*like, None)) if where is None else self._placed(like, where)
        if group is not None:
            return group.batch_max or self.default
        return self._by_kind.get((variant, slot.hardware), self.default)

    def weight(self, variant: str, slot: Slot, shape: Shape = ALONE, where: DeviceKey | None = None) -> float:
        """The rate that the plan expects one such replica to serve; its cores if the plan does not say."""
        like = variant, slot, shape
        group = self._groups.get((*like, None)) if where is None else self._placed(like, where)
        return group.rate_rps / group.count if group is not None and group.rate_rps else slot.cores

    def _placed(self, like: tuple[str, Slot, Shape], where: DeviceKey) -> Group | None:
        """The group of the plan for replicas on this device: the one that names it, or its node, or any."""
        places = (where, (where[0], ""), None)
        return next((found for place in places if (found := self._groups.get((*like, place)))), None)


def _limits_of(group: Group) -> tuple[int, float]:
    """What a group says of each of its replicas."""
    return group.batch_max, group.rate_rps / group.count


def cost_of(costs_ns: Sequence[int], rows: int) -> int:
    """Believed duration of `rows` ≥ 1 rows, if `costs_ns` has the durations by number of rows. More rows than one pass
    takes run in several passes, one after the other."""
    most = len(costs_ns) - 1
    if rows <= most:
        return costs_ns[rows]
    passes, rest = divmod(rows, most)
    return passes * costs_ns[most] + costs_ns[rest]


@dataclass(slots=True, eq=False)
class ServiceRate:
    """The believed speed of one variant on one slot in one shape.

    All such replicas of a stage share it, so that a control tick costs the same for four replicas as for four hundred.
    """

    belief: Belief
    """Of this shape."""
    slot: Slot
    shape: Shape
    millicores: int
    """Of a replica, with those of its shadow."""
    where: DeviceKey | None = None
    """Their device, if the plan has another limit or rate for such replicas elsewhere."""
    is_shared: bool = False
    """Whether the belief says how these replicas share their devices; if not, nothing is kept of that."""
    profiled_ns: Sequence[int] = (0,)
    """Believed durations by size of a batch, as the belief has them: on the device for which it was profiled."""
    costs_ns: Sequence[int] = (0,)
    """The same with this share of the device, and nothing beside it."""
    batch_max: int = 0
    """The largest batch that these replicas get."""
    weight: float = 0.0
    """The rate that the plan expects each of them to serve; their cores if the plan does not say."""
    least_alone_ns: int = 0
    least_full_ns: int = 0
    """Durations of a batch of one and of a full batch that drop policies reckon with. On a stage with several kinds of
    hardware they are those of the fastest replica: a slow one must not drop what a fast one can still serve."""
    replicas: int = 0
    """How many replicas share it, in any state."""
    ready: int = 0
    starting: int = 0
    crowds: dict[Life, Counter[DeviceKey]] = field(default_factory=dict)
    """If `is_shared`, how many replicas in a state are on each device."""
    by_size: "dict[int, ServiceRate]" = field(default_factory=dict)
    """By class of sizes, the speed with rows of this class; at most as many as there are classes. These rates count no
    replicas."""

    def at(self, size: int, limits: BatchLimits) -> "ServiceRate":
        """The speed with rows of this class of sizes; 0: with the mean of all rows."""
        if not size:
            return self
        found = self.by_size.get(size)
        if found is None:
            belief = self.belief.at(size)
            found = ServiceRate(belief, self.slot, self.shape, self.millicores, self.where, self.is_shared)
            found.refresh(limits, self.least_full_ns)
            self.by_size[size] = found
        return found

    def refresh(self, limits: BatchLimits, full_ns: int = 0) -> None:
        """Reread the costs, which the belief may have corrected, and the limits of the plan. `full_ns` is given for a
        class of sizes: what a full batch of mean rows takes, for which the plan was made. No batch needs to take longer
        because its rows are large, but for that of a single row."""
        costs_ns = self.belief.costs_ns(self.slot)
        if not self.is_shared:
            self.costs_ns = costs_ns
        elif costs_ns is not self.profiled_ns:
            self.profiled_ns = costs_ns
            sizes = range(1, len(costs_ns))
            self.costs_ns = costs_ns = (0, *accumulate((self.beside(size, ()) for size in sizes), max))
        else:
            costs_ns = self.costs_ns
        shape = ALONE if self.shape and bounds_of(self.shape) else self.shape  # plans know nothing of pipelines
        self.batch_max = min(limits.batch_max(self.belief.variant, self.slot, shape, self.where), len(costs_ns) - 1)
        self.weight = limits.weight(self.belief.variant, self.slot, shape, self.where)
        self.least_alone_ns, self.least_full_ns = costs_ns[1], costs_ns[self.batch_max]
        if full_ns:
            self.least_full_ns = max(self.least_alone_ns, min(self.least_full_ns, full_ns))
        for rate in self.by_size.values():
            rate.refresh(limits, self.least_full_ns)

    def least_ns(self, rows: int) -> int:
        """Believed duration of a batch of these rows alone, for drop policies."""
        return self.least_alone_ns if rows == 1 else cost_of(self.costs_ns, rows)

    def count(self, replica: "Replica", change: int) -> None:
        """Count a replica in its state (`change` is 1), or not any more (-1)."""
        life = replica.life
        self.replicas += change
        if life is Life.READY:
            self.ready += change
        elif life is Life.STARTING:
            self.starting += change
        if self.is_shared:
            crowd = self.crowds.setdefault(life, Counter())
            crowd[replica.device_key] += change
            if not crowd[replica.device_key]:
                del crowd[replica.device_key]

    def beside(self, size: int, others: Sequence[DeviceDemand]) -> int:
        """Believed duration of a batch of this size while `others` run on its device, if `is_shared`."""
        factor = self.belief.interference.slowdown(self.belief.demand(size, self.slot), others)
        return max(1, round(self.profiled_ns[size] * factor))

    def capacity(self, life: Life) -> float:
        """What the replicas in this state can serve together in full batches, if `is_shared`: rows per nanosecond.

        Those on one device slow each other down; what replicas of other stages run there is not foreseen.
        """
        batch = self.batch_max
        if not batch:
            return 0.0
        crowds, own = Counter(self.crowds.get(life, {}).values()), self.belief.demand(batch, self.slot)
        return sum(
            devices * count * batch / self.beside(batch, [own] * (count - 1)) for count, devices in crowds.items()
        )


@dataclass(slots=True, eq=False)
class LoadedBatch:
    """A batch that runs on a device beside others."""

    rate: ServiceRate
    """Whose belief has its law of interference."""
    size: int
    stage: str
    began_ns: int
    done_ns: float = 0.0
    """How much of it is believed to be done: the time that it would have taken alone, on all of the device."""
    factor: float = 1.0
    """Its present slowdown: the duration at this speed, divided by its duration alone."""
    demand: DeviceDemand = field(init=False)
    """What it demands of the device."""

    def __post_init__(self) -> None:
        self.demand = self.rate.belief.demand(self.size, self.rate.slot)


@dataclass(slots=True, eq=False)
class DeviceLoad:
    """The batches that run beside each other on one device, and how far they are believed to be.

    Whenever one begins or ends, the others proceed slower or faster from then on: `sloop.profile.interference`. So
    what an estimate learns from a batch is what the batch would have taken alone.
    """

    now_ns: int = 0
    """Up to when the progress of the batches is known."""
    batches: dict[BatchId, LoadedBatch] = field(default_factory=dict)
    """In the order in which they began, so that sums of floats are the same in every run."""
    _is_due: bool = False
    """Whether the factors are out of date. They are computed once for all batches that begin at one instant."""

    def join(self, now_ns: int, id: BatchId, batch: LoadedBatch) -> None:
        """A batch begins."""
        self._advance(now_ns)
        self.batches[id] = batch
        self._is_due = True

    def leave(self, now_ns: int, id: BatchId) -> float:
        """A batch is over; returns the time in ns that it would have taken alone."""
        self._advance(now_ns)
        self._is_due = True
        return self.batches.pop(id).done_ns

    def slowdown(self, id: BatchId) -> float:
        """The slowdown of a batch: its present one or, if that is larger, the mean so far."""
        self._renew()
        batch = self.batches[id]
        passed_ns = self.now_ns - batch.began_ns
        return max(batch.factor, passed_ns / batch.done_ns) if passed_ns else batch.factor

    def _advance(self, now_ns: int) -> None:
        passed_ns = now_ns - self.now_ns
        if passed_ns and self.batches:
            self._renew()
            for batch in self.batches.values():
                batch.done_ns += passed_ns / batch.factor
        self.now_ns = now_ns

    def _renew(self) -> None:
        """Compute the factors for the batches that run now."""
        if not self._is_due:
            return
        self._is_due = False
        demands = [batch.demand for batch in self.batches.values()]
        for place, batch in enumerate(self.batches.values()):
            others = demands[:place] + demands[place + 1 :]
            batch.factor = batch.rate.belief.interference.slowdown(batch.demand, others)


class SlowedCosts(Sequence[int]):
    """The believed durations of a replica's next batch by its size, if it begins now beside what runs on its device.

    They are computed when they are read: most policies read few of them.
    """

    __slots__ = ("_others", "_rate")

    def __init__(self, rate: ServiceRate, load: DeviceLoad) -> None:
        self._rate = rate
        self._others = [batch.demand for batch in load.batches.values()]

    def __len__(self) -> int:
        return len(self._rate.costs_ns)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int, ...]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int, ...]:
        sizes = range(len(self))[at]
        if isinstance(sizes, range):
            return tuple([self[size] for size in sizes])
        return self._rate.beside(sizes, self._others) if sizes else 0
