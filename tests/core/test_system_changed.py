"""Another system decides for an application version from now on: nothing that serves or waits is touched."""

from typing import Any

import pytest

from sloop.actions import Action, Decided, End, RequestPlan, ResizeWorker, Rollout, StartBatch, StartWorker, StopWorker
from sloop.events import (
    WOKE,
    Deployed,
    Finished,
    Planned,
    Removed,
    SystemChanged,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.policies.drop import Age, Never
from sloop.policies.order import Edf, Fifo
from sloop.policies.provision import CheapestStart
from sloop.units import ms, s
from sloop.vocabulary import BatchId, Canary, Outcome, ReplicaId
from tests.core.scene import Deployment, request

R = ReplicaId(0)


def serving(*, order: object = None, **options: Any) -> Deployment:
    """One replica of `x` with one core, which serves."""
    scene = Deployment({"x": 1.0}, cores=8, order=order or Edf(), drop=Never(), **options)
    scene.warm_up()
    return scene


def changed(version: str = "1", **definition: Any) -> SystemChanged:
    return SystemChanged("x", version, {"system": "the second", "policies": {}} | definition)


def decided(actions: list[Action], kind: str) -> list[str]:
    return [action.why for action in actions if isinstance(action, Decided) and action.kind == kind]


def test_replicas_requests_and_the_plan_in_force_stay() -> None:
    scene = serving()
    scene.act(100, *[request(number, application="x", at_ms=100) for number in range(3)])
    actions = scene.act(105, changed(cores=1.0))
    assert decided(actions, "system") == ["the second decides from now on, where the first did"]
    assert len(actions) == 1, "no replica is started or stopped, no request ends"
    (replica,) = scene.core.state.replicas.values()
    assert replica.batch is not None, "its batch runs on"
    ended = scene.act(112, Finished(BatchId(0), R, ms(11)))
    assert [action.outcome for action in ended if isinstance(action, End)] == [Outcome.SERVED]
    (batch,) = [action for action in ended if isinstance(action, StartBatch)]
    assert batch.requests == (1, 2), "the queue is served on"
    actions = scene.act(113, WOKE)
    assert [type(action) for action in actions] == [], "the same plan changes nothing"


def test_the_new_system_plans_at_once_and_changes_replicas_as_any_plan_does() -> None:
    scene = serving()
    scene.act(1100, changed(cores=3.0))
    assert scene.core.wake_ns == ms(1100)
    actions = scene.act(1100.001, WOKE)
    (plan,) = [action for action in actions if isinstance(action, Decided) and action.kind == "plan"]
    assert plan.plan is not None
    assert ResizeWorker(R, 3.0) in actions
    scene.act(1200, WorkerResized(R, 3.0))
    assert scene.planned_cores("x") == 3.0


def test_it_begins_without_plan_and_memory_and_with_the_history_of_the_traffic() -> None:
    scene = serving()
    for number in range(5):
        scene.act(10 * number + 1, request(number, application="x", at_ms=10 * number + 1))
    scene.act(1000, WOKE)
    scene.core.planner._memories["x"] = "what the first remembers"
    scene.act(1100, changed())
    assert scene.core.planner.memories == {}
    scene.act(1101, WOKE)
    (view,) = scene.scripts["x"].seen
    assert view.plan is None
    assert view.ingress.buckets[0].arrivals == 5
    assert [replica.id for replica in view.stages[0].replicas] == [R]
    scene.act(2000, WOKE)
    assert scene.scripts["x"].seen[-1].plan is not None, "its own"


def test_a_system_without_a_plan_leaves_the_one_in_force() -> None:
    scene = serving()
    before = scene.core.plan_of("x")
    scene.act(1100, changed(script={"target": None}))
    scene.act(1101, WOKE)
    scene.act(2000, WOKE)
    assert scene.core.plan_of("x") == before
    assert [view.plan for view in scene.scripts["x"].seen] == [None, None]


def test_what_waits_is_sorted_anew_and_what_is_tried_again_stays_first() -> None:
    scene = serving(order=Fifo())
    deadlines = {1: 900, 2: 800, 3: 700, 4: 600, 5: 800}
    scene.act(100, request(0, application="x", at_ms=100))
    for number, slo_ms in deadlines.items():
        scene.act(100 + number, request(number, application="x", at_ms=100, slo_ms=slo_ms))
    (stage,) = scene.application_stages("x")
    again = stage.queue.take(1)
    stage.queue.push_again(ms(106), again)
    scene.act(107, changed(policies={"order": Edf()}))
    assert [visit.request.id for visit in stage.queue.visits] == [1, 4, 3, 2, 5]
    scene.act(108, request(6, application="x", at_ms=108, slo_ms=600))
    assert [visit.request.id for visit in stage.queue.visits] == [1, 4, 6, 3, 2, 5]
    scene.act(109, changed(policies={"order": Fifo()}))
    assert [visit.request.id for visit in stage.queue.visits] == [1, 2, 3, 4, 5, 6]


def test_its_drop_policy_looks_at_the_queue_at_once() -> None:
    scene = serving()
    scene.act(100, request(0, application="x", at_ms=100), request(1, application="x", at_ms=100, slo_ms=50))
    assert not [action for action in scene.act(500, WOKE) if isinstance(action, End)]
    scene.act(501, changed(policies={"drop": Age(limit=1.0)}))
    (end,) = [action for action in scene.act(501.001, WOKE) if isinstance(action, End)]
    assert (end.request, end.outcome) == (1, Outcome.DROPPED)


def test_a_plan_that_is_being_made_does_not_count() -> None:
    scene = serving(is_quick=False)
    (asked,) = [action for action in scene.act(1000, WOKE) if isinstance(action, RequestPlan)]
    old = scene.plan("x", 5.0)
    scene.act(1001, changed(cores=2.0))
    assert scene.core.plan_input is not None
    assert not scene.core.plan_input.due, "nobody is planned any more"
    scene.act(1002, Planned(asked.number, {"x": old}))
    assert scene.planned_cores("x") == 1.0
    (again,) = [action for action in scene.act(1003, WOKE) if isinstance(action, RequestPlan)]
    scene.act(1004, scene.core.planner.plan(scene.core.plan_input))
    assert again.number == asked.number + 1
    assert scene.planned_cores("x") == 2.0


def test_a_system_that_is_not_quick_plans_beside_the_loop_from_then_on() -> None:
    scene = serving()
    scene.act(1100, changed(script={"is_quick": False}))
    assert any(isinstance(action, RequestPlan) for action in scene.act(1101, WOKE))


def test_other_buckets_forget_the_traffic_so_nothing_that_serves_is_stopped_before_it_is_known() -> None:
    scene = serving()
    for number in range(40):
        scene.act(10 * number + 1, request(number, application="x", at_ms=10 * number + 1))
    scene.act(1000, WOKE)
    scene.act(1100, changed(cores=0.0, script={"period_ns": ms(200)}))
    actions = scene.act(1101, WOKE)
    assert scene.planned_cores("x") == 0.0
    assert not [action for action in actions if isinstance(action, StopWorker)]
    (application,) = scene.core.state.applications.values()
    assert application.ingress.bucket_ns == ms(200)
    running = application.stages["x/only"].monitor.running
    scene.act(1200, WOKE)
    scene.act(1400, WOKE)
    assert [(bucket.start_ns, bucket.arrivals, bucket.running_ns) for bucket in application.ingress.buckets] == [
        (s(1), 0, running * ms(100)),
        (ms(1200), 0, running * ms(200)),
    ]


@pytest.mark.parametrize(
    ("definition", "why"),
    [
        ({"broken": True}, "its definition is not valid: a broken definition"),
        (
            {"policies": {"provision": CheapestStart()}},
            "its `provision` policy brings weights to nodes in another way than that of the system that decides now",
        ),
        (
            {"memory_bytes": 1_001},
            "it resizes replicas, for which they need 8.39e-07 GiB more on n0, which has 8.38e-07 GiB free",
        ),
    ],
)
def test_one_that_cannot_decide_here_changes_nothing(definition: dict[str, Any], why: str) -> None:
    scene = serving()
    scene.act(100, request(0, application="x", at_ms=100), request(1, application="x", at_ms=100))
    before, planner = scene.core._paths["x"], scene.core.planner.policies["x"]
    actions = scene.act(105, changed(**definition))
    assert decided(actions, "unchanged") == [f"another system cannot decide: {why}"]
    assert scene.core._paths["x"] is before
    assert scene.core.planner.policies["x"] is planner
    (end, _) = scene.act(112, Finished(BatchId(0), R, ms(11)))
    assert isinstance(end, End)


def test_replicas_get_the_memory_that_they_need_under_it() -> None:
    scene = serving()
    ledger = scene.core.state.ledger
    scene.act(100, changed(memory_bytes=160))
    assert ledger.reservations[R].memory_bytes == 160
    assert ledger.free_memory_bytes("n0") == 840
    scene.act(200, changed(memory_bytes=100))
    assert ledger.reservations[R].memory_bytes == 160, "it has it until it stops"
    scene.act(300, changed(memory_bytes=160, cores=2.0))
    assert ledger.reservations[R].memory_bytes == 160


def test_each_version_is_changed_by_itself_and_one_that_ends_is_not() -> None:
    scene = serving()
    scene.act(1000, Deployed("x", "2", {}, Canary(0.5)))
    (start,) = [action for action in scene.act(1001, WOKE) if isinstance(action, StartWorker)]
    scene.act(1500, WorkerReady(start.worker))
    assert any(isinstance(action, Rollout) for action in scene.act(2000, WOKE))
    assert decided(scene.act(2100, changed("2")), "system")
    systems = {key: each.parts.system for key, each in scene.core.state.applications.items()}
    assert systems == {"x": "the first", "x@2": "the second"}
    scene.act(2200, Removed("x", "2"))
    assert scene.act(2300, changed("2", system="the third")) == []
    assert scene.act(2301, changed("7")) == []


def test_one_that_rests_is_planned_by_it_when_it_wakes() -> None:
    scene = serving(rest_after_s=5)
    for at_s in range(1, 12):
        scene.act(1000 * at_s, WOKE)
    assert scene.is_resting("x")
    scene.act(11_500, WorkerStopped(R))
    scene.act(12_000, changed(cores=2.0))
    scene.act(12_001, WOKE)
    assert scene.is_resting("x")
    scene.act(13_000, request(1, application="x", at_ms=13_000))
    assert scene.planned_cores("x") == 2.0
    assert scene.scripts["x"].seen[0].plan is None
