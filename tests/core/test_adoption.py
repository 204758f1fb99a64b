"""Replicas that an earlier core has started: a core that knows nothing of them takes them over."""

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop.actions import Action, AdoptWorker, Decided, ResizeWorker, StartBatch, StartWorker, StopWorker
from sloop.core.control import MEASURE_NS
from sloop.events import (
    WOKE,
    Event,
    Finished,
    KeptWorker,
    NodeLost,
    NodeReady,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from sloop.runlog import Record
from sloop.systems.replay import replay_log
from sloop.units import ms, to_ms
from sloop.vocabulary import BatchId, Device, Life, Node, ReplicaId, ReplicaSpec, Slot, WorkerId
from tests.core import scene as scenes
from tests.core.scene import NODE, plan_of, request

FIRST = 100
"""The first number of the core that adopts."""
Scene = partial(scenes.Scene, first_worker=FIRST)
Deployment = partial(scenes.Deployment, first_worker=FIRST)
R0, R1 = ReplicaId(0), ReplicaId(1)
KEPT_MS = to_ms(MEASURE_NS)
"""How long adopted replicas are kept whatever the plan says."""


def kept(number: int = 0, cores: float = 1.0, *, is_ready: bool = True, **others: object) -> KeptWorker:
    spec = structs.replace(ReplicaSpec("only", "a", Slot(cores), "n0"), **others)
    return KeptWorker(WorkerId(number), spec, is_ready)


def adopted(actions: Sequence[Action]) -> list[AdoptWorker]:
    return [each for each in actions if isinstance(each, AdoptWorker)]


def orders(actions: Sequence[Action]) -> list[Action]:
    return [each for each in actions if not isinstance(each, Decided | AdoptWorker)]


def test_the_first_plan_counts_what_runs_already() -> None:
    scene = Scene(plan_of(3))
    actions = scene.act(0, NodeReady(NODE, (kept(7), kept(9, is_ready=False))))
    assert [each.worker for each in adopted(actions)] == [7, 9]
    assert not orders(actions), "the plan follows what is said of nodes"
    started = orders(scene.act(0, WOKE))
    assert [type(each) for each in started] == [StartWorker]
    assert scene.core.state.ledger.free_millicores("n0") == 1000
    lives = [replica.life for replica in scene.core.state.replicas.values()]
    assert lives == [Life.READY, Life.STARTING, Life.STARTING]


def test_an_adopted_replica_serves_at_once_and_one_that_starts_when_it_is_ready() -> None:
    scene = Scene(plan_of(2))
    scene.act(0, NodeReady(NODE, (kept(0), kept(1, is_ready=False))), WOKE)
    (batch,) = orders(scene.act(1, request(1, at_ms=1)))
    assert isinstance(batch, StartBatch)
    assert batch.replica == R0
    assert not orders(scene.act(2, request(2, at_ms=2)))
    (batch,) = orders(scene.act(3, WorkerReady(R1)))
    assert isinstance(batch, StartBatch)
    assert batch.replica == R1


def test_a_worker_keeps_its_number_and_others_get_those_of_this_core() -> None:
    """Also on a node that comes late."""
    scene = Scene(plan_of(4))
    scene.act(0, WOKE)
    scene.act(1, NodeLost("n0", "gone"), *(WorkerLost(ReplicaId(FIRST + at), "gone") for at in range(4)))
    scene.act(10_000, NodeReady(NODE, (kept(0), kept(1))))
    replicas = [each.worker for each in scene.actions if isinstance(each, AdoptWorker | StartWorker)]
    assert replicas[4:6] == [0, 1]
    assert sorted(set(replicas)) == sorted(replicas)
    assert len([each for each in replicas if each >= FIRST]) == len(replicas) - 2


def test_what_was_adopted_is_kept_until_traffic_was_measured() -> None:
    """The first plan has seen no request, and would stop all that serves."""
    scene = Scene(plan_of(1))
    scene.act(0, NodeReady(NODE, (kept(0), kept(1, 2.0))), WOKE)
    for at_ms in range(1000, int(KEPT_MS), 1000):
        assert not orders(scene.act(at_ms, WOKE)), at_ms
    assert [type(each) for each in orders(scene.act(KEPT_MS, WOKE))] == [StopWorker]


def test_a_plan_that_wants_fewer_cores_shrinks_what_was_adopted_later() -> None:
    scene = Scene(plan_of(1, cores=1))
    scene.act(0, NodeReady(NODE, (kept(0, 3.0),)), WOKE)
    scene.act(1000, WOKE)
    assert not orders(scene.actions)
    assert orders(scene.act(KEPT_MS, WOKE)) == [ResizeWorker(R0, 1.0)]


def test_a_plan_that_wants_more_is_followed_at_once() -> None:
    scene = Scene(plan_of(2, cores=2))
    (resize, start) = orders(scene.act(0, NodeReady(NODE, (kept(0),)), WOKE))
    assert resize == ResizeWorker(R0, 2.0)
    assert isinstance(start, StartWorker)


def test_one_of_another_variant_gives_way_if_the_planned_one_has_no_room() -> None:
    scene = Scene(plan_of(1, cores=3, variant="b"))
    actions = scene.act(0, NodeReady(NODE, (kept(0, 2.0),)), WOKE)
    assert [type(each) for each in orders(actions)] == [StopWorker]
    (start,) = orders(scene.act(1, WorkerStopped(R0)))
    assert isinstance(start, StartWorker)


def test_a_starting_replica_that_the_plan_does_not_want_is_stopped_at_once() -> None:
    scene = Scene(plan_of(1))
    actions = orders(scene.act(0, NodeReady(NODE, (kept(0), kept(1, is_ready=False))), WOKE))
    assert actions == [StopWorker(R1, "the plan has no use for it")]


GPU = Node("n0", "local", 4, 1000, (Device("d0", "T4", 100),))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (kept(stage="other"), "no application"),
        (kept(variant="c"), "no application"),
        (kept(slot=Slot(1.0, "gpu")), "no application"),
        (kept(node="n1"), "is of hardware"),
        (kept(slot=Slot(1.0, "", "T4"), device="d1"), "no device"),
        (kept(slot=Slot(1.0, "", "T4"), device=None), "no device"),
        (kept(cores=9.0), "no room"),
    ],
)
def test_what_is_of_no_use_is_told_to_stop_and_has_its_cores_until_then(wrong: KeptWorker, why: str) -> None:
    scene = Scene(plan_of(4), nodes=(GPU,))
    adopt, stop = scene.act(0, NodeReady(GPU, (wrong,)))
    assert isinstance(adopt, AdoptWorker)
    assert isinstance(stop, StopWorker)
    assert (stop.worker, why in stop.why) == (adopt.worker, True)
    scene.act(0, WOKE)
    ledger = scene.core.state.ledger
    if wrong.spec.cores == 9.0:
        assert ledger.free_millicores("n0") == -5000
        assert not any(isinstance(each, StartWorker) for each in scene.actions)
    scene.act(1, WorkerStopped(adopt.worker))
    assert ledger.free_millicores("n0") == 0
    assert sum(isinstance(each, StartWorker) for each in scene.actions) == 4


