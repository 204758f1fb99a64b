"""Service times: true batch durations, from the order to start a batch to its answer.

The durations of a variant come from the first of these sources that exists:

1. A recorded run (`sloop simulate --recorded`). The durations of each cell, one batch size on one core count of a kind
   of hardware, of one class of sizes, are replayed in order: a machine is slow for seconds at a time, which independent
   draws would not show.
2. The runs that the profile was measured from (`Sample.likely_ms`), unless the scenario declares `truth.service`. Each
   batch draws one of its cell's durations, all equally likely; between cells they are interpolated as the profile's
   table is.
3. The latency function of the profile (Sponge specification, §1.4):

       service(b, c) = latency_ms(b, c) · error / ratio · noise

   `latency_ms` is a 99th percentile, and `ratio` (1.0 to 1.1) is how far it exceeds the true mean. The noise has mean 1
   and is normal with a coefficient of variation of about 3 %; exponential and deterministic noise exist for comparison
   with queueing theory.

If the profile knows sizes, the mean of a pass of rows of another size than the typical one is longer or shorter, as its
latencies say (`Profile.latency_at`). All rows of a pass are as large as the largest, to which they are padded. More
rows than a pass takes run in several, one after the other.

In 2 and 3 `error` is the ratio of true to profiled durations of the variant on its kind of hardware. Interference
between replicas on one node would also multiply these durations here.

In 2 the durations on a fraction of a core are those of a busy replica (`sloop.runlog.durations`). One that was idle has
saved CPU time, which `ReplicaQuota` adds.

A seed gives the same factors on every machine. The normal noise therefore does not call the platform's `log` or `cos`:
it draws one of 4,096 equally likely quantiles, rounded to nine decimals, which all libraries compute equally. That cuts
the tails at 3.7 standard deviations, which the durations of forward passes do not reach.

A body with a shadow takes a share of the body's time, batch by batch: that of the layers in the profile, where the pair
waits at the end of each run of blocks (`sloop.profile.blocks.true_pair_shares`). Its noise is the body's. The parts of
a pipeline divide the whole model's time as their layers in the profile do; what they pass on takes as long as over the
true link (`sloop.profile.pipelines`).

Must not read the policies' beliefs or corrections: it has separate profiles.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, cycle, repeat
from math import ceil, log
from operator import neg, sub
from random import Random
from statistics import NormalDist, fmean
from types import MappingProxyType
from typing import Final, TypeVar

from msgspec import Struct, structs

from sloop.app.scenario import NoiseShape
from sloop.machine import quota
from sloop.profile.blocks import true_pair_shares
from sloop.profile.passes import tables_of
from sloop.profile.pipelines import stations_ms, whole_ms
from sloop.profile.profile import FLOOR_MS, Profile, sample_of
from sloop.runlog.durations import Durations, VariantKey
from sloop.streams import stream
from sloop.units import NS_PER_MS
from sloop.vocabulary import Slot, Worker

RATIO: Final = 1.05
CV: Final = 0.03
"""Defaults if nothing was measured or declared (Sponge specification, §1.4)."""

Value = TypeVar("Value")

SIZE_FACTORS_MAX: Final = 100_000
"""How many factors for sizes are kept: a trace of sounds may have as many sizes as requests."""
NS_PER_US: Final = 1_000
NOISE_MIN: Final = 0.05
"""No draw is shorter than this share of its mean, however large the coefficient of variation."""
_QUANTILE_BITS: Final = 12
_QUANTILES: Final = tuple(
    round(NormalDist().inv_cdf((index + 0.5) / 2**_QUANTILE_BITS), 9) for index in range(2**_QUANTILE_BITS)
)


class Speed(Struct, frozen=True, gc=False):
    """The speed of a variant on one slot. Both lists are indexed by batch size, from 0 to the largest batch."""

    means_ns: list[float]
    """True mean durations; 0.0 for a batch of 0."""
    noises: list[Iterator[float]]
    """Per batch size, an endless iterator of noise factors with mean 1."""


class ServiceSampler:
    """The service times of one application version, drawn from stream `service`. The parameters are those of the
    equation above."""

    def __init__(
        self,
        seed: int,
        profiles: Mapping[VariantKey, Profile],
        *,
        shape: NoiseShape = "normal",
        cv: float | None = None,
        ratio: float | None = None,
        errors: Mapping[VariantKey, float] | None = None,
        recorded: Mapping[int, Durations] = MappingProxyType({}),
        quota_ms: float | None = None,
    ) -> None:
        """`quota_ms` is the period of CPU quotas; None for the server's, with measured profiles only; 0 for none.
        `recorded` are durations of batches by the class of their sizes; 0 is that of rows of one size."""
        self._recorded = recorded.get(0, {})
        self._sized = {
            (key, size, *cell): cycle(runs_ns)
            for size, durations in recorded.items()
            if size
            for key, cells in durations.items()
            for cell, runs_ns in cells.items()
        }
        """By variant, class of sizes, rows and cores, the recorded durations of batches, endlessly."""
        self._profiles = {key: with_recorded(profile, self._recorded.get(key, {})) for key, profile in profiles.items()}
        self._ratio = RATIO if ratio is None else ratio
        self._errors = errors or {}
        self._random = stream(seed, "service")
        self._noise = noise(shape, CV if cv is None else cv, self._random)
        self._as_measured = shape == "normal" and cv is None and ratio is None
        self._quota_ms = quota_ms
        self._speeds: dict[tuple[str, str, Slot], Speed] = {}
        self._pair_speeds: dict[tuple[str, str, Slot, Worker], Speed] = {}
        self._size_factors: dict[tuple[str, str, Slot, int, int], float] = {}
        self._lines: dict[tuple[str, str, Slot, tuple[int, ...]], list[list[float]]] = {}

    def line_ns(
        self, stage: str, variant: str, slot: Slot, bounds: tuple[int, ...], link_mbps: float
    ) -> list[list[float]]:
        """The true mean durations of the stations of a pipeline whose workers have `slot`, by batch from 0; returns the
        same object for the same arguments."""
        known = self._lines.get((stage, variant, slot, bounds))
        if known is None:
            alone, layers = self.speed(stage, variant, slot), self._profiles[stage, variant, slot.hardware].layers
            assert layers is not None, f"{stage}/{variant} is a pipeline and has no measured layers"
            known = [[]]
            for batch in range(1, len(alone.means_ns)):
                scale = alone.means_ns[batch] / whole_ms(layers, slot.cores, batch)
                stations = stations_ms(layers, slot.cores, bounds, batch, link_mbps)
                moved = [own_ms * NS_PER_MS for own_ms in stations[1::2]]
                parts = [own_ms * scale for own_ms in stations[::2]]
                known.append([parts[0], *chain.from_iterable(zip(moved, parts[1:], strict=True))])
            self._lines[stage, variant, slot, bounds] = known
        return known

    def pair_speed(self, stage: str, variant: str, slot: Slot, shadow: Worker) -> Speed:
        """The true speed of a body on `slot` with a shadow; returns the same object for the same arguments."""
        key = stage, variant, slot, shadow
        known = self._pair_speeds.get(key)
        if known is None:
            alone, layers = self.speed(stage, variant, slot), self._profiles[stage, variant, slot.hardware].layers
            assert layers is not None, f"{stage}/{variant} has a shadow and no measured layers"
            shares = true_pair_shares(layers, slot.cores, shadow, len(alone.means_ns) - 1)
            means_ns = [mean_ns * share for mean_ns, share in zip(alone.means_ns, shares, strict=True)]
            known = self._pair_speeds[key] = Speed(means_ns, alone.noises)
        return known

    def speed(self, stage: str, variant: str, slot: Slot) -> Speed:
        """The true speed of a variant on `slot`; returns the same object for the same arguments."""
        known = self._speeds.get((stage, variant, slot))
        if known is None:
            key = stage, variant, slot.hardware
            profile, error = self._profiles[key], self._errors.get(key, 1.0)
            cores = profile.cores_on(slot)
            if self._as_measured and is_measured(profile):
                known = self._measured(profile, error, cores)
            else:
                known = self._promised(profile, error / self._ratio, cores)
            for size in range(1, len(known.means_ns)):
                durations_ns = self._recorded.get(key, {}).get((size, cores))
                if durations_ns:
                    known.means_ns[size] = mean_ns = fmean(durations_ns)
                    known.noises[size] = cycle([duration_ns / mean_ns for duration_ns in durations_ns])
            self._speeds[stage, variant, slot] = known
        return known

    def recorded_ns(self, stage: str, variant: str, slot: Slot, size: int, rows: int) -> float | None:
        """The next recorded duration of a batch of so many rows of a class of sizes; None if there are none."""
        key = stage, variant, slot.hardware
        runs_ns = self._sized.get((key, size, rows, self._profiles[key].cores_on(slot))) if self._sized else None
        return None if runs_ns is None else next(runs_ns)

    def size_factor(self, stage: str, variant: str, slot: Slot, size: int, rows: int) -> float:
        """How many times as long a pass of so many rows of this size takes as one of typical rows; 1 for size 0, and if
        the profile knows no sizes."""
        profile = self._profiles[stage, variant, slot.hardware]
        if not (size and profile.knows_sizes):
            return 1.0
        key = stage, variant, slot, size, rows
        factor = self._size_factors.get(key)
        if factor is None:
            cores = profile.cores_on(slot)
            factor = profile.latency_at(size, rows, cores) / profile.latency_ms.latency_ms(rows, cores)
            if len(self._size_factors) >= SIZE_FACTORS_MAX:
                self._size_factors.clear()
            self._size_factors[key] = factor
        return factor

    def quota(self, stage: str, variant: str, slot: Slot) -> "ReplicaQuota | None":
        """The CPU quota of a replica that gets `slot`; None if its durations do not depend on when it has run before:
        its cores are whole, a device computes, or the durations are recorded ones, which had their quotas."""
        key = stage, variant, slot.hardware
        cores = self._profiles[key].cores_on(slot)
        period_us, share = quota(cores)[1], cores / ceil(cores)
        if share == 1.0 or slot.accelerator or self._recorded.get(key):
            return None
        if self._quota_ms is not None:
            return ReplicaQuota(share, round(self._quota_ms * NS_PER_MS)) if self._quota_ms else None
        is_known = self._as_measured and is_measured(self._profiles[key])
        return ReplicaQuota(share, period_us * NS_PER_US) if is_known else None

    def _promised(self, profile: Profile, scale: float, cores: float) -> Speed:
        sizes = range(1, profile.max_batch + 1)
        latency_ms = profile.latency_ms.latency_ms
        means_ns = [0.0, *(max(FLOOR_MS, latency_ms(size, cores)) * scale * NS_PER_MS for size in sizes)]
        return Speed(means_ns, [self._noise] * len(means_ns))

    def _measured(self, profile: Profile, error: float, cores: float) -> Speed:
        tables = tables_of(profile.samples)
        means_ns, noises = [0.0], [self._noise]
        for size in range(1, profile.max_batch + 1):
            durations_ms = [table.latency_ms(size, cores) for table in tables]
            mean_ms = fmean(durations_ms)
            means_ns.append(mean_ms * error * NS_PER_MS)
            noises.append(draws([duration_ms / mean_ms for duration_ms in durations_ms], self._random))
        return Speed(means_ns, noises)


class ReplicaQuota:
    """The CPU time that a replica with a fraction of a core has saved while it was idle.

    The kernel gives it CPU time for one period at a time (`sloop.machine.quota`), and throttles it when that is used
    up. A busy replica therefore runs for a `share` of the time, its cores over its threads. One that was idle has the
    CPU time of up to one period at once and ends earlier: by up to 10 ms, but no earlier than without throttling.

    This is a token bucket whose depth is the quota of a period. The kernel fills it in steps, checks it at ticks, and
    keeps some of it per CPU; we measured 8 to 12 ms on 0.25 to 0.3 cores, where the bucket gives 10.

    Source: Linux, Documentation/scheduler/sched-bwc.rst.
    """

    __slots__ = ("_ended_ns", "_saved_ns", "period_ns", "share")

    def __init__(self, share: float, period_ns: int) -> None:
        self.share, self.period_ns = share, period_ns
        self._ended_ns, self._saved_ns = 0, period_ns
        """When the last batch ended, and by how much a next one could have been shorter then."""

    def run(self, now_ns: int, busy_ns: int) -> int:
        """Run a batch that takes `busy_ns` on a busy replica; returns how long it takes now."""
        saved_ns = min(self.period_ns, self._saved_ns + max(0, now_ns - self._ended_ns))
        took_ns = max(round(busy_ns * self.share), busy_ns - saved_ns)
        self._saved_ns, self._ended_ns = saved_ns - (busy_ns - took_ns), now_ns + took_ns
        return took_ns


def is_measured(profile: Profile) -> bool:
    """Whether every cell of the profile keeps the distribution of its runs."""
    return bool(profile.samples) and all(sample.likely_ms for sample in profile.samples)


def with_recorded(profile: Profile, durations_ns: Mapping[tuple[int, float], Sequence[int]]) -> Profile:
    """The profile with its cells replaced by recorded ones; other measured cells stay."""
    if not durations_ns:
        return profile
    cells = {(sample.batch, sample.cores): sample for sample in profile.samples if is_measured(profile)}
    cells |= {cell: sample_of(*cell, runs_ns) for cell, runs_ns in durations_ns.items()}
    return structs.replace(profile, samples=tuple(cells[cell] for cell in sorted(cells)))


def noise(shape: NoiseShape, cv: float, random: Random) -> Iterator[float]:
    """Endless random factors with mean 1. `cv` is their standard deviation, used by `normal` only."""
    if shape == "exponential":  # -log(1 - u), without a call of a Python function for each
        return map(neg, map(log, map(sub, repeat(1.0), iter(random.random, None))))
    if shape == "deterministic" or cv == 0.0:
        return repeat(1.0)
    return draws([max(NOISE_MIN, 1.0 + cv * quantile) for quantile in _QUANTILES], random)


def draws(values: Sequence[Value], random: Random) -> Iterator[Value]:
    """Endless draws from equally likely values. If their number is a power of two, each draw is one `getrandbits`
    call."""
    bits = (len(values) - 1).bit_length()
    if len(values) != 1 << bits:
        return choices(values, random)
    return map(values.__getitem__, map(random.getrandbits, repeat(bits)))


def choices(values: Sequence[Value], random: Random) -> Iterator[Value]:
    """Endless results of `random.choice(values)`, without a call of a Python function for each."""
    count = len(values)
    indices = filter(count.__gt__, map(random.getrandbits, repeat(count.bit_length())))
    return map(values.__getitem__, indices)
