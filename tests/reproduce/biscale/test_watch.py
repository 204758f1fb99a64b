"""Cores in service, second by second."""

from sloop.actions import StartReplica, StopReplica
from sloop.events import ReplicaReady, Resized
from sloop.reproduce.biscale.watch import Watch
from sloop.units import s
from sloop.vocabulary import ReplicaId, ReplicaSpec


def test_from_ready_to_the_order_to_stop_with_the_cores_in_effect() -> None:
    watch = Watch(4)
    one, two = ReplicaId(1), ReplicaId(2)
    for at_s, record in (
        (0, StartReplica(one, ReplicaSpec("a", "v", 1.0))),
        (0, ReplicaReady(one)),
        (0.5, StartReplica(two, ReplicaSpec("a", "v", 2.0))),
        (1, ReplicaReady(two)),
        (1.5, Resized(one, 3.0)),
        (2, Resized(two, 1.0)),
        (3, StopReplica(one, "no use")),
        (9, StopReplica(two, "no use")),
    ):
        watch.append(s(at_s), record)
    watch.finish()
    assert watch.cores == [1.0, 4.0, 4.0, 1.0]
    assert watch.count == [1.0, 2.0, 2.0, 1.0]
    assert watch.single == [1.0, 0.0, 0.0, 1.0]
