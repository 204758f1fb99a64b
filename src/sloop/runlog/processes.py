"""What the server's own processes, edges and deciding process, took of the cores of their machine."""

from sloop.runlog import ProcessorTime, Record
from sloop.units import to_s
from sloop.vocabulary import Request


class ProcessorUse:
    """A fold over the log of a server: what a request takes, and not what the processes take without any.

    Between two records of processor time, it is a · seconds + b · requests; a and b follow by least squares, because
    seconds differ in their requests. If they do not differ enough, everything counts as taken by requests. Processes
    began before their log, so that only differences count; where an edge has died, nothing is known of the difference.
    """

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        """The instant of the last record of processor time, and what it said."""
        self._new = self._requests = 0
        """Since that record, and in all differences together."""
        self._passed_s = self._taken_s = 0.0
        self._squares_s = self._squares = self._products_s = 0.0
        """Sums over the differences: of seconds squared, of requests squared, of both multiplied."""
        self._taken_by_s = self._taken_by_requests = 0.0

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record; instants never decrease."""
        if isinstance(record, Request):
            self._new += 1
        elif isinstance(record, ProcessorTime):
            if self._last is not None and record.taken_ns >= self._last[1]:
                self._add(to_s(now_ns - self._last[0]), to_s(record.taken_ns - self._last[1]))
            self._last, self._new = (now_ns, record.taken_ns), 0

    def _add(self, passed_s: float, taken_s: float) -> None:
        self._requests += self._new
        self._passed_s += passed_s
        self._taken_s += taken_s
        self._squares_s += passed_s * passed_s
        self._squares += self._new * self._new
        self._products_s += passed_s * self._new
        self._taken_by_s += passed_s * taken_s
        self._taken_by_requests += self._new * taken_s

    @property
    def request_us(self) -> float | None:
        """Processor time that a request takes, in microseconds; None if the log does not say."""
        if not self._requests:
            return None
        most_s = self._taken_s / self._requests
        different = self._squares_s * self._squares - self._products_s**2
        if different <= DIFFERENT_MIN * self._squares_s * self._squares:
            return 1e6 * most_s
        found_s = (self._squares_s * self._taken_by_requests - self._products_s * self._taken_by_s) / different
        return 1e6 * min(most_s, max(0.0, found_s))

    @property
    def rate_rps(self) -> float:
        """Requests per second meanwhile; 0 if the log does not say."""
        return self._requests / self._passed_s if self._passed_s else 0.0

    @property
    def cores(self) -> float:
        """How many cores requests took on average; 0 if the log does not say."""
        return (self.request_us or 0.0) * self.rate_rps / 1e6


DIFFERENT_MIN = 1e-3
"""Relative to what it would be if seconds and requests had nothing to do with each other: seconds with all the same
number of requests do not say what a second takes without."""
