"""Turns in proportion to cores."""

from collections.abc import Callable

from sloop.core.protocols import ReadyReplica
from sloop.policies.route.smooth_weighted import FORGOTTEN_MAX, SmoothWeighted
from sloop.vocabulary import ReplicaId

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
