"""What the requests of an application bring on average, for plans at steady rates: how many rows, and how large."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple

from sloop.app.application import Application
from sloop.app.limits import ROWS_MAX
from sloop.profile.estimate import Estimate
from sloop.profile.size_law import NO_LESSONS, ClassLesson, SizeLessons
from sloop.workload import Work


@dataclass(frozen=True, slots=True)
class WorkMix:
    """The mean number of rows of a request, and how many of all rows are of each size."""

    rows: float = 1.0
    sizes: Mapping[int, float] = field(default_factory=dict)
    """By size, ascending, the fraction of the rows; empty if all are equally large."""

    @classmethod
    def of(cls, works: Sequence[Work]) -> "WorkMix":
        """Of requests that bring these; of ordinary ones if there are none."""
        if not works:
            return ONE_ROW_EACH
        rows = sum(work.rows for work in works)
        counts = Counter[int]()
        for work in works:
            counts[work.size] += work.rows
        sizes = {size: counts[size] / rows for size in sorted(counts)} if any(counts) else {}
        return cls(rows / len(works), sizes)

    @property
    def behind(self) -> "WorkMix":
        """At a later stage: as many rows, whose sizes nobody knows."""
        return WorkMix(self.rows)

    def teach(self, belief: Estimate) -> None:
        """Let a fresh belief be that of the mean of these rows."""
        shares = dict[int, float]()
        for size, share in self.sizes.items():
            bound = belief.classes.class_of(size)
            shares[bound] = shares.get(bound, 0.0) + share
        known = belief.profile.sizes
        unit = known[0].size if known else 0
        classes = [ClassLesson(size, shares[size], 1.0, 1.0, NO_LESSONS.per_row(size, unit)) for size in shares]
        if classes:
            belief.apply(1.0, 1.0, SizeLessons(tuple(classes)))


WORKS_MAX: Final = 10_000
"""Of a trace or a log, the rows and sizes of so many requests stand for those of all."""
ONE_ROW_EACH: Final = WorkMix()
"""What ordinary requests bring."""


class RefusedWork(NamedTuple):
    """Why a server would refuse requests."""

    key: str
    """Where users say what requests bring: `rows` or `sizes`."""
    what: str
    help: str


def refusal_of(works: Sequence[Work], application: Application) -> RefusedWork | None:
    """Why a server would refuse some of the requests that bring these: they have more rows than they may have, or rows
    so large that the profiles say nothing of them. None if it takes all."""
    rows, size = (max(map(attrgetter(each), works), default=0) for each in ("rows", "size"))
    if rows > 1 and application.one_row_why:
        what = f"a request to {application.name} has one row: {application.one_row_why}"
        return RefusedWork("rows", what, "say nothing of rows, or 1")
    most, known = application.limits.rows or ROWS_MAX, application.size_max
    if rows > most:
        what = f"{rows} rows exceed the limit of {most} rows per request to {application.name}"
        return RefusedWork("rows", what, "send fewer, or raise `limits: {rows: N}` of the application")
    if known and size > known:
        what = f"rows of {size:,} elements, where the profile of {application.name} says something of up to {known:,}"
        return RefusedWork("sizes", what, "send smaller ones, or let `sloop profile MODEL --sizes` measure larger ones")
    return None
