"""The data path: requests from arrival through batches to their end, in one stage and in a graph."""

from collections.abc import Sequence

from msgspec import structs

from sloop.actions import Action, End, StartBatch, StartWorker
from sloop.app.application import Application
from sloop.app.graph import When
from sloop.events import WOKE, BatchFailed, Cancelled, Draining, Finished, WorkerLost, WorkerReady
from sloop.policies.batch import Full, Timeout
from sloop.policies.drop import Age, Never, PredictiveDrop
from sloop.units import FOREVER_NS, ms
from sloop.vocabulary import BatchId, Outcome, ReplicaId, RequestId
from tests.core.scene import Scene, graph, one_each, plan_of, request

R0, B0 = ReplicaId(0), BatchId(0)


def warm(count: int = 1, **options: object) -> Scene:
    scene = Scene(plan_of(count), **options)  # type: ignore[arg-type]
    scene.warm_up()
    return scene


def outcomes(scene: Scene) -> dict[int, Outcome]:
    ends = [action for action in scene.actions if isinstance(action, End)]
    assert len({end.request for end in ends}) == len(ends), "a request ended twice"
    return {end.request: end.outcome for end in ends}


def test_a_request_goes_straight_to_an_idle_replica_and_is_served() -> None:
    scene = warm()
    assert scene.act(5, request(1, at_ms=5)) == [StartBatch(B0, R0, "only", (RequestId(1),))]
    assert scene.act(16, Finished(B0, R0, ms(10))) == [End(RequestId(1), Outcome.SERVED)]
    assert scene.beliefs["only", "a", ""].observed == [(1, 1.0, ms(11))]


def test_waiting_requests_become_one_batch_in_order_of_deadlines() -> None:
    scene = warm()
    scene.act(5, request(1, at_ms=5), request(2, at_ms=5, slo_ms=900), request(3, at_ms=5, slo_ms=300))
    assert scene.act(16, Finished(B0, R0, ms(11)))[-1] == StartBatch(
        BatchId(1), R0, "only", (RequestId(3), RequestId(2))
    )


def test_a_late_request_is_answered_with_how_late_it_is() -> None:
    scene = warm()
    scene.act(0, request(1, slo_ms=50))
    assert scene.act(61.5, Finished(B0, R0, ms(60))) == [
        End(RequestId(1), Outcome.LATE, "finished 11.5 ms after its deadline")
    ]


def test_hopeless_requests_are_dropped_when_a_batch_is_formed() -> None:
    scene = warm()
    scene.act(0, request(1), request(2, slo_ms=25))
    dropped, *_ = [a for a in scene.act(20, Finished(B0, R0, ms(20))) if isinstance(a, End) and a.request == 2]
    assert dropped.outcome is Outcome.DROPPED
    assert "slack 5.0 ms" in dropped.why
    assert "11.0 ms" in dropped.why


def test_a_passed_deadline_is_answered_although_no_replica_becomes_free() -> None:
    scene = warm()
    scene.act(0, request(1), request(2, slo_ms=25))
    assert ms(25) < scene.core.wake_ns <= ms(26)
    scene.act(26, WOKE)
    assert outcomes(scene) == {2: Outcome.DROPPED}
    (dropped,) = [action for action in scene.actions if isinstance(action, End)]
    assert "no replica was free" in dropped.why
    assert "takes" not in dropped.why, "no batch is compared with the slack while no replica is free"


def wakes(scene: Scene, until_ms: float) -> list[int]:
    """Wake the core whenever it asks for it; returns these instants."""
    found = []
    while scene.core.wake_ns <= ms(until_ms):
        found.append(scene.core.wake_ns)
        scene.act(found[-1] / ms(1), WOKE)
    return found


def test_a_request_kept_beyond_its_deadline_is_dropped_when_the_policy_says_so() -> None:
    scene = Scene(plan_of(cores=64), drop=Age(limit=2))
    scene.act(0, WOKE)
    scene.act(0, request(1, slo_ms=100))
    wakes(scene, 199)
    assert outcomes(scene) == {}
    wakes(scene, 225)
    assert outcomes(scene) == {1: Outcome.DROPPED}


def test_a_policy_that_never_drops_is_asked_ever_more_seldom() -> None:
    scene = Scene(plan_of(cores=64), drop=Never())
    scene.act(0, WOKE)
    scene.act(0, request(1, slo_ms=100))
    assert len(wakes(scene, 100_000)) < 100 + 70, "a hundred heartbeats, and the rest"


