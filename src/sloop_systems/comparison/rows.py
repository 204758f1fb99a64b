"""Rows of a reproduction: a published or derived figure, our result, and a verdict computed from both.

No verdict is written by hand, and each row says which results would be `off`: `Row.least` and `Row.most`. What no
result can fail is no row: limits that every possible result keeps are refused.

How far our mean may be from a figure depends on how the figure is known:

| kind of figure | tolerance | counts at least | % and points at least | at most |
| --- | --- | --- | --- | --- |
| `exact`: a table cell, a count, a recorded output, a derivation | half a unit of its last printed digit | | | |
| `simulated`: the mean of somebody's simulation or experiment | 10 % | 0.1 | 0.1 | 2 |
| `plot`: read off a figure | 15 % | 1 | 0.3 | 3 |
| `text`: "about", "up to", "x times" | 20 % | 1 | 0.5 | 5 |

A percentage is judged on the smaller of itself and the rest to 100: 99.5 % in time are 0.5 % late. A row may set a
smaller tolerance, never a larger one. A figure below its tolerance cannot be distinguished from 0 (or 100 %), so that
it is only a bound (`within-bound`). Simulated results must also be precise enough: at least three runs, whose mean has
a standard error of at most half the tolerance (so that the 95 % confidence interval is about ± the tolerance). Fewer
runs, such as those of `--quick`, or runs that scatter more are a `shape` at most.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from statistics import fmean, stdev
from typing import Final, Literal, get_args

from msgspec import Struct, structs

from sloop.api import ROUNDING, number
from sloop.api.reports import Table

Verdict = Literal["reproduced", "derived", "fitted", "self", "within-bound", "shape", "off", "source-inconsistent"]
Known = Literal["exact", "simulated", "plot", "text"]
Judged = Literal["mean", "every run", "interval", "doubt"]

VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)
MEANINGS: Final = (
    "reproduced: our mean is within the tolerance of a printed figure, and nothing was fitted to it. The tolerance "
    "depends on the kind of figure: half a unit of the last digit for exact figures, 10 % for means of simulations, "
    "15 % for figures read off a plot, 20 % for 'about' or 'up to' in a text. Simulated means need at least three runs "
    "that agree.",
    "derived: the same for a figure that is not printed, but was derived from the publication by arithmetic or by "
    "another simulation.",
    "fitted: the same, but parameters were set by the source's own numbers; the note says which. self: our formula "
    "agrees with our formula.",
    "within-bound: an inequality, published or set by us as an acceptance test, holds in every run, or of the mean if "
    "the note says so; or the figure is so small that its tolerance includes 0.",
    "shape: our result differs from the figure, or is not precise enough, but an order, a direction or the magnitude "
    "(within a factor of two) is as expected; the note says what was expected.",
    "off: none of these. source-inconsistent: two statements of the source contradict each other, and ours agrees with "
    "the one that is not the figure.",
)
COLUMNS: Final = (
    "Columns: paper is the published figure; derived one that was computed from the publication; ours the mean "
    "of our runs, low and high the least and the most of them; note says what differs from the publication."
)
RUNS_MIN: Final = 3
"""Runs needed to estimate the standard error of a mean."""
STUDENT: Final = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.306, 2.26216)
"""0.975 quantiles of Student's t with 1, 2, … degrees of freedom."""
COUNTS: Final = frozenset({"cores", "replicas", "GPUs", "instances", "bodies", "runs"})
NEVER_NEGATIVE: Final = frozenset({"×", "GPUs"})
"""Units of results that are 0 or more, also as differences, so that a limit of 0 asks for nothing."""


class Tolerance(Struct, frozen=True):
    """The allowed difference between our mean and a figure of one kind."""

    relative: float
    least_count: float
    least_points: float
    most_points: float

    def of(self, figure: float, unit: str) -> float:
        """The tolerance in the figure's unit. Percentages have a limit in points, because 10 % of 90 % would be too
        wide."""
        wide = self.relative * _small_part(figure, unit)
        if unit in {"%", "points"}:
            return max(self.least_points, min(wide, self.most_points))
        return max(self.least_count, wide) if unit in COUNTS else wide


TOLERANCES: Final = {
    "simulated": Tolerance(relative=0.10, least_count=0.1, least_points=0.1, most_points=2.0),
    "plot": Tolerance(relative=0.15, least_count=1.0, least_points=0.3, most_points=3.0),
    "text": Tolerance(relative=0.20, least_count=1.0, least_points=0.5, most_points=5.0),
}
IN_WORDS: Final = {
    "exact": "exact figure",
    "simulated": "mean of a simulation",
    "plot": "read off a plot",
    "text": "given in the text",
}


