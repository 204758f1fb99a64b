"""Latency estimates for policies: a variant's profile, corrected by the durations of finished batches.

Deterministic: the same profile and observations give the same answers. An estimate never sees the simulator's truth; it
implements `sloop.core.views.Belief`.

Source of the correction: Sponge, specification §6.16: the latency is multiplied by a moving average of (measured P99 /
predicted), clipped to [0.8, 1.5].

Where rows differ in size, each class of sizes has an estimate of its own. The estimate of the variant is the mean of
the classes, weighted by the rows that came. A profile that knows sizes is corrected class by class. A profile that does
not is only the start: `sloop.profile.size_law` says how finished batches teach what other sizes take.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from operator import mul
from statistics import fmean
from typing import TYPE_CHECKING, Any

from sloop.profile.interference import NO_SLOWDOWN, DeviceDemand, Interference
from sloop.profile.profile import FLOOR_MS, Profile
from sloop.profile.size_law import NO_LESSONS, SizeLaw, SizeLearning, SizeLessons
from sloop.sizes import GRID, SizeClasses
from sloop.transient import Cache
from sloop.units import ms, s, to_ms
from sloop.vocabulary import ALONE, Shape, Slot, bounds_of, shadow_in

if TYPE_CHECKING:
    from sloop.profile.pairs import BlockCosts

CORRECTION_MIN, CORRECTION_MAX = 0.8, 1.5
LEARNT_MIN, LEARNT_MAX = 0.5, 3.0
"""Bounds of the correction of a class of sizes that the profile extrapolates; the upper one also where it knows no
sizes, so that the mean of batches that ran is corrected."""
EVERY = 64
"""Observations between two corrections, so that `observe` takes far less than a microsecond on average."""
SETTLED = 4
"""After so many batches of a class, its mean is known well enough to tell how much its batches differ from it."""
BLOCKS = 4
"""The P99 is taken over the observations of the last `BLOCKS` corrections."""
HIGHEST = BLOCKS * EVERY // 100 + 1
"""How many of the highest ratios of each block are kept; the P99 over all blocks is one of these."""
WEIGHT = 0.3
"""Weight of the newest P99 in the moving average."""
NOTICED = 0.005
"""Policies see a new correction only if it changed by more than this; otherwise every tick would change the plan."""
SHAPES_MAX = 64
"""For how many shapes of a variant corrections are kept; the oldest is forgotten first."""
PRIOR_WEIGHT_MIN = 0.01
"""A smaller prior weight counts as 0, which it reaches after 13 corrections."""
CACHED_MAX = 512
"""Core counts whose costs are cached. The bound keeps a policy with arbitrary core fractions from filling memory."""

OVERHEAD_MIN = 0.1
"""At least this part of the duration of a batch of one row is taken as overhead, and at least this part as the row's
own time. If either were 0, no batch could teach its factor (u or v in `sloop.profile.size_law`)."""
BLOCK_COSTS_MAX = 64
"""For how many pairs of core counts the costs of a model's layers are cached: they are tables of all its layers."""