def test_a_batch_that_waits_starts_when_its_time_is_up() -> None:
    scene = warm(batch=Timeout(wait_ns=ms(10)))
    assert scene.act(3, request(1, at_ms=3)) == []
    assert scene.core.wake_ns == ms(13)
    assert scene.act(13, WOKE) == [StartBatch(B0, R0, "only", (RequestId(1),))]


def test_a_full_queue_rejects_with_the_time_it_needs_to_drain() -> None:
    scene = warm(queue_max=2)
    scene.act(0, *(request(id) for id in range(4)))
    end = scene.actions[-1]
    assert isinstance(end, End)
    assert (end.request, end.outcome) == (3, Outcome.REJECTED)
    assert end.retry_after_ns == 2 * round(ms(14) / 4)


def test_faults_fail_alone_also_in_an_application_of_one_stage() -> None:
    scene = warm()
    first = started(scene.act(0, request(0), request(1), request(2)), "only")
    start = started(scene.act(11, Finished(first.batch, first.replica, ms(11))), "only")
    assert start.requests == (1, 2)
    failed, served = scene.act(23, Finished(start.batch, start.replica, ms(12), faults=(1,)))
    why = "its tensors do not fit stage 'only', or the stage's outputs for it fit no later one"
    assert failed == End(RequestId(2), Outcome.FAILED, why, stage="only")
    assert served == End(RequestId(1), Outcome.SERVED)


def test_events_of_unknown_batches_change_nothing() -> None:
    scene = warm()
    scene.act(0, request(1))
    scene.act(11, Finished(B0, R0, ms(11)))
    assert (
        scene.act(12, Finished(B0, R0, ms(11)), Finished(BatchId(9), ReplicaId(7), 1), BatchFailed(B0, R0, "x")) == []
    )


def test_a_client_that_left_is_forgotten_unless_its_batch_runs() -> None:
    scene = warm()
    scene.act(0, request(1), request(2))
    scene.act(1, Cancelled(RequestId(2)), Cancelled(RequestId(1)))
    scene.act(11, Finished(B0, R0, ms(11)))
    assert outcomes(scene) == {1: Outcome.SERVED, 2: Outcome.DROPPED}


def test_a_draining_server_rejects_new_requests_and_finishes_open_ones() -> None:
    scene = warm()
    scene.act(0, request(1), request(2), Draining(), request(3))
    scene.act(11, Finished(B0, R0, ms(11)))
    scene.act(22, Finished(BatchId(1), R0, ms(11)))
    assert outcomes(scene) == {1: Outcome.SERVED, 2: Outcome.SERVED, 3: Outcome.REJECTED}
    assert scene.is_idle


def test_an_idle_core_waits_for_the_next_tick() -> None:
    scene = warm()
    scene.act(0, request(1))
    scene.act(11, Finished(B0, R0, ms(11)))
    assert scene.core.wake_ns == ms(1000) < FOREVER_NS


DIAMOND = graph(first={}, left={"after": ("first",)}, right={"after": ("first",)}, join={"after": ("left", "right")})


def on(application: Application, **options: object) -> Scene:
    """One ready replica for each stage."""
    scene = Scene(one_each(application), application=application, **options)  # type: ignore[arg-type]
    scene.warm_up()
    return scene


def diamond() -> Scene:
    return on(DIAMOND)


def started(actions: Sequence[Action], stage: str) -> StartBatch:
    """The only batch at a stage."""
    (batch,) = [action for action in actions if isinstance(action, StartBatch) and action.stage == stage]
    return batch


def done(batch: StartBatch, *edge_counts: tuple[int, ...], faults: tuple[int, ...] = ()) -> Finished:
    return Finished(batch.batch, batch.replica, ms(5), edge_counts, faults)


def test_a_request_passes_a_graph_stage_by_stage() -> None:
    scene = diamond()
    order = []
    scene.act(0, request(1))
    for at in range(11, 60, 11):
        for batch in [a for a in scene.actions if isinstance(a, StartBatch) and a.stage not in order]:
            order.append(batch.stage)
            scene.act(at, Finished(batch.batch, batch.replica, ms(11)))
    assert order == ["first", "left", "right", "join"]
    assert outcomes(scene) == {1: Outcome.SERVED}


def test_a_request_of_a_graph_that_fails_on_one_branch_ends_once() -> None:
    scene = diamond()
    scene.act(0, request(1))
    scene.act(11, Finished(B0, R0, ms(11)))
    left, right = [a for a in scene.actions if isinstance(a, StartBatch)][1:]
    scene.act(20, BatchFailed(left.batch, left.replica, "boom"))
    scene.act(22, Finished(right.batch, right.replica, ms(11)))
    assert outcomes(scene) == {1: Outcome.FAILED}
    assert scene.is_idle