class Row(Struct, frozen=True, kw_only=True):
    """One figure and our result. `low` and `high` are the smallest and largest of our samples, one sample per run."""

    experiment: str
    metric: str
    unit: str
    paper: float | None
    derived: float | None = None
    """Computed independently from the publication, by arithmetic or by another simulation."""
    ours: float
    low: float
    high: float
    least: float | None = None
    """A result below this is `off`."""
    most: float | None = None
    """A result above this is `off`."""
    verdict: Verdict
    note: str = ""


class ResultLimits(Struct, frozen=True):
    """What a result has to keep. ValueError if every result does."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    of: Judged = "mean"
    """Whether the mean, every run, or the whole 95 % interval of the mean has to keep them; in `doubt`, a mean that
    breaks them is forgiven while its interval does not."""

    def __post_init__(self) -> None:
        if self.least is None and self.most is None:
            raise ValueError("a row needs a result that fails it: limits that every result keeps are none")

    @property
    def least(self) -> float | None:
        """The lower limit."""
        return self.at_least if self.at_least is not None else self.above

    @property
    def most(self) -> float | None:
        """The upper limit."""
        return self.at_most if self.at_most is not None else self.below

    def keep(self, samples: Sequence[float]) -> bool:
        """Whether our samples, one of each run, keep these limits."""
        if self.of == "every run":
            return all(map(self._keeps, samples))
        mean = fmean(samples)
        if self.of == "mean":
            return self._keeps(mean)
        half = half_width(samples)
        if self.of == "interval":
            return self._keeps(mean - half) and self._keeps(mean + half)
        return self._keeps(mean) or self._keeps(mean - half) or self._keeps(mean + half)

    def _keeps(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least - ROUNDING * max(1.0, abs(self.at_least)))
            and (self.at_most is None or value <= self.at_most + ROUNDING * max(1.0, abs(self.at_most)))
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        named = (("at least", self.at_least), ("at most", self.at_most), ("above", self.above), ("below", self.below))
        said = " and ".join(f"{word} {number(value)}" for word, value in named if value is not None)
        whole = {
            "mean": "",
            "every run": " in every run",
            "interval": " by the whole 95 % interval",
            "doubt": " unless the 95 % interval leaves it open",
        }
        return said + whole[self.of]


class Claim(Struct, frozen=True):
    """A figure to compare with: the experiment, the metric, the figure and its kind."""

    experiment: str
    metric: str
    unit: str
    known: Known = "simulated"
    paper: float | None = None
    derived: float | None = None
    note: str = ""
    computed: bool = False
    """Our result is computed rather than simulated, so one value is enough; always so for `exact` figures."""
    fitted: str = ""
    """Which parameters the source's own numbers have set."""
    itself: bool = False
    """The figure comes from our own formula, with our own parameters."""
    places: int | None = None
    """Decimals of an exact figure as it is printed, if these end with zeros."""

    @property
    def figure(self) -> float:
        """The published figure, or else the derived one."""
        found = self.paper if self.paper is not None else self.derived
        assert found is not None, self
        return found

    @property
    def equal(self) -> Verdict:
        """The verdict if ours is the figure."""
        if self.itself:
            return "self"
        if self.fitted:
            return "fitted"
        return "derived" if self.paper is None else "reproduced"

    def tolerance(self, within: float | None = None) -> float:
        """The allowed difference: `within`, if that is smaller. For an exact figure, half a unit of the last digit."""
        if self.known == "exact":
            exponent = Decimal(repr(self.figure)).as_tuple().exponent
            assert isinstance(exponent, int), self
            widest = 0.5 * 10.0 ** (min(0, exponent) if self.places is None else -self.places)
        else:
            widest = TOLERANCES[self.known].of(self.figure, self.unit)
        return widest if within is None else min(within, widest)

    def similar(self) -> ResultLimits | None:
        """Between half and double the figure; of a percentage, and of what is missing to 100. None for 0 and 100 %."""
        if not _small_part(self.figure, self.unit):
            return None
        least, most = sorted((self.figure / 2, 2 * self.figure))
        if self.unit == "%" and 0 < self.figure < 100:
            missing = 100 - self.figure
            least, most = max(least, 100 - 2 * missing), min(most, 100 - missing / 2)
        return ResultLimits(at_least=least, at_most=most)


def _small_part(figure: float, unit: str) -> float:
    """The figure without its sign; of a percentage near 100, what is missing."""
    return min(figure, 100 - figure) if unit == "%" and 0 <= figure <= 100 else abs(figure)