class Estimate:
    """The latency estimate of one variant on one kind of hardware: profile × correction × margin.

    With `margin` > 1 every batch is estimated slower than profiled. With `correct=False` finished batches are ignored.
    Of a slot only the cores count, and whether they are a cap. The share does not: a profile for an accelerator is of
    the whole accelerator. How much slower a batch is on a share of it, or beside others, `interference` says.
    """

    __slots__ = (
        "_applied",
        "_average",
        "_base_ns",
        "_best_sizes",
        "_block",
        "_blocks",
        "_clip",
        "_correct",
        "_costs_ns",
        "_highest",
        "_learning",
        "_parts_ns",
        "_prior_weight",
        "_shapes",
        "_sizes",
        "accuracy",
        "classes",
        "hardware",
        "margin",
        "mean_ratio",
        "profile",
        "size_lessons",
        "variant",
    )

    def __init__(
        self,
        profile: Profile,
        *,
        variant: str = "",
        hardware: str = "",
        accuracy: float | None = None,
        classes: SizeClasses = GRID,
        margin: float = 1.0,
        correct: bool = True,
    ) -> None:
        assert margin > 0, margin
        self.profile = profile
        self.variant = variant
        self.hardware = hardware
        self.accuracy = accuracy
        self.classes = classes
        """The classes of sizes of its rows."""
        self.margin = margin
        self.mean_ratio = 1.0
        """The mean duration of batches divided by the estimate, which is of their P99; 1 until there were `EVERY`."""
        self._correct = correct
        self._clip = CORRECTION_MIN, CORRECTION_MAX
        """The bounds of the correction."""
        self._prior_weight = 1.0
        self._average = 1.0
        self._applied = 1.0
        self._block: list[float] = []
        self._highest: list[list[float]] = []
        self._base_ns: Cache[float, tuple[int, ...]] = Cache()
        self._costs_ns: Cache[float, tuple[int, ...]] = Cache()
        self._blocks: Cache[tuple[float, float, float], BlockCosts] = Cache()
        """By the cores of a body and of its shadow, and the factor."""
        self._best_sizes: Cache[tuple[float, int, int], float] = Cache()
        self._shapes: dict[Shape, ShapeEstimate] = {}
        self._sizes: dict[int, SizeEstimate] = {}
        """By class of sizes; at most as many as there are classes."""
        self._learning: SizeLearning | None = None
        """What batches of rows with a size have taught; None before the first one."""
        self._parts_ns: Cache[float, tuple[float, list[float]]] = Cache()
        self.size_lessons = NO_LESSONS
        """What was learnt about sizes, as costs have it now. It lags behind `_learning`: it changes only if costs
        change enough (`reconsider_sizes`)."""

    @property
    def _declared(self) -> dict[str, Any]:
        """What an estimate of the same variant on the same hardware is made with."""
        return {
            "variant": self.variant,
            "hardware": self.hardware,
            "accuracy": self.accuracy,
            "classes": self.classes,
        }

    def times(self, factor: float) -> "Estimate":
        """The estimate, as it begins, for a machine on which everything takes `factor` times as long."""
        return Estimate(self.profile, **self._declared, margin=self.margin * factor)

    def of(self, shape: Shape) -> "Estimate":
        """The estimate for replicas of another shape, which learns only from their batches; this one for `ALONE`."""
        if shape == ALONE:
            return self
        found = self._shapes.get(shape)
        if found is None:
            while len(self._shapes) >= SHAPES_MAX:
                del self._shapes[next(iter(self._shapes))]
            self._shapes[shape] = found = ShapeEstimate(self, shape)
        return found

    def at(self, size: int) -> "Estimate":
        """The estimate for batches of the class of sizes that `size` is in. It learns only from these batches. For 0 it
        is this estimate itself."""
        if not size:
            return self
        bound = self.classes.class_of(size)
        found = self._sizes.get(bound)
        if found is None:
            self._sizes[bound] = found = SizeEstimate(self, bound)
        return found

    @property
    def accelerator(self) -> str:
        """The kind of accelerator that the variant runs on; "" for none."""
        return self.profile.accelerator

    @property
    def batch_max(self) -> int:
        """Largest batch the variant takes."""
        return self.profile.max_batch

    @property
    def cores_max(self) -> float:
        """Core count above which more cores bring no speed-up."""
        return self.profile.max_cores

    @property
    def startup_ns(self) -> int:
        """Time from the order to start a replica until it can run batches."""
        return s(self.profile.load_s)

    @property
    def memory_bytes(self) -> int:
        """Memory one replica takes."""
        return self.profile.memory_bytes

    @property
    def device_memory_bytes(self) -> int:
        """Memory one replica takes on its accelerator."""
        return self.profile.device_memory_bytes

    def slot(self, cores: float) -> Slot:
        """The slot of a replica with `cores` cores, and with its part of an accelerator if the variant uses one."""
        return Slot(cores, self.hardware, self.profile.accelerator, self.profile.device_share)

    @property
    def shares_device(self) -> bool:
        """Whether the profile has a law of interference that holds at least on some slots."""
        return self.profile.sharing is not None

    @property
    def shared_cores(self) -> float:
        """The number of cores of a node for which the profile has a law of interference of replicas without a cap; 0 if
        it has none."""
        return self.profile.sharing.cores if self.profile.sharing is not None else 0.0

    def shares(self, slot: Slot) -> bool:
        """Whether the profile has a law of interference for batches on this slot."""
        return self.profile.sharing_on(slot) is not None

    def demand(self, batch: int, slot: Slot) -> DeviceDemand:
        """What a batch of `batch` on `slot` demands of its device while it runs; only its share if the profile has no
        demands."""
        sharing = self.profile.sharing_on(slot)
        if sharing is None:
            return DeviceDemand(self.variant, batch, share=slot.share)
        return sharing.demand(batch, share=slot.share, is_capped=slot.is_capped, variant=self.variant)

    @property
    def interference(self) -> Interference:
        """The law by which its batches take longer than `latency_ms` beside others; no slowdown if the profile has
        none."""
        sharing = self.profile.sharing
        return NO_SLOWDOWN if sharing is None else sharing.law

    @property
    def correction(self) -> float:
        """The factor learnt from finished batches, in [0.8, 1.5]; 1 until there were `EVERY` of them.

        Once batches of rows with a size have run, it is the mean of the classes. If the profile does not know
        sizes, it is the estimate of a full batch divided by the profile's."""
        lessons = self.size_lessons.classes
        if not lessons:
            return self._applied
        if self.profile.knows_sizes:
            return sum(each.share * each.correction for each in lessons)
        return self._full_ratio(self._costs_on(self.profile.max_cores))

    def _full_ratio(self, costs_ns: Sequence[int]) -> float:
        """The estimated duration of a full batch divided by the profiled one, on `max_cores`. `costs_ns` are the
        estimated durations there."""
        return costs_ns[-1] / (self._base(self.profile.max_cores)[-1] * self.margin)

    @property
    def prior_weight(self) -> float:
        """The weight of the profile alone in `correction`: 1 until the first correction, then less with each one, down
        to 0."""
        lessons = self.size_lessons.classes
        return sum(each.share * each.prior_weight for each in lessons) if lessons else self._prior_weight

    def apply(
        self, correction: float, prior_weight: float, sizes: SizeLessons = NO_LESSONS, mean_ratio: float = 1.0
    ) -> None:
        """Use what another estimate of the same variant has learnt: a correction, lessons about sizes, and how far
        means are from the estimate."""
        self.mean_ratio = mean_ratio
        if sizes.classes:
            if sizes != self.size_lessons:
                self._adopt(sizes)
            return
        self._prior_weight = prior_weight
        if correction != self._applied:
            self._applied = correction
            self._costs_ns.clear()

    def measured_as(self, other: object) -> None:
        """Take over the profile of another estimate of the same variant on the same hardware, and keep what was
        learnt."""
        assert isinstance(other, Estimate), other
        self.profile = other.profile
        self._best_sizes.clear()
        for estimate in (*self._shapes.values(), *self._sizes.values()):
            estimate.measured_as(other)

    def latency_ms(self, batch: int, slot: Slot) -> float:
        """Estimated duration in ms of a batch of `batch` ≥ 1 on `slot`; always positive."""
        if self.size_lessons.classes:
            return to_ms(self.costs_ns(slot)[batch])
        profiled_ms = self.profile.latency_ms.latency_ms(batch, self.profile.cores_on(slot))
        return max(FLOOR_MS, profiled_ms * self._applied * self.margin)

    def best_size(self, cores: float, limit_ns: int, batch_max: int) -> float:
        """See `Profile.best_size`."""
        key = cores, limit_ns, batch_max
        found = self._best_sizes.get(key)
        if found is None:
            if len(self._best_sizes) >= CACHED_MAX:
                self._best_sizes.clear()
            found = self._best_sizes[key] = self.profile.best_size(cores, to_ms(limit_ns), batch_max)
        return found

    def blocks(self, body_cores: float, shadow_cores: float, *, corrected: bool = True) -> "BlockCosts | None":
        """The costs of the model's blocks on the cores of a body and of its shadow, with the correction of the body
        alone; None if the layers were not measured. Without `corrected`, finished batches do not change them."""
        layers = self.profile.layers
        if layers is None:
            return None
        from sloop.profile.blocks import block_costs  # noqa: PLC0415  # it needs NumPy

        key = body_cores, shadow_cores, (self._applied if corrected else 1.0) * self.margin
        found = self._blocks.get(key)
        if found is None:
            if len(self._blocks) >= BLOCK_COSTS_MAX:
                self._blocks.clear()
            found = block_costs(layers, body_cores, shadow_cores, self.profile.max_batch, factor=key[2])
            self._blocks[key] = found
        return found

    @property
    def layer_count(self) -> int:
        """How many layers were measured; 0 if none were."""
        return len(self.profile.layers.blocks) if self.profile.layers is not None else 0

    @property
    def multiply_adds(self) -> float:
        """The multiply-adds of the model for one row; 0 if unknown."""
        return sum(each.multiply_adds for each in self.profile.layers.blocks) if self.profile.layers else 0.0

    def costs_ns(self, slot: Slot) -> tuple[int, ...]:
        """Estimated durations in ns indexed by batch size, `(0, cost of 1, …, cost of batch_max)`; never decreasing."""
        cores = slot.cores if slot.is_capped else self.profile.cores_on(slot)
        return self._costs_ns.get(cores) or self._costs_on(cores)

    def _costs_on(self, cores: float) -> tuple[int, ...]:
        costs_ns = self._costs_ns.get(cores)
        if costs_ns is None:
            costs_ns = self._costs(cores)
            if len(self._costs_ns) >= CACHED_MAX:
                self._costs_ns.clear()
            self._costs_ns[cores] = costs_ns
        return costs_ns

    def _costs(self, cores: float) -> tuple[int, ...]:
        lessons = self.size_lessons.classes
        if lessons:
            shares = [each.share for each in lessons]
            by_rows = zip(*(self.at(each.size)._costs_on(cores) for each in lessons), strict=True)
            return tuple(round(sum(map(mul, shares, costs_ns))) for costs_ns in by_rows)
        factor = self._applied * self.margin
        return (0, *(max(1, round(base_ns * factor)) for base_ns in self._base(cores)[1:]))

    def is_extrapolated(self, batch: int, slot: Slot) -> bool:
        """Whether this point lies outside the measured region of the profile."""
        return self.profile.is_extrapolated(batch, self.profile.cores_on(slot))

    def observe(self, batch: int, slot: Slot, taken_ns: int, size: int = 0) -> None:
        """Learn from a finished batch: `taken_ns` from its start to its answer. Called for every batch."""
        if not self._correct:
            return
        cores = slot.cores if slot.is_capped else self.profile.cores_on(slot)
        base_ns = self._base_ns.get(cores) or self._base(cores)
        if batch > 0 and taken_ns > 0 and batch < len(base_ns):
            block = self._block
            block.append(taken_ns / base_ns[batch])
            if len(block) >= EVERY:
                self._learn()

    def _learn(self) -> None:
        """Add a full block to the moving averages, and let policies see the result if it changed enough."""
        self._learn_mean(fmean(self._block) / (self._applied * self.margin))
        self._highest = [*self._highest, sorted(self._block)[-HIGHEST:]][-BLOCKS:]
        self._block.clear()
        above = EVERY * len(self._highest) // 100
        p99 = sorted(chain.from_iterable(self._highest))[-1 - above]
        least, most = self._clip
        self._average += WEIGHT * (min(most, max(least, p99)) - self._average)
        kept = self._prior_weight * (1.0 - WEIGHT)
        self._prior_weight = kept if kept >= PRIOR_WEIGHT_MIN else 0.0
        if abs(self._average - self._applied) > NOTICED:
            self._notice()

    def _learn_mean(self, ratio: float) -> None:
        """The batches of a block took so many times the estimate on average. The first block takes the place of the 1,
        which stands for nothing known."""
        self.mean_ratio += (WEIGHT if self.mean_ratio != 1.0 else 1.0) * (ratio - self.mean_ratio)

    def _notice(self) -> None:
        """Let policies see the correction."""
        self._applied = self._average
        self._costs_ns.clear()

    def _base(self, cores: float) -> tuple[int, ...]:
        """The uncorrected durations in ns, indexed by batch size; never decreasing."""
        base_ns = self._base_ns.get(cores)
        if base_ns is None:
            base_ns = self._base_at(0, cores)
            if len(self._base_ns) >= CACHED_MAX:
                self._base_ns.clear()
            self._base_ns[cores] = base_ns
        return base_ns

    def _base_at(self, size: int, cores: float) -> tuple[int, ...]:
        """The durations that the profile has for rows of this size; 0: for typical rows."""
        latency_at = self.profile.latency_at
        highest_ns, costs_ns = 1, [0]
        for batch in range(1, self.profile.max_batch + 1):
            highest_ns = max(highest_ns, ms(max(FLOOR_MS, latency_at(size, batch, cores))))
            costs_ns.append(highest_ns)
        return tuple(costs_ns)

    # Sizes

    def learn_size(self, size: int, rows: int, cores: float, taken_ns: int, largest: int) -> None:
        """A batch of a class of sizes has finished; `largest` is the size of its largest row."""
        if self._learning is None:
            known = self.profile.sizes
            self._learning = SizeLearning(SizeLaw(known[0].size if known else 0), not self.profile.knows_sizes)
        fixed_ns, moving_ns = self.parts_ns(cores)
        self._learning.add(size, rows, fixed_ns / taken_ns, moving_ns[rows] / taken_ns, largest)

    def learn_spread(self, ratio: float) -> None:
        """A batch of a class has taken `ratio` times as long as expected, where expected durations are means."""
        self._block.append(ratio)
        if len(self._block) >= EVERY:
            self._learn()

    def _divide(self, longer: float) -> None:
        """Expected durations of classes have changed by this factor. Divide what was learnt of their batches by it, so
        that it does not count twice. It stays at least 1, because the slowest batches take longer than the mean."""
        if self._prior_weight < 1.0:
            self._average = min(LEARNT_MAX, max(1.0, self._average / longer))
        self._block = [ratio / longer for ratio in self._block]
        self._highest = [[ratio / longer for ratio in ratios] for ratios in self._highest]

    def miss(self, rows: int) -> None:
        """Rows have come and were not served; `SizeEstimate` counts them."""

    def miss_size(self, size: int, rows: int) -> None:
        """Rows of a class of sizes have come and were not served."""
        if self._learning is not None:
            self._learning.miss(size, rows)

    def reconsider_sizes(self) -> None:
        """Let costs follow what batches have taught about sizes, if they change by more than `NOTICED`."""
        lessons = self._lessons()
        before, after = (list(self._reference_ns(each)) for each in (self.size_lessons, lessons))
        if len(before) == len(after) and all(
            abs(new_ns - old_ns) <= NOTICED * old_ns for old_ns, new_ns in zip(before, after, strict=True)
        ):
            return
        if not self.profile.knows_sizes:
            if classes := self.size_lessons.classes:
                self._divide(sum(each.share * self._sizes[each.size].expect(lessons) for each in classes))
            lessons = self._lessons()
        self._adopt(lessons)

    def _lessons(self) -> SizeLessons:
        """What the batches of classes say now."""
        assert self._learning is not None
        taught = {size: (each._average, each._prior_weight) for size, each in self._sizes.items()}
        learnt = 1.0 - self._prior_weight
        spread = (self._average - self._prior_weight) / learnt if learnt else 1.0
        return self._learning.lessons(taught, max(1.0, spread))

    def _reference_ns(self, lessons: SizeLessons) -> Iterator[float]:
        """For each class, and for the mean of the classes, the durations of a batch of one and of a full batch by these
        lessons, on `max_cores`."""
        cores, mean_ns = self.profile.max_cores, [0.0, 0.0]
        for each in lessons.classes:
            expected_ns = self._sizes[each.size].expected_ns(lessons, cores)
            for place, batch in enumerate((1, -1)):
                cost_ns = each.correction * expected_ns[batch]
                mean_ns[place] += each.share * cost_ns
                yield cost_ns
        yield from mean_ns

    def _adopt(self, lessons: SizeLessons) -> None:
        """Let policies see these lessons."""
        self.size_lessons = lessons
        self._costs_ns.clear()
        for each in lessons.classes:
            self.at(each.size)
        for found in self._sizes.values():
            found.follow(lessons)

    def parts_ns(self, cores: float) -> tuple[float, list[float]]:
        """The profile's durations for typical rows, divided into overhead and the rest: F, and R indexed by the number
        of rows from 0 (`sloop.profile.size_law`). F + R is the duration of the profile, or more if that hardly grows
        with the rows."""
        found = self._parts_ns.get(cores)
        if found is None:
            base_ns = self._base(cores)
            one_ns, count = base_ns[1], len(base_ns) - 1
            row_ns = (base_ns[-1] - one_ns) / (count - 1) if count > 1 else one_ns / 2
            fixed_ns = min(max(one_ns - row_ns, OVERHEAD_MIN * one_ns), (1 - OVERHEAD_MIN) * one_ns)
            moving_ns = [max(own_ns - fixed_ns, OVERHEAD_MIN * one_ns * rows) for rows, own_ns in enumerate(base_ns)]
            if len(self._parts_ns) >= CACHED_MAX:
                self._parts_ns.clear()
            self._parts_ns[cores] = found = fixed_ns, moving_ns
        return found


