"""Figures of a run in which requests bring several rows, or rows of several sizes."""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from msgspec import Struct, field

from sloop.actions import End
from sloop.runlog import Record
from sloop.runlog.samples import Samples, new_samples
from sloop.sizes import class_to_show
from sloop.units import quantile, to_ms
from sloop.vocabulary import Outcome, Request, RequestId


class SizeFigures(Struct, frozen=True, kw_only=True):
    """The requests whose rows are of one size, or of one class of sizes, named by its upper bound."""

    size: int
    requests: int
    served: int
    attainment: float
    p50_ms: float | None
    p99_ms: float | None
    """Of the answered ones."""


class SizeCounts(Struct):
    """The requests whose rows are of one size."""

    requests: int = 0
    served: int = 0
    latencies_ns: "Samples[int]" = field(default_factory=new_samples)


class RowCounts:
    """A sink that counts the rows of requests, and how requests end by the size of their rows."""

    def __init__(self) -> None:
        self.rows = self.rows_served = 0
        self._open: dict[RequestId, Request] = {}
        self._is_mixed = False
        self._sizes: dict[int, SizeCounts] = {}

    def append(self, now_ns: int, record: Record) -> None:
        """Add the next record."""
        if type(record) is Request:
            self._open[record.id] = record
            self._is_mixed = self._is_mixed or record.size > 0 or record.rows != 1
            self.rows += record.rows
            self._counts(record.size).requests += 1
        elif type(record) is End and (request := self._open.pop(record.request, None)) is not None:
            counts = self._counts(request.size)
            if record.outcome is Outcome.SERVED:
                counts.served += 1
                self.rows_served += request.rows
            if record.outcome in (Outcome.SERVED, Outcome.LATE):
                counts.latencies_ns.append(now_ns - request.sent_ns)

    def _counts(self, size: int) -> SizeCounts:
        return self._sizes.setdefault(size, SizeCounts())

    @property
    def sizes(self) -> list[int]:
        """The sizes of the rows that came, ascending; 0 for rows that are all equally large."""
        return sorted(self._sizes)

    def figures(self, duration_s: float) -> Mapping[str, Any]:
        """The fields about rows of a `RunRow`; none if every request brought one row of the only size."""
        if not self._is_mixed:
            return {}
        return {
            "rows": self.rows,
            "goodput_rows_per_s": self.rows_served / duration_s if duration_s else 0.0,
            "sizes": tuple(self._by_size()) if len(self._sizes) > 1 else (),
        }

    def _by_size(self) -> Iterator[SizeFigures]:
        class_of = class_to_show(self._sizes)
        for bound in sorted({class_of(size) for size in self._sizes}):
            own = [counts for size, counts in self._sizes.items() if class_of(size) == bound]
            requests, served = sum(each.requests for each in own), sum(each.served for each in own)
            latencies_ns = sorted(chain.from_iterable(each.latencies_ns for each in own))
            p50_ms, p99_ms = (to_ms(quantile(latencies_ns, share)) if latencies_ns else None for share in (0.5, 0.99))
            yield SizeFigures(
                size=bound, requests=requests, served=served, attainment=served / requests, p50_ms=p50_ms, p99_ms=p99_ms
            )
