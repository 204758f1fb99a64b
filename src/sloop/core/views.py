"""What policies see: only what a real cluster could measure, and estimates (law 2).

Views are built at each control tick and are the policy's to read, never to change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from sloop.units import NS_PER_S
from sloop.vocabulary import Life, Node, Path, Plan, ReplicaId, ReplicaSpec, Visit


class Belief(Protocol):
    """What a policy may know of a variant's speed: an estimate, never the simulator's truth.

    `sloop.profile.Estimate` is the implementation; batches run from 1 to `batch_max`, cores up to `cores_max`.
    """

    @property
    def batch_max(self) -> int: ...
    @property
    def cores_max(self) -> float: ...
    @property
    def startup_ns(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def accuracy(self) -> float | None: ...

    def latency_ms(self, batch: int, cores: float) -> float:
        """Believed duration of one batch of `batch` on `cores`, in milliseconds."""
        ...

    def costs_ns(self, cores: float) -> Sequence[int]:
        """Believed durations in ns indexed by batch size: `[0, cost of 1, …, cost of batch_max]`, monotone."""
        ...

    def observe(self, batch: int, cores: float, taken_ns: int) -> None:
        """Learn from a finished batch: `taken_ns` from giving it to the replica to its answer, transport included."""
        ...


class Bucket(Struct, gc=False):
    """What one stage did in one monitoring interval `[start_ns, start_ns + bucket_ns)`."""

    start_ns: int
    arrivals: int = 0
    waiting_ns: int = 0
    """Integral over time of requests queued at the stage."""
    running_ns: int = 0
    """Integral over time of requests being executed."""
    busy_core_ns: int = 0
    """Integral over time of the cores of replicas that run a batch."""
    ready_core_ns: int = 0
    """Integral over time of the cores of replicas that are ready, busy or not."""
    slack_ns: list[int] = []  # msgspec copies the empty list for each instance
    """For each arrival, what remained of its budget: deadline - arrival."""


class ReplicaView(Struct, frozen=True, gc=False):
    """One replica as a policy sees it."""

    id: ReplicaId
    spec: ReplicaSpec
    life: Life
    since_ns: int
    """When it entered this life."""
    running: int
    """Requests in its current batch; 0 when idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What arrived, and what became of it, in buckets: complete ones, oldest first, the last ended at or before now."""

    buckets: Sequence[Bucket]
    bucket_ns: int

    def window(self, length_ns: int) -> Sequence[Bucket]:
        """The last buckets that make up `length_ns`, fewer at the start of a run."""
        return self.buckets[-max(1, length_ns // self.bucket_ns) :]

    def rate_rps(self, length_ns: int = NS_PER_S) -> float:
        """Mean arrival rate over the last `length_ns`, in requests per second; 0 before the first bucket ends."""
        window = self.window(length_ns)
        if not window:
            return 0.0
        return sum(bucket.arrivals for bucket in window) * NS_PER_S / (len(window) * self.bucket_ns)

    def concurrency(self, length_ns: int) -> float:
        """Mean number of requests inside, waiting or running, over the last `length_ns`."""
        window = self.window(length_ns)
        if not window:
            return 0.0
        return sum(bucket.waiting_ns + bucket.running_ns for bucket in window) / (len(window) * self.bucket_ns)

    def utilisation(self, length_ns: int) -> float:
        """Busy share of the ready cores over the last `length_ns`, 0 to 1; 0 where no core was ready."""
        window = self.window(length_ns)
        ready = sum(bucket.ready_core_ns for bucket in window)
        return sum(bucket.busy_core_ns for bucket in window) / ready if ready else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView(Traffic):
    """One stage at a control tick."""

    name: str
    slo_ns: int
    """The application's end-to-end SLO."""
    after: tuple[str, ...]
    variants: Mapping[str, Belief]
    replicas: tuple[ReplicaView, ...]
    queue: tuple[Visit, ...]
    """Waiting visits in queue order."""
    running: int
    """Requests being executed now."""
    visits: float = 1.0
    """How often a request is believed to visit the stage: less than once behind a branch, more behind a fan-out."""

    def count(self, life: Life) -> int:
        """Replicas in this state of life."""
        return sum(replica.life is life for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node and what is still free on it."""

    node: Node
    free_cores: float
    free_memory_bytes: int
    free_share: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Everything a scaling policy is shown at a control tick."""

    stages: tuple[StageView, ...]
    """In topological order."""
    nodes: tuple[NodeView, ...]
    plan: Plan | None
    """The plan in force."""
    demand_rps: Mapping[str, float]
    """Per stage, the forecast for the ingress times the visits a request makes."""
    ingress: Traffic
    """Requests that arrive at the application."""
    forecast_rps: float
    """The forecast policy's answer: requests per second to expect at the ingress."""
    paths: tuple[Path, ...]
    """Every way through the graph from an entry to an end, with its deadline."""