class ShapeEstimate(Estimate):
    """The estimate for the replicas of one shape: profile × the shape's share × a correction of its own.

    The shape's share is its time divided by that of a whole replica alone. For a body with a shadow and for a part of a
    pipeline, it follows from the profile's layers (`sloop.profile.blocks`, `sloop.profile.pipelines`); without layers
    it is 1.
    """

    __slots__ = ("_shape", "_shares", "_whole")

    def __init__(self, whole: Estimate, shape: Shape) -> None:
        super().__init__(whole.profile, **whole._declared, margin=whole.margin, correct=whole._correct)
        self._whole = whole
        self._shape = shape
        self._shares: Cache[float, tuple[float, ...]] = Cache()

    @property
    def memory_bytes(self) -> int:
        """Memory of the replica with its shadow, which holds the weights of its blocks."""
        shadow, layers = shadow_in(self._shape), self.profile.layers
        if shadow is None or layers is None:
            return self.profile.memory_bytes
        return self.profile.memory_bytes + sum(layers.blocks[place].param_bytes for place in shadow.layers)

    def latency_ms(self, batch: int, slot: Slot) -> float:
        """Estimated duration in ms of a batch of `batch` ≥ 1 on `slot`; always positive."""
        own_ms = super().latency_ms(batch, slot)
        if self.size_lessons.classes:
            return own_ms
        return max(FLOOR_MS, own_ms * self._shares_on(self.profile.cores_on(slot))[batch])

    def _base_at(self, size: int, cores: float) -> tuple[int, ...]:
        pairs = zip(self._whole._base_at(size, cores), self._shares_on(cores), strict=True)
        return tuple(accumulate((max(1, round(own_ns * share)) if own_ns else 0 for own_ns, share in pairs), max))

    def _shares_on(self, cores: float) -> tuple[float, ...]:
        """The share of the whole model's time on these cores, by batch from 0."""
        shares = self._shares.get(cores)
        if shares is None:
            shadow, bounds, layers = shadow_in(self._shape), bounds_of(self._shape), self.profile.layers
            if bounds and layers is not None:
                from sloop.profile.pipelines import pipeline_shares  # noqa: PLC0415  # ordinary replicas do without

                shares = pipeline_shares(layers, cores, bounds, self.profile.max_batch)
            elif shadow is None or layers is None:
                shares = (1.0,) * (self.profile.max_batch + 1)
            else:
                from sloop.profile.blocks import pair_shares  # noqa: PLC0415  # it needs NumPy

                shares = pair_shares(layers, cores, shadow, self.profile.max_batch)
            if len(self._shares) >= CACHED_MAX:
                self._shares.clear()
            self._shares[cores] = shares
        return shares

    def of(self, shape: Shape) -> Estimate:
        """The estimate of another shape of the same model."""
        return self if shape == self._shape else self._whole.of(shape)