def compare(
    claim: Claim,
    samples: Sequence[float],
    *,
    similar: bool = False,
    shape: ResultLimits | None = None,
    within: float | None = None,
    runs: int = 0,
    error: float | None = None,
) -> Row:
    """Compare our samples with the claim's figure.

    A result that differs is a `shape` if it is `similar` (a factor of two) or keeps the limits `shape`, which an order
    or a direction sets; without these it is `off`. `within` narrows the tolerance. If the only sample is itself a mean
    or a ratio of means, `runs` is the number of runs behind it and `error` its standard error.
    """
    assert not runs or error is not None, f"{claim}: the standard error of a mean of {runs} runs is missing"
    tolerance, mean = claim.tolerance(within), fmean(samples)
    close = abs(mean - claim.figure) <= tolerance + ROUNDING * max(1.0, abs(claim.figure))
    if error is None:
        error = _standard_error(samples) if len(samples) > 1 else 0.0
    runs = max(runs, len(samples))
    enough = claim.known == "exact" or claim.computed or (runs >= RUNS_MIN and error <= tolerance / 2)
    limits = shape if shape is not None else claim.similar() if similar else None
    notes = [f"{IN_WORDS[claim.known]}, within {number(tolerance)}"]
    verdict: Verdict = "off"
    if close and enough:
        verdict = claim.equal
        if claim.known != "exact" and tolerance > _small_part(claim.figure, claim.unit) and not claim.fitted:
            verdict = "within-bound"
            notes.append("cannot be distinguished from 0")
    elif close or (limits is not None and limits.keep(samples)):
        verdict = "shape"
    if not enough:
        notes.append(_uncertainty(runs, error))
    if limits is not None and not (close and enough):
        notes.append(f"expected: {limits}")
    around = ResultLimits(at_least=claim.figure - tolerance, at_most=claim.figure + tolerance)
    return _row(claim, samples, verdict, notes, around, limits or around)


