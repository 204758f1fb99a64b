"""What Biscale's evaluation looks at: each second's cores in service, and whether every replica has a single one.

A fold over the log. Cost counts replicas that take requests, as the publication's does: from ready to the order to
stop, with the cores in effect.
"""

from sloop.actions import StartReplica, StopReplica
from sloop.events import ReplicaLost, ReplicaReady, ReplicaStopped, Resized
from sloop.runlog import Record
from sloop.units import NS_PER_S
from sloop.vocabulary import ReplicaId


class Watch:
    """A sink. `cores[t]` and `count[t]` are means over second t, `single[t]` the part of it with one core each."""

    def __init__(self, seconds: int) -> None:
        self.cores = [0.0] * seconds
        self.count = [0.0] * seconds
        self.single = [0.0] * seconds
        self._starting: dict[ReplicaId, float] = {}
        self._ready: dict[ReplicaId, float] = {}
        self._seen_ns = 0

    def append(self, now_ns: int, record: Record) -> None:
        """Take one record."""
        if isinstance(record, StartReplica):
            self._starting[record.replica] = record.spec.cores
        elif isinstance(record, ReplicaReady):
            self._charge(now_ns)
            cores = self._starting.pop(record.replica, None)
            if cores is not None:
                self._ready[record.replica] = cores
        elif isinstance(record, Resized):
            self._charge(now_ns)
            for known in (self._starting, self._ready):
                if record.replica in known:
                    known[record.replica] = record.cores
        elif isinstance(record, StopReplica | ReplicaStopped | ReplicaLost):
            self._charge(now_ns)
            self._starting.pop(record.replica, None)
            self._ready.pop(record.replica, None)

    def finish(self) -> None:
        """Account for what is left of the run."""
        self._charge(len(self.cores) * NS_PER_S)

    def _charge(self, now_ns: int) -> None:
        cores = sum(self._ready.values())
        single = all(own == 1.0 for own in self._ready.values())
        while self._seen_ns < min(now_ns, len(self.cores) * NS_PER_S):
            second = self._seen_ns // NS_PER_S
            until_ns = min(now_ns, (second + 1) * NS_PER_S)
            part = (until_ns - self._seen_ns) / NS_PER_S
            self.cores[second] += part * cores
            self.count[second] += part * len(self._ready)
            self.single[second] += part * single
            self._seen_ns = until_ns
