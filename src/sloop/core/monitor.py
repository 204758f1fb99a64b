"""Measurements of one stage, in buckets of equal length, for the policies' views. Arrivals, what waits and what runs
count in rows.

A count n(t) that changes at events (rows waiting, cores busy) is integrated over time without work between events:
each change by d at time e adds -d·e to a sum S, and the integral up to t is S + n(t)·t. So an event costs one addition,
and a bucket is the difference of two such values. Integer nanoseconds keep it exact.
"""

from collections import deque
from copy import copy

from sloop.core.views import Bucket
from sloop.units import NS_PER_S

BUCKETS_KEPT = 600
"""The number of one-second buckets that are kept; of shorter buckets more, so that they always cover ten minutes. The
longest window of a policy is HPA's stabilisation of five minutes."""

SLACK_BUCKETS_KEPT = 10
"""Only this many buckets, the newest, keep every request's slack: a second at 10,000 requests/s takes 80 kB."""


class Monitor:
    """One stage's counts and buckets. `roll` closes buckets; the core calls it at the first event after their end."""

    def __init__(self, bucket_ns: int, now_ns: int = 0) -> None:
        self.bucket_ns = bucket_ns
        self.waiting = self.running = self.busy_millicores = self.ready_millicores = 0
        self._waiting_sum = self._running_sum = self._busy_sum = self._ready_sum = 0
        self.buckets: deque[Bucket] = deque(maxlen=_buckets_kept(bucket_ns))
        self._more_rows = 0
        """Rows that arrived in the open bucket, without one row of each visit: `slack_ns` has these."""
        self._open(now_ns // bucket_ns * bucket_ns)
        self._closed = (0, 0, 0, 0)

    def arrive(self, now_ns: int, slack_ns: int) -> None:
        """A visit enters the queue with `slack_ns` of its budget left."""
        self.now.slack_ns.append(slack_ns)
        self.waiting += 1
        self._waiting_sum -= now_ns

    def arrive_more(self, now_ns: int, rows: int) -> None:
        """The visit that has just entered the queue has `rows` rows beyond the first."""
        self._more_rows += rows
        self.queue(now_ns, rows)

    def refuse(self, slack_ns: int, rows: int) -> None:
        """Count a request of `rows` rows as demand, although it is refused and waits nowhere."""
        self.now.slack_ns.append(slack_ns)
        self._more_rows += rows - 1

    def queue(self, now_ns: int, count: int) -> None:
        """`count` rows return to the queue; if negative, they leave it without being served."""
        self.waiting += count
        self._waiting_sum -= count * now_ns

    def start(self, now_ns: int, count: int, millicores: int) -> None:
        """`count` rows leave the queue as a batch on a replica with `millicores`."""
        moved = count * now_ns
        self.waiting -= count
        self._waiting_sum += moved
        self.running += count
        self._running_sum -= moved
        self.busy_millicores += millicores
        self._busy_sum -= millicores * now_ns

    def finish(self, now_ns: int, count: int, millicores: int) -> None:
        """A batch is over, whether it succeeded or not."""
        self.running -= count
        self._running_sum += count * now_ns
        self.busy_millicores -= millicores
        self._busy_sum += millicores * now_ns

    def ready(self, now_ns: int, millicores: int) -> None:
        """Replicas with `millicores` in total become ready; if negative, they stop being ready."""
        self.ready_millicores += millicores
        self._ready_sum -= millicores * now_ns

    def roll(self, now_ns: int) -> None:
        """Close each bucket that ends at or before `now_ns`."""
        while (end_ns := self.now.start_ns + self.bucket_ns) <= now_ns:
            totals = self._totals(end_ns)
            bucket, before = self.now, self._closed
            bucket.arrivals = len(bucket.slack_ns) + self._more_rows
            self._more_rows = 0
            bucket.waiting_ns = totals[0] - before[0]
            bucket.running_ns = totals[1] - before[1]
            bucket.busy_core_ns = (totals[2] - before[2]) // 1000
            bucket.ready_core_ns = (totals[3] - before[3]) // 1000
            self._closed = totals
            self.buckets.append(bucket)
            if len(self.buckets) > SLACK_BUCKETS_KEPT:
                self.buckets[-SLACK_BUCKETS_KEPT - 1].slack_ns = []
            self._open(end_ns)

    def restart(self, now_ns: int, bucket_ns: int) -> None:
        """Measure in buckets of another length from now on; the history is forgotten."""
        self.bucket_ns, self._more_rows = bucket_ns, 0
        self.buckets = deque(maxlen=_buckets_kept(bucket_ns))
        self._open(now_ns // bucket_ns * bucket_ns)
        self._closed = self._totals(now_ns)

    def is_quiet(self, now_ns: int, quiet_ns: int) -> bool:
        """Whether nothing has run for this long; the first bucket of that time counts whole."""
        begun_ns = self.buckets[0].start_ns if self.buckets else self.now.start_ns
        if self.running or self._totals(now_ns)[1] != self._closed[1] or begun_ns > now_ns - quiet_ns:
            return False
        for bucket in reversed(self.buckets):
            if bucket.start_ns + self.bucket_ns <= now_ns - quiet_ns:
                break
            if bucket.running_ns:
                return False
        return True

    def absorb(self, now_ns: int, other: "Monitor") -> None:
        """Add what another monitor with equal buckets has measured, and its buckets from before this one began.

        A new version of an application takes over the history of the version that it replaces."""
        own = {bucket.start_ns: bucket for bucket in self.buckets}
        first_ns = self.buckets[0].start_ns if self.buckets else self.now.start_ns
        for bucket in reversed(other.buckets):
            if bucket.start_ns in own:
                mine = own[bucket.start_ns]
                mine.arrivals += bucket.arrivals
                mine.waiting_ns += bucket.waiting_ns
                mine.running_ns += bucket.running_ns
                mine.busy_core_ns += bucket.busy_core_ns
                mine.ready_core_ns += bucket.ready_core_ns
            elif bucket.start_ns < first_ns and len(self.buckets) < (self.buckets.maxlen or 0):
                self.buckets.appendleft(copy(bucket))
        if self.now.start_ns == other.now.start_ns:
            self.now.slack_ns += other.now.slack_ns  # their number becomes `arrivals`
            self._more_rows += other._more_rows
            passed = [total - closed for total, closed in zip(other._totals(now_ns), other._closed, strict=True)]
            self._waiting_sum += passed[0]
            self._running_sum += passed[1]
            self._busy_sum += passed[2]
            self._ready_sum += passed[3]

    def _totals(self, until_ns: int) -> tuple[int, int, int, int]:
        """The integrals of the rows that wait and run, and of the millicores that are busy and ready."""
        return (
            self._waiting_sum + self.waiting * until_ns,
            self._running_sum + self.running * until_ns,
            self._busy_sum + self.busy_millicores * until_ns,
            self._ready_sum + self.ready_millicores * until_ns,
        )

    def _open(self, start_ns: int) -> None:
        self.now = Bucket(start_ns=start_ns)


def _buckets_kept(bucket_ns: int) -> int:
    return BUCKETS_KEPT * max(1, NS_PER_S // bucket_ns)
