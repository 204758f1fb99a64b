"""What `plan` answers, as values: the keys of `sloop plan --json`. No working out is done here.

Latencies are of one request, in milliseconds, infinite (null in JSON) where a stage cannot keep up. Rates are in
requests per second; at a stage that runs for parts, in parts per second.
"""

from typing import Literal

from msgspec import Struct

Kind = Literal["throughput", "deadline", "batch", "cores"]


class Bound(Struct, frozen=True):
    """A constraint that keeps a stage from having less than it has, or from getting more.

    `throughput`: what it has just keeps up. `deadline`: with less it would keep up, but a path would be too slow.
    `batch`: larger batches would save something, and there are none. `cores`: no node has room for one more replica.
    """

    kind: Kind
    why: str


class StageNeed(Struct, frozen=True):
    """What one stage gets of one kind of replica; `cores` are each replica's."""

    stage: str
    variant: str
    replicas: int
    batch: int
    """The largest the plan allows."""
    cores: float
    predicted_ms: float
    """From entering the stage to leaving it: `wait_ms` + `service_ms`."""
    rate_rps: float = 0.0
    """What reaches the stage: the rate at the ingress times the visits a request makes to it."""
    parts: float = 1.0
    """Visits of one request that come together: more than one where the stage runs for parts."""
    service_ms: float = 0.0
    """A batch of `batch_expected`."""
    wait_ms: float = 0.0
    """For the batch to fill or for the one before it, and for those of a request's parts that go first."""
    batch_expected: int = 1
    """With which the stage keeps up."""
    rate_max_rps: float = 0.0
    """With which the stage, all its replicas together, would just keep up."""
    binds: tuple[Bound, ...] = ()
    """Of the stage as a whole; empty where nothing binds."""
    one_more: str = "nothing"
    """What the stage needs for one more request per second at the ingress."""


class PathNeed(Struct, frozen=True):
    """One way through the graph: every stage on it in turn."""

    stages: tuple[str, ...]
    share: float
    slo_ms: float
    predicted_ms: float
    slack_ms: float
    """Deadline less prediction: below 0 where it is missed."""


class Lack(Struct, frozen=True):
    """One reason why a goal cannot be met: at which stage, or on which path, and by how much.

    Of `plan`, the system's own reason, there are no figures.
    """

    kind: Literal["plan", "throughput", "deadline", "cores", "memory"]
    why: str
    stage: str = ""
    path: tuple[str, ...] = ()
    needs: float = 0.0
    has: float = 0.0
    unit: str = ""

    @property
    def by(self) -> float:
        """How much is too little, in `unit`."""
        return abs(self.needs - self.has)


class OneMore(Struct, frozen=True):
    """What one more request per second would need, by the same policies' answer to it."""

    feasible: bool
    says: str
    """`nothing`, `+1 replica of read (0.5 cores)`, `batch 4 -> 8 at detect`, or `cannot: …`."""
    cores: float = 0.0
    """More than now, all stages together."""
    changes: tuple[str, ...] = ()
    lacks: tuple[Lack, ...] = ()
    """Why not."""


class Need(Struct, frozen=True):
    """The cluster a system wants at a steady rate, and what that is believed to give."""

    system: str
    feasible: bool
    stages: tuple[StageNeed, ...]
    cores: float
    usd_per_h: float
    predicted_ms: float
    """Of the longest path."""
    solve_ms: float
    """The longest single decision of the policy, nothing else."""
    why: str
    notes: tuple[str, ...] = ()
    """What speaks against believing it, one line each."""
    rate_rps: float = 0.0
    paths: tuple[PathNeed, ...] = ()
    """The tightest first."""
    lacks: tuple[Lack, ...] = ()
    """Why the goal cannot be met; empty where it can."""
    one_more: OneMore | None = None
    plan_why: str = ""
    """The system's own reason alone."""
