"""Rows of a reproduction: a published or derived figure, our result, and a verdict computed from both.

No verdict is written by hand. It is computed from the numbers, one table of tolerances (`TOLERANCES`), and a tested
shape (an order, a direction, a factor of two). The tolerance depends only on the kind of the figure:

| kind of figure | tolerance | at least | at most, for % and points |
| --- | --- | --- | --- |
| `exact`: a table cell, a count, a recorded output, a derivation | half a unit of its last printed digit | | |
| `simulated`: the mean of somebody's simulation or experiment | 10 % | 0.1 | 2 points |
| `plot`: read off a figure | 15 % | 1, or 0.3 points | 3 points |
| `text`: "about", "up to", "x times" | 20 % | 1, or 0.5 points | 5 points |

A row may set a smaller tolerance, never a larger one. A figure below its tolerance cannot be distinguished from 0, so
that it is only a bound (`within-bound`). Our simulated results must also be precise enough: at least three runs, whose
mean has a standard error of at most half the tolerance (so that the 95 % confidence interval is about ± the tolerance).
Fewer runs, such as those of `--quick`, or runs that scatter more can only be `shape`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final, Literal, get_args

from msgspec import Struct, structs

from sloop.report.tables import Table
from sloop.text import number
from sloop.units import ROUNDING

Verdict = Literal["reproduced", "within-bound", "shape", "off", "source-inconsistent"]
Known = Literal["exact", "simulated", "plot", "text"]

VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)
MEANINGS: Final = (
    "reproduced: our mean is within the tolerance of the published figure, or of the derived one if none was "
    "published. The tolerance depends on the kind of figure: half a unit of the last digit for exact figures, 10 % for "
    "means of simulations, 15 % for figures read off a plot, 20 % for 'about' or 'up to' in a text. Simulated means "
    "need at least three runs that agree.",
    "within-bound: an inequality, published or set by us as an acceptance test, holds in every run; or the figure is "
    "so small that its tolerance includes 0. This is weaker than `reproduced`.",
    "shape: our result differs from the figure, or is not precise enough, but the expected order, direction or "
    "magnitude (within a factor of two) holds.",
    "off: none of these. source-inconsistent: the source's own figures contradict each other, or a constant that the "
    "source leaves open and the note names; ours agrees with one of them.",
)
COLUMNS: Final = (
    "Columns: paper is the published figure; derived one that was computed from the publication; ours the mean "
    "of our runs, low and high the least and the most of them; note says what differs from the publication."
)
RUNS_MIN: Final = 3
"""Runs needed to estimate the standard error of a mean."""
STUDENT: Final = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.306, 2.26216)
"""0.975 quantiles of Student's t with 1, 2, … degrees of freedom."""


class Tolerance(Struct, frozen=True):
    """The allowed difference between our mean and a figure of one kind."""

    relative: float
    least: float
    least_points: float
    most_points: float

    def of(self, figure: float, unit: str) -> float:
        """The tolerance in the figure's unit. Percentages have a limit in points, because 10 % of 90 % would be too
        wide."""
        wide = self.relative * abs(figure)
        if unit in {"%", "points"}:
            return max(self.least_points, min(wide, self.most_points))
        return max(self.least, wide)


