"""What the fold keeps of requests: those that are open, the seconds of a run, the stages, the routes.

What is made for every request is a struct, what is counted up is a dataclass with slots: Python makes structs three
times as fast, and sets the attributes of dataclasses three times as fast.
"""

from dataclasses import dataclass, field

from msgspec import Struct

from sloop.app.progress import RequestProgress
from sloop.runlog.samples import Samples, new_samples

Place = tuple[str, int]
"""A stage and the part of the request that visits it; the part is 0 at a stage that runs once per request."""


@dataclass(slots=True)
class SecondRecord:
    """One second of the run. A request's end counts in the second of its arrival, so that ends add up to arrivals."""

    start_s: int
    arrivals: int = 0
    served: int = 0
    late: int = 0
    dropped: int = 0
    rejected: int = 0
    failed: int = 0
    worst_ns: int = 0
    """The longest latency of its answered requests, in ns."""
    microcore_ns: int = 0
    """Integral of the allocated microcores over this second; set when it has ended."""
    hardware_microcore_ns: tuple[int, ...] = ()
    """Its parts by kind of hardware, in the order of `CostAccount.hardware_microcore_ns`; empty as long as there is
    only one kind."""

    @property
    def missed(self) -> int:
        """Requests of this second that have ended without being served in time."""
        return self.late + self.dropped + self.rejected + self.failed


class RequestRecord(Struct, gc=False):
    """A request that has not ended."""

    sent_ns: int
    second: SecondRecord
    """The second in which it arrived."""
    since_ns: int
    """When its current or last wait began; used only in applications with a single stage."""


class GraphRequestRecord(RequestRecord, gc=False):
    """A request that has not ended, in an application of several stages."""

    progress: RequestProgress
    waiting: dict[Place, int]
    """For each queued visit, when its wait began."""
    accuracies: dict[str, tuple[float, int]]
    """Per visited stage, the sum of the accuracies of the variants that ran its visits, and the number of visits."""
    rows_done: dict[str, int]
    """By stage where it runs in pieces, how many of its rows have run."""


@dataclass(slots=True)
class StageRecord:
    """Queue, waits and ends of one stage."""

    name: str
    queued: int = 0
    """Visits in its queue. Not kept in applications with a single stage; see `RunState.queued`."""
    waits_ns: "Samples[int]" = field(default_factory=new_samples)
    """Waits in ns from entering the queue to the start of a batch, one per visit."""
    dropped: int = 0
    """Ends by outcome, of requests whose end names this stage or that waited only here."""
    rejected: int = 0
    failed: int = 0


@dataclass(slots=True)
class RouteRecord:
    """Answered requests that visited the same stages."""

    served: int = 0
    latencies_ns: "Samples[int]" = field(default_factory=new_samples)
