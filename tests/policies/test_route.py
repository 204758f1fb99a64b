"""Route policies: which idle replica is next."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.core.protocols import ReadyReplica
from sloop.policies.route import (
    FORGOTTEN_MAX,
    BatchRoundRobin,
    EarliestFree,
    Fastest,
    FirstIdle,
    LeastLoaded,
    PlannedRate,
    RoundRobin,
    SmoothWeighted,
)
from sloop.vocabulary import ReplicaId
from tests.policies.conftest import Idle


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
    policy = SmoothWeighted()
    turns = [replicas[policy.choose(0, replicas, NONE)].id for _ in range(12)]
    assert turns == [1, 1, 2, 1, 3, 1] * 2


def test_replicas_that_come_and_go_are_forgotten(idle: Callable[..., list[ReadyReplica]]) -> None:
    policy = SmoothWeighted()
    for number in range(1000):
        policy.choose(0, idle(number, number + 1), NONE)
    assert len(policy._credit) <= 2 + FORGOTTEN_MAX


def test_memory_is_its_own(idle: Callable[..., list[ReadyReplica]]) -> None:
    first, second = SmoothWeighted(), SmoothWeighted()
    first.choose(0, idle(1, 2), NONE)
    assert first == second
    assert second.choose(0, idle(1, 2), NONE) == 0


def test_turns_follow_planned_rates_not_cores() -> None:
    """One with an accelerator, two without: the plan expects 60, 20 and 20 requests per second."""
    replicas = [Idle(ReplicaId(1), cores=4, weight=60), *(Idle(ReplicaId(n), cores=8, weight=20) for n in (2, 3))]
    policy = SmoothWeighted()
    turns = [replicas[policy.choose(0, replicas, NONE)].id for _ in range(50)]
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


# Early binding


@pytest.mark.parametrize("policy", [BatchRoundRobin(), PlannedRate(), EarliestFree()])
def test_they_bind_early(policy: object) -> None:
    assert getattr(policy, "binds_early", False) is True
    assert getattr(RoundRobin(), "binds_early", False) is False


def test_batches_go_round_the_ready_replicas(idle: Callable[..., list[ReadyReplica]]) -> None:
    choose = BatchRoundRobin().choose
    assert [choose(0, idle(2, 5, 9), ReplicaId(last)) for last in (-1, 2, 3, 5, 8, 9, 70)] == [0, 1, 1, 2, 2, 0, 0]


@given(st.lists(st.tuples(st.integers(1, 500), st.sampled_from((1, 2, 4, 8, 64))), min_size=1, max_size=6))
def test_requests_follow_planned_rates_whatever_the_batches(planned: list[tuple[int, int]]) -> None:
    """After any number of full batches, a replica has its part of the requests, but for one batch of each replica."""
    replicas = [Idle(ReplicaId(number), weight=rate, batch_max=batch) for number, (rate, batch) in enumerate(planned)]
    policy, sent = PlannedRate(), [0] * len(replicas)
    for _ in range(200):
        at = policy.choose(0, replicas, NONE)
        sent[at] += replicas[at].batch_max
    total, rates = sum(sent), sum(rate for rate, _ in planned)
    most = sum(batch for _, batch in planned)
    assert all(abs(own - total * rate / rates) <= most for own, (rate, _) in zip(sent, planned, strict=True))


def test_the_first_to_be_free_gets_the_batch_and_late_batches_count_as_done_now() -> None:
    busy = [
        Idle(ReplicaId(1), ends_ns=500, lane_ns=100),
        Idle(ReplicaId(2), ends_ns=50, lane_ns=300),
        Idle(ReplicaId(3), ends_ns=450, lane_ns=0),
    ]
    assert EarliestFree().choose(100, busy, NONE) == 1, "400 ns"
    assert EarliestFree().choose(200, busy, NONE) == 2, "450 ns, before 500"
    assert EarliestFree().choose(100, [*busy, Idle(ReplicaId(4)), Idle(ReplicaId(5))], NONE) == 3
