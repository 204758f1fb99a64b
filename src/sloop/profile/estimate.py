"""Estimates: what policies are told of a variant's speed, from its profile and corrected by finished batches.

Promises to be deterministic: the same profile and observations give the same answers, without clock or chance. Must
not know truth: only what a profile says and what a replica measured. Implements `sloop.core.views.Belief`.

Source of the correction: Sponge, specification §6.16: the latency is multiplied by a moving average of (measured P99 /
predicted), clipped to [0.8, 1.5].
"""

from itertools import chain

from sloop.profile.profile import FLOOR_MS, Profile
from sloop.units import ms, s

CORRECTION_MIN, CORRECTION_MAX = 0.8, 1.5
EVERY = 64
"""Observations between two corrections: what keeps `observe` far below a microsecond on average."""
BLOCKS = 4
"""So many corrections' observations the P99 is taken over."""
HIGHEST = BLOCKS * EVERY // 100 + 1
"""Of each of them the P99 of all can only be one of the highest."""
WEIGHT = 0.3
"""Of the newest P99 in the moving average."""
NOTICED = 0.005
"""A correction moves what policies see only when it changed by this much; else every tick would plan anew."""
CACHED_MAX = 512
"""Core counts whose costs are kept; fractional cores come from a finite set, but nothing forces that."""


class Estimate:
    """The belief in one variant: profile × correction × margin.

    `margin` > 1 believes every batch slower than profiled. With `correct=False` the profile is all there is.
    """

    __slots__ = (
        "_applied",
        "_average",
        "_base_ns",
        "_block",
        "_correct",
        "_costs_ns",
        "_highest",
        "accuracy",
        "margin",
        "profile",
    )

    def __init__(
        self, profile: Profile, *, accuracy: float | None = None, margin: float = 1.0, correct: bool = True
    ) -> None:
        assert margin > 0, margin
        self.profile = profile
        self.accuracy = accuracy
        self.margin = margin
        self._correct = correct
        self._average = 1.0
        self._applied = 1.0
        self._block: list[float] = []
        self._highest: list[list[float]] = []
        self._base_ns: dict[float, tuple[int, ...]] = {}
        self._costs_ns: dict[float, tuple[int, ...]] = {}

    @property
    def batch_max(self) -> int:
        """Largest batch the variant takes."""
        return self.profile.max_batch

    @property
    def cores_max(self) -> float:
        """Cores beyond which nothing is gained."""
        return self.profile.max_cores

    @property
    def load_ns(self) -> int:
        """Time a new replica needs to load the variant."""
        return s(self.profile.load_s)

    @property
    def memory_bytes(self) -> int:
        """Memory one replica takes."""
        return self.profile.memory_bytes

    @property
    def correction(self) -> float:
        """What finished batches multiply the profile by, in [0.8, 1.5]; 1 until there were enough of them."""
        return self._applied

    def latency_ms(self, batch: int, cores: float) -> float:
        """Believed duration of one batch of `batch` ≥ 1 on `cores` > 0, in milliseconds; positive."""
        profiled_ms = self.profile.latency_ms.latency_ms(batch, cores)
        return max(FLOOR_MS, profiled_ms * self._applied * self.margin)

    def costs_ns(self, cores: float) -> tuple[int, ...]:
        """Believed durations in ns indexed by batch: `(0, cost of 1, …, cost of batch_max)`, never decreasing."""
        costs_ns = self._costs_ns.get(cores)
        if costs_ns is None:
            factor = self._applied * self.margin
            costs_ns = (0, *(max(1, round(base_ns * factor)) for base_ns in self._base(cores)[1:]))
            if len(self._costs_ns) >= CACHED_MAX:
                self._costs_ns.clear()
            self._costs_ns[cores] = costs_ns
        return costs_ns

    def is_extrapolated(self, batch: int, cores: float) -> bool:
        """Whether the belief there goes beyond what was measured."""
        return self.profile.is_extrapolated(batch, cores)

    def observe(self, batch: int, cores: float, taken_ns: int) -> None:
        """Learn from a finished batch: `taken_ns` from its start to its answer. Called for every batch."""
        if not self._correct:
            return
        base_ns = self._base_ns.get(cores) or self._base(cores)
        if 0 < batch < len(base_ns) and taken_ns > 0:
            block = self._block
            block.append(taken_ns / base_ns[batch])
            if len(block) >= EVERY:
                self._learn()

    def _learn(self) -> None:
        """Fold a full block into the moving average, and show it to policies if it moved enough."""
        self._highest = [*self._highest, sorted(self._block)[-HIGHEST:]][-BLOCKS:]
        self._block.clear()
        above = EVERY * len(self._highest) // 100
        p99 = sorted(chain.from_iterable(self._highest))[-1 - above]
        self._average += WEIGHT * (min(CORRECTION_MAX, max(CORRECTION_MIN, p99)) - self._average)
        if abs(self._average - self._applied) > NOTICED:
            self._applied = self._average
            self._costs_ns.clear()

    def _base(self, cores: float) -> tuple[int, ...]:
        """The profile's own durations in ns by batch, made monotone by carrying the maximum upwards."""
        base_ns = self._base_ns.get(cores)
        if base_ns is None:
            latency_ms = self.profile.latency_ms.latency_ms
            highest_ns, costs_ns = 1, [0]
            for batch in range(1, self.profile.max_batch + 1):
                highest_ns = max(highest_ns, ms(max(FLOOR_MS, latency_ms(batch, cores))))
                costs_ns.append(highest_ns)
            base_ns = tuple(costs_ns)
            if len(self._base_ns) >= CACHED_MAX:
                self._base_ns.clear()
            self._base_ns[cores] = base_ns
        return base_ns
