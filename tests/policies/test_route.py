"""Route policies: which idle replica is next."""

from collections.abc import Callable

from sloop.core.protocols import ReadyReplica, choosing
from sloop.policies.route import (
    FORGOTTEN_MAX,
    Fastest,
    FirstIdle,
    LeastLoaded,
    RoundRobin,
    SmoothWeighted,
)
from sloop.testing.views import Idle
from sloop.vocabulary import ReplicaId


def test_always_the_first(idle: Callable[..., list[ReadyReplica]]) -> None:
    assert FirstIdle().choose(0, idle(3, 5, 9), ReplicaId(5)) == 0


# round_robin


def test_takes_turns_even_when_the_previous_choice_is_busy_or_gone(idle: Callable[..., list[ReadyReplica]]) -> None:
    choose = RoundRobin().choose
    assert [choose(0, idle(2, 5, 9), ReplicaId(last)) for last in (-1, 2, 3, 5, 8, 9, 70)] == [0, 1, 1, 2, 2, 0, 0]


def test_shares_evenly(idle: Callable[..., list[ReadyReplica]]) -> None:
    replicas, last, sent = idle(1, 4, 6), ReplicaId(-1), {1: 0, 4: 0, 6: 0}
    for _ in range(30):
        last = replicas[RoundRobin().choose(0, replicas, last)].id
        sent[last] += 1
    assert set(sent.values()) == {10}


# smooth_weighted


NONE = ReplicaId(-1)


def test_spreads_a_large_replicas_turns(idle: Callable[..., list[ReadyReplica]]) -> None:
    replicas = [*idle(1, cores=4), *idle(2), *idle(3)]  # without planned rates, cores are the weights
    choose = choosing(SmoothWeighted())
    turns = [replicas[choose(0, replicas, NONE)].id for _ in range(12)]
    assert turns == [1, 1, 2, 1, 3, 1] * 2


def test_replicas_that_come_and_go_are_forgotten(idle: Callable[..., list[ReadyReplica]]) -> None:
    memory = None
    for number in range(1000):
        _, memory = SmoothWeighted().choose(0, idle(number, number + 1), NONE, memory)
    assert len(memory or ()) <= 2 + FORGOTTEN_MAX


def test_turns_follow_planned_rates_not_cores() -> None:
    """One with an accelerator, two without: the plan expects 60, 20 and 20 requests per second."""
    replicas = [Idle(ReplicaId(1), cores=4, weight=60), *(Idle(ReplicaId(n), cores=8, weight=20) for n in (2, 3))]
    choose = choosing(SmoothWeighted())
    turns = [replicas[choose(0, replicas, NONE)].id for _ in range(50)]
    assert [turns.count(ReplicaId(number)) for number in (1, 2, 3)] == [30, 10, 10]


# least_loaded


def test_counts_batches_by_weight_and_breaks_ties_by_id() -> None:
    sent = [(1, 1.0, 6), (2, 4.0, 20), (3, 1.0, 5)]
    idle = [Idle(ReplicaId(number), batches=batches, weight=weight) for number, weight, batches in sent]
    assert LeastLoaded().choose(0, idle, NONE) == 1


# fastest


def test_the_quickest_first_and_among_equals_the_oldest() -> None:
    idle = [Idle(ReplicaId(number), alone_ns=alone_ns) for number, alone_ns in ((1, 30), (2, 10), (4, 10), (7, 20))]
    assert Fastest().choose(0, idle, NONE) == 1
    assert Fastest().choose(0, idle[2:], ReplicaId(2)) == 0
    assert Fastest().choose(0, [idle[0], idle[3]], NONE) == 1
