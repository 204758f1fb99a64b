"""What the core measures about one stage, in buckets of equal length, for the views policies are shown.

An integral over time of a count that changes at events (requests waiting, cores busy) needs no work between events:
with n(t) the count and S the signed sum of the instants at which it changed, the integral up to t is S + n·t. So an
event costs one addition, and a bucket is the difference of two such values.
"""

from collections import deque

from sloop.core.views import Bucket

BUCKETS_KEPT = 600
"""Ten minutes at one second: the longest window a policy here looks back over is HPA's five."""

SLACK_BUCKETS_KEPT = 10
"""Only the newest buckets keep every request's slack; a second at 10,000 rps is 80 kB."""


class Level:
    """A count and the integral of it over time."""

    __slots__ = ("_sum", "value")

    def __init__(self) -> None:
        self.value = 0
        self._sum = 0

    def add(self, now_ns: int, amount: int) -> None:
        """Change the count by `amount` at `now_ns`."""
        self.value += amount
        self._sum -= amount * now_ns

    def integral(self, now_ns: int) -> int:
        """∫ count dt from 0 to `now_ns`, which must not lie before the last change."""
        return self._sum + self.value * now_ns


class Monitor:
    """One stage's levels and buckets. `roll` closes buckets; the core calls it before events beyond their end."""

    __slots__ = ("_closed", "bucket_ns", "buckets", "busy_millicores", "now", "ready_millicores", "running", "waiting")

    def __init__(self, bucket_ns: int) -> None:
        self.bucket_ns = bucket_ns
        self.waiting = Level()
        self.running = Level()
        self.busy_millicores = Level()
        self.ready_millicores = Level()
        self.buckets: deque[Bucket] = deque(maxlen=BUCKETS_KEPT)
        self.now = Bucket(start_ns=0)
        self._closed = (0, 0, 0, 0)

    def roll(self, now_ns: int) -> None:
        """Close every bucket that ends at or before `now_ns`."""
        while (end_ns := self.now.start_ns + self.bucket_ns) <= now_ns:
            totals = (
                self.waiting.integral(end_ns),
                self.running.integral(end_ns),
                self.busy_millicores.integral(end_ns),
                self.ready_millicores.integral(end_ns),
            )
            bucket, before = self.now, self._closed
            bucket.waiting_ns = totals[0] - before[0]
            bucket.running_ns = totals[1] - before[1]
            bucket.busy_core_ns = (totals[2] - before[2]) // 1000
            bucket.ready_core_ns = (totals[3] - before[3]) // 1000
            self._closed = totals
            self.buckets.append(bucket)
            if len(self.buckets) > SLACK_BUCKETS_KEPT:
                self.buckets[-SLACK_BUCKETS_KEPT - 1].slack_ns = []
            self.now = Bucket(start_ns=end_ns)
