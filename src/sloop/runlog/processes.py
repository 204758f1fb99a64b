"""What the server's own processes, edges and deciding process, took of the cores of their machine."""

from sloop.runlog import ProcessorTime, Record
from sloop.vocabulary import Request


class ProcessorUse:
    """A fold over the log of a server. A log begins in the midst of its processes' life, so that only differences
    between its records count; of an edge that has died nothing is known any more."""

    def __init__(self) -> None:
        self._taken_ns: int | None = None
        self._began_ns = self._ended_ns = self._used_ns = 0
        self._requests = self._new = 0
        """Up to the last record of processor time, and since."""

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record; instants never decrease."""
        if isinstance(record, Request):
            self._new += 1
        elif isinstance(record, ProcessorTime):
            if self._taken_ns is None:
                self._began_ns = now_ns
            else:
                self._used_ns += max(0, record.taken_ns - self._taken_ns)
                self._requests += self._new
            self._taken_ns, self._ended_ns, self._new = record.taken_ns, now_ns, 0

    @property
    def request_us(self) -> float | None:
        """Processor time for each request, in microseconds; None if the log does not say."""
        return self._used_ns / 1e3 / self._requests if self._requests else None

    @property
    def rate_rps(self) -> float:
        """Requests per second meanwhile; 0 if the log does not say."""
        passed_ns = self._ended_ns - self._began_ns
        return 1e9 * self._requests / passed_ns if passed_ns else 0.0

    @property
    def cores(self) -> float:
        """How many cores they took on average; 0 if the log does not say."""
        return (self.request_us or 0.0) * self.rate_rps / 1e6
