"""A node gets other capacities while replicas run on it, as a pod that is resized in place."""

from collections.abc import Sequence

import pytest
from msgspec import structs

from sloop.actions import Action, Decided, ResizeReplica, StartReplica, StopReplica
from sloop.events import WOKE, NodeReady, ReplicaReady, ReplicaStopped, Resized
from sloop.vocabulary import Node, ReplicaId
from tests.core.scene import NODE, Deployment, Scene, plan_of, request


def sized(cores: float = NODE.cores, memory_bytes: int = NODE.memory_bytes) -> Node:
    return structs.replace(NODE, cores=cores, memory_bytes=memory_bytes)


def running(count: int, cores: float, *, nodes: Sequence[Node] = (NODE,), in_place: bool = True) -> Scene:
    """A scene with so many replicas that are ready."""
    scene = Scene(plan_of(count, cores, in_place=in_place), nodes=nodes)
    scene.warm_up()
    return scene


def resizes(actions: Sequence[Action]) -> dict[int, float]:
    return {each.replica: each.cores for each in actions if isinstance(each, ResizeReplica)}


def stops(actions: Sequence[Action]) -> list[int]:
    return [each.replica for each in actions if isinstance(each, StopReplica)]


def said(actions: Sequence[Action], kind: str) -> list[str]:
    return [each.why for each in actions if isinstance(each, Decided) and each.kind == kind]


def free(scene: Scene) -> tuple[int, int]:
    ledger = scene.core.state.ledger
    return ledger.free_millicores("n0"), ledger.free_memory_bytes("n0")


def test_replicas_share_what_is_left_of_a_smaller_node_and_it_is_said() -> None:
    scene = running(2, 2)
    actions = scene.act(1500, NodeReady(sized(cores=1.5)))
    assert resizes(actions) == {0: 0.75, 1: 0.75}
    assert stops(actions) == []
    assert said(actions, "node") == ["n0 has 1.5 cores now, not 4: all applications are planned anew"]
    assert free(scene)[0] == 0
    actions = scene.act(1600, Resized(ReplicaId(0), 0.75), Resized(ReplicaId(1), 0.75))
    assert said(actions, "shortage") == ["replica 1 has 0.75 cores, not 2: n0 has no more free"]


def test_all_are_planned_anew_at_once_for_the_new_size() -> None:
    scene = running(1, 4)
    scene.script.obeys = True
    scene.act(1400, WOKE)
    seen = len(scene.script.seen)
    scene.act(1500, NodeReady(sized(cores=2)))
    assert scene.core.wake_ns == 1_500_000_000
    scene.act(1500, WOKE)
    [view] = scene.script.seen[seen:]
    assert [node.node.cores for node in view.nodes] == [2]
    assert scene.core.plan == structs.replace(plan_of(1, 2), why="the test says so")


def test_a_resize_is_ordered_once() -> None:
    scene = running(2, 2)
    scene.act(1500, NodeReady(sized(cores=2)))
    later = scene.act(1600, Resized(ReplicaId(0), 1), Resized(ReplicaId(1), 1))
    later += [each for at_ms in (2000, 3000, 4000) for each in scene.act(at_ms, WOKE)]
    assert resizes(later) == {}
    assert free(scene)[0] == 0


def test_a_node_that_grows_again_gives_replicas_what_they_were_to_have() -> None:
    scene = running(2, 2)
    scene.act(1500, NodeReady(sized(cores=1)), Resized(ReplicaId(0), 0.5), Resized(ReplicaId(1), 0.5))
    assert resizes(scene.act(2500, NodeReady(sized(cores=4)))) == {0: 2, 1: 2}


def test_replicas_that_are_not_resized_in_place_stop_the_newest_first() -> None:
    """The last one is better with fewer cores than not there."""
    scene = running(3, 1, in_place=False)
    actions = scene.act(1500, NodeReady(sized(cores=2)))
    assert (stops(actions), resizes(actions)) == ([2], {})
    actions = scene.act(2500, ReplicaStopped(ReplicaId(2)), NodeReady(sized(cores=0.5)))
    assert (stops(actions), resizes(actions)) == ([1], {0: 0.5})


def test_replicas_without_memory_stop_the_newest_first_but_not_the_last() -> None:
    """Each has 100 bytes."""
    scene = running(3, 1)
    actions = scene.act(1500, NodeReady(sized(memory_bytes=250)))
    assert stops(actions) == [2]
    assert [each.why for each in actions if isinstance(each, StopReplica)] == ["n0 has too little memory for it now"]
    assert free(scene)[1] == -50
    actions = scene.act(1600, ReplicaStopped(ReplicaId(2)))
    assert free(scene)[1] == 50
    assert said(scene.actions, "shortage") == ["no node has room for a replica of a with 1 cores"]
    assert stops(scene.act(2500, NodeReady(sized(memory_bytes=50)))) == [1]
    assert stops(scene.act(2600, ReplicaStopped(ReplicaId(1)), WOKE)) == []
    back = scene.act(3500, NodeReady(sized(memory_bytes=300)))
    assert [each.replica for each in back if isinstance(each, StartReplica)] == [3, 4]


def test_a_replica_that_stops_finishes_its_batch_and_starts_elsewhere() -> None:
    other = Node("n1", "local", cores=1, memory_bytes=100)
    scene = running(2, 1, nodes=[NODE])
    scene.act(1000, NodeReady(other))
    scene.act(1100, *(request(id, at_ms=1100) for id in range(8)))
    actions = scene.act(1150, NodeReady(sized(memory_bytes=150)))
    assert stops(actions) == []  # it has a batch
    assert [each.spec.node for each in actions if isinstance(each, StartReplica)] == ["n1"]


def test_each_application_gets_its_part_of_a_smaller_node() -> None:
    scene = Deployment({"a": 2, "b": 2})
    scene.warm_up()
    actions = scene.act(1500, NodeReady(structs.replace(scene.node, cores=2)), WOKE)
    assert resizes(actions) == {0: 1, 1: 1}
    assert (scene.planned_cores("a"), scene.planned_cores("b")) == (1, 1)


@pytest.mark.parametrize("node", [NODE, structs.replace(NODE, rack="r")])
def test_a_node_of_the_same_size_changes_nothing(node: Node) -> None:
    scene = running(2, 2)
    assert scene.act(1500, NodeReady(node)) == []


def test_replicas_never_have_more_than_there_is_once_orders_are_carried_out() -> None:
    scene = running(2, 2)
    for second, cores in enumerate((1.0, 3.0, 0.3, 4.0, 2.5), 2):
        actions = scene.act(1000 * second, NodeReady(sized(cores=cores)), WOKE)
        actions += scene.act(1000 * second + 100, request(second, at_ms=1000 * second + 100))
        for id, given in resizes(actions).items():
            actions += scene.act(1000 * second + 200, Resized(ReplicaId(id), given))
        for each in actions:
            if isinstance(each, StartReplica):
                scene.act(1000 * second + 300, ReplicaReady(each.replica))
        assert free(scene)[0] >= 0, cores
        replicas = scene.core.state.replicas.values()
        assert len(replicas) == 2
        assert sum(each.target_cores for each in replicas) <= cores
        assert sum(each.slot.cores for each in replicas) <= cores