class SizeEstimate(Estimate):
    """The estimate for rows of one class of sizes: expected durations × a correction of its own.

    If the profile knows sizes, the expected durations are those of the profile for the largest rows of the class. If
    not, they are what batches of this class, or of other classes, have taught (`sloop.profile.size_law`), from the
    first batch on. These are means, and the correction moves the estimate from their mean to their P99. How far apart
    these are, the batches of all classes say together; after the first `EVERY` batches of the class, its own do.
    """

    __slots__ = ("_batches", "_whole", "size")

    def __init__(self, whole: Estimate, size: int) -> None:
        super().__init__(whole.profile, **whole._declared, margin=whole.margin, correct=whole._correct)
        self._whole = whole
        self.size = size
        """The largest size of the class."""
        self._batches = 0
        if not self.profile.knows_sizes:
            self._clip = 1.0, LEARNT_MAX
        elif self.profile.is_extrapolated(1, self.profile.max_cores, size):
            self._clip = LEARNT_MIN, LEARNT_MAX
        self.follow(whole.size_lessons)

    @property
    def memory_bytes(self) -> int:
        """That of a replica, which serves rows of all sizes."""
        return self._whole.memory_bytes

    def of(self, shape: Shape) -> Estimate:
        """The estimate for this class and another shape of the same model."""
        return self._whole.of(shape).at(self.size)

    def at(self, size: int) -> Estimate:
        """The estimate for another class; that for all classes for 0."""
        return self._whole.at(size)

    @property
    def correction(self) -> float:
        """The factor learnt from finished batches. If the profile does not know sizes: the estimate of a full batch
        divided by the profile's."""
        if self.profile.knows_sizes:
            return self._applied
        return self._whole._full_ratio(self._costs_on(self.profile.max_cores))

    @property
    def prior_weight(self) -> float:
        """0 after the first batch of the class, if the profile does not know sizes."""
        own = self._whole.size_lessons.of(self.size)
        return self._prior_weight if own is None else own.prior_weight

    def latency_ms(self, batch: int, slot: Slot) -> float:
        """Estimated duration in ms of a batch of 1 ≤ `batch` ≤ `batch_max` on `slot`; always positive."""
        return to_ms(self.costs_ns(slot)[batch])

    def is_extrapolated(self, batch: int, slot: Slot) -> bool:
        """Whether this point lies outside the measured region of the profile."""
        return self.profile.is_extrapolated(batch, self.profile.cores_on(slot), self.size)

    def observe(self, batch: int, slot: Slot, taken_ns: int, size: int = 0) -> None:
        """Learn from a finished batch of `batch` rows of this class. `size` is that of the largest of them; 0: of the
        largest of the class."""
        if not self._correct or taken_ns <= 0 or not 0 < batch <= self.batch_max:
            return
        whole, self._batches = self._whole, self._batches + 1
        cores = slot.cores if slot.is_capped else self.profile.cores_on(slot)
        whole.learn_size(self.size, batch, cores, taken_ns, size or self.size)
        if self.profile.knows_sizes or self._batches > EVERY:
            super().observe(batch, slot, taken_ns)
        if not self.profile.knows_sizes and self._batches > SETTLED:
            whole.learn_spread(taken_ns / self._base(cores)[batch])
        is_early = self._batches < EVERY and not self._batches & (self._batches - 1)  # a power of two
        if is_early or self._batches % EVERY == 0:
            whole.reconsider_sizes()

    def miss(self, rows: int) -> None:
        """Rows of this class have come and were not served: they count in the mean of the classes."""
        self._whole.miss_size(self.size, rows)

    def follow(self, lessons: SizeLessons) -> None:
        """Use these lessons."""
        own = lessons.of(self.size)
        self._applied = own.correction if own is not None else lessons.expected
        if self._prior_weight == 1.0:
            self._average = self._applied
        self._costs_ns.clear()
        if not self.profile.knows_sizes:
            self._base_ns.clear()

    def expect(self, lessons: SizeLessons) -> float:
        """These lessons change the expected durations by the factor that this returns."""
        cores = self.profile.max_cores
        longer = self.expected_ns(lessons, cores)[-1] / self._base(cores)[-1]
        self._divide(longer)
        return longer

    def _learn_mean(self, ratio: float) -> None:
        self._whole._learn_mean(ratio)

    def _notice(self) -> None:
        """`observe` lets policies see all classes together."""

    def expected_ns(self, lessons: SizeLessons, cores: float) -> Sequence[float]:
        """Durations in ns by these lessons, without the correction, indexed by rows."""
        if self.profile.knows_sizes:
            return self._base(cores)
        unit = self.profile.sizes[0].size if self.profile.sizes else 0
        if not unit and not lessons.classes:
            return self._whole._base(cores)
        per_row = lessons.per_row(self.size, unit)
        fixed_ns, moving_ns = self._whole.parts_ns(cores)
        return [0.0, *(lessons.overhead * fixed_ns + per_row * own_ns for own_ns in moving_ns[1:])]

    def _base_at(self, size: int, cores: float) -> tuple[int, ...]:
        if self.profile.knows_sizes:
            return self._whole._base_at(size or self.size, cores)
        expected_ns = self.expected_ns(self._whole.size_lessons, cores)
        return (0, *accumulate((max(1, round(own_ns)) for own_ns in expected_ns[1:]), max))

    def _costs(self, cores: float) -> tuple[int, ...]:
        """If the profile knows no sizes, the neighbours that had batches bound the costs, because larger rows never
        take less: the costs are at least those of the next class below. If this class had no batch itself, they are
        interpolated linearly between its two neighbours; with a neighbour above only, they are at most its costs."""
        own_ns = super()._costs(cores)
        if self.profile.knows_sizes:
            return own_ns
        lessons = self._whole.size_lessons
        below, above = lessons.around(self.size)
        low_ns = self._whole.at(below)._costs_on(cores) if below else (0,) * len(own_ns)
        if lessons.of(self.size) is not None or not above:
            return tuple(map(max, own_ns, low_ns))
        high_ns = self._whole.at(above)._costs_on(cores)
        if not below:
            return tuple(map(min, own_ns, high_ns))
        part = (self.size - below) / (above - below)
        return tuple(round(low + part * (high - low)) for low, high in zip(low_ns, high_ns, strict=True))