def test_each_application_adopts_its_own_and_one_that_rests_keeps_nothing() -> None:
    two = Deployment({"red": 1.0, "green": 1.0}, rest_after_s=1)
    names = ("red/only", "green/only", "red@2/only")
    specs = [ReplicaSpec(name, "a", Slot(1.0), "n0") for name in names]
    event = NodeReady(two.node, tuple(KeptWorker(WorkerId(number), spec, True) for number, spec in enumerate(specs)))
    actions = two.act(0, event, WOKE)
    assert len(adopted(actions)) == 3
    assert orders(actions) == [StopWorker(ReplicaId(2), "no application has such a replica")]
    for at_ms in range(1000, 4000, 500):
        two.act(at_ms, WOKE)
    stopped = {each.worker for each in two.actions if isinstance(each, StopWorker)}
    assert stopped == {0, 1, 2}, "without requests they rest, traffic or not"


def test_a_node_that_is_lost_before_the_first_plan_gets_no_replicas() -> None:
    other = structs.replace(NODE, name="n1")
    scene = Scene(plan_of(2), nodes=(NODE, other))
    assert not orders(scene.act(0, NodeLost("n0", "its agent has not come")))
    started = [each for each in scene.act(0, WOKE) if isinstance(each, StartWorker)]
    assert [each.spec.node for each in started] == ["n1", "n1"]


@st.composite
def restarts(draw: st.DrawFn) -> tuple[int, list[tuple[float, bool]]]:
    """How many replicas the plan wants, and what runs already: cores, and whether it is ready."""
    cores = st.sampled_from((0.5, 1.0, 1.3, 2.0))
    return draw(st.integers(0, 5)), draw(st.lists(st.tuples(cores, st.booleans()), max_size=6))


@given(restarts())
def test_nothing_is_overbooked_or_stopped_while_it_serves_and_a_replay_adopts_the_same(
    case: tuple[int, list[tuple[float, bool]]],
) -> None:
    count, found = case
    scene = Scene(plan_of(count))
    records: list[tuple[int, Record]] = []

    def act(at_ms: float, event: Event) -> None:
        actions = scene.act(at_ms, event)
        records.extend((ms(at_ms), each) for each in (event, *actions))

    act(0, NodeReady(NODE, tuple(kept(at, cores, is_ready=ready) for at, (cores, ready) in enumerate(found))))
    act(0.001, WOKE)
    ledger, replicas = scene.core.state.ledger, scene.core.state.replicas
    for at_ms in range(1, 5000, 250):
        for order in [each for each in scene.actions if isinstance(each, StopWorker)]:
            if order.worker in replicas:
                act(at_ms, WorkerStopped(order.worker))
        for replica in [each for each in replicas.values() if each.life is Life.STARTING]:
            act(at_ms, WorkerReady(replica.id))
        act(at_ms + 1, request(at_ms, at_ms=at_ms + 1))
        for replica in [each for each in replicas.values() if each.batch is not None]:
            assert replica.batch is not None
            act(at_ms + 2, Finished(BatchId(replica.batch.id), replica.id, ms(1)))
    fits, free = set[int](), 4.0
    for number, (cores, is_ready) in enumerate(found):
        if cores <= free and is_ready:
            fits.add(number)
        free -= cores  # also of one without room, until it has stopped
    assert [each.worker for each in adopted(scene.actions)] == list(range(len(found)))
    stops = {each.worker: each.why for each in scene.actions if isinstance(each, StopWorker)}
    whys = {stops[WorkerId(number)] for number in fits if number in stops}
    assert whys <= {"its replacement has no room while it runs"}, "what serves is kept"
    assert ledger.free_millicores("n0") >= 0
    again = Scene(plan_of(count))
    assert replay_log(records, again.core).difference is None
