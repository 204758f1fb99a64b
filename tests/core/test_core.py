"""`Core.handle` itself: time, wakes, and that the same events give the same actions."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.actions import Action, End, StartBatch, StartWorker
from sloop.core.protocols import Forecast
from sloop.core.views import Traffic
from sloop.events import WOKE, Event, Finished, Woke, WorkerLost, WorkerReady
from sloop.units import ms
from sloop.vocabulary import Outcome
from tests.core.scene import Scene, plan_of, request


def test_a_spurious_wake_does_nothing() -> None:
    scene = Scene(plan_of())
    scene.warm_up()
    before = scene.core.wake_ns
    assert scene.act(10, WOKE, Woke()) == []
    assert scene.core.wake_ns == before


def test_an_event_after_a_missed_wake_does_what_was_due_first() -> None:
    scene = Scene(plan_of())
    scene.warm_up()
    scene.script.target = plan_of(2)
    actions = scene.act(1200, request(1, at_ms=1200))
    assert [type(a) for a in actions if isinstance(a, StartWorker | StartBatch)] == [StartWorker, StartBatch]


def play(choices: list[int]) -> tuple[list[tuple[int, Event]], list[Action]]:
    """A run whose next event is drawn at random: an arrival, a finished or lost batch, a started replica, a wake."""
    scene, events, now_ms, id = Scene(plan_of(2)), [], 0, 0
    running: list[StartBatch] = []
    starting: list[StartWorker] = []
    for choice in [0, *choices, *([1, 3, 0] * (len(choices) + 4))]:
        event: Event = WOKE
        if choice in (4, 5):
            event, id = request(id, at_ms=now_ms, slo_ms=50 + 100 * choice), id + 1
        elif choice == 1 and running:
            batch = running.pop(0)
            event = Finished(batch.batch, batch.replica, ms(5))
        elif choice == 2 and running:
            event = WorkerLost(running.pop().replica, "chance")
        elif choice == 3 and starting:
            event = WorkerReady(starting.pop(0).worker)
        else:
            now_ms += 37
        events.append((ms(now_ms), event))
        new = scene.act(now_ms, event)
        running += [a for a in new if isinstance(a, StartBatch)]
        starting += [a for a in new if isinstance(a, StartWorker)]
    ends = [a for a in scene.actions if isinstance(a, End)]
    assert sorted(end.request for end in ends) == list(range(id)), "every request ends exactly once"
    assert all(end.outcome is not Outcome.REJECTED for end in ends)
    assert scene.is_idle
    return events, scene.actions


@given(st.lists(st.integers(0, 5), max_size=60))
@settings(max_examples=60)
def test_every_request_ends_once_and_the_same_events_give_the_same_actions(choices: list[int]) -> None:
    events, actions = play(choices)
    again = Scene(plan_of(2))
    replayed = [action for now_ns, event in events for action in again.core.handle(now_ns, event)]
    assert replayed == actions


@given(st.lists(st.integers(0, 400), min_size=1, max_size=12))
@settings(max_examples=60)
def test_requests_of_one_instant_share_a_batch_in_order_of_deadlines(slacks: list[int]) -> None:
    scene = Scene(plan_of(2, batch_max=4))
    scene.warm_up()
    arrived = [request(id, at_ms=10, slo_ms=500 + slack) for id, slack in enumerate(slacks)]
    *others, last = arrived
    assert not [action for each in others for action in scene.core.handle(ms(10), each, True)]
    batches = [action for action in scene.core.handle(ms(10), last) if isinstance(action, StartBatch)]
    urgent = [each.id for each in sorted(arrived, key=lambda each: each.deadline_ns)]
    assert [list(batch.requests) for batch in batches] == [part for part in (urgent[:4], urgent[4:8]) if part]


def test_reading_the_stages_asks_no_policy() -> None:
    """A forecast policy may remember being asked: a request for the server's state must not change decisions."""
    asked: list[int] = []

    class Counting(Forecast):
        def demand_rps(self, now_ns: int, ingress: Traffic) -> float:
            asked.append(now_ns)
            return 1.0

    scene = Scene(plan_of(), forecast=Counting())
    scene.warm_up()
    (view,) = scene.core.stage_views("")
    assert (view.name, len(view.replicas)) == ("only", 1)
    assert asked == [0], "by the first tick alone"
