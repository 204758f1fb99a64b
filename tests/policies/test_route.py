"""Route policies: which idle replica is next."""

from collections.abc import Callable

from sloop.core.protocols import ReadyReplica
from sloop.policies.route import FORGOTTEN_MAX, FirstIdle, LeastLoaded, RoundRobin, SmoothWeighted
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
    replicas = [*idle(1, cores=4), *idle(2), *idle(3)]
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


# least_loaded


class Sent:
    def __init__(self, number: int, cores: float, batches: int) -> None:
        self.id, self.cores, self.batches = ReplicaId(number), cores, batches


def test_counts_batches_per_core_and_breaks_ties_by_id() -> None:
    assert LeastLoaded().choose(0, [Sent(1, 1, 6), Sent(2, 4, 20), Sent(3, 1, 5)], ReplicaId(-1)) == 1