def test_a_visit_has_the_rows_and_the_size_that_earlier_stages_tell() -> None:
    """Of several, the most; otherwise the rows that there were, all of one size."""
    scene = diamond()
    scene.act(0, structs.replace(request(1), rows=3, size=100))
    first = started(scene.actions, "first")
    scene.act(11, Finished(first.batch, first.replica, ms(11), sizes=(((4, 0), (0, 64)),)))
    left, right = started(scene.actions, "left"), started(scene.actions, "right")
    assert [(each.rows, each.size) for each in (first, left, right)] == [(3, 128), (4, 0), (3, 64)]
    scene.act(40, Finished(left.batch, left.replica, ms(11), sizes=(((0, 5),),)))
    scene.act(41, Finished(right.batch, right.replica, ms(11), sizes=(((2, 3),),)))
    join = started(scene.actions, "join")
    assert (join.rows, join.size) == (2, 6)
    scene = diamond()
    scene.act(0, structs.replace(request(1), rows=3, size=100))
    first = started(scene.actions, "first")
    scene.act(11, Finished(first.batch, first.replica, ms(11)))
    left = started(scene.actions, "left")
    assert (left.rows, left.size) == (3, 0)


CHAIN = graph(a={}, b={"after": ("a",)}, c={"after": ("b",)})


def test_drop_policies_are_shown_the_least_time_of_later_stages() -> None:
    scene = on(CHAIN)
    scene.act(0, request(1, slo_ms=33), request(2, slo_ms=32.9))
    assert started(scene.actions, "a").requests == (1,), "three stages of 11 ms"
    (dropped,) = [a for a in scene.act(11, done(started(scene.actions, "a"))) if isinstance(a, End)]
    assert (dropped.request, dropped.outcome) == (2, Outcome.DROPPED)
    assert dropped.why == "slack 21.9 ms at a, where the least time to the answer is 33.0 ms"
    scene.act(22, done(started(scene.actions, "b")))
    scene.act(33, done(started(scene.actions, "c")))
    assert outcomes(scene) == {1: Outcome.SERVED, 2: Outcome.DROPPED}


def test_drop_policies_are_shown_the_time_in_full_batches() -> None:
    scene = on(CHAIN, drop=PredictiveDrop(batch="full"))
    scene.act(0, request(1, slo_ms=41.9))
    assert outcomes(scene) == {1: Outcome.DROPPED}, "three batches of four, of 14 ms each"
    scene.act(0, request(2, slo_ms=42))
    assert started(scene.actions, "a").requests == (2,)


def busy_chain(deadline_ms: float) -> Scene:
    """`b` runs one request and five wait, which take 3.5 ms each in full batches, then 11 ms each there and at `c`."""
    scene = on(CHAIN, drop=PredictiveDrop(proactive=True))
    for count in (1, 4, 1):
        at_ms = 20 * len(scene.actions)
        slo_ms = deadline_ms - at_ms
        scene.act(at_ms, *[request(at_ms + number, at_ms=at_ms, slo_ms=slo_ms) for number in range(count)])
        while scene.application.stages["a"].pool.running:
            (running,) = scene.application.stages["a"].pool.running.values()
            scene.act(at_ms + 15, Finished(running.id, R0, ms(11)))
    assert (scene.application.stages["b"].monitor.running, scene.application.stages["b"].monitor.waiting) == (1, 5)
    return scene


def test_drop_policies_that_look_ahead_are_shown_what_waits_at_later_stages() -> None:
    scene = busy_chain(deadline_ms=530)
    scene.act(500, request(8, at_ms=500, slo_ms=39.4))
    assert outcomes(scene) == {8: Outcome.DROPPED}
    scene.act(500, request(9, at_ms=500, slo_ms=39.5))
    assert outcomes(scene) == {8: Outcome.DROPPED}
    assert scene.application.stages["a"].pool.running


def test_what_waits_at_later_stages_does_not_delay_a_request_that_comes_before_it_there() -> None:
    scene = busy_chain(deadline_ms=1000)
    scene.act(500, request(8, at_ms=500, slo_ms=39.4))
    assert not outcomes(scene)
    assert scene.application.stages["a"].pool.running


