"""The seams of the core: one protocol per verb a policy can be (law 4), and the bundle a system is made of.

A policy is a frozen dataclass of parameters with one verb; memory, where it needs any, sits in `init=False` fields that
only its own method changes. Policies are told the time and shown values; they never ask for either.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from sloop.core.views import ClusterView, NodeView, Traffic
from sloop.units import FOREVER_NS
from sloop.vocabulary import Plan, ReplicaId, ReplicaSpec, Request, Visit


class Order(Protocol):
    """Which waiting visit comes first: the smallest key; ties go to the earlier arrival."""

    def key(self, visit: Visit) -> int: ...


class Take(Struct, frozen=True, gc=False):
    """A batch policy's answer: pass over (and drop) the first `skip` visits, start the next `count`.

    After a skip the core prunes what is now in front and asks again, so `count` is then what the policy means to start.
    `count=0` starts nothing; the core asks again at `wait_until_ns` (later than now), at the next arrival, or when a
    replica becomes free.
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
        """`queue` is in queue order and not empty; `limit` ≥ 1 is the largest batch allowed;
        `costs_ns[n]` is the believed duration of a batch of n on this replica, for n ≤ limit;
        `wait_ns` is how long the plan in force finds a full batch worth waiting for, `remaining_ns` the least time that
        requests are believed to need from leaving this stage to the answer."""
        ...


class ReadyReplica(Protocol):
    """An idle replica as a router sees it."""

    @property
    def id(self) -> ReplicaId: ...
    @property
    def cores(self) -> float: ...
    @property
    def batches(self) -> int:
        """Batches it has been sent so far."""
        ...


class Route(Protocol):
    """Which idle replica takes the next batch."""

    def choose(self, now_ns: int, idle: Sequence[ReadyReplica], last: ReplicaId) -> int:
        """Index into `idle`, which is sorted by id and not empty; `last` was the previous choice (-1 at first)."""
        ...


class Drop(Protocol):
    """Whether a waiting visit should be given up. Asked when a batch is formed, from the head of the queue on."""

    def is_hopeless(self, now_ns: int, visit: Visit, cost_ns: int, full_ns: int = 0) -> bool:
        """`cost_ns` is the least time its request is believed to need from here to the answer: the visit alone on the
        replica that is free, then alone at every stage that is sure to come (`core.ahead`). `full_ns` is the same in
        full batches of the plan."""
        ...


class Admit(Protocol):
    """Whether a request may enter."""

    def retry_after_ns(self, now_ns: int, request: Request, queued: int, drain_ns: int) -> int:
        """0 to admit; otherwise how long the client should wait before it tries again.

        `queued` visits wait at the first stage and `drain_ns` is the believed time to work them off.
        """
        ...


class Place(Protocol):
    """Which node a new replica goes to."""

    def choose(self, now_ns: int, spec: ReplicaSpec, memory_bytes: int, nodes: Sequence[NodeView]) -> str | None:
        """A node's name, or None where no node has room."""
        ...


class Forecast(Protocol):
    """How many requests per second to expect."""

    def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
        """`ingress` counts the requests that have come to the application."""
        ...


class Scale(Protocol):
    """What the cluster should look like."""

    @property
    def period_ns(self) -> int:
        """How often to ask."""
        ...

    def plan(self, now_ns: int, view: ClusterView) -> Plan | None:
        """The target, or None to leave the one in force."""
        ...


@dataclass(frozen=True, slots=True)
class Policies:
    """One policy for each verb: all the freedom a system has."""

    order: Order
    batch: Batch
    route: Route
    drop: Drop
    admit: Admit
    place: Place
    forecast: Forecast
    scale: Scale