class CrowdedEstimate(Estimate):
    """The estimate for replicas of which `count` run equal batches on one device all the time."""

    __slots__ = ("_count", "_whole")

    def __init__(self, whole: Estimate, count: int) -> None:
        super().__init__(whole.profile, **whole._declared, margin=whole.margin, correct=False)
        self._whole, self._count = whole, count

    def at(self, size: int) -> Estimate:
        """The estimate for a class of sizes; this one for 0."""
        return CrowdedEstimate(self._whole.at(size), self._count) if size else self

    def latency_ms(self, batch: int, slot: Slot) -> float:
        """Estimated duration in ms of a batch of `batch` ≥ 1 on `slot`; always positive."""
        return self._whole.latency_ms(batch, slot) * self._slowdown(batch, slot)

    def costs_ns(self, slot: Slot) -> tuple[int, ...]:
        """Estimated durations in ns indexed by batch size; never decreasing."""
        alone_ns = self._whole.costs_ns(slot)
        slowed = (round(own_ns * self._slowdown(batch, slot)) if batch else 0 for batch, own_ns in enumerate(alone_ns))
        return tuple(accumulate(slowed, max))

    def _slowdown(self, batch: int, slot: Slot) -> float:
        own = self.demand(batch, slot)
        return self.interference.slowdown(own, [own] * (self._count - 1)) if self.shares(slot) else 1.0
