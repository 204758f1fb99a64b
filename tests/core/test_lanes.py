"""Requests of several rows, and rows of several sizes: which run together, and what the core believes of them.

A batch of n rows takes (10 + n) ms, and n rows of size s take 10 + n·s/10 ms.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.actions import Action, End, StartBatch
from sloop.core.batching import fitting
from sloop.core.lanes import LaneKey, MixedQueue
from sloop.core.protocols import BatchDecision, Order
from sloop.core.rates import cost_of
from sloop.core.views import BatchDevice, QueueView
from sloop.events import WOKE, Cancelled, Event, Finished, WorkerLost
from sloop.policies.admit import Bounded, PredictiveAdmit
from sloop.policies.batch import Adaptive, Deadline, Full, Slack, Timeout
from sloop.policies.drop import Never, PredictiveDrop
from sloop.policies.order import Edf, Fifo
from sloop.sizes import GRID, SizeClasses
from sloop.units import FOREVER_NS, ms, s
from sloop.vocabulary import BatchId, Outcome, ReplicaId, Request, RequestId, Slot, Visit, WorkerId
from tests.core import scene as scenes
from tests.core.scene import Belief, Scene, plan_of
from tests.counting import calls_of


@dataclass
class SizedBelief(Belief):
    """A batch of n rows of size s takes 10 + n·s/10 ms; the mean row has size 10."""

    size: int = 10
    by_size: dict[int, "SizedBelief"] = field(default_factory=dict)

    def latency_ms(self, batch: int, slot: Slot) -> float:
        return (10 + batch * self.size / 10) / slot.cores

    def at(self, size: int) -> "SizedBelief":
        if not size:
            return self
        return self.by_size.setdefault(size, SizedBelief(batch_max=self.batch_max, size=size))


def request(
    id: int, rows: int = 1, size: int = 0, *, at_ms: float = 0, slo_ms: float = 1000, shape: tuple[int, ...] = ()
) -> Request:
    sent_ns = ms(at_ms)
    return Request(RequestId(id), sent_ns, sent_ns, sent_ns + ms(slo_ms), rows=rows, size=size, shape=shape)


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        scenes, "beliefs_of", lambda application, times: {("only", name, ""): SizedBelief(name) for name in "ab"}
    )


def visit_of(each: Request) -> Visit:
    return Visit(each, "only", 0, each.deadline_ns, 0, 0, 0, each.rows, each.size)


def warm(count: int = 1, batch_max: int = 8, **options: object) -> Scene:
    scene = Scene(plan_of(count, batch_max=batch_max), **options)  # type: ignore[arg-type]
    scene.warm_up()
    return scene


def started(actions: list[Action]) -> list[list[int]]:
    return [list(action.requests) for action in actions if isinstance(action, StartBatch)]


def arrive(scene: Scene, *requests: Request) -> list[Action]:
    """They arrive at one instant."""
    actions: list[Action] = []
    for number, each in enumerate(requests, 1):
        actions += scene.core.handle(each.arrived_ns, each, number < len(requests))
    scene.actions += actions
    return actions


def outcomes(scene: Scene) -> dict[int, Outcome]:
    return {action.request: action.outcome for action in scene.actions if isinstance(action, End)}


def finish(scene: Scene, at_ms: float, batch: int, replica: int = 0) -> list[Action]:
    return scene.act(at_ms, Finished(BatchId(batch), ReplicaId(replica), ms(1)))


# Rows


def test_a_batch_has_as_many_rows_as_the_plan_allows() -> None:
    scene = warm(batch_max=8)
    assert started(arrive(scene, *[request(id, rows=3) for id in range(5)])) == [[0, 1]]
    assert started(finish(scene, 20, 0)) == [[2, 3]]
    assert started(finish(scene, 40, 1)) == [[4]]


def test_a_batch_is_as_near_to_the_plan_as_whole_requests_allow() -> None:
    """The plan has batches of five, the profile ends at eight."""
    scene = warm(batch_max=5)
    assert started(arrive(scene, *[request(id, rows=3) for id in range(4)])) == [[0, 1]], "six rather than three"
    scene = warm(batch_max=5)
    assert started(arrive(scene, *[request(id, rows=4) for id in range(4)])) == [[0]], "four rather than eight"


def test_single_rows_fill_a_batch_beside_larger_requests() -> None:
    scene = warm(batch_max=8)
    assert started(arrive(scene, request(0, 5), request(1), request(2, 2), request(3))) == [[0, 1, 2]]


def test_a_request_of_more_rows_than_a_pass_has_runs_alone_and_costs_its_passes() -> None:
    scene = warm(batch_max=8)
    assert started(arrive(scene, request(0, rows=20), request(1))) == [[0]]
    (batch,) = scene.application.stages["only"].pool.running.values()
    assert batch.cost_ns == ms(18 + 18 + 14), "two passes of eight rows and one of four"


def test_the_estimate_learns_from_rows() -> None:
    scene = warm(batch_max=8)
    arrive(scene, request(0, 3), request(1, 2))
    finish(scene, 15, 0)
    assert scene.beliefs["only", "a", ""].observed == [(5, 1.0, ms(15))]


def test_what_waits_and_arrives_is_counted_in_rows() -> None:
    scene = warm(batch_max=8)
    monitor = scene.application.stages["only"].monitor
    arrive(scene, request(0, 8), request(1, 5), request(2, 2))
    assert (monitor.running, monitor.waiting) == (8, 7)
    finish(scene, 20, 0)
    assert (monitor.running, monitor.waiting) == (7, 0)
    finish(scene, 40, 1)
    scene.act(1_000, WOKE)
    (bucket,) = monitor.buckets
    assert bucket.arrivals == 15
    assert bucket.running_ns == 8 * ms(20) + 7 * ms(20)
    assert bucket.waiting_ns == 7 * ms(20)
    assert monitor.running == monitor.waiting == 0


@pytest.mark.parametrize("end", ["cancel", "late", "lost"])
def test_rows_that_leave_are_not_counted_any_more(end: str) -> None:
    scene = warm(batch_max=4)
    monitor = scene.application.stages["only"].monitor
    arrive(scene, request(0, 4))
    arrive(scene, request(1, 3, slo_ms=50), request(2, 9, slo_ms=50))
    assert (monitor.running, monitor.waiting) == (4, 12)
    if end == "cancel":
        scene.act(5, Cancelled(RequestId(1)), Cancelled(RequestId(2)))
    elif end == "late":
        scene.act(60, WOKE)
    else:
        scene.act(5, WorkerLost(WorkerId(0), "it died"))
        assert (monitor.running, monitor.waiting) == (0, 16)
        scene.act(60, WOKE)
        assert monitor.waiting == 4
        return
    assert (monitor.running, monitor.waiting) == (4, 0)


def test_a_request_is_hopeless_by_the_time_of_all_its_rows() -> None:
    scene = warm(batch_max=8)
    ends = [
        action
        for action in arrive(scene, request(0, 8, slo_ms=15), request(1, 2, slo_ms=15))
        if isinstance(action, End)
    ]
    assert [(end.request, end.outcome) for end in ends] == [(0, Outcome.DROPPED)]
    assert "18.0 ms" in ends[0].why


def test_a_full_batch_is_no_less_than_the_rows_of_a_request() -> None:
    """Twenty rows take 50 ms in three passes, a full batch of eight 18 ms."""
    scene = warm(batch_max=8, drop=PredictiveDrop(batch="full"))
    assert started(arrive(scene, request(0, rows=20, slo_ms=45))) == []
    assert outcomes(scene) == {0: Outcome.DROPPED}
    assert started(arrive(scene, request(1, rows=20, slo_ms=55))) == [[1]]


def test_large_rows_are_not_dropped_for_what_eight_of_them_would_take(sized: None) -> None:
    """A full batch of mean rows takes 18 ms, and a row of 500 alone 60; eight of these would take 410."""
    scene = warm(batch_max=8, drop=PredictiveDrop(batch="full"))
    arrive(scene, request(0, size=500))
    finish(scene, 60, 0)
    in_time, late = request(1, size=500, at_ms=61, slo_ms=100), request(2, size=500, at_ms=61, slo_ms=55)
    assert started(arrive(scene, in_time, late)) == [[1]]
    assert outcomes(scene) == {0: Outcome.SERVED, 2: Outcome.DROPPED}


def test_admission_knows_how_many_rows_wait() -> None:
    """24 rows take 54 ms, and its own row 11 ms."""
    scene = warm(batch_max=8, admit=PredictiveAdmit(), order=Fifo())
    arrive(scene, request(0, 8), request(1, 24))
    (end,) = arrive(scene, request(2, at_ms=1, slo_ms=40))
    assert isinstance(end, End)
    assert end.outcome is Outcome.REJECTED
    assert "24 rows wait at only, about 65 ms" in end.why


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 10), st.integers(0, 6))
def test_batch_policies_are_shown_how_many_of_the_first_visits_fit(
    rows: list[int], batch_max: int, further: int
) -> None:
    costs_ns = [0, *(ms(10 + n) for n in range(1, batch_max + further + 1))]
    limit, costs = fitting([visit_of(request(id, each)) for id, each in enumerate(rows)], batch_max, costs_ns)
    most = len(costs_ns) - 1
    together = [1]
    for n in range(2, len(rows) + 1):
        less, more = sum(rows[: n - 1]), sum(rows[:n])
        if more > most or abs(more - batch_max) > abs(batch_max - less):
            break
        together.append(n)
    assert limit == together[-1] if len(together) < len(rows) else limit >= len(rows)
    assert [costs[n] for n in together] == [cost_of(costs_ns, sum(rows[:n])) for n in together]
    assert list(costs[: limit + 1]) == sorted(costs[: limit + 1])
    assert len(costs) > limit


def test_policies_that_wait_for_a_full_batch_count_rows() -> None:
    """A batch of eight is full with a visit of five rows, to which no other one like it can be added, and not with one
    of two rows."""
    for policy in (Timeout(s(1)), Slack(), Full()):
        scene = warm(batch_max=8, batch=policy, drop=Never())
        assert started(arrive(scene, request(0, 5), request(1, 5))) == [[0]], policy
        assert started(finish(scene, 20, 0)) == [[1]]
        finish(scene, 40, 1)
        is_waiting = not isinstance(policy, Full)  # the plan allows no time for it
        assert started(arrive(scene, request(2, 2, at_ms=50))) == ([] if is_waiting else [[2]])


# Sizes


def test_rows_of_different_sizes_never_run_together(sized: None) -> None:
    scene = warm()
    assert started(arrive(scene, *[request(id, size=(16, 500)[id % 2]) for id in range(6)])) == [[0, 2, 4]]
    assert started(finish(scene, 15, 0)) == [[1, 3, 5]]


def test_rows_of_a_class_run_together_only_if_they_are_padded(sized: None) -> None:
    """The grid has classes up to 12 and up to 16."""
    for is_padded, expected in ((False, [[0, 3], [1], [2]]), (True, [[0, 1, 3], [2]])):
        scene = warm()
        scene.application.stages["only"].is_padded = is_padded
        batches = started(
            arrive(scene, request(0, size=15), request(1, size=14), request(2, size=12), request(3, size=15))
        )
        for batch in range(len(expected) - 1):
            batches += started(finish(scene, 20 * (batch + 1), batch))
        assert batches == expected


def test_equal_areas_of_different_shapes_run_together_only_if_they_are_padded(sized: None) -> None:
    for is_padded, expected in ((False, [[0, 2], [1]]), (True, [[0, 1, 2]])):
        scene = warm()
        scene.application.stages["only"].is_padded = is_padded
        shapes = [(4, 8), (8, 4), (4, 8)]
        batches = started(arrive(scene, *[request(id, size=32, shape=shape) for id, shape in enumerate(shapes)]))
        if not is_padded:
            batches += started(finish(scene, 20, 0))
        assert batches == expected


def test_a_batch_says_its_rows_and_the_class_of_their_size(sized: None) -> None:
    scene = warm(3)
    said = arrive(scene, request(0, size=16), request(1, size=500), request(2, 3), request(3))
    orders = [action for action in said if isinstance(action, StartBatch)]
    assert [(each.requests, each.rows, each.together, each.size) for each in orders] == [
        ((0,), 1, 0, 16),
        ((1,), 1, 0, 512),
        ((2, 3), 4, 4, 0),
    ]


def test_the_lane_whose_first_visit_is_due_first_comes_first(sized: None) -> None:
    scene = warm()
    requests = [request(0, size=500, slo_ms=900), request(1, size=16, slo_ms=800), request(2, size=500, slo_ms=700)]
    assert started(arrive(scene, *requests)) == [[2, 0]]
    assert started(finish(scene, 120, 0)) == [[1]]


def test_declared_classes_are_those_of_the_lanes_and_of_the_estimates(sized: None) -> None:
    scene = warm()
    stage = scene.application.stages["only"]
    stage.is_padded, stage.size_classes = True, SizeClasses((100, 1000))
    assert started(arrive(scene, request(0, size=16), request(1, size=90), request(2, size=101))) == [[0, 1]]
    (batch,) = stage.pool.running.values()
    assert batch.cost_ns == ms(10 + 2 * 10), "what two rows of the largest size of the class take"


def test_each_class_learns_from_its_own_batches(sized: None) -> None:
    scene = warm()
    belief = scene.beliefs["only", "a", ""]
    assert isinstance(belief, SizedBelief)
    arrive(scene, request(0, size=16), request(1, 2, size=500))
    finish(scene, 13, 0)
    finish(scene, 130, 1)
    assert {size: each.observed for size, each in belief.by_size.items()} == {
        16: [(1, 1.0, ms(13))],
        512: [(2, 1.0, ms(117))],
    }


def test_a_size_that_cannot_be_in_time_is_dropped_and_another_is_not(sized: None) -> None:
    scene = warm()
    arrive(scene, request(9, size=500))
    finish(scene, 70, 0)
    actions = arrive(scene, *[request(id, size=size, at_ms=80, slo_ms=50) for id, size in enumerate((500, 16))])
    ends = [action for action in actions if isinstance(action, End)]
    assert [(end.request, end.outcome) for end in ends] == [(0, Outcome.DROPPED)]
    assert "61.2 ms" in ends[0].why
    assert [belief.at(512).missed for belief in scene.beliefs.values()] == [1, 1]
    assert started(actions) == [[1]]


def test_a_size_that_cannot_be_in_time_is_dropped_as_soon_as_it_arrives(sized: None) -> None:
    """The replica is busy until 100."""
    scene = warm(batch_max=1)
    arrive(scene, request(0, size=500), request(1, size=16))
    actions = arrive(scene, request(2, size=500, at_ms=10, slo_ms=50), request(3, size=16, at_ms=10, slo_ms=200))
    (end,) = actions
    assert isinstance(end, End)
    assert (end.request, end.outcome) == (2, Outcome.DROPPED)


def test_a_size_that_has_never_run_is_tried_although_it_is_believed_hopeless(sized: None) -> None:
    scene = warm()
    assert started(arrive(scene, request(0, size=16), request(1, size=500, slo_ms=50))) == [[1]]
    assert started(finish(scene, 40, 0)) == [[0]]
    finish(scene, 60, 1)
    assert started(arrive(scene, request(2, size=500, slo_ms=50, at_ms=70))) == []
    assert outcomes(scene)[2] is Outcome.DROPPED, "its size has just run"


def test_a_hopeless_size_is_tried_when_it_has_not_run_for_long_and_nothing_else_waits(sized: None) -> None:
    scene = warm()
    arrive(scene, request(0, size=500))
    finish(scene, 70, 0)
    for second in range(1, 6):
        scene.act(1_000 * second, WOKE)
    both = [request(1, size=500, slo_ms=50, at_ms=5_000), request(2, size=16, slo_ms=60, at_ms=5_000)]
    assert started(arrive(scene, *both)) == [[2]]
    finish(scene, 5_020, 1)
    assert started(arrive(scene, request(3, size=500, slo_ms=50, at_ms=5_030))) == [[3]]


def test_a_lane_that_waits_does_not_hold_up_another(sized: None) -> None:
    scene = warm(batch_max=2, batch=Timeout(ms(100)))
    assert started(arrive(scene, request(0, size=500))) == []
    assert started(arrive(scene, *[request(id, size=16, at_ms=10) for id in (1, 2)])) == [[1, 2]]
    assert started(finish(scene, 30, 0)) == []
    assert scene.core.wake_ns == ms(100)
    assert started(scene.act(100, WOKE)) == [[0]]


def test_a_large_batch_leaves_time_for_another_size_that_is_due(sized: None) -> None:
    """Eight rows of 512 would take 420 ms, until when the row of 16 would be late; two of them are in time."""
    scene = warm(batch=Deadline())
    large = [request(id, size=512, slo_ms=900) for id in range(8)]
    assert started(arrive(scene, *large, request(8, size=16, slo_ms=950))) == [list(range(8))]
    scene = warm(batch=Deadline())
    arrive(scene, request(9, size=16, slo_ms=100))
    arrive(scene, *[request(id, size=512, slo_ms=190) for id in range(2)], request(8, size=16, slo_ms=195))
    assert started(finish(scene, 20, 0)) == [[0, 1]]
    scene = warm(batch=Deadline())
    arrive(scene, request(9, size=16, slo_ms=100))
    arrive(scene, *[request(id, size=512, slo_ms=180) for id in range(3)], request(8, size=16, slo_ms=181))
    assert started(finish(scene, 20, 0)) == [[0, 1]]


def test_a_batch_leaves_no_time_for_another_size_if_two_replicas_are_idle(sized: None) -> None:
    """Also if one was, when the policy was asked last: rows of 512 wait all the time."""
    seen = list[tuple[int, int]]()

    class Asked(Deadline):
        def decide(self, now_ns: int, queue: QueueView, device: BatchDevice) -> BatchDecision:
            seen.append((len(scene.application.stages["only"].pool.idle), queue.others_due_ns))
            return BatchDecision(1)

    scene = warm(2, batch=Asked())
    arrive(scene, *[request(id, size=512) for id in range(9)], request(9, size=16), request(10, size=16))
    finish(scene, 70, 0)
    assert min(due_ns for idle, due_ns in seen if idle == 1) < FOREVER_NS
    scene.core.handle(ms(140), Finished(BatchId(1), ReplicaId(1), ms(1)), True)
    finish(scene, 140, 2)
    two = [due_ns for idle, due_ns in seen if idle == 2]
    assert len(two) == 2
    assert set(two) == {FOREVER_NS}


def test_another_idle_replica_takes_the_size_that_is_due(sized: None) -> None:
    scene = warm(2, batch=Deadline())
    large = [request(id, size=512, slo_ms=300) for id in range(4)]
    assert started(arrive(scene, *large, request(8, size=16, slo_ms=301))) == [[0, 1, 2, 3], [8]]


@pytest.mark.parametrize(("size", "work"), [(16, "9 ms"), (512, "157 ms")])
def test_admission_knows_of_which_sizes_rows_wait(sized: None, size: int, work: str) -> None:
    """Three rows wait. A row of 16 adds 22.8 / 8 ms in batches of eight, one of 512 adds 419.6 / 8 ms."""
    scene = warm(batch_max=8, admit=Bounded(queue_max=3))
    arrive(scene, request(9, size=100))
    (end,) = arrive(scene, *[request(id, size=size) for id in range(4)])
    assert isinstance(end, End)
    assert f"3 rows wait at only, about {work} of work" in end.why


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.sampled_from([0, 10, 16, 40]), st.integers(20, 400), st.integers(0, 60)),
        max_size=20,
    ),
    st.booleans(),
    st.sampled_from([None, Deadline(), Timeout(ms(30)), Slack()]),
    st.sampled_from([None, Fifo()]),
)
def test_every_request_ends_once_and_every_batch_is_one_pass(
    arrivals: list[tuple[int, int, int, int]], is_padded: bool, batch: object, order: object
) -> None:
    """Random arrivals on two replicas, each of which takes what is believed."""
    scene = warm(2, batch=batch, order=order)
    stage = scene.application.stages["only"]
    stage.is_padded = is_padded
    requests = [
        request(id, rows, size, at_ms=at, slo_ms=slo)
        for id, (rows, size, slo, at) in enumerate(sorted(arrivals, key=lambda each: each[3]))
    ]
    due: list[tuple[int, int, Event]] = [(each.arrived_ns, 0, each) for each in requests]
    ended = list[int]()
    while due or stage.pool.running or stage.queue.visits:
        now_ns, _, event = due.pop(0) if due else (scene.core.wake_ns, 0, WOKE)
        for action in scene.core.handle(now_ns, event):
            if isinstance(action, End):
                ended.append(action.request)
            elif isinstance(action, StartBatch):
                members = [requests[id] for id in action.requests]
                assert sum(each.rows for each in members) <= 8 or len(members) == 1
                sizes = {GRID.class_of(each.size) if is_padded else each.size for each in members}
                assert len(sizes) == 1
                running = stage.pool.running[action.replica]
                finished: Event = Finished(action.batch, action.replica, 0)
                due = sorted([*due, (now_ns + running.cost_ns, 1, finished)], key=lambda each: each[:2])
    assert sorted(ended) == list(range(len(requests)))
    assert stage.monitor.waiting == stage.monitor.running == 0


class OnlyFull:
    """A batch policy that knows nothing of lanes."""

    def decide(self, now_ns: int, queue: QueueView, device: BatchDevice) -> BatchDecision:
        is_full = len(queue.visits) >= device.batch_max
        return BatchDecision(device.batch_max) if is_full else BatchDecision(wait_until_ns=now_ns + s(60))


def test_no_policy_waits_for_a_full_batch_while_as_many_visits_wait_in_other_lanes(sized: None) -> None:
    """Eight visits of eight sizes, which cannot share a pass. With seven, it waits."""
    for policy in (Timeout(s(1)), Slack(), Adaptive(), OnlyFull()):
        scene = warm(batch_max=8, batch=policy, drop=Never(), order=Fifo())
        visits = [request(id, size=20 + id, slo_ms=5_000) for id in range(8)]
        assert started(arrive(scene, *visits[:7])) == [], policy
        assert started(arrive(scene, visits[7])) == [[0]], policy


# What the queue knows


@given(st.data(), st.booleans())
def test_a_mixed_queue_knows_the_lane_of_each_visit(data: st.DataObject, is_padded: bool) -> None:
    """Whatever enters and leaves, the lanes are what sorting all visits into lanes gives."""
    scene = warm(count=0)
    stage = scene.application.stages["only"]
    stage.is_padded = is_padded
    stage.mix()
    queue = stage.queue
    assert isinstance(queue, MixedQueue)
    orders: list[Order] = [Fifo(), Edf()]
    for id in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["push"] * 4 + ["again", "take", "remove", "lane", "cancel", "order"]))
        count = len(queue.visits)
        if what == "push" or not count:
            slo_ms, size = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([0, 13, 14, 15, 200]))
            queue.push(0, visit_of(request(id, size=size, slo_ms=slo_ms)))
        elif what == "again":
            queue.push_again(0, queue.take(data.draw(st.integers(1, count))))
        elif what == "take":
            queue.take(data.draw(st.integers(1, count)))
        elif what == "remove":
            queue.remove(sorted(data.draw(st.sets(st.integers(0, count - 1)))))
        elif what == "lane":
            lane = data.draw(st.sampled_from(list(queue.in_order())))
            visits, left = list(lane.visits), list(queue.visits)
            gone = sorted(data.draw(st.sets(st.integers(0, len(visits) - 1))))
            lane.remove(gone)
            assert queue.visits == [each for each in left if not any(each is visits[index] for index in gone)]
        elif what == "cancel":
            queue.remove_request(data.draw(st.sampled_from(queue.visits)).request.id)
        else:
            queue.reorder(0, orders[0])
            orders.reverse()
        expected: dict[LaneKey, list[int]] = {}
        for each in queue.visits:
            expected.setdefault(stage.lane_key(each), []).append(each.request.id)
        found = [(lane.key, [each.request.id for each in lane.visits]) for lane in queue.in_order()]
        assert found == list(expected.items())
        assert {lane.waiting for lane in queue.in_order()} <= {len(queue.visits)}


WAITING = st.tuples(st.integers(1, 9), st.sampled_from([0, 10, 16, 40, 500]), st.integers(1, 600))
"""Rows, size, and deadline in ms."""


@given(
    st.lists(WAITING, min_size=1, max_size=30),
    st.tuples(st.sampled_from([0, 16, 500]), st.integers(1, 600)),
    st.sampled_from([Never(), PredictiveDrop(), PredictiveDrop(batch="full")]),
    st.integers(1, 3),
)
def test_the_work_before_a_visit_is_what_comes_before_it_and_will_not_be_dropped(
    waiting: list[tuple[int, int, int]], new: tuple[int, int], drop: Never | PredictiveDrop, replicas: int
) -> None:
    """Played through visit by visit, by the formulas of `SizedBelief`: a full batch is one of eight rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            scenes, "beliefs_of", lambda application, times: {("only", name, ""): SizedBelief(name) for name in "ab"}
        )
        scene = warm(replicas, drop=drop)
    stage = scene.application.stages["only"]
    stage.mix()

    def took_ms(rows: int, size: int) -> float:
        largest = GRID.class_of(size) or 10
        return sum(10 + each * largest / 10 for each in ([8] * (rows // 8) + [rows % 8] * (rows % 8 > 0)))

    visits = [visit_of(request(id, *each[:2], slo_ms=each[2])) for id, each in enumerate(waiting)]
    for each in visits:
        stage.queue.push(0, each)
    size, slo_ms = new
    expected_ms = 0.0
    for each in sorted(visits, key=lambda each: each.deadline_ns):
        if each.deadline_ns > ms(slo_ms):
            break
        alone_ms, full_ms = took_ms(each.rows, each.size), took_ms(8, each.size)
        least_ms = max(alone_ms, full_ms) if drop == PredictiveDrop("full") else alone_ms
        if drop == Never() or 0.7 * expected_ms + least_ms <= each.deadline_ns / 1e6:
            expected_ms += each.rows * full_ms / 8 / replicas
    found_ns = stage.until_served_ns(0, visit_of(request(99, size=size, slo_ms=slo_ms)), drop)
    assert found_ns == pytest.approx(ms(expected_ms), abs=len(visits))


def test_what_will_be_dropped_is_no_work_before_another_request(sized: None) -> None:
    """A row of 512 takes 61.2 ms. Of ten that are due in 300 ms, six are expected to be in time: a queue takes 0.7 of
    what is believed. So the queue is served within 0.7 × 367 ms: too late for a row of 16 that is due in 200 ms, and
    not for one that is due in 320 ms."""
    for slo_ms, is_admitted in ((320, True), (200, False)):
        scene = warm(batch_max=1, admit=PredictiveAdmit(trust=0.7), order=Fifo())
        arrive(scene, request(99, size=600, slo_ms=10_000))
        arrive(scene, *[request(id, size=512, at_ms=1, slo_ms=300) for id in range(10)])
        assert outcomes(scene) == {}
        arrive(scene, request(50, size=16, at_ms=1, slo_ms=slo_ms))
        assert outcomes(scene) == ({} if is_admitted else {50: Outcome.REJECTED})


def test_a_request_is_refused_at_once_for_its_own_time_if_rows_of_its_size_have_run_lately(sized: None) -> None:
    """61.2 ms wait, and it takes as long itself, where 100 ms are left. A size that has not run is admitted."""
    for size, outcome in ((512, Outcome.REJECTED), (500 * 4, None)):
        scene = warm(batch_max=1, admit=PredictiveAdmit(), order=Fifo())
        arrive(scene, request(0, size=512, slo_ms=10_000), request(1, size=512, slo_ms=10_000))
        arrive(scene, request(2, size=size, at_ms=1, slo_ms=100))
        assert outcomes(scene).get(2) is outcome


def test_what_is_due_later_is_no_work_before_a_request(sized: None) -> None:
    scene = warm(batch_max=1, admit=PredictiveAdmit())
    arrive(scene, request(99, size=512, slo_ms=10_000))
    arrive(scene, *[request(id, size=512, at_ms=1, slo_ms=900) for id in range(10)])
    arrive(scene, request(50, size=16, at_ms=1, slo_ms=50))
    assert outcomes(scene) == {}


# What it costs


def calls_of_arrival(waiting: int, **options: Any) -> int:
    """What one more visit costs when so many wait, each of a size of its own."""
    scene = warm(queue_max=10_000, drop=Never(), **options)
    arrive(scene, *[request(id, 1, 100 + id, slo_ms=900_000) for id in range(waiting)])
    return calls_of(lambda: scene.act(1, request(waiting, 1, 99, at_ms=1, slo_ms=900_000))).total()


def test_a_visit_costs_the_same_however_many_wait_for_a_replica() -> None:
    assert calls_of_arrival(400, count=0) <= calls_of_arrival(50, count=0) + 10


def test_a_batch_begins_at_the_same_cost_however_many_visits_wait() -> None:
    def calls(waiting: int) -> int:
        scene = warm(queue_max=10_000, drop=Never())
        arrive(scene, *[request(id, size=16 << id % 5, slo_ms=900_000) for id in range(waiting)])
        return calls_of(lambda: finish(scene, 20, 0)).total()

    assert calls(1_000) <= calls(50) + 10


def test_lanes_that_wait_for_more_visits_are_each_looked_at_once() -> None:
    few, many = (calls_of_arrival(waiting, batch=Timeout(s(60))) for waiting in (50, 400))
    assert many <= 8 * few


def test_lanes_whose_visits_are_hopeless_are_each_looked_at_once() -> None:
    def calls(waiting: int) -> int:
        scene = warm(queue_max=10_000)
        scene.act(0, request(waiting))
        (order,) = (action for action in scene.actions if isinstance(action, StartBatch))
        arrive(scene, *[request(id, 1, 100 + id, at_ms=1) for id in range(waiting)])
        stage = scene.application.stages["only"]
        stage.ran_ns = {stage.size_classes.class_of(100 + id): ms(1) for id in range(waiting)}  # so that none is tried
        found = calls_of(lambda: scene.act(995, Finished(order.batch, order.replica, ms(1)))).total()
        assert list(outcomes(scene).values()).count(Outcome.DROPPED) == waiting
        return found

    assert calls(400) <= 8 * calls(50) * 1.1
