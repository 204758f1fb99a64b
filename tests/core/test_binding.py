"""Early binding: batches wait in the lanes of busy replicas, in order, and come back when a replica does not serve.

A batch of n takes 10 + n ms. The batch policy waits 100 ms for full batches of four.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.actions import Action, BindBatch, Decided, End, StartBatch, StartReplica, StopReplica
from sloop.core.state import Replica
from sloop.events import WOKE, BatchFailed, Cancelled, Finished, ReplicaLost, ReplicaReady, ReplicaStopped
from sloop.policies.batch import Timeout, WorkConserving
from sloop.policies.drop import Never
from sloop.policies.order import Fifo
from sloop.policies.route import BatchRoundRobin, EarliestFree, PlannedRate, RoundRobin
from sloop.units import FOREVER_NS, ms
from sloop.vocabulary import (
    Group,
    Life,
    Outcome,
    Plan,
    ReplicaId,
    ReplicaSpec,
    RequestId,
    Slot,
    StagePlan,
)
from tests.core.scene import Scene, graph, one_each, plan_of, request

R0, R1 = ReplicaId(0), ReplicaId(1)


def early(count: int = 1, **options: Any) -> Scene:
    """Ready replicas that take batches of up to four."""
    policies: dict[str, Any] = {
        "order": Fifo(),
        "drop": Never(),
        "route": BatchRoundRobin(),
        "batch": Timeout(wait_ns=ms(100)),
    }
    made = Scene(plan_of(count), **policies | options)
    made.warm_up()
    return made


def clump(scene: Scene, at_ms: float, first: int, count: int, slo_ms: float = 1000) -> list[Action]:
    """Requests that come together."""
    for number in range(first, first + count - 1):
        scene.core.handle(ms(at_ms), request(number, at_ms=at_ms, slo_ms=slo_ms), True)
    return scene.act(at_ms, request(first + count - 1, at_ms=at_ms, slo_ms=slo_ms))


def of(actions: Sequence[Action]) -> list[tuple[str, int, tuple[int, ...]]]:
    """What starts and what is bound: on which replica, and of which requests."""
    return [
        ("start" if isinstance(each, StartBatch) else "bind", each.replica, each.requests)
        for each in actions
        if isinstance(each, StartBatch | BindBatch)
    ]


def finish(scene: Scene, at_ms: float, replica: ReplicaId = R0) -> list[Action]:
    batch = scene.core.state.replicas[replica].batch
    assert batch is not None
    return scene.act(at_ms, Finished(batch.id, replica, 0))


def stage_of(scene: Scene) -> Any:
    (stage,) = scene.application.all_stages
    return stage


def test_a_batch_waits_for_a_busy_replica_and_begins_when_that_is_free() -> None:
    scene = early()
    assert of(clump(scene, 1, 0, 4)) == [("start", 0, (0, 1, 2, 3))]
    assert of(clump(scene, 2, 4, 4)) == [("bind", 0, (4, 5, 6, 7))]
    assert of(clump(scene, 3, 8, 4)) == [("bind", 0, (8, 9, 10, 11))]
    assert stage_of(scene).monitor.waiting == 8
    assert of(finish(scene, 15)) == [("start", 0, (4, 5, 6, 7))]
    assert of(finish(scene, 29)) == [("start", 0, (8, 9, 10, 11))]
    assert of(finish(scene, 43)) == []
    assert (stage_of(scene).monitor.waiting, len(stage_of(scene).pool.idle)) == (0, 1)


def test_batches_of_all_replicas_are_numbered_as_they_begin() -> None:
    scene = early(2)
    for number in range(4):
        clump(scene, 1 + number, 4 * number, 4)
    finish(scene, 20, R1)
    finish(scene, 21, R0)
    starts = [action for action in scene.actions if isinstance(action, StartBatch)]
    assert [(each.batch, each.replica) for each in starts] == [(0, 0), (1, 1), (2, 1), (3, 0)]


def test_round_robin_goes_by_batches_past_replicas_that_are_busy() -> None:
    scene = early(3)
    made = [each for number in range(7) for each in of(clump(scene, 1 + number, 4 * number, 4))]
    assert [replica for _, replica, _ in made] == [0, 1, 2, 0, 1, 2, 0]
    assert [kind for kind, _, _ in made] == ["start"] * 3 + ["bind"] * 4


def test_the_batch_of_the_next_replica_is_as_large_as_that_one_takes() -> None:
    """One takes four requests, the other two: they get them in this proportion, whatever their speed."""
    groups = tuple(
        Group(ReplicaSpec("only", variant, Slot(1.0)), 1, batch_max=size) for variant, size in (("a", 4), ("b", 2))
    )
    scene = early(0)
    scene.script.target = Plan((StagePlan("only", groups, 4),), "the test says so")
    for action in scene.act(1000, WOKE):
        if isinstance(action, StartReplica):
            scene.act(1000, ReplicaReady(action.replica))
    sent: Counter[int] = Counter()
    for number in range(60):
        for _, replica, requests in of(scene.act(1001 + number / 10, request(number, at_ms=1001 + number / 10))):
            sent[replica] += len(requests)
    assert sent == {0: 40, 1: 20}


def test_the_open_batch_keeps_its_replica_until_that_stops_to_be_ready() -> None:
    scene = early(2)
    clump(scene, 1, 0, 2)
    assert stage_of(scene).opened.id == R0
    scene.act(2, ReplicaLost(R0, "it died"))
    assert stage_of(scene).opened is None or stage_of(scene).opened.id == R1
    assert of(clump(scene, 3, 2, 2)) == [("start", 1, (0, 1, 2, 3))]


def test_a_batch_is_bound_when_its_time_is_up() -> None:
    scene = early()
    clump(scene, 1, 0, 4)
    clump(scene, 2, 4, 2)
    assert scene.core.wake_ns <= ms(102)
    assert of(scene.act(102, WOKE)) == [("bind", 0, (4, 5))]


def lane_of(scene: Scene) -> list[int]:
    return [visit.request.id for visit in stage_of(scene).pool.bound]


@pytest.mark.parametrize("how", ["lost", "stopped without an order", "given up", "drained"])
def test_what_is_bound_to_a_replica_that_goes_returns_to_the_queue_untried(how: str) -> None:
    scene = early(2)
    for number in range(4):
        clump(scene, 1 + number, 4 * number, 4)
    clump(scene, 6, 16, 1)
    assert lane_of(scene) == [8, 9, 10, 11, 12, 13, 14, 15]
    if how == "lost":
        new = scene.act(7, ReplicaLost(R0, "it died"))
        alone = [("bind", 1, (number,)) for number in range(4)]
        assert of(new) == [*alone, ("bind", 1, (8, 9, 10, 11))], "each of the lost batch is tried alone"
    elif how == "stopped without an order":
        assert ("bind", 1, (8, 9, 10, 11)) in of(scene.act(7, ReplicaStopped(R0)))
    elif how == "given up":
        scene.act(40_000, WOKE)
        assert [action for action in scene.actions if isinstance(action, StopReplica)]
        assert not any(replica.lane for replica in scene.core.state.replicas.values())
        return
    else:
        scene.script.target = plan_of(1)
        new = scene.act(1000, WOKE)
        (drained,) = [each.replica for each in new if isinstance(each, Decided) and each.kind == "drain"]
        (other,) = {R0, R1} - {drained}
        assert scene.core.state.replicas[drained].lane is None  # type: ignore[index]
        assert {replica for kind, replica, _ in of(new) if kind == "bind"} == {other}
    waiting = [visit.request.id for visit in stage_of(scene).queue.visits]
    assert {*lane_of(scene), *waiting} >= set(range(8, 17))
    assert all(visit.attempts == 0 for visit in stage_of(scene).pool.bound if visit.request.id >= 8)


def test_requests_that_are_tried_again_alone_stay_alone_in_a_lane() -> None:
    scene = early()
    clump(scene, 1, 0, 4)
    clump(scene, 2, 4, 4)
    (batch,) = [each.batch for each in scene.actions if isinstance(each, StartBatch)]
    new = of(scene.act(3, BatchFailed(batch, R0, "it raised")))
    assert new == [("start", 0, (4, 5, 6, 7)), ("bind", 0, (0, 1)), ("bind", 0, (2, 3))]
    assert of(finish(scene, 20)) == [("start", 0, (0, 1))]


def test_cancelled_requests_leave_their_lane() -> None:
    scene = early()
    clump(scene, 1, 0, 4)
    clump(scene, 2, 4, 4)
    (end,) = scene.act(3, Cancelled(RequestId(5)))
    assert isinstance(end, End)
    assert end.outcome is Outcome.DROPPED
    for number in (4, 6, 7):
        scene.act(4, Cancelled(RequestId(number)))
    assert scene.core.state.replicas[R0].lane is None
    assert of(finish(scene, 15)) == []
    assert len(stage_of(scene).pool.idle) == 1


def test_what_became_hopeless_in_a_lane_is_left_out_of_its_batch() -> None:
    scene = early(drop=None)
    clump(scene, 1, 0, 4, slo_ms=2000)
    clump(scene, 2, 4, 3, slo_ms=30)
    scene.act(2, request(7, at_ms=2))
    new = finish(scene, 25)
    assert of(new) == [("start", 0, (7,))]
    assert [end.request for end in new if isinstance(end, End) and end.outcome is Outcome.DROPPED] == [4, 5, 6]


def test_what_becomes_hopeless_while_its_replica_is_busy_is_dropped_soon_after_its_deadline() -> None:
    """The queue is empty, so nothing else happens at that time."""
    scene = early(drop=None)
    clump(scene, 1, 0, 4, slo_ms=2000)
    clump(scene, 2, 4, 4, slo_ms=30)
    assert stage_of(scene).queue.visits == []
    assert scene.core.wake_ns == ms(32) + 1
    new = scene.core.handle(scene.core.wake_ns, WOKE)
    assert [end.request for end in new if isinstance(end, End)] == [4, 5, 6, 7]
    assert scene.core.wake_ns > ms(100)
    assert stage_of(scene).monitor.waiting == 0


def test_reminders_survive_a_tick() -> None:
    scene = early(drop=None)
    clump(scene, 900, 0, 4, slo_ms=5000)
    clump(scene, 901, 4, 4, slo_ms=300)
    scene.act(1000, WOKE)
    assert scene.core.wake_ns == ms(1201) + 1


def test_policies_see_what_is_bound() -> None:
    scene = early(2)
    for number in range(3):
        clump(scene, 1 + number, 4 * number, 4)
    scene.act(4, request(12, at_ms=4))
    (view,) = scene.core.stage_views()
    assert [(each.running, each.waiting) for each in view.replicas] == [(4, 4), (4, 0)]
    assert [visit.request.id for visit in view.queue] == [12, 8, 9, 10, 11]
    finish(scene, 15)
    (view,) = scene.core.stage_views()
    assert [(each.running, each.waiting) for each in view.replicas] == [(4, 0), (4, 0)]


def test_admission_counts_what_is_bound() -> None:
    scene = early(queue_max=8)
    for number in range(3):
        clump(scene, 1 + number, 4 * number, 4)
    (end,) = scene.act(5, request(12, at_ms=5))
    assert isinstance(end, End)
    assert end.outcome is Outcome.REJECTED


def test_a_replica_tells_when_it_is_believed_to_be_free() -> None:
    scene = early()
    replica: Replica = scene.core.state.replicas[R0]
    assert (replica.ends_ns, replica.lane_ns) == (0, 0)
    clump(scene, 1, 0, 4)
    clump(scene, 2, 4, 4)
    clump(scene, 3, 8, 3)
    scene.act(103, WOKE)
    assert (replica.ends_ns, replica.lane_ns) == (ms(15), ms(14 + 13))
    finish(scene, 104)
    assert (replica.ends_ns, replica.lane_ns) == (ms(118), ms(13))


def test_in_a_graph_a_request_that_has_ended_elsewhere_does_not_begin() -> None:
    """Both branches follow the first stage; the request is cancelled while it waits in the lane of one."""
    application = graph(a={}, b={"after": ("a",)})
    scene = Scene(
        one_each(application, batch_max=1),
        application=application,
        drop=Never(),
        order=Fifo(),
        route=BatchRoundRobin(),
        batch=WorkConserving(),
    )
    scene.warm_up()
    scene.act(1, request(0, at_ms=1), request(1, at_ms=1), request(2, at_ms=1))
    assert lane_of_stage(scene, "a") == [1, 2]
    scene.act(2, Cancelled(RequestId(1)))
    new = scene.act(12, Finished(next(b.batch for b in scene.actions if isinstance(b, StartBatch)), R0, 0, ((1,),)))
    assert [(each.stage, each.requests) for each in new if isinstance(each, StartBatch)] == [("a", (2,)), ("b", (0,))]


def lane_of_stage(scene: Scene, name: str) -> list[int]:
    return [visit.request.id for visit in scene.application.stages[name].pool.bound]


def test_late_binding_has_no_lanes() -> None:
    scene = early(2, route=RoundRobin())
    for number in range(4):
        clump(scene, 1 + number, 4 * number, 4)
    assert not any(isinstance(action, BindBatch) for action in scene.actions)
    assert len(stage_of(scene).queue.visits) == 8
    assert stage_of(scene).lanes_ns == FOREVER_NS


EVENTS = st.lists(
    st.tuples(st.sampled_from(("request", "finish", "fail", "lose", "cancel", "wake", "plan")), st.integers(0, 40)),
    max_size=80,
)


class Play:
    """Events for a core, and what must hold after each."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.now, self.requests = 1.0, 0
        self.open = set[int]()
        self.bound: dict[int, list[tuple[int, ...]]] = {}
        """By replica, what was bound to it and has not begun."""

    def act(self, event: object) -> None:
        for action in self.scene.act(self.now, event):
            if isinstance(action, End):
                self.open.remove(action.request)
            elif isinstance(action, BindBatch):
                self.bound.setdefault(action.replica, []).append(action.requests)
            elif isinstance(action, StartBatch):
                self.check_first(action)
        replicas = self.scene.core.state.replicas
        for replica in replicas.values():
            assert replica.lane is None or (replica.life is Life.READY and replica.batch is not None), replica.id
        for id in [id for id in self.bound if ReplicaId(id) not in replicas or replicas[ReplicaId(id)].lane is None]:
            del self.bound[id]
        stage = stage_of(self.scene)
        assert stage.monitor.waiting == len(stage.queue.visits) + len(stage.pool.bound)

    def check_first(self, start: StartBatch) -> None:
        """A replica begins what was bound to it first, without what has ended."""
        own = self.bound.get(start.replica, [])
        while own and not set(own[0]) & self.open:
            own.pop(0)
        if own:
            assert list(start.requests) == [id for id in own.pop(0) if id in self.open]

    def take(self, what: str, detail: int) -> None:
        self.now += detail / 4
        busy = [replica for replica in self.scene.core.state.replicas.values() if replica.batch is not None]
        if what == "request":
            for _ in range(detail % 6):
                self.requests += 1
                self.open.add(self.requests)
                self.act(request(self.requests, at_ms=self.now, slo_ms=60 + 10 * detail))
        elif what == "plan":
            self.scene.script.target = plan_of(1 + detail % 3, batch_max=1 + detail % 4)
            self.now = 1000.0 * (self.now // 1000 + 1)
            self.act(WOKE)
        elif what == "cancel" and self.open:
            self.act(Cancelled(RequestId(sorted(self.open)[detail % len(self.open)])))
        elif what in ("finish", "fail", "lose") and busy:
            replica = busy[detail % len(busy)]
            assert replica.batch is not None
            ends: dict[str, object] = {
                "finish": Finished(replica.batch.id, replica.id, 0),
                "fail": BatchFailed(replica.batch.id, replica.id, "it raised"),
                "lose": ReplicaLost(replica.id, "it died"),
            }
            self.act(ends[what])
        else:
            self.act(WOKE)
        for replica in list(self.scene.core.state.replicas.values()):
            if replica.life is Life.STARTING:
                self.act(ReplicaReady(replica.id))

    def end(self) -> None:
        self.scene.script.target = plan_of(3)
        for _ in range(400):
            self.take("wake", 200)
            for replica in list(self.scene.core.state.replicas.values()):
                if replica.batch is not None:
                    self.act(Finished(replica.batch.id, replica.id, 0))
            if not self.open:
                return


@settings(max_examples=60)
@given(
    EVENTS,
    st.sampled_from((BatchRoundRobin, PlannedRate, EarliestFree)),
    st.sampled_from((WorkConserving(), Timeout(wait_ns=ms(20)), Timeout(wait_ns=ms(20), timer=False))),
    st.booleans(),
)
def test_no_request_is_lost_or_answered_twice_and_lanes_are_in_order(
    events: list[tuple[str, int]], route: Any, batch: Any, drops: bool
) -> None:
    play = Play(early(3, route=route(), batch=batch, **({"drop": None} if drops else {})))
    for what, detail in events:
        play.take(what, detail)
    play.end()
    assert not play.open