def test_batch_policies_that_wait_leave_time_for_later_stages() -> None:
    scene = on(CHAIN, batch=Full(patience=1e9))
    scene.application.stages["a"].queue.wait_ns = 1
    assert scene.act(0, request(1, slo_ms=100)) == []
    assert scene.core.wake_ns == ms(100 - 14 - 22), "a batch of four here, and two of one"


def test_of_two_branches_the_quickest_counts_as_remaining_time() -> None:
    application = graph(
        a={},
        b={"after": ("a",), "when": (When("a", "kind", (1,)),)},
        c={"after": ("a",), "when": (When("a", "kind", (2,)),)},
        d={"after": ("c",)},
    )
    scene = on(application)
    scene.act(0, request(1, slo_ms=22))
    batch = started(scene.actions, "a")
    assert started(scene.act(11, done(batch, (1, 0))), "b").requests == (1,)
    scene.act(12, request(2, at_ms=12, slo_ms=22))
    dropped = scene.act(23, done(scene.actions[-1], (0, 1)))  # type: ignore[arg-type]
    assert "slack 11.0 ms at c, where the least time to the answer is 22.0 ms" in str(dropped)


def test_ends_without_an_answer_name_their_stage() -> None:
    def stage_of(scene: Scene) -> str:
        (end,) = [action for action in scene.actions if isinstance(action, End)]
        return end.stage

    full = on(CHAIN, queue_max=1)
    full.act(0, request(1), request(2), request(3))
    assert stage_of(full) == "a"
    slow = on(CHAIN)
    slow.act(0, request(1, slo_ms=30))
    assert stage_of(slow) == "a"
    gone = on(CHAIN)
    gone.act(0, request(1), Cancelled(RequestId(1)))
    assert stage_of(gone) == ""
    lost = on(CHAIN)
    lost.act(0, request(1))
    run = started(lost.act(11, done(started(lost.actions, "a"))), "b")
    (again,) = [a for a in lost.act(12, WorkerLost(run.replica, "killed")) if isinstance(a, StartWorker)]
    lost.act(13, WorkerReady(again.worker))
    lost.act(14, WorkerLost(again.worker, "killed"))
    assert stage_of(lost) == "b"


def dropped(actions: Sequence[Action]) -> list[int]:
    return [each.request for each in actions if isinstance(each, End) and each.outcome is Outcome.DROPPED]


def test_an_idle_stage_serves_one_hopeless_request_at_a_time() -> None:
    """A belief that is too high would otherwise stop it for ever: nothing would run that could correct it."""
    scene = on(CHAIN)
    actions = scene.act(5000, request(1, at_ms=5000, slo_ms=1), request(2, at_ms=5000, slo_ms=1))
    assert started(actions, "a").requests == (1,)
    assert dropped(actions) == []
    ended = scene.act(5010, done(started(actions, "a")))
    assert dropped(ended) == [2], "the stage has just ended something"
    last = scene.act(5030, done(started(scene.act(5020, done(started(ended, "b"))), "c")))
    assert [each.outcome for each in last if isinstance(each, End)] == [Outcome.LATE]
    assert dropped(scene.act(7999, request(3, at_ms=7999, slo_ms=1))) == [3]
    scene.act(9000, WOKE)
    assert started(scene.act(9001, request(4, at_ms=9001, slo_ms=1)), "a").requests == (4,)


def test_an_idle_stage_serves_the_newest_of_hopeless_requests() -> None:
    scene = Scene(one_each(CHAIN), application=CHAIN)
    scene.act(0, WOKE)
    scene.act(5000, *(request(number, at_ms=5000, slo_ms=1) for number in (1, 2, 3)))
    actions = scene.act(5000, *(WorkerReady(ReplicaId(number)) for number in range(3)))
    assert started(actions, "a").requests == (3,)
    assert dropped(actions) == [1, 2]


def test_an_idle_stage_serves_what_is_in_time_and_no_hopeless_request_beside_it() -> None:
    scene = Scene(one_each(CHAIN), application=CHAIN)
    scene.act(0, WOKE)
    scene.act(5000, request(1, at_ms=5000, slo_ms=100), request(2, at_ms=5000, slo_ms=1))
    actions = scene.act(5000, *(WorkerReady(ReplicaId(number)) for number in range(3)))
    assert started(actions, "a").requests == (1,)
    assert dropped(scene.actions) == [2]


def test_a_strict_drop_policy_lets_no_hopeless_request_through() -> None:
    scene = on(CHAIN, drop=PredictiveDrop(strict=True))
    assert dropped(scene.act(5000, request(1, at_ms=5000, slo_ms=1))) == [1]
