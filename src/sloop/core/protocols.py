"""Policy protocols: one for each verb that a policy can be (law 4), and the bundle of all eight that a system is.

A policy is a frozen dataclass of parameters with one method, its verb. Memory, where it needs any, is in `init=False`
fields that only this method changes. The core passes the time and all values in; a policy asks for neither.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from sloop.core.views import ClusterView, NodeView, Traffic
from sloop.units import FOREVER_NS
from sloop.vocabulary import Plan, ReplicaId, ReplicaSpec, Request, Visit


class Order(Protocol):
    """Which waiting visit is served first: the one with the smallest key; of equal ones the one that came first."""

    def key(self, visit: Visit) -> int: ...


class Take(Struct, frozen=True, gc=False):
    """A batch policy's answer: drop the first `skip` visits, then start a batch of the next `count`.

    After a skip the core drops hopeless visits that are now in front and asks again; it ignores `count` until then.
    `count=0` starts nothing: the core asks again at `wait_until_ns` (later than now), at the next arrival, or when a
    replica becomes idle.
    """

    count: int
    skip: int = 0
    wait_until_ns: int = FOREVER_NS


class Batch(Protocol):
    """How many of the waiting visits to run now on an idle replica."""

    def decide(
        self,
        now_ns: int,
        queue: Sequence[Visit],
        limit: int,
        costs_ns: Sequence[int],
        wait_ns: int = 0,
        remaining_ns: int = 0,
    ) -> Take:
        """`queue` is not empty and in the order of the order policy; `limit` ≥ 1 is the largest batch allowed;
        `costs_ns[n]` is the believed duration of a batch of n on this replica, for n ≤ limit; `wait_ns` is how long the
        plan in force allows to wait for a full batch; `remaining_ns` is the least time that requests are believed to
        need from leaving this stage to the answer."""
        ...


class ReadyReplica(Protocol):
    """An idle replica as a route policy sees it."""

    @property
    def id(self) -> ReplicaId: ...
    @property
    def cores(self) -> float: ...
    @property
    def batches(self) -> int:
        """How many batches it has been sent so far."""
        ...


class Route(Protocol):
    """Which idle replica takes the next batch."""

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        """An index into `idle`, which is sorted by id and not empty; `last` is the replica chosen last, -1 at first."""
        ...


class Drop(Protocol):
    """Whether to drop a waiting visit. Asked when a batch is formed, from the head of the queue on, and when a deadline
    has passed in the queue."""

    def is_hopeless(self, now_ns: int, visit: Visit, cost_ns: int, full_ns: int = 0) -> bool:
        """`cost_ns` is the least time that the request is believed to need from here to the answer: alone on the idle
        replica, then alone at every stage that it is certain to visit (`core.graph_estimates.remaining_times`).
        `full_ns` is the same in full batches of the plan."""
        ...


class Admit(Protocol):
    """Whether to accept a request."""

    def retry_after_ns(self, now_ns: int, request: Request, queued: int, drain_ns: int) -> int:
        """0 to accept it; otherwise how long the client should wait before it tries again.

        `queued` visits wait at the entry stage, and serving them is believed to take `drain_ns`.
        """
        ...


class Place(Protocol):
    """Which node a new replica goes to."""

    def choose(self, now_ns: int, spec: ReplicaSpec, memory_bytes: int, nodes: Sequence[NodeView]) -> str | None:
        """The name of one of `nodes`, or None where none has room (`core.ledger.fits`)."""
        ...


class Forecast(Protocol):
    """How many requests per second to expect."""

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        """`ingress` is what has arrived at the application in the past."""
        ...


class Scale(Protocol):
    """Which replicas the cluster should have.

    A policy may also have an attribute `arrivals`, "even" or "burst": how it supposes that the requests of a second
    arrive. `sloop plan` names it where its own prediction, which assumes one of the two, disagrees with the policy.
    """

    @property
    def period_ns(self) -> int:
        """How often the core asks for a plan."""
        ...

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """The plan to work towards, or None to keep the one in force."""
        ...


@dataclass(frozen=True, slots=True)
class Policies:
    """One policy for each verb: all that systems differ in."""

    order: Order
    batch: Batch
    route: Route
    drop: Drop
    admit: Admit
    place: Place
    forecast: Forecast
    scale: Scale