def bounded(
    claim: Claim,
    samples: Sequence[float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    mean: bool = False,
    shape: ResultLimits | None = None,
    runs: int = 0,
) -> Row:
    """The row of an inequality, published or ours: `within-bound` if every sample is within the bounds, or their mean
    if the row is about the `mean`; else `shape` if the limits `shape` are kept. If the only sample is a mean, a ratio
    of means or a maximum, `runs` is the number of runs behind it, and the row is about the mean."""
    mean = mean or bool(runs)
    limits = ResultLimits(at_least=at_least, at_most=at_most, of="mean" if mean else "every run")
    whose = "published bound" if claim.paper is not None else "our bound"
    assert claim.paper is None or claim.paper in {at_least, at_most}, f"{claim}: not the published bound"
    runs = max(runs, len(samples))
    enough = claim.computed or runs >= RUNS_MIN
    verdict: Verdict = "off"
    if limits.keep(samples):
        verdict = "shape" if not enough else claim.equal if claim.fitted or claim.itself else "within-bound"
    elif shape is not None and shape.keep(samples):
        verdict = "shape"
    each = "" if claim.computed and len(samples) == 1 else f" of the mean of {runs} runs" if mean else " in every run"
    notes = [f"{whose}{each}: {ResultLimits(at_least=at_least, at_most=at_most)}"]
    notes += [] if enough else [_uncertainty(runs, 0.0)]
    notes += [f"expected: {shape}"] if shape is not None and verdict in {"shape", "off"} else []
    return _row(claim, samples, verdict, notes, limits, shape or limits)


def directed(
    claim: Claim,
    samples: Sequence[float],
    expect: str = "",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    of: Judged = "mean",
) -> Row:
    """The row of a claim without a figure: `shape` if our samples keep the expected order or direction, else `off`.
    `expect` says what the limits mean."""
    limits = ResultLimits(at_least=at_least, at_most=at_most, above=above, below=below, of=of)
    said = f"expected: {expect}, {limits}" if expect else f"expected: {limits}"
    if of in {"interval", "doubt"}:
        said += "; one run, which says nothing about the scatter" if len(samples) == 1 else f"; {_interval(samples)}"
    return _row(claim, samples, "shape" if limits.keep(samples) else "off", [said], limits, limits)


def contradicted(claim: Claim, samples: Sequence[float], *, other: float, why: str, within: float | None = None) -> Row:
    """The row of a printed figure that another statement of the same source contradicts: `source-inconsistent` if ours
    is `other`, which follows from that statement; `why` says how."""
    assert claim.paper is not None, claim
    mean, rival = fmean(samples), structs.replace(claim, paper=other)
    around = ResultLimits(at_least=claim.paper - claim.tolerance(within), at_most=claim.paper + claim.tolerance(within))
    against = ResultLimits(at_least=other - rival.tolerance(within), at_most=other + rival.tolerance(within))
    verdict: Verdict = claim.equal if around.keep([mean]) else "source-inconsistent" if against.keep([mean]) else "off"
    return _row(claim, samples, verdict, [f"the source says {number(other)}, too: {why}"], around, against)


def outside(
    claim: Claim,
    samples: Sequence[float],
    *,
    why: str,
    at_least: float | None = None,
    at_most: float | None = None,
) -> Row:
    """The row of a published figure that lies outside the bounds which other figures of the same source give it:
    `source-inconsistent` if ours keeps these bounds, else `off`. `why` says where they come from."""
    assert claim.paper is not None, claim
    limits = ResultLimits(at_least=at_least, at_most=at_most)
    assert not limits.keep([claim.paper]), f"{claim}: the figure is within the bounds"
    verdict: Verdict = "source-inconsistent" if limits.keep(samples) else "off"
    return _row(claim, samples, verdict, [f"the source's own figures allow {limits}: {why}"], limits, limits)


def half_width(samples: Sequence[float]) -> float:
    """Half the width of the 95 % interval of the mean of at most ten samples (Student's t); 0 of one."""
    return STUDENT[len(samples) - 2] * _standard_error(samples) if len(samples) > 1 else 0.0


@dataclass(frozen=True)
class PairedDifference:
    """By how much one result is above another, paired by seed: the same load, or the same data, for both."""

    mean: float
    half: float | None
    """Half the width of its 95 % interval; None of one seed."""
    unit: str = "points"

    def is_at_least(self, least: float) -> bool:
        """Whether it is `least` or more, or no less than that as far as the interval can tell."""
        return self.mean + (self.half or 0.0) >= least

    def __str__(self) -> str:
        if self.half is None:
            return f"{self.mean:+.1f} {self.unit}"
        low, high = self.mean - self.half, self.mean + self.half
        return f"{self.mean:+.1f} {self.unit}, 95 % interval {low:.1f} to {high:.1f}"


def minus(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """The differences, run by run."""
    return [a - b for a, b in zip(one, other, strict=True)]


def over(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """The ratios, run by run."""
    return [a / b for a, b in zip(one, other, strict=True)]


def difference(one: Sequence[float], other: Sequence[float], unit: str = "points") -> PairedDifference:
    """Of results in `unit`, one of each seed, at most ten."""
    pairs = minus(one, other)
    return PairedDifference(fmean(pairs), half_width(pairs) if len(pairs) > 1 else None, unit)


def with_note(rows: Sequence[Row], note: str) -> list[Row]:
    """The rows with `note` added to each."""
    return [structs.replace(row, note=f"{row.note}; {note}") for row in rows]


def as_table(rows: Sequence[Row], title: str = "") -> Table:
    """The rows as a table for people; notes say the limits."""
    return Table(
        title,
        ("metric", "unit", "paper", "derived", "ours", "low", "high", "verdict", "note"),
        tuple((r.metric, r.unit, r.paper, r.derived, r.ours, r.low, r.high, r.verdict, r.note) for r in rows),
    )


def summary(rows: Sequence[Row]) -> str:
    """`58 rows: 50 reproduced, 6 shape, 1 off, 1 source-inconsistent`."""
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS}
    return f"{len(rows)} rows: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def _standard_error(samples: Sequence[float]) -> float:
    return stdev(samples) / math.sqrt(len(samples))


def _interval(samples: Sequence[float]) -> str:
    mean, half = fmean(samples), half_width(samples)
    return f"95 % interval {number(mean - half)} to {number(mean + half)}"


def _uncertainty(runs: int, error: float) -> str:
    if runs < RUNS_MIN:
        return "one run, so that the standard error is unknown" if runs == 1 else f"only {runs} runs"
    return f"the mean of {runs} runs has a standard error of {number(error)}"


def _row(
    claim: Claim,
    samples: Sequence[float],
    verdict: Verdict,
    notes: Sequence[str],
    one: ResultLimits,
    other: ResultLimits,
) -> Row:
    """A row that is off for results which keep neither of two limits."""
    fitted = f"fitted: {claim.fitted}" if claim.fitted else ""
    least = None if one.least is None or other.least is None else min(one.least, other.least)
    most = None if one.most is None or other.most is None else max(one.most, other.most)
    _can_fail(claim, least, most)
    return Row(
        experiment=claim.experiment,
        metric=claim.metric,
        unit=claim.unit,
        paper=claim.paper,
        derived=claim.derived,
        ours=fmean(samples),
        low=min(samples),
        high=max(samples),
        least=least,
        most=most,
        verdict=verdict,
        note="; ".join(part for part in (*notes, fitted, claim.note) if part),
    )


def _can_fail(claim: Claim, least: float | None, most: float | None) -> None:
    """ValueError if no possible result lies outside the limits: for `of N`, 0 to N; 0 for what is never negative."""
    counted = re.fullmatch(r"of ([\d,]+)", claim.unit)
    floor = 0.0 if counted or claim.unit in NEVER_NEGATIVE else -math.inf
    ceiling = float(counted[1].replace(",", "")) if counted else math.inf
    if (least is None or least <= floor) and (most is None or most >= ceiling):
        raise ValueError(f"{claim.experiment}, {claim.metric}: no result in {claim.unit or 'this unit'} can fail it")
