"""A node gets other capacities while replicas run on it, as a pod that is resized in place."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop.actions import Action, Decided, ResizeWorker, StartBatch, StartWorker, StopWorker
from sloop.events import WOKE, Finished, NodeReady, WorkerReady, WorkerResized, WorkerStopped
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
    return {each.worker: each.cores for each in actions if isinstance(each, ResizeWorker)}


def stops(actions: Sequence[Action]) -> list[int]:
    return [each.worker for each in actions if isinstance(each, StopWorker)]


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
    actions = scene.act(1600, WorkerResized(ReplicaId(0), 0.75), WorkerResized(ReplicaId(1), 0.75))
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
    assert scene.core.plan_of("") == structs.replace(plan_of(1, 2), why="the test says so")


def test_a_resize_is_ordered_once() -> None:
    scene = running(2, 2)
    scene.act(1500, NodeReady(sized(cores=2)))
    later = scene.act(1600, WorkerResized(ReplicaId(0), 1), WorkerResized(ReplicaId(1), 1))
    later += [each for at_ms in (2000, 3000, 4000) for each in scene.act(at_ms, WOKE)]
    assert resizes(later) == {}
    assert free(scene)[0] == 0


def test_a_node_that_grows_again_gives_replicas_what_they_were_to_have() -> None:
    scene = running(2, 2)
    scene.act(1500, NodeReady(sized(cores=1)), WorkerResized(ReplicaId(0), 0.5), WorkerResized(ReplicaId(1), 0.5))
    assert resizes(scene.act(2500, NodeReady(sized(cores=4)))) == {0: 2, 1: 2}


def test_replicas_that_are_not_resized_in_place_stop_the_newest_first() -> None:
    """The last one is better with fewer cores than not there."""
    scene = running(3, 1, in_place=False)
    actions = scene.act(1500, NodeReady(sized(cores=2)))
    assert (stops(actions), resizes(actions)) == ([2], {})
    actions = scene.act(2500, WorkerStopped(ReplicaId(2)), NodeReady(sized(cores=0.5)))
    assert (stops(actions), resizes(actions)) == ([1], {0: 0.5})


def test_replicas_without_memory_stop_the_newest_first_but_not_the_last() -> None:
    """Each has 100 bytes."""
    scene = running(3, 1)
    actions = scene.act(1500, NodeReady(sized(memory_bytes=250)))
    assert stops(actions) == [2]
    assert [each.why for each in actions if isinstance(each, StopWorker)] == ["n0 has too little memory for it now"]
    assert free(scene)[1] == -50
    actions = scene.act(1600, WorkerStopped(ReplicaId(2)))
    assert free(scene)[1] == 50
    assert said(scene.actions, "shortage") == [
        "no node has room for a replica of a with 1 core: nodes with enough free cores have less than 9.31e-08 GiB of "
        "memory free"
    ]
    assert stops(scene.act(2500, NodeReady(sized(memory_bytes=50)))) == [1]
    assert stops(scene.act(2600, WorkerStopped(ReplicaId(1)), WOKE)) == []
    back = scene.act(3500, NodeReady(sized(memory_bytes=300)))
    assert [each.worker for each in back if isinstance(each, StartWorker)] == [3, 4]


def test_a_replica_that_stops_finishes_its_batch_and_starts_elsewhere() -> None:
    other = Node("n1", "local", cores=1, memory_bytes=100)
    scene = running(2, 1, nodes=[NODE])
    scene.act(1000, NodeReady(other))
    scene.act(1100, *(request(id, at_ms=1100) for id in range(8)))
    actions = scene.act(1150, NodeReady(sized(memory_bytes=150)))
    assert stops(actions) == []  # it has a batch
    assert [each.spec.node for each in actions if isinstance(each, StartWorker)] == ["n1"]


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


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from([0.3, 1.0, 1.5, 2.0, 4.0]),
            st.sampled_from([90, 150, 250, 400, 1000]),
            st.integers(0, 4),
            st.sampled_from([0.25, 1.0, 2.0]),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    ),
    size=st.sampled_from([2, 0]),
)
def test_under_any_sizes_and_plans_replicas_have_no_more_than_there_is(
    steps: list[tuple[float, int, int, float, bool]], size: int
) -> None:
    """Once orders are carried out. Memory is exceeded by one replica of the stage at most, which is the last one. When
    the node has room for all again, all are there again."""
    scene = running(2, 1, nodes=[NODE, structs.replace(NODE, name="n1", cores=2)][: size or 1])
    now_ms = 1000.0
    for number, (cores, memory_bytes, count, each, in_place) in enumerate(steps):
        now_ms += 1000
        scene.script.target = plan_of(count, each, in_place=in_place)
        scene.act(now_ms, request(number, at_ms=now_ms), NodeReady(sized(cores, memory_bytes)), WOKE)
        settle(scene, now_ms + 1)
        on = [each for each in scene.core.state.replicas.values() if each.node == "n0"]
        assert sum(each.slot.cores for each in on) <= cores + 1e-9
        assert free(scene)[0] >= 0
        assert free(scene)[1] >= 0 or len(on) == 1
    scene.script.target = plan_of(3, 1.0)
    for second in range(1, 40):
        scene.act(now_ms + 1000 * second, NodeReady(NODE) if second == 1 else WOKE)
        settle(scene, now_ms + 1000 * second + 1)
    assert [each.slot.cores for each in scene.core.state.replicas.values()] == [1.0] * 3


def settle(scene: Scene, at_ms: float) -> None:
    """Carry out all orders, until there are no more."""
    done = 0
    for _ in range(50):
        orders, done = scene.actions[done:], len(scene.actions)
        for order in orders:
            if isinstance(order, StartWorker):
                scene.act(at_ms, WorkerReady(order.worker))
            elif isinstance(order, StopWorker):
                scene.act(at_ms, WorkerStopped(order.worker))
            elif isinstance(order, ResizeWorker):
                scene.act(at_ms, WorkerResized(order.worker, order.cores))
            elif isinstance(order, StartBatch):
                scene.act(at_ms, Finished(order.batch, order.replica, 1))
        if not orders:
            scene.actions.clear()
            return
    raise AssertionError("orders without end")
