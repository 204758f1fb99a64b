"""Batch: how many of the waiting visits to run now on an idle replica, or until when to wait for more.

Each class is one policy; none uses another. `core.protocols.Batch` describes the arguments of `decide`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sloop.core.protocols import BatchDecision, start_or_wait
from sloop.core.views import BatchDevice, QueueView
from sloop.options import NonNegativeFloat, NonNegativeInt
from sloop.units import FOREVER_NS, ms, s
from sloop.vocabulary import Visit

ONE: Final = BatchDecision(1)
"""A batch of the first visit alone, the most frequent answer: made once."""


@dataclass(frozen=True, slots=True)
class WorkConserving:
    """Start all waiting visits, at most `limit`, as soon as a replica is idle.

    The queue grows while all replicas are busy, so batches grow with load, and no replica idles while visits wait.
    Fails if a small batch now makes a large one late: it never looks ahead.
    """

    def decide(self, now_ns: int, queue: QueueView, device: BatchDevice) -> BatchDecision:
        count = len(queue.visits)
        if count == 1:  # as most are: they cost no look at the device
            return ONE
        return BatchDecision(count if count <= device.batch_max else device.batch_max)


GUARD_NS: Final = ms(20)
"""What `Slack` leaves for transport and for the error of the believed cost."""


def _full(queue: QueueView, device: BatchDevice) -> BatchDecision | None:
    """A full batch; None if too few visits wait."""
    return BatchDecision(device.batch_max) if len(queue.visits) >= device.batch_max else None


def _oldest_ns(visits: Sequence[Visit]) -> int:
    """When the first of these visits arrived at the stage."""
    return min(visit.arrived_ns for visit in visits)


def _latest_ns(queue: QueueView, device: BatchDevice) -> int:
    """When a full batch must start, so that all that wait are in time."""
    earliest_ns = min(visit.deadline_ns for visit in queue.visits)
    return earliest_ns - queue.remaining_ns - device.costs_ns[device.batch_max]


@dataclass(frozen=True, slots=True)
class Timeout:
    """Wait for a full batch, at most `wait_ns` after the oldest arrival.

    The dynamic batching of Triton and most serving systems, and of Sponge's public artefact. Under EDF the oldest
    arrival may not be at the head of the queue. Fails at low rates: every batch waits the whole time for visits that do
    not arrive.
    """

    wait_ns: NonNegativeInt = s(1)

    def decide(self, now_ns: int, queue: QueueView, device: BatchDevice) -> BatchDecision:
        visits = queue.visits
        return _full(queue, device) or start_or_wait(now_ns, len(visits), _oldest_ns(visits) + self.wait_ns)


@dataclass(frozen=True, slots=True)
class Full:
    """Wait for a full batch: at most `patience` times the plan's waiting time, and within the tightest deadline.

    FA2, IPA, Biscale and their baselines assume this: their plans count on full batches and on the time to fill one.
    The publications wait without limit, so that the last requests of a stream are never served; here the time counts
    from the oldest arrival at the stage; a plan without a waiting time does not wait. Fails if the arrival rate falls
    below the planned rate: every batch then waits the whole time and still is not full.
    """

    patience: NonNegativeFloat = 2.0
    """A batch waits at most this many times the plan's waiting time."""

    def decide(self, now_ns: int, queue: QueueView, device: BatchDevice) -> BatchDecision:
        visits, patience_ns = queue.visits, round(self.patience * queue.wait_ns)
        return _full(queue, device) or start_or_wait(
            now_ns, len(visits), min(_oldest_ns(visits) + patience_ns, _latest_ns(queue, device))
        )


@dataclass(frozen=True, slots=True)
class Slack:
    """Wait for a full batch only while the tightest deadline can afford one.

    Starts when slack ≤ cost of a full batch + 20 ms, which cover transport and the error of the believed cost. Fails if
    the believed cost is too low by more than that: then every batch starts too late.
    """

    def decide(self, now_ns: int, queue: QueueView, device: BatchDevice) -> BatchDecision:
        return _full(queue, device) or start_or_wait(now_ns, len(queue.visits), _latest_ns(queue, device) - GUARD_NS)


