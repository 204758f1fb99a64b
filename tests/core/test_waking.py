"""Requests that wait for the first replicas of an application, after its start or after a rest (`wake_s`).

Starts are believed to take 5 s; a batch of one takes 11 ms.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from sloop.actions import Action, Decided, End, StartBatch, StartWorker, StopWorker
from sloop.app.application import Application
from sloop.core import ApplicationParts, Core
from sloop.events import WOKE, Cancelled, Finished, WorkerLost, WorkerReady, WorkerStopped
from sloop.policies.admit import Bounded, PredictiveAdmit
from sloop.policies.drop import Age, Never, PredictiveDrop
from sloop.units import ms, s
from sloop.vocabulary import Node, Outcome, ReplicaId, RequestId
from tests.core.scene import Acting, Deployment, Script, beliefs_of, graph, one_each, policies_of, request


def resting(**options: Any) -> Deployment:
    """An application that rests; its replica has stopped. The next one has the number 1."""
    scene = Deployment({"x": 1.0}, **{"rest_after_s": 2, "wake_s": 30} | options)
    scene.warm_up()
    tick(scene, 1, 4)
    scene.act(4000, WorkerStopped(ReplicaId(0)))
    assert scene.is_resting("x")
    return scene


def tick(scene: Acting, first_s: int, end_s: int) -> list[Action]:
    """Let these seconds pass."""
    return [action for second in range(first_s, end_s) for action in scene.act(second * 1000, WOKE)]


def ask(scene: Acting, id: int, at_ms: float, slo_ms: float = 100) -> list[Action]:
    return scene.act(at_ms, request(id, at_ms=at_ms, slo_ms=slo_ms))


def ends(actions: Sequence[Action]) -> list[tuple[int, Outcome]]:
    return [(action.request, action.outcome) for action in actions if isinstance(action, End)]


def finish(scene: Acting, at_ms: float, actions: Sequence[Action]) -> list[Action]:
    """The batch that these actions start is done."""
    (batch,) = [action for action in actions if isinstance(action, StartBatch)]
    return scene.act(at_ms, Finished(batch.batch, batch.replica, ms(11)))


def is_dear(scene: Deployment) -> bool:
    """Whether the end of a batch looks at each of its requests."""
    return scene.core.state.applications["x"].stages["x/only"].finishes_each


@pytest.mark.parametrize("drop", [PredictiveDrop(), Age(), Never()])
def test_the_first_requests_wait_for_the_start_and_are_served_late(drop: object) -> None:
    scene = resting(drop=drop)
    actions = ask(scene, 1, 5_000) + tick(scene, 6, 8) + ask(scene, 2, 7_500) + tick(scene, 8, 10)
    assert [action.worker for action in actions if isinstance(action, StartWorker)] == [1]
    assert ends(actions) == []
    begun = scene.act(10_000, WorkerReady(ReplicaId(1)))
    assert [action.requests for action in begun if isinstance(action, StartBatch)] == [(1, 2)]
    assert ends(finish(scene, 10_012, begun)) == [(1, Outcome.LATE), (2, Outcome.LATE)]


def test_a_request_whose_own_deadline_is_longer_is_served_in_time() -> None:
    scene = resting()
    ask(scene, 1, 5_000, slo_ms=6_000)
    assert ends(finish(scene, 10_012, scene.act(10_000, WorkerReady(ReplicaId(1))))) == [(1, Outcome.SERVED)]


def test_once_it_is_awake_deadlines_hold_again() -> None:
    scene = resting(drop=PredictiveDrop())
    ask(scene, 1, 5_000)
    begun = scene.act(10_000, WorkerReady(ReplicaId(1)))
    assert is_dear(scene), "late and served requests are told apart one by one"
    ask(scene, 2, 10_001, slo_ms=5)
    assert ends(scene.act(10_007, WOKE)) == [(2, Outcome.DROPPED)]
    finish(scene, 10_012, begun)
    assert not is_dear(scene), "requests are cheap again"
    assert ends(finish(scene, 10_212, ask(scene, 3, 10_100))) == [(3, Outcome.LATE)]


@pytest.mark.parametrize("drop", [PredictiveDrop(), Never()])
def test_beyond_the_bound_a_client_is_told_when_to_come_back(drop: object) -> None:
    scene = resting(wake_s=2, drop=drop)
    ask(scene, 1, 5_000)
    actions = tick(scene, 6, 7) + scene.act(scene.core.wake_ns / ms(1), WOKE) + scene.act(7_001, WOKE)
    (end,) = [action for action in actions if isinstance(action, End)]
    assert (end.outcome, end.stage) == (Outcome.REJECTED, "x/only")
    assert s(2.9) < end.retry_after_ns <= s(3), "of the 5 s of a start, 2 have passed"
    assert "no replica of stage 'only' is ready (1 starting); it has waited for 2" in end.why


def test_a_replica_that_was_never_ready_is_not_stopped_for_quiet() -> None:
    scene = resting(rest_after_s=1, wake_s=0.5)
    ask(scene, 1, 5_000)
    actions = scene.act(5_501, WOKE) + tick(scene, 6, 12)
    assert ends(actions) == [(1, Outcome.REJECTED)]
    assert StopWorker not in map(type, actions)
    scene.act(12_500, WorkerReady(ReplicaId(1)))
    assert StopWorker not in map(type, scene.act(13_000, WOKE)), "quiet counts from here"
    assert ends(finish(scene, 13_312, ask(scene, 2, 13_300))) == [(2, Outcome.SERVED)]
    assert StopWorker in map(type, tick(scene, 14, 17))


def test_a_replica_stays_until_the_client_that_was_sent_away_is_expected() -> None:
    scene = resting(rest_after_s=0.2, wake_s=1)
    ask(scene, 1, 5_000)
    (end,) = [action for action in scene.act(6_001, WOKE) if isinstance(action, End)]
    scene.act(7_000, WorkerReady(ReplicaId(1)))  # sooner than expected
    back_ms = 6_001 + end.retry_after_ns / ms(1)
    assert back_ms > 9_900
    assert StopWorker not in map(type, tick(scene, 8, 10))
    assert ends(finish(scene, back_ms + 11, ask(scene, 2, back_ms))) == [(2, Outcome.SERVED)]


def test_starts_that_fail_are_tried_again_and_told() -> None:
    scene = resting(wake_s=4)
    ask(scene, 1, 5_000)
    scene.act(5_100, WorkerLost(ReplicaId(1), "it exited with 3"))
    scene.act(5_200, WorkerLost(ReplicaId(2), "it exited with 3"))
    actions = tick(scene, 6, 9) + scene.act(9_001, WOKE)
    (end,) = [action for action in actions if isinstance(action, End)]
    assert end.outcome is Outcome.REJECTED
    assert "no replica of stage 'only' can start: it exited with 3; another attempt runs" in end.why
    for number in range(3, 7):
        scene.act(9_100, WorkerLost(ReplicaId(number), "it exited with 3"))
    assert not scene.is_resting("x")
    later = tick(scene, 10, 60)
    assert StartWorker in map(type, later), "also without a further request"
    assert ("rest", "x") not in [(each.kind, each.application) for each in later if isinstance(each, Decided)]


@pytest.mark.parametrize("error", [None, ValueError("a bug")])
def test_a_policy_that_keeps_its_plan_keeps_the_one_before_the_rest(error: ValueError | None) -> None:
    scene = resting()
    scene.scripts["x"].target, scene.scripts["x"].error = None, error
    actions = ask(scene, 1, 5_000)
    assert [action.worker for action in actions if isinstance(action, StartWorker)] == [1]
    assert scene.planned_cores("x") == 1.0


def test_a_client_that_leaves_ends_its_wait() -> None:
    scene = resting()
    ask(scene, 1, 5_000)
    assert ends(scene.act(5_500, Cancelled(RequestId(1)))) == [(1, Outcome.DROPPED)]
    assert not scene.core.state.applications["x"].woken
    assert not is_dear(scene)


def test_admission_knows_how_long_a_request_may_wait() -> None:
    scene = resting(wake_s=30, admit=PredictiveAdmit())
    assert ends(ask(scene, 1, 5_000) + ask(scene, 2, 5_001)) == []
    scene = resting(wake_s=1, admit=PredictiveAdmit())
    ask(scene, 1, 5_000)
    (end,) = [action for action in ask(scene, 2, 5_001) if isinstance(action, End)]
    assert (end.outcome, round(end.retry_after_ns / s(1))) == (Outcome.REJECTED, 4)
    scene = resting(admit=Bounded(queue_max=1))
    assert ends(ask(scene, 1, 5_000) + ask(scene, 2, 5_001)) == [(2, Outcome.REJECTED)]


def test_without_the_bound_a_rest_costs_the_first_request() -> None:
    scene = resting(wake_s=0)
    ask(scene, 1, 5_000)
    assert ends(scene.act(5_101, WOKE)) == [(1, Outcome.DROPPED)]


def pair(application: Application) -> Acting:
    """An application of two stages before its first tick; its replicas get the numbers 0 and 1."""
    scene = Acting()
    scene.core = Core(
        [
            ApplicationParts(
                graph=application.graph,
                beliefs=beliefs_of(application),
                policies=policies_of(Script(one_each(application))),
                rest_after_ns=s(60),
                wake_ns=s(10),
            )
        ],
        [Node("n0", "local", 4, 1000)],
    )
    return scene


def test_in_a_graph_a_request_waits_for_each_stage() -> None:
    scene = pair(graph(first={}, second={"after": ("first",)}))
    scene.act(0, WOKE)
    ask(scene, 1, 10)
    begun = scene.act(3_000, WorkerReady(ReplicaId(0)))
    assert ends(finish(scene, 3_011, begun) + tick(scene, 4, 6)) == []
    assert ends(finish(scene, 6_012, scene.act(6_000, WorkerReady(ReplicaId(1))))) == [(1, Outcome.LATE)]
    assert ends(ask(scene, 2, 6_100, slo_ms=20) + scene.act(6_121, WOKE)) == [(2, Outcome.DROPPED)]


def test_in_a_graph_the_stage_that_does_not_start_is_named() -> None:
    scene = pair(graph(first={}, second={"after": ("first",)}))
    scene.act(0, WOKE)
    scene.act(5, WorkerLost(ReplicaId(1), "no disk"))
    ask(scene, 1, 10)
    finish(scene, 3_011, scene.act(3_000, WorkerReady(ReplicaId(0))))
    (end,) = [action for action in tick(scene, 4, 12) if isinstance(action, End)]
    assert (end.outcome, end.stage) == (Outcome.REJECTED, "second")
    assert "no replica of stage 'second' can start: no disk" in end.why
