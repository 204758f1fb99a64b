"""Bodies and shadows: when a shadow is attached and detached, what it holds, and what its loss costs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.actions import Action, Decided, ResizeWorker, StartBatch, StartWorker, StopWorker
from sloop.core.difference import diff
from sloop.core.ledger import cores_by_hardware
from sloop.core.planner import check, trimmed
from sloop.core.views import ReplicaView
from sloop.errors import InputError
from sloop.events import WOKE, BatchFailed, Finished, WorkerLost, WorkerReady, WorkerResized, WorkerStopped
from sloop.units import ms
from sloop.vocabulary import ALONE, Group, Life, Node, Plan, ReplicaId, ReplicaSpec, Slot, StagePlan, Worker, WorkerId
from tests.core.scene import NODE, Scene, plan_of, request

R0, R1 = ReplicaId(0), ReplicaId(1)
SHADOW = Worker(2.0, (0, 1))
OTHER = Worker(1.0, (0,))


def pair_plan(shadow: Worker | None = SHADOW, *, count: int = 1, cores: float = 1.0, in_place: bool = True) -> Plan:
    (target,) = plan_of(count, cores, in_place=in_place).stages
    (group,) = target.groups
    group = structs.replace(group, spec=structs.replace(group.spec, shape=ALONE if shadow is None else (shadow,)))
    return Plan((structs.replace(target, groups=(group,)),), "the test says so")


def starts(replica: ReplicaId, number: int, shadow: Worker, *, cores: float = 1.0) -> StartWorker:
    spec = ReplicaSpec("only", "a", Slot(cores), NODE.name, shape=(shadow,))
    return StartWorker(WorkerId(number), spec, replica)


def orders(actions: list[Action]) -> list[Action]:
    return [each for each in actions if not isinstance(each, Decided)]


def body(**scene_of: object) -> Scene:
    """A ready body of one core, whose plan wants a shadow from now on; a pair takes half as long."""
    scene = Scene(plan_of(1), **scene_of)  # type: ignore[arg-type]
    belief = scene.beliefs["only", "a", ""]
    belief.layer_count = 3
    belief.shapes[(SHADOW,)] = replace(belief, times=0.5, memory_bytes=150, observed=[], shapes={})
    belief.shapes[(OTHER,)] = replace(belief, times=0.8, memory_bytes=110, observed=[], shapes={})
    scene.warm_up()
    scene.script.target = pair_plan()
    return scene


def attached(scene: Scene) -> Scene:
    assert orders(scene.act(1000, WOKE)) == [starts(R0, 1, SHADOW)]
    scene.act(1010, WorkerReady(WorkerId(1)))
    return scene


def replica(scene: Scene, id: ReplicaId = R0):  # type: ignore[no-untyped-def]  # noqa: ANN201
    return scene.core.state.replicas[id]


def test_a_shadow_is_attached_to_the_running_body_which_serves_alone_until_it_is_ready() -> None:
    scene = body()
    assert orders(scene.act(1000, WOKE)) == [starts(R0, 1, SHADOW)]
    assert scene.core.state.ledger.view("n0").free_cores == NODE.cores - 3
    assert scene.core.state.ledger.view("n0").free_memory_bytes == NODE.memory_bytes - 150
    (start,) = scene.act(1005, request(1, at_ms=1005))
    assert isinstance(start, StartBatch)
    assert (replica(scene).shape, replica(scene).alone_ns) == (ALONE, ms(11))
    assert scene.act(1010, WorkerReady(WorkerId(1))) == []
    assert (replica(scene).shape, replica(scene).alone_ns) == ((SHADOW,), ms(5.5))
    (view,) = scene.core.stage_views("")[0].replicas
    assert (view.spec.shadow, view.shape) == (SHADOW, (SHADOW,))
    scene.act(1016, Finished(start.batch, R0, ms(11)))
    belief = scene.beliefs["only", "a", ""]
    assert belief.observed[-1] == (1, 1.0, ms(11)), "the batch began on the body alone, and teaches that"
    assert belief.shapes[(SHADOW,)].observed == []
    (start,) = scene.act(1020, request(2, at_ms=1020))
    assert isinstance(start, StartBatch)
    scene.act(1026, Finished(start.batch, R0, ms(6)))
    assert belief.shapes[(SHADOW,)].observed == [(1, 1.0, ms(6))]
    assert len(belief.observed) == 1
    assert orders(scene.act(2000, WOKE)) == []


def test_a_shadow_that_the_plan_does_not_want_any_more_is_detached_and_frees_its_room_when_it_has_stopped() -> None:
    scene = attached(body())
    (start,) = scene.act(1990, request(1, at_ms=1990))
    assert isinstance(start, StartBatch)
    scene.script.target = plan_of(1)
    assert orders(scene.act(2000, WOKE)) == [StopWorker(WorkerId(1), "the plan has no such shadow")]
    assert (replica(scene).shape, len(replica(scene).workers)) == (ALONE, 2)
    assert scene.core.state.ledger.view("n0").free_cores == 1, "until it has stopped"
    assert scene.act(2002, Finished(start.batch, R0, ms(12)))
    assert scene.beliefs["only", "a", ""].shapes[(SHADOW,)].observed == [(1, 1.0, ms(12))]
    assert scene.act(2010, WorkerStopped(WorkerId(1))) == []
    assert scene.core.state.ledger.view("n0").free_cores == 3
    assert scene.core.state.ledger.view("n0").free_memory_bytes == NODE.memory_bytes - 100


def test_a_lost_shadow_dissolves_the_pair_and_costs_no_batch() -> None:
    scene = attached(body())
    (start,) = scene.act(1500, request(1, at_ms=1500))
    assert isinstance(start, StartBatch)
    first, second = scene.act(1503, WorkerLost(WorkerId(1), "it died"))
    assert isinstance(first, Decided)
    assert (first.kind, first.why) == ("shadow", "its shadow is lost: it died; another one starts at once")
    assert second == starts(R0, 2, SHADOW)
    assert replica(scene).shape is ALONE
    assert replica(scene).batch is not None, "the body finishes it"
    assert scene.core.state.ledger.view("n0").free_cores == 1
    assert len(scene.act(1510, Finished(start.batch, R0, ms(10)))) == 1


def test_shadows_that_die_again_and_again_are_replaced_ever_later() -> None:
    scene = attached(body())
    assert starts(R0, 2, SHADOW) in scene.act(1500, WorkerLost(WorkerId(1), "it died"))
    (note,) = scene.act(1501, WorkerLost(WorkerId(2), "it died"))
    assert isinstance(note, Decided)
    assert note.why == "its shadow is lost: it died; another one starts in 1 s"
    assert orders(scene.act(2000, WOKE)) == []
    assert orders(scene.act(3000, WOKE)) == [starts(R0, 3, SHADOW)]
    (note,) = scene.act(3001, WorkerLost(WorkerId(3), "it died"))
    assert isinstance(note, Decided)
    assert note.why.endswith("in 2 s")
    scene.act(6000, WOKE)
    scene.act(60_000, WOKE)
    assert starts(R0, 5, SHADOW) in scene.act(60_001, WorkerLost(WorkerId(4), "it died")), "that was long ago"


def test_events_of_other_shadows_count_for_nothing() -> None:
    scene = attached(body())
    before = scene.core.state.ledger.view("n0")
    for event in (
        WorkerReady(WorkerId(8)),
        WorkerLost(WorkerId(8), "?"),
        WorkerStopped(WorkerId(8)),
    ):
        assert scene.act(1100, event) == []
    assert scene.act(1200, WorkerReady(WorkerId(1))) == []
    assert (replica(scene).shape, scene.core.state.ledger.view("n0")) == ((SHADOW,), before)
    scene.script.target = plan_of(1)
    assert orders(scene.act(2000, WOKE)) == [StopWorker(WorkerId(1), "the plan has no such shadow")]
    assert scene.act(2001, WorkerReady(WorkerId(1))) == []
    assert replica(scene).shape is ALONE, "it was told to stop"
    assert scene.act(2002, WorkerLost(WorkerId(1), "it died")) == [], "which is as good"
    assert scene.core.state.ledger.view("n0").free_cores == 3
    assert scene.act(2003, WorkerStopped(WorkerId(1))) == []


def test_a_shadow_that_stops_by_itself_is_replaced_as_any_worker_is() -> None:
    scene = attached(body())
    assert orders(scene.act(1100, WorkerStopped(WorkerId(1)))) == [starts(R0, 2, SHADOW)]
    assert replica(scene).shape is ALONE


def test_a_shadow_waits_for_its_body() -> None:
    scene = Scene(pair_plan())
    scene.beliefs["only", "a", ""].layer_count = 3
    (start,) = orders(scene.act(0, WOKE))
    assert isinstance(start, StartWorker)
    assert start.spec.shadow is None
    assert scene.core.state.ledger.view("n0").free_cores == 3
    assert orders(scene.act(500, WorkerReady(R0))) == [starts(R0, 1, SHADOW)]


def test_another_shadow_is_attached_when_the_first_one_has_stopped() -> None:
    scene = attached(body(nodes=(structs.replace(NODE, cores=8),)))
    scene.script.target = pair_plan(OTHER, cores=2.0)
    stop = StopWorker(WorkerId(1), "the plan has no such shadow")
    assert orders(scene.act(2000, WOKE)) == [stop, ResizeWorker(R0, 2.0)]
    assert orders(scene.act(3000, WOKE, WorkerResized(R0, 2.0))) == [], "there is room, but the first one still stops"
    assert orders(scene.act(3010, WorkerStopped(WorkerId(1)))) == [starts(R0, 2, OTHER, cores=2.0)]
    scene.act(3020, WorkerReady(WorkerId(2)))
    assert replica(scene).shape == (OTHER,)


def test_a_shadow_without_room_is_tried_again() -> None:
    scene = body(nodes=(Node("n0", "local", cores=2, memory_bytes=1000),))
    (note,) = [each for each in scene.act(1000, WOKE) if isinstance(each, Decided) and each.kind != "plan"]
    assert (note.kind, note.why) == ("shadow", "n0 has no room for a shadow of replica 0 with 2 cores")
    assert scene.act(2000, WOKE) == [], "it is said once"
    scene.script.target = pair_plan(OTHER)
    assert orders(scene.act(3000, WOKE)) == [starts(R0, 1, OTHER)]


def test_shortages_that_last_at_once_are_each_said_once() -> None:
    """Two shadows and a replica have no room: at no tick is one of them new because another one was said last."""
    scene = body(nodes=(Node("n0", "local", cores=2, memory_bytes=1000),))

    def said(at_ms: int, event: object = WOKE) -> list[tuple[str, ReplicaId | None]]:
        notes = [each for each in scene.act(at_ms, event) if isinstance(each, Decided)]
        return [(each.kind, each.replica) for each in notes if each.kind != "plan"]

    three = pair_plan(count=3)
    scene.script.target = three
    assert said(1000) == [("shadow", R0), ("shortage", None)]
    assert said(1010, WorkerReady(R1)) == [("shadow", R1)]
    assert [said(at_ms) for at_ms in range(2000, 9000, 1000)] == [[]] * 7
    scene.script.target = pair_plan(count=2)
    assert said(9000) == []
    scene.script.target = three
    assert said(10_000) == [("shortage", None)], "it was over, those of the shadows were not"


def test_memory_limits_shadows_too() -> None:
    scene = body(nodes=(Node("n0", "local", cores=4, memory_bytes=149),))
    assert orders(scene.act(1000, WOKE)) == []


def test_a_shadow_attaches_while_its_body_is_resized() -> None:
    scene = body()
    scene.script.target = pair_plan(cores=2.0)
    assert orders(scene.act(1000, WOKE)) == [ResizeWorker(R0, 2.0), starts(R0, 1, SHADOW, cores=2.0)]
    scene.act(1010, WorkerReady(WorkerId(1)))
    scene.act(1020, WorkerResized(R0, 2.0))
    assert (replica(scene).shape, replica(scene).cores) == ((SHADOW,), 2.0)
    assert replica(scene).alone_ns == ms(2.75)
    assert replica(scene).millicores == 4000
    assert scene.core.state.ledger.view("n0").free_cores == 0


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_body_that_is_gone_takes_its_shadow_along(is_ready: bool) -> None:
    scene = body()
    scene.act(1000, WOKE)
    if is_ready:
        scene.act(1010, WorkerReady(WorkerId(1)))
    (_, start) = scene.act(1500, WorkerLost(R0, "it died"))
    assert isinstance(start, StartWorker)
    assert scene.core.state.ledger.view("n0").free_cores == 3
    assert orders(scene.act(1501, WorkerLost(WorkerId(1), "it died"))) == []
    assert orders(scene.act(1600, WorkerReady(start.worker))) == [starts(start.worker, 3, SHADOW)]


def test_a_pair_that_stops_frees_all_of_it() -> None:
    scene = attached(body())
    scene.script.target = plan_of(0)
    scene.act(2000, WOKE)
    assert replica(scene).life is Life.DRAINING
    assert orders(scene.act(2001, WorkerStopped(R0))) == []
    assert scene.core.state.ledger.view("n0").free_cores == NODE.cores


def test_a_failed_batch_of_a_pair_is_tried_again_and_teaches_nothing() -> None:
    scene = attached(body())
    (start,) = scene.act(1500, request(1, at_ms=1500))
    assert isinstance(start, StartBatch)
    scene.act(1503, BatchFailed(start.batch, R0, "the model raised"))
    assert scene.beliefs["only", "a", ""].shapes[(SHADOW,)].observed == []


def test_a_pair_keeps_its_shadow_until_a_replacement_is_ready() -> None:
    """Two bodies instead of a pair: the shadow goes when the second body serves."""
    scene = attached(body())
    scene.script.target = plan_of(2)
    (start,) = orders(scene.act(2000, WOKE))
    assert isinstance(start, StartWorker)
    assert orders(scene.act(2500, WorkerReady(start.worker))) == [
        StopWorker(WorkerId(1), "the plan has no such shadow")
    ]


def test_a_shadow_makes_room_for_a_replacement_that_has_none() -> None:
    scene = attached(body(nodes=(Node("n0", "local", cores=3, memory_bytes=1000),)))
    scene.script.target = plan_of(3)
    (first,) = orders(scene.act(2000, WOKE))
    assert isinstance(first, StopWorker)
    started = orders(scene.act(2010, WorkerStopped(WorkerId(1))))
    assert [type(each) for each in started] == [StartWorker, StartWorker]


# Plans


def test_plans_with_shadows_that_cannot_be_are_refused() -> None:
    scene = body()
    scene.act(900, WOKE)
    view = scene.script.seen[-1]
    check(pair_plan(), view)
    for shadow, complaint in (
        (Worker(0.0, (0,)), "a shadow with 0.0 cores"),
        (Worker(1.0, ()), r"a shadow with blocks \(\); they must ascend"),
        (Worker(1.0, (1, 0)), "must ascend"),
        (Worker(1.0, (1, 1)), "must ascend"),
        (Worker(1.0, (-1, 0)), "must ascend"),
        (Worker(1.0, (2, 3)), "a shadow with block 3 of a, of which 3 are measured"),
    ):
        with pytest.raises(InputError, match=complaint):
            check(pair_plan(shadow), view)


def test_cores_of_shadows_count_when_applications_share_a_cluster() -> None:
    plan = pair_plan(count=2)
    assert cores_by_hardware(plan) == {"": 6.0}
    assert trimmed(plan, {"": 6.0}) == plan
    less = trimmed(plan, {"": 5.0})
    assert cores_by_hardware(less) == {"": 2.0}
    assert not less.feasible
    assert cores_by_hardware(trimmed(plan, {"": 1.0})) == {"": 1.0}


# Laws

CORES = (1.0, 2.0)
SHADOWS = (None, SHADOW, OTHER)
SPECS = st.builds(
    lambda cores, shadow: ReplicaSpec("only", "a", Slot(cores), shape=ALONE if shadow is None else (shadow,)),
    st.sampled_from(CORES),
    st.sampled_from(SHADOWS),
)


def rate_rps(spec: ReplicaSpec) -> float:
    return spec.cores + (spec.shadow.cores / 2 if spec.shadow is not None else 0.0)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(SPECS, st.booleans()), max_size=5), st.lists(st.tuples(SPECS, st.integers(1, 2)), max_size=3))
def test_shadow_changes_lead_to_the_plan_and_lose_nothing_that_it_needs(
    present: list[tuple[ReplicaSpec, bool]], wanted: list[tuple[ReplicaSpec, int]]
) -> None:
    """Carrying out a difference again and again ends at the plan, whatever there is; replicas are restarted only where
    cores or counts differ; ready capacity stays above the smaller of now and planned, but for a change of shadows."""
    plan = StagePlan("only", tuple(Group(*each) for each in wanted), 1)
    now = {
        ReplicaId(id): ReplicaView(ReplicaId(id), spec, Life.READY if ready else Life.STARTING, 0, 0, shape=spec.shape)
        for id, (spec, ready) in enumerate(present)
        if ready or spec.shadow is None
    }
    planned_rps = sum(rate_rps(spec) * count for spec, count in wanted)
    for _ in range(12):
        by_id = {id: rate_rps(each.spec) for id, each in now.items()}
        found = diff(list(now.values()), plan, by_id.__getitem__, rate_rps)
        swaps = set(found.detach) & {id for id, _ in found.attach}
        assert not swaps, "one after the other"
        needed_rps = min(planned_rps, sum(by_id[id] for id, each in now.items() if each.life is Life.READY))
        replaced = {id for id in found.detach if now[id].spec.shadow is not None}
        for id in found.stop:
            del now[id]
        for id, cores in (*found.grow, *found.shrink):
            now[id] = structs.replace(now[id], spec=now[id].spec.with_cores(cores))
        for id in found.detach:
            now[id] = structs.replace(now[id], spec=structs.replace(now[id].spec, shape=ALONE))
        ready_rps = sum(rate_rps(each.spec) for each in now.values() if each.life is Life.READY)
        assert ready_rps >= needed_rps - 1e-6 or replaced
        for id, shadow in found.attach:
            assert now[id].spec.shadow is None
            now[id] = structs.replace(now[id], spec=structs.replace(now[id].spec, shape=(shadow,)))
        for spec in found.start:
            id = ReplicaId(max(now, default=0) + 1)
            now[id] = ReplicaView(id, spec, Life.STARTING, 0, 0)
        now = {id: structs.replace(each, life=Life.READY) for id, each in now.items()}
    counts = sorted(map(repr, (each.spec for each in now.values())))
    assert counts == sorted(repr(spec) for spec, count in wanted for _ in range(count))
