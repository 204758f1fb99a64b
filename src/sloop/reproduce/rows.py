"""Rows of a reproduction: what was published, what came out here, and a verdict that follows from the two.

Promises that no verdict is written by hand: each is computed from numbers and from a shape that was tested. `paper` is
what a publication prints; `derived` what was worked out from it before (by an independent simulation, or arithmetic);
`low` and `high` are the smallest and largest of our samples, one for each seed.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from sloop.report.tables import Table

Verdict = Literal["reproduced", "shape", "off", "source-inconsistent"]


class Row(Struct, frozen=True, kw_only=True):
    """One number of a publication beside ours."""

    experiment: str
    metric: str
    unit: str
    paper: float | None
    derived: float | None = None
    ours: float
    low: float
    high: float
    verdict: Verdict
    note: str = ""


class Claim(Struct, frozen=True, kw_only=True):
    """What is being compared: which experiment, which metric, in which unit, and what is known of it."""

    experiment: str
    metric: str
    unit: str
    paper: float | None = None
    derived: float | None = None
    note: str = ""


def equals(claim: Claim, samples: Sequence[float], *, within: float, shape: bool = False) -> Row:
    """`reproduced` where our mean is within `within` of the published number (else of the derived one), or our samples
    enclose it; `shape` where at least the shape holds."""
    expected = claim.paper if claim.paper is not None else claim.derived
    assert expected is not None, claim
    mean = sum(samples) / len(samples)
    close = abs(mean - expected) <= within * (1 + 1e-9) or min(samples) <= expected <= max(samples)
    verdict: Verdict = "reproduced" if close else "shape" if shape else "off"
    return _row(claim, samples, verdict, f"within {within:.3g}")


def bounded(
    claim: Claim,
    samples: Sequence[float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    shape: bool = False,
) -> Row:
    """For claims that are inequalities: `reproduced` where every sample keeps the bounds, `shape` where the shape
    holds."""
    kept = all(
        (at_most is None or sample <= at_most) and (at_least is None or sample >= at_least) for sample in samples
    )
    verdict: Verdict = "reproduced" if kept else "shape" if shape else "off"
    bounds = [f"at least {at_least:.4g}"] if at_least is not None else []
    bounds += [f"at most {at_most:.4g}"] if at_most is not None else []
    return _row(claim, samples, verdict, " and ".join(bounds))


def shaped(claim: Claim, samples: Sequence[float], *, shape: bool, expect: str) -> Row:
    """For experiments nobody printed numbers of: `shape` where what is to be expected came out, else `off`."""
    return _row(claim, samples, "shape" if shape else "off", expect)


def contradicted(claim: Claim, samples: Sequence[float], *, rival: float, within: float = 0.0) -> Row:
    """For claims that another figure of the same source contradicts: `source-inconsistent` where the two differ and
    ours is the rival; `reproduced` where ours is the claim."""
    assert claim.paper is not None, claim
    mean = sum(samples) / len(samples)
    if abs(mean - claim.paper) <= within:
        verdict: Verdict = "reproduced"
    elif abs(mean - rival) <= within and abs(rival - claim.paper) > within:
        verdict = "source-inconsistent"
    else:
        verdict = "off"
    return _row(claim, samples, verdict, f"the source's own figures give {rival:.4g}")


def as_table(rows: Sequence[Row], title: str = "") -> Table:
    """For people; the experiment, if it is one for all, is the title."""
    return Table(
        title,
        ("metric", "unit", "paper", "derived", "ours", "low", "high", "verdict", "note"),
        tuple((r.metric, r.unit, r.paper, r.derived, r.ours, r.low, r.high, r.verdict, r.note) for r in rows),
    )


def tally(rows: Sequence[Row]) -> str:
    """`58 rows: 50 reproduced, 6 shape, 1 off, 1 source-inconsistent`."""
    verdicts: tuple[Verdict, ...] = ("reproduced", "shape", "off", "source-inconsistent")
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in verdicts}
    return f"{len(rows)} rows: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def _row(claim: Claim, samples: Sequence[float], verdict: Verdict, rule: str) -> Row:
    assert samples, claim
    return Row(
        experiment=claim.experiment,
        metric=claim.metric,
        unit=claim.unit,
        paper=claim.paper,
        derived=claim.derived,
        ours=sum(samples) / len(samples),
        low=min(samples),
        high=max(samples),
        verdict=verdict,
        note="; ".join(part for part in (rule, claim.note) if part),
    )
