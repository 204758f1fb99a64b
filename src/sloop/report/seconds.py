"""A run second by second: what arrived in each, how that ended, and what was held and waiting meanwhile.

A dozen numbers a second, appended as time goes on. Knows no request: its owner counts into the `columns`.
"""

from array import array
from collections.abc import Callable
from typing import Final

from sloop.report.holdings import MICROCORES, Holdings
from sloop.report.rows import Second
from sloop.units import NS_PER_MS, NS_PER_S

COLUMNS: Final = ("arrivals", "served", "late", "dropped", "rejected", "failed", "queue", "worst_ns")
BEFORE_NS: Final = -(2**63)


class Seconds:
    """The seconds since `start_ns`, by default the first instant that is told."""

    def __init__(self, holdings: Holdings, start_ns: int | None) -> None:
        self.columns: dict[str, list[int]] = {name: [] for name in COLUMNS}
        self.start_ns = start_ns
        self.origin_ns = start_ns or 0
        self.current = -1
        """The second that is open; -1 before the first."""
        self.end_ns = BEFORE_NS
        """When it ends."""
        self._holdings = holdings
        self._holdings.charged_ns = self.origin_ns
        self._cores: array[float] = array("d")
        self._mark = 0

    def begin(self, now_ns: int, waiting: Callable[[], int]) -> None:
        """Close the seconds that `now_ns` has left behind and open the one it is in."""
        if not self._cores:
            if self.start_ns is None:
                self.start_ns = self.origin_ns = self._holdings.charged_ns = now_ns
            self.end_ns = self.origin_ns
            self._open()
        while now_ns >= self.end_ns:
            self._holdings.charge(self.end_ns)
            self._cores[-1] = self._cores_since_mark(NS_PER_S)
            self.columns["queue"][-1] = waiting()
            self._mark = self._holdings.microcore_ns
            self._open()

    def rows(self, last_ns: int, waiting: int) -> list[Second]:
        """The run up to `last_ns`; the last second may be incomplete."""
        if not self._cores:
            return []
        self._holdings.charge(last_ns)
        cores = list(self._cores)
        part_ns = last_ns - (self.end_ns - NS_PER_S)
        cores[-1] = self._cores_since_mark(part_ns) if part_ns else self._holdings.cores
        queue = [*self.columns["queue"][:-1], waiting]
        ends = zip(*(self.columns[name] for name in COLUMNS[1:6]), strict=True)
        return [
            Second(start_s, arrivals, served, late, dropped, rejected, failed, core, queued, worst_ns / NS_PER_MS)
            for start_s, (arrivals, (served, late, dropped, rejected, failed), core, queued, worst_ns) in enumerate(
                zip(self.columns["arrivals"], ends, cores, queue, self.columns["worst_ns"], strict=True)
            )
        ]

    def _cores_since_mark(self, passed_ns: int) -> float:
        return (self._holdings.microcore_ns - self._mark) / MICROCORES / passed_ns

    def _open(self) -> None:
        self.current += 1
        self.end_ns += NS_PER_S
        for column in self.columns.values():
            column.append(0)
        self._cores.append(0.0)
