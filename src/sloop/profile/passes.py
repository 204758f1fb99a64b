"""Combines several measurement passes of a model: pooled samples, the speed range of the machine, and refinement.

Two passes over the same cells differ, because a machine is not equally fast at all times. `speed_range` estimates from
their differences how much faster or slower than the profile a further run may be. `refined` adds the durations that a
server's log shows as one more pass: batches can take longer in service than in the measurement, so cells seen in
service replace the measured ones, and the other cells are scaled by the same ratio.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import exp, hypot, log, sqrt
from statistics import fmean, stdev
from typing import Any, Final

from msgspec import Struct, structs

from sloop.profile.fit import Percentile, fit_all, points_p50, points_p99
from sloop.profile.profile import (
    FLOOR_MS,
    LIKELY,
    Latency,
    LatencyTable,
    Pass,
    Profile,
    Sample,
    SizeLatency,
    likely,
    sample_of,
    scaled,
)
from sloop.units import quantile

CellKey = tuple[int, float]
"""Batch size and cores."""

STUDENT_T: Final = (1.96, 1.39, 1.25, 1.19, 1.16, 1.13, 1.12, 1.11, 1.10, 1.09)
"""85 % quantile of Student's t for 1, 2, … degrees of freedom: 70 % of further passes lie within ± this many standard
deviations. A run lasts several times longer than a pass and so varies less, and the simulator adds a term for sampling.
Together they should cover nine of ten runs: with random speeds (standard deviation 1 to 3 %) they covered 67 of 72 runs
of one minute. `python -m benchmarks.ranges` measures the coverage on a real machine."""
SPEED_SD_MIN: Final = 0.01
"""Lower bound of the relative standard deviation: passes that agree better than 1 % do so by chance."""


STUDENT_T_OF_PARTS: Final = 1.78
"""95 % quantile of Student's t for the parts of a log that the error of a `MachineSpeed` is estimated from, ten at
least (`sloop.sim.machine_speed`)."""
NORMAL_95: Final = 1.645
"""95 % quantile of the normal distribution."""


class SpeedRange(Struct, frozen=True):
    """How much the durations of a further run may differ from the profile: factors from `fast` ≤ 1 to `slow` ≥ 1."""

    fast: float
    slow: float
    passes: int
    """How many passes this was estimated from."""


class MachineSpeed(Struct, frozen=True):
    """How many times as fast as the profiles say a machine was measured to be."""

    factor: float
    error: float = 0.0
    """The standard error of `factor`."""

    def __str__(self) -> str:
        return f"{self.factor:.3f}+-{self.error:.3f}"

    @property
    def range(self) -> SpeedRange:
        """The range of the speed of nine of ten further runs, which differ from the one where it was measured by its
        error, and from minute to minute by `SPEED_SD_MIN`."""
        width = hypot(STUDENT_T_OF_PARTS * self.error / self.factor, NORMAL_95 * SPEED_SD_MIN)
        return SpeedRange(exp(-width), exp(width), 1)


def speed_range(profile: Profile) -> SpeedRange | None:
    """The range in which the speed of one further run is expected; None with fewer than two comparable passes.

    The speed of a pass is the logarithm of (time of its runs / time of the same runs at the mean of all passes), over
    the cells that other passes also have. The standard deviation s of the speeds gives the prediction interval of one
    more pass, ± t · s · √(1 + 1/n). Passes in service are used if there are at least two, because service is what is
    predicted; otherwise the passes of `sloop profile`.
    """
    for in_service in (True, False):
        chosen = [known for known in profile.passes if known.in_service is in_service]
        speeds = _speeds(chosen)
        if len(speeds) > 1:
            student = STUDENT_T[min(len(speeds) - 1, len(STUDENT_T)) - 1]
            width = student * max(SPEED_SD_MIN, stdev(speeds)) * sqrt(1 + 1 / len(speeds))
            return SpeedRange(exp(-width), exp(width), len(speeds))
    return None


def range_advice(profiles: Iterable[Profile]) -> tuple[str, ...]:
    """How predictions from these profiles get a range, if they were measured, but in too few passes."""
    measured = [profile for profile in profiles if profile.passes]
    if not measured or any(map(speed_range, measured)):
        return ()
    return ("predictions have no range: profiles of several passes give one (`sloop profile MODEL --passes 3`)",)


def _speeds(passes: Sequence[Pass]) -> list[float]:
    cells = _pooled_cells(passes)
    counts = Counter((sample.batch, sample.cores) for one in passes for sample in one.samples)
    speeds: list[float] = []
    for one in passes:
        shared = [sample for sample in one.samples if counts[sample.batch, sample.cores] > 1]
        if shared:
            expected_ms = sum(max(1, s.n) * cells[s.batch, s.cores].mean_ms for s in shared)
            speeds.append(log(sum(max(1, s.n) * s.mean_ms for s in shared) / expected_ms))
    return speeds


def pooled(samples: Sequence[Sample]) -> Sample:
    """Merge several samples of one cell, weighted by their runs. The P99 is the weighted mean of their P99s."""
    if len(samples) == 1:
        return samples[0]
    runs = [max(1, sample.n) for sample in samples]
    parts = sorted(
        (duration_ms, count / len(sample.likely_ms or (0,)))
        for sample, count in zip(samples, runs, strict=True)
        for duration_ms in sample.likely_ms or (sample.p50_ms,)
    )
    spread_ms = _equal_parts(parts)
    return Sample(
        batch=samples[0].batch,
        cores=samples[0].cores,
        p50_ms=quantile(spread_ms, 0.5),
        p99_ms=sum(sample.p99_ms * count for sample, count in zip(samples, runs, strict=True)) / sum(runs),
        n=sum(sample.n for sample in samples),
        likely_ms=tuple(round(value, 3) or 0.001 for value in spread_ms),
        beside_cores=fmean([sample.beside_cores for sample in samples], runs),
    )


def _equal_parts(weighted: Sequence[tuple[float, float]]) -> list[float]:
    """`LIKELY` equally likely values for ascending weighted ones; each weight is resolved to 1/16 of such a part."""
    total = sum(weight for _, weight in weighted)
    steps, reached, place = LIKELY * 16, 0.0, -1
    values: list[float] = []
    for step in range(steps):
        while reached <= (step + 0.5) / steps * total and place + 1 < len(weighted):
            place += 1
            reached += weighted[place][1]
        values.append(weighted[place][0])
    return likely(values, LIKELY)


def refined(
    profile: Profile,
    runs: Mapping[CellKey, Sequence[int]],
    *,
    date: str,
    beside: str,
    beside_cores: float = 0.0,
    percentile: Percentile = "p99",
) -> Profile:
    """The profile with the durations in ns of batches in service as one more pass; its latencies are fitted again.

    `beside` and `beside_cores` are of what ran meanwhile (`Pass`, `Sample`). `date` is the start of that service: an
    older pass in service with the same date is replaced, so that refining twice from one log is the same as refining
    once. ValueError if `runs` is empty.
    """
    if not runs:
        raise ValueError("no batches to refine the profile from")
    measured = (Pass(date=profile.date, beside="not recorded", samples=profile.samples),) if profile.samples else ()
    before = [one for one in profile.passes or measured if not (one.in_service and one.date == date)]
    seen = tuple(sample_of(*cell, runs[cell], beside_cores) for cell in sorted(runs))
    passes = (*before, Pass(date=date, in_service=True, beside=beside, samples=seen))
    samples = in_service_samples(passes, profile.latency_ms)
    fits = fit_all(samples, percentile)
    return structs.replace(
        profile,
        latency_ms=fits["table"].params,
        max_batch=max(profile.max_batch, *(batch for batch, _ in runs)),
        max_cores=max(profile.max_cores, *(cores for _, cores in runs)),
        origin="measured",
        measured=None,
        source=f"{profile.source.partition('; refined')[0]}; refined from service, {percentile}",
        date=date[:10] or profile.date,
        samples=samples,
        passes=passes,
        fits=fits,
        sizes=(SizeLatency(profile.sizes[0].size, fits["table"].params),) if len(profile.sizes) == 1 else profile.sizes,
    )


Runs = Mapping[CellKey, Sequence[int]]
"""Durations in ns of the batches of each cell."""


def refined_by_size(
    profile: Profile,
    runs: Mapping[int, Runs],
    *,
    date: str,
    beside: str,
    beside_cores: float = 0.0,
    percentile: Percentile = "p99",
) -> Profile:
    """The profile with the durations of batches in service whose rows differ in size, by class; see `refined`.

    What it says of each size is multiplied by the ratio (duration in service / duration in the profile) of the nearest
    class; batches of the class nearest to its typical rows refine these in all cells, as if they had been of them. If
    it knew no sizes, its typical rows are those of the commonest class afterwards. A log that it contains is ignored.
    """
    if any(one.in_service and one.date == date for one in profile.passes):
        return profile
    known: dict[str, Any] = {
        "date": date,
        "beside": beside,
        "beside_cores": beside_cores,
        "percentile": percentile,
    }
    if not profile.knows_sizes:
        usual = max(runs, key=lambda size: sum(map(len, runs[size].values())))
        made = refined(profile, runs[usual], **known)
        made = structs.replace(made, sizes=())
        others = {
            size: scaled(made.latency_ms, _ratio(made, size, cells, percentile))
            for size, cells in runs.items()
            if size != usual
        }
        found = {usual: made.latency_ms} | others
        return structs.replace(made, sizes=tuple(SizeLatency(size, found[size]) for size in sorted(found)))
    typical = next((each.size for each in profile.sizes if each.latency_ms == profile.latency_ms), 0)
    usual = _nearest(runs, typical or profile.sizes[len(profile.sizes) // 2].size)
    equal = {
        cell: [
            round(each_ns * profile.latency_at(typical, *cell) / profile.latency_at(usual, *cell)) for each_ns in own
        ]
        for cell, own in runs[usual].items()
    }
    ratios = {size: _ratio(profile, size, cells, percentile) for size, cells in runs.items()}
    made = refined(profile, equal, **known)
    sizes = []
    for each in profile.sizes:
        ratio = ratios[_nearest(ratios, each.size)]
        sizes.append(
            SizeLatency(each.size, made.latency_ms if each.size == typical else scaled(each.latency_ms, ratio))
        )
    return structs.replace(made, sizes=tuple(sizes))


def _nearest(sizes: Iterable[int], own: int) -> int:
    """The one of these sizes that differs from this one by the smallest factor."""
    return min(sizes, key=lambda size: (abs(log(size / own)), size))


def _ratio(profile: Profile, size: int, cells: Runs, percentile: Percentile) -> float:
    """How many times as long as in the profile batches of this size took: the mean over the cells by their runs."""
    samples = [sample_of(*cell, runs_ns) for cell, runs_ns in cells.items()]
    points = points_p50(samples) if percentile == "p50" else points_p99(samples)
    ratios = [point.latency_ms / max(FLOOR_MS, profile.latency_at(size, point.batch, point.cores)) for point in points]
    return fmean(ratios, [sample.n for sample in samples])


def in_service_samples(passes: Sequence[Pass], latency: Latency) -> tuple[Sample, ...]:
    """Samples for the full grid of batch sizes and cores: from service where available, otherwise measured × a ratio.

    `latency` replaces the measured samples if there are none. The ratio is (duration in service / measured duration)
    over the cells that have both, on the same core count if possible.
    """
    alone = _pooled_cells([one for one in passes if not one.in_service])
    seen = _pooled_cells([one for one in passes if one.in_service])
    base = _Base(list(alone.values()), latency)
    batches = sorted({cell[0] for cell in (*alone, *seen)})
    all_cores = sorted({cell[1] for cell in (*alone, *seen)})
    samples: list[Sample] = []
    for cores in all_cores:
        similar = [sample for sample in seen.values() if sample.cores == cores] or list(seen.values())
        ratio = sum(s.n * s.mean_ms for s in similar) / sum(s.n * base.at(s.batch, s.cores).mean_ms for s in similar)
        beside_cores = fmean([s.beside_cores for s in similar], [max(1, s.n) for s in similar])
        samples += [seen.get((batch, cores)) or base.at(batch, cores, ratio, beside_cores) for batch in batches]
    return tuple(samples)


def _pooled_cells(passes: Sequence[Pass]) -> dict[CellKey, Sample]:
    cells: dict[CellKey, list[Sample]] = {}
    for one in passes:
        for sample in one.samples:
            cells.setdefault((sample.batch, sample.cores), []).append(sample)
    return {cell: pooled(samples) for cell, samples in cells.items()}


class _Base:
    """Measured samples, interpolated between cells; the latency function if the profile has no samples."""

    def __init__(self, samples: Sequence[Sample], latency: Latency) -> None:
        self._cells = {(sample.batch, sample.cores): sample for sample in samples}
        self._tables = tables_of(samples) if samples and all(sample.likely_ms for sample in samples) else []
        self._latency = latency

    def at(self, batch: int, cores: float, ratio: float = 1.0, beside_cores: float = 0.0) -> Sample:
        """The sample of a cell, its durations times `ratio`, as they are beside what takes so many cores."""
        own = self._cells.get((batch, cores))
        durations_ms = [table.latency_ms(batch, cores) for table in self._tables]
        if not durations_ms:
            durations_ms = [max(FLOOR_MS, self._latency.latency_ms(batch, cores))]
        p50_ms = own.p50_ms if own else quantile(durations_ms, 0.5)
        p99_ms = own.p99_ms if own else durations_ms[-1]
        scaled_ms = tuple(round(duration_ms * ratio, 3) or 0.001 for duration_ms in durations_ms)
        n = own.n if own else 0
        return Sample(batch, cores, p50_ms * ratio, p99_ms * ratio, n, scaled_ms, beside_cores, round(ratio, 4))


def tables_of(samples: Sequence[Sample]) -> list[LatencyTable]:
    """One table over batch size and cores for each of the equally likely durations, the shortest first.

    A cell with fewer durations than another repeats its durations, so that all tables have all cells.
    """
    count = max(len(sample.likely_ms) for sample in samples)
    tables: list[dict[int, dict[float, float]]] = [{} for _ in range(count)]
    for sample in samples:
        durations_ms = sample.likely_ms
        for number, table in enumerate(tables):
            table.setdefault(sample.batch, {})[sample.cores] = durations_ms[number * len(durations_ms) // count]
    return [LatencyTable(table) for table in tables]
