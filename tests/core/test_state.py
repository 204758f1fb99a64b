from sloop.core.state import Replica, Stage
from sloop.policies.order.fifo import Fifo
from sloop.units import ms, s
from sloop.vocabulary import Life, ReplicaId, ReplicaSpec
from tests.core.scene import Belief


def stage(replicas: int) -> Stage:
    made = Stage("only", (), {"a": Belief()}, Fifo(), s(1))
    for id in range(replicas):
        made.add(Replica(ReplicaId(id), ReplicaSpec("only", "a", 1.0), made, 0))
    return made


def test_idle_replicas_stay_sorted_however_they_come_and_go() -> None:
    made = stage(5)
    for id in (3, 0, 4, 1):
        made.add_idle(made.replicas[ReplicaId(id)])
    assert [r.id for r in made.idle] == [0, 1, 3, 4]
    made.remove_idle(made.replicas[ReplicaId(1)])
    assert [r.id for r in made.idle] == [0, 3, 4]


def test_each_waiting_visit_lengthens_the_queue_by_the_ready_replicas_share() -> None:
    made = stage(2)
    made.limit = 4
    made.refresh()
    assert made.start_ns == s(5), "before any replica is ready, loading one is what there is to wait for, once"
    assert made.visit_ns == round(ms(14) / 4 / 2)
    for replica in made.replicas.values():
        made.turn(replica, Life.READY)
    made.refresh()
    assert made.start_ns == 0
    assert made.visit_ns == round(ms(14) / 4 / 2)