@dataclass(frozen=True, slots=True)
class Adaptive:
    """All waiting visits in one batch, as late as one more visit would not fit into the SLO any more.

    The adaptive scheduling of AsyFunc (submission to SoCC'23, Algorithm 3, as corrected in our specification, section
    2.9). With q visits waiting, the batch would end t_s after the oldest was sent; it starts when t_s · (q + 1)/q
    exceeds the SLO, or at once if the replica takes no more than q. Where more wait than this replica serves in time,
    `overflow` decides. Needs the order `fifo`. The publication asks for the smallest idle replica first (the route
    `smallest`), and drops visits only when it has asked for all; here the first that is asked for decides.
    Fails, with `drop`, where a replica would soon have served what it drops, and with `split` under overload, where
    the oldest visits have little time left, so that all batches are small.
    """

    overflow: Literal["drop", "split", "early_drop"] = "drop"
    """Where more wait than a replica serves in time: `drop` the oldest, so that one batch has all others; `split` and
    serve as many of the oldest as possible; or `early_drop` as few of the oldest as `deadline` does."""

    def decide(self, now_ns: int, queue: QueueView, device: BatchDevice) -> BatchDecision:
        visits, limit, costs_ns = queue.visits, device.batch_max, device.costs_ns
        count, head, due_ns = len(visits), visits[0], now_ns + queue.remaining_ns
        if count <= limit and due_ns + costs_ns[count] <= head.deadline_ns:
            sent_ns, slo_ns = head.request.sent_ns, head.deadline_ns - head.request.sent_ns
            taken_ns = due_ns + costs_ns[count] - sent_ns
            if count == limit or taken_ns * (count + 1) > slo_ns * count:
                return BatchDecision(count)
            full_ns = sent_ns + slo_ns * count // (count + 1) - costs_ns[count] - queue.remaining_ns + 1
            return BatchDecision(wait_until_ns=full_ns)
        if self.overflow == "split":
            count = min(_affordable(head.deadline_ns - due_ns, limit, costs_ns), count)
            return BatchDecision(count) if count else BatchDecision(skip=1)
        if self.overflow == "early_drop":
            return _early_drop(due_ns, visits, limit, costs_ns)
        for served in range(min(count, limit), 0, -1):
            if due_ns + costs_ns[served] <= visits[count - served].deadline_ns:
                return BatchDecision(skip=count - served)
        return BatchDecision(skip=count)


LOOKAHEAD_BATCHES = 4
"""Length of the dry run of `Deadline`, in full batches of the queue: enough to tell overload from a burst."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The largest batch that finishes in time; drops visits whose small slack would make all batches small.

    The slack of the first visit bounds the batch. Under overload that slack is always small, so every batch is small
    and throughput falls below that of FIFO. Nexus' early drop therefore drops a few visits for a large batch; this
    policy does so only if a dry run over the visible queue then serves more requests. (Four replicas of 8 + b ms at 70
    % load, budgets of 25, 50 and 200 ms: 94 % in time, against 82 % with the largest batch always and 79 %
    work-conserving.) Where visits wait that cannot run in the batch, the batch is no larger than their deadlines allow.
    Needs the `edf` order. Fails if the believed cost is too high: it drops visits that could be
    served.
    """

    def decide(self, now_ns: int, queue: QueueView, device: BatchDevice) -> BatchDecision:
        visits, limit, costs_ns = queue.visits, device.batch_max, device.costs_ns
        due_ns = now_ns + queue.remaining_ns  # when a batch that ended now would be answered
        count = min(_affordable(visits[0].deadline_ns - due_ns, limit, costs_ns), len(visits))
        if count < min(limit, len(visits)):
            return _early_drop(due_ns, visits, limit, costs_ns)
        if count > 1 and queue.others_due_ns < FOREVER_NS:
            count = max(1, min(count, _affordable(queue.others_due_ns - now_ns, limit, costs_ns)))
        return BatchDecision(count)


def _affordable(slack_ns: int, limit: int, costs_ns: Sequence[int]) -> int:
    """Largest batch that takes at most `slack_ns`; 0 if even a batch of one takes longer."""
    return bisect_right(costs_ns, slack_ns, 1, limit + 1) - 1


def _early_drop(due_ns: int, queue: Sequence[Visit], limit: int, costs_ns: Sequence[int]) -> BatchDecision:
    """Drop as many of the oldest visits as let a dry run over the visible queue serve most in time, of the few numbers
    that `_skip` tries; if that is none, start the largest batch that is in time. A batch that ended now would be
    answered at `due_ns`."""
    visible = min(len(queue), limit * LOOKAHEAD_BATCHES)
    deadlines_ns = [queue[index].deadline_ns for index in range(visible)]
    skip = _skip(due_ns, deadlines_ns, limit, costs_ns)
    if skip:
        return BatchDecision(skip=skip)
    return BatchDecision(min(_affordable(deadlines_ns[0] - due_ns, limit, costs_ns), len(queue)))


def _skip(now_ns: int, deadlines_ns: Sequence[int], limit: int, costs_ns: Sequence[int]) -> int:
    """How many visits to drop at the head. Only positions where the possible batch doubles are tried: at most
    log2(limit) + 1."""
    best_skip, best_served, best_reach = len(deadlines_ns), 0, 0
    for index, deadline_ns in enumerate(deadlines_ns):
        reach = min(_affordable(deadline_ns - now_ns, limit, costs_ns), len(deadlines_ns) - index)
        if reach < max(1, 2 * best_reach) and not (reach > best_reach and reach == limit):
            continue
        best_reach = reach
        served = _dry_run(now_ns, deadlines_ns[index:], limit, costs_ns)
        if served > best_served:
            best_skip, best_served = index, served
        if reach == limit:
            break
    return best_skip


def _dry_run(now_ns: int, deadlines_ns: Sequence[int], limit: int, costs_ns: Sequence[int]) -> int:
    """Requests served in time by one replica that serves the queue, each batch as large as its first visit allows."""
    served = index = 0
    while index < len(deadlines_ns):
        size = min(_affordable(deadlines_ns[index] - now_ns, limit, costs_ns), len(deadlines_ns) - index)
        now_ns += costs_ns[size]
        served += size
        index += max(1, size)
    return served
