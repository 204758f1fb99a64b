"""The idle replica with the lowest id."""

from collections.abc import Callable

from sloop.core.protocols import ReadyReplica
from sloop.policies.route.first_idle import FirstIdle
from sloop.vocabulary import ReplicaId


def test_always_the_first(idle: Callable[..., list[ReadyReplica]]) -> None:
    assert FirstIdle().choose(0, idle(3, 5, 9), ReplicaId(5)) == 0
