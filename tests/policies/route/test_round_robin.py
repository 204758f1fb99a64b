"""Replicas in turn."""

from collections.abc import Callable

from sloop.core.protocols import ReadyReplica
from sloop.policies.route.round_robin import RoundRobin
from sloop.vocabulary import ReplicaId


def test_takes_turns_even_when_the_previous_choice_is_busy_or_gone(idle: Callable[..., list[ReadyReplica]]) -> None:
    choose = RoundRobin().choose
    assert [choose(0, idle(2, 5, 9), ReplicaId(last)) for last in (-1, 2, 3, 5, 8, 9, 70)] == [0, 1, 1, 2, 2, 0, 0]


def test_shares_evenly(idle: Callable[..., list[ReadyReplica]]) -> None:
    replicas, last, sent = idle(1, 4, 6), ReplicaId(-1), {1: 0, 4: 0, 6: 0}
    for _ in range(30):
        last = replicas[RoundRobin().choose(0, replicas, last)].id
        sent[last] += 1
    assert set(sent.values()) == {10}