TOLERANCES: Final = {
    "simulated": Tolerance(relative=0.10, least=0.1, least_points=0.1, most_points=2.0),
    "plot": Tolerance(relative=0.15, least=1.0, least_points=0.3, most_points=3.0),
    "text": Tolerance(relative=0.20, least=1.0, least_points=0.5, most_points=5.0),
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
    verdict: Verdict
    note: str = ""


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

    @property
    def figure(self) -> float:
        """The published figure, or else the derived one."""
        found = self.paper if self.paper is not None else self.derived
        assert found is not None, self
        return found

    def tolerance(self, within: float | None = None) -> float:
        """The allowed difference: `within`, if that is smaller. For an exact figure, half a unit of the last digit of
        the literal."""
        if self.known == "exact":
            widest = 0.5 * 10.0 ** -len(repr(self.figure).partition(".")[2])
        else:
            widest = TOLERANCES[self.known].of(self.figure, self.unit)
        return widest if within is None else min(within, widest)


def compare(
    claim: Claim,
    samples: Sequence[float],
    *,
    shape: bool = False,
    within: float | None = None,
    runs: int = 0,
    error: float = 0.0,
) -> Row:
    """Compare our samples with the claim's figure.

    `shape` says whether the expected order, direction or magnitude holds, `within` narrows the tolerance. If the only
    sample is itself a mean or a ratio of means, `runs` is the number of runs behind it and `error` its standard error,
    if known.
    """
    tolerance, mean = claim.tolerance(within), fmean(samples)
    apart = abs(mean - claim.figure)
    rounding = ROUNDING * max(1.0, abs(claim.figure))
    note = f"{IN_WORDS[claim.known]}, within {number(tolerance)}"
    error = error or (_standard_error(samples) if len(samples) > 1 else 0.0)
    enough = max(runs, len(samples)) >= RUNS_MIN and error <= tolerance / 2
    if claim.known == "exact" or claim.computed or enough:
        verdict: Verdict = "reproduced" if apart <= tolerance + rounding else "shape" if shape else "off"
    else:
        verdict = "shape" if shape or apart <= 2 * tolerance + rounding else "off"
        note += f"; {_uncertainty(max(runs, len(samples)), error)}"
    if verdict == "reproduced" and claim.known != "exact" and tolerance > abs(claim.figure):
        verdict, note = "within-bound", f"{note}, so that it cannot be distinguished from 0"
    return _row(claim, samples, verdict, note)


def bounded(
    claim: Claim,
    samples: Sequence[float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    shape: bool = False,
    runs: int = 0,
) -> Row:
    """The row of an inequality, published or ours: `within-bound` if every sample is within the bounds."""
    kept = all((at_most is None or x <= at_most) and (at_least is None or x >= at_least) for x in samples)
    runs = max(runs, len(samples))
    enough = claim.computed or runs >= RUNS_MIN
    verdict: Verdict = "within-bound" if kept and enough else "shape" if shape or kept else "off"
    whose = "published bound" if claim.paper is not None else "our bound"
    note = f"{whose}: {_limits(at_least, at_most)}" + ("" if enough else f"; {_uncertainty(runs, 0.0)}")
    return _row(claim, samples, verdict, note)


@dataclass(frozen=True)
class PairedDifference:
    """By how much one result is above another, paired by seed: the same load, or the same data, for both."""

    mean: float
    half: float | None
    """Half the width of its 95 % interval; None of one seed."""
    unit: str = "points"

    @property
    def is_above(self) -> bool:
        """Whether it is more than 0, even at the lower end of the interval."""
        return self.mean - (self.half or 0.0) > 0

    def is_at_least(self, least: float) -> bool:
        """Whether it is `least` or more, or no less than that as far as the interval can tell."""
        return self.mean + (self.half or 0.0) >= least

    def __str__(self) -> str:
        if self.half is None:
            return f"{self.mean:+.1f} {self.unit}"
        low, high = self.mean - self.half, self.mean + self.half
        return f"{self.mean:+.1f} {self.unit}, 95 % interval {low:.1f} to {high:.1f}"


def difference(one: Sequence[float], other: Sequence[float], unit: str = "points") -> PairedDifference:
    """Of results in `unit`, one of each seed, at most ten."""
    pairs = [a - b for a, b in zip(one, other, strict=True)]
    half = STUDENT[len(pairs) - 2] * _standard_error(pairs) if len(pairs) > 1 else None
    return PairedDifference(fmean(pairs), half, unit)


def similar(figure: float, samples: Sequence[float]) -> bool:
    """Whether our mean lies between half and double the figure; a test for `shape`."""
    return figure / 2 <= fmean(samples) <= 2 * figure


def directed(claim: Claim, samples: Sequence[float], *, holds: bool, expect: str) -> Row:
    """The row of a claim without a figure: `shape` if the expected order or direction holds, else `off`."""
    return _row(claim, samples, "shape" if holds else "off", f"expected: {expect}")


def contradicted(
    claim: Claim,
    samples: Sequence[float],
    *,
    other: float,
    within: float | None = None,
    by: str = "the source's own figures give",
) -> Row:
    """The row of a figure that `other` contradicts, which follows from the same source or, if `by` says so, from a
    constant that the source leaves open: `source-inconsistent` if ours matches `other`.
    """
    assert claim.paper is not None, claim
    mean = fmean(samples)
    rival = structs.replace(claim, paper=other)
    verdict: Verdict = "off"
    if abs(mean - claim.paper) <= claim.tolerance(within):
        verdict = "reproduced"
    elif abs(mean - other) <= rival.tolerance(within):
        verdict = "source-inconsistent"
    return _row(claim, samples, verdict, f"{by} {number(other)}")


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
    low, high = -math.inf if at_least is None else at_least, math.inf if at_most is None else at_most
    assert not low <= claim.paper <= high, f"{claim}: the figure is within the bounds"
    verdict: Verdict = "source-inconsistent" if low <= fmean(samples) <= high else "off"
    return _row(claim, samples, verdict, f"the source's own figures allow {_limits(at_least, at_most)}: {why}")


def with_note(rows: Sequence[Row], note: str) -> list[Row]:
    """The rows with `note` added to each."""
    return [structs.replace(row, note=f"{row.note}; {note}") for row in rows]


def as_table(rows: Sequence[Row], title: str = "") -> Table:
    """The rows as a table for people."""
    return Table(
        title,
        ("metric", "unit", "paper", "derived", "ours", "low", "high", "verdict", "note"),
        tuple((r.metric, r.unit, r.paper, r.derived, r.ours, r.low, r.high, r.verdict, r.note) for r in rows),
    )


def summary(rows: Sequence[Row]) -> str:
    """`58 rows: 50 reproduced, 6 shape, 1 off, 1 source-inconsistent`."""
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in VERDICTS}
    return f"{len(rows)} rows: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def _limits(at_least: float | None, at_most: float | None) -> str:
    limits = [f"at least {number(at_least)}"] if at_least is not None else []
    limits += [f"at most {number(at_most)}"] if at_most is not None else []
    return " and ".join(limits)


def _standard_error(samples: Sequence[float]) -> float:
    return stdev(samples) / math.sqrt(len(samples))


def _uncertainty(runs: int, error: float) -> str:
    if runs < RUNS_MIN:
        return "one run, so that the standard error is unknown" if runs == 1 else f"only {runs} runs"
    return f"the mean of {runs} runs has a standard error of {number(error)}"


def _row(claim: Claim, samples: Sequence[float], verdict: Verdict, rule: str) -> Row:
    return Row(
        experiment=claim.experiment,
        metric=claim.metric,
        unit=claim.unit,
        paper=claim.paper,
        derived=claim.derived,
        ours=fmean(samples),
        low=min(samples),
        high=max(samples),
        verdict=verdict,
        note="; ".join(part for part in (rule, claim.note) if part),
    )
