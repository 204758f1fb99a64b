"""Requests that fan out into parts, or take one of several paths, in the core."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from sloop.actions import Action, End, StartBatch, StartWorker
from sloop.app.graph import Each
from sloop.core.graph_estimates import CERTAIN_AFTER
from sloop.core.queue import Queue
from sloop.events import WOKE, BatchFailed, Cancelled, WorkerLost, WorkerReady
from sloop.policies.drop import PredictiveDrop
from sloop.units import ms
from sloop.vocabulary import Outcome, Path, RequestId
from tests.core.scene import graph, request
from tests.core.test_dispatch import done, on, outcomes, started

PARTS = graph(
    find={},
    read={"after": ("find",), "each": Each("find", "boxes", most=6)},
    tell={"after": ("find", "read"), "join": True},
)


def test_a_request_fans_out_and_its_parts_join() -> None:
    scene = on(PARTS)
    scene.act(0, request(1))
    find = started(scene.actions, "find")
    assert find.parts == (), "only where a stage runs for parts"
    read = started(scene.act(11, done(find, (5, 1))), "read")
    assert (read.requests, read.parts) == ((1, 1, 1, 1), (0, 1, 2, 3))
    rest = started(scene.act(25, done(read)), "read")
    assert (rest.requests, rest.parts) == ((1,), (4,))
    assert not [a for a in scene.actions if isinstance(a, StartBatch) and a.stage == "tell"]
    tell = started(scene.act(36, done(rest)), "tell")
    assert (tell.requests, tell.parts) == ((1,), ())
    assert scene.act(47, done(tell)) == [End(RequestId(1), Outcome.SERVED)]


def test_no_request_is_dropped_for_parts_that_it_may_not_have() -> None:
    application = graph(find={}, read={"after": ("find",), "each": Each("find", "boxes", mean=1.5)})
    scene = on(application, drop=PredictiveDrop(strict=True))

    def answered(id: int, parts: int) -> list[Action]:
        at_ms = 30.0 * id
        (find,) = scene.act(at_ms, request(id, at_ms=at_ms, slo_ms=100 if parts else 15))
        if isinstance(find, End):
            return [find]
        assert isinstance(find, StartBatch)
        found = scene.act(at_ms + 11, done(find, (parts,)))
        return scene.act(at_ms + 23, done(found[0])) if isinstance(found[0], StartBatch) else found

    assert answered(0, 0) == [End(RequestId(0), Outcome.SERVED)]
    for id in range(1, CERTAIN_AFTER + 1):
        assert answered(id, 1) == [End(RequestId(id), Outcome.SERVED)]
    (hopeless,) = answered(CERTAIN_AFTER + 100, 0)
    assert "slack 15.0 ms at find, where the least time to the answer is 22.0 ms" in str(hopeless), (
        "all of late had some"
    )


def test_parts_of_several_requests_share_batches() -> None:
    scene = on(PARTS)
    scene.act(0, request(1), request(2), request(3))
    scene.act(11, done(started(scene.actions, "find"), (1, 1)))
    both = scene.actions[-2]
    assert isinstance(both, StartBatch)
    scene.act(23, done(both, (1, 0), (2, 1)))
    read = started(scene.act(24, done(started(scene.actions, "read"))), "read")
    assert (read.requests, read.parts) == ((2, 3, 3), (0, 0, 1))


def test_a_request_without_parts_goes_on_or_is_answered() -> None:
    scene = on(PARTS)
    scene.act(0, request(1))
    tell = started(scene.act(11, done(started(scene.actions, "find"), (0, 1))), "tell")
    assert scene.act(22, done(tell))[-1] == End(RequestId(1), Outcome.SERVED)
    scene.act(30, request(2, at_ms=30))
    find = scene.actions[-1]
    assert isinstance(find, StartBatch)
    assert scene.act(41, done(find, (0, 0))) == [End(RequestId(2), Outcome.SERVED)]
    assert scene.is_idle


def test_more_parts_than_a_stage_takes_fail_the_request_and_say_so() -> None:
    scene = on(PARTS)
    scene.act(0, request(1))
    (failed,) = scene.act(11, done(started(scene.actions, "find"), (7, 1)))
    why = "find sends 7 parts to read, which takes at most 6 per request"
    assert failed == End(RequestId(1), Outcome.FAILED, why, stage="find")
    assert scene.is_idle
    assert scene.application.stages["read"].monitor.waiting == 0


def test_tensors_that_do_not_fit_fail_their_request_and_none_of_its_batch() -> None:
    scene = on(PARTS)
    scene.act(0, request(1), request(2), request(3), request(4))
    scene.act(11, done(started(scene.actions, "find"), (0, 1)))
    three = [action for action in scene.actions if isinstance(action, StartBatch) and action.stage == "find"][1]
    failed, *_ = scene.act(25, done(three, (0, 1), (), (0, 1), faults=(1,)))
    why = "its tensors do not fit stage 'find', or the stage's outputs for it fit no later one"
    assert failed == End(RequestId(3), Outcome.FAILED, why, stage="find")
    tell = started(scene.act(26, done(started(scene.actions, "tell"))), "tell")
    assert tell.requests == (2, 4)
    scene.act(40, done(tell, faults=(1,)))
    assert outcomes(scene) == {1: Outcome.SERVED, 2: Outcome.SERVED, 3: Outcome.FAILED, 4: Outcome.FAILED}
    assert scene.is_idle


def test_two_items_along_a_plain_edge_fail_the_request() -> None:
    scene = on(PARTS)
    scene.act(0, request(1))
    (failed,) = scene.act(11, done(started(scene.actions, "find"), (1, 2)))
    assert "find sends 2 parts to tell, which takes at most 1 per request" in str(failed)


def test_a_request_with_a_failed_part_ends_and_its_other_parts_are_removed() -> None:
    scene = on(PARTS)
    scene.act(0, request(1))
    read = started(scene.act(11, done(started(scene.actions, "find"), (6, 1))), "read")
    failed = End(RequestId(1), Outcome.FAILED, "boom", stage="read")
    assert scene.act(12, BatchFailed(read.batch, read.replica, "boom")) == [failed]
    assert scene.is_idle
    assert scene.application.stages["read"].monitor.waiting == 0
    assert scene.application.ingress.waiting == 0


def test_parts_of_a_lost_batch_are_retried_with_their_numbers() -> None:
    scene = on(PARTS)
    scene.act(0, request(1))
    read = started(scene.act(11, done(started(scene.actions, "find"), (3, 1))), "read")
    (again,) = [a for a in scene.act(12, WorkerLost(read.replica, "killed")) if isinstance(a, StartWorker)]
    retried = started(scene.act(13, WorkerReady(again.worker)), "read")
    assert (retried.requests, sorted(retried.parts)) == ((1, 1, 1), [0, 1, 2])
    scene.act(14, WorkerLost(again.worker, "killed"))
    assert outcomes(scene) == {1: Outcome.FAILED}
    assert scene.is_idle


@pytest.mark.parametrize("wakes", [True, False])
def test_all_parts_of_a_dropped_request_leave_the_queue_at_once(monkeypatch: pytest.MonkeyPatch, wakes: bool) -> None:
    removed: list[int] = []
    remove = Queue.remove

    def counting(queue: Queue, indices: Sequence[int]) -> None:
        removed.append(len(indices))
        remove(queue, indices)

    monkeypatch.setattr(Queue, "remove", counting)
    crowd = graph(find={}, read={"after": ("find",), "each": Each("find", "boxes", most=1000)})
    scene = on(crowd)
    scene.act(0, request(1))
    read = started(scene.act(11, done(started(scene.actions, "find"), (1000,))), "read")
    if wakes:
        scene.act(1001, WOKE)
    scene.act(1002, done(read))
    assert outcomes(scene) == {1: Outcome.DROPPED}
    assert [count for count in removed if count] == [996]
    assert scene.is_idle
    assert scene.application.stages["read"].monitor.waiting == 0


def test_cancelling_removes_all_parts_of_a_request() -> None:
    scene = on(PARTS)
    scene.act(0, request(1), request(2))
    read = started(scene.act(11, done(started(scene.actions, "find"), (6, 1))), "read")
    assert scene.act(12, Cancelled(RequestId(1))) == [End(RequestId(1), Outcome.DROPPED, "the client went away")]
    assert scene.application.stages["read"].monitor.waiting == 0
    assert scene.act(25, done(read)) == []
    assert scene.application.ingress.waiting == 1, "request 2"


WAYS = replace(
    graph(a={}, b={}, c={"after": ("a", "b")}, d={"after": ("c",)}),
    declared_paths=(
        Path(("a", "c", "d"), ms(1000), 0.4),
        Path(("b", "c"), ms(40), 0.3),
        Path(("b", "c", "d"), ms(70), 0.3),
    ),
)


@pytest.mark.parametrize(
    ("goes_on", "ends_ms", "expected"),
    [(0, 40, Outcome.SERVED), (0, 45, Outcome.LATE), (1, 65, Outcome.SERVED), (1, 71, Outcome.LATE)],
)
def test_each_path_has_its_deadline(goes_on: int, ends_ms: float, expected: Outcome) -> None:
    scene = on(WAYS)
    scene.act(0, request(1, enters=("b",)))
    middle = started(scene.act(11, done(started(scene.actions, "b"))), "c")
    assert not [a for a in scene.actions if isinstance(a, StartBatch) and a.stage == "a"]
    if goes_on:
        scene.act(30, done(middle, (1,)))
        scene.act(ends_ms, done(started(scene.actions, "d")))
    else:
        scene.act(ends_ms, done(middle, (0,)))
    assert outcomes(scene) == {1: expected}


def test_no_request_is_dropped_for_a_stage_that_its_path_may_not_reach() -> None:
    scene = on(WAYS)
    scene.act(48, request(1, at_ms=48, enters=("b",)))
    scene.act(59, done(started(scene.actions, "b")))
    middle = started(scene.actions, "c")
    assert scene.act(88, done(middle, (0,))) == [End(RequestId(1), Outcome.SERVED)]


def test_admission_looks_only_at_the_queues_that_a_request_enters() -> None:
    scene = on(WAYS, queue_max=2)
    scene.act(0, *(request(id, enters=("a",)) for id in range(4)))
    assert outcomes(scene) == {3: Outcome.REJECTED}
    scene.act(0, request(4, enters=("b",)))
    assert started(scene.actions, "b").requests == (4,)
    with pytest.raises(AssertionError, match="request 5 begins at"):
        scene.act(0, request(5, enters=("c",)))


def test_ingress_counts_requests_and_how_many_are_open() -> None:
    scene = on(PARTS, queue_max=2)
    ingress = scene.application.ingress
    scene.act(0, *(request(id) for id in range(3)))
    assert (ingress.waiting, outcomes(scene)) == (3, {})
    scene.act(0, request(3))
    assert (ingress.waiting, outcomes(scene)) == (3, {3: Outcome.REJECTED})
    scene.act(11, done(started(scene.actions, "find"), (4, 1)))
    assert ingress.waiting == 3, "parts are not requests"
    (both,) = [a for a in scene.actions[-2:] if isinstance(a, StartBatch) and a.stage == "find"]
    scene.act(25, done(both, (0, 0), (0, 0)))
    assert ingress.waiting == 1
    scene.act(1000, WOKE)
    (bucket,) = scene.script.seen[-1].ingress.buckets
    assert (bucket.arrivals, bucket.slack_ns) == (3, [ms(1000)] * 3)
    assert bucket.waiting_ns == 2 * ms(25) + ms(1000)
    assert scene.script.seen[-1].ingress.concurrency(ms(1000)) == pytest.approx(1.05)
