from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from sloop.actions import Action, End, RequestPlan, StartBatch
from sloop.core.views import PlanInput
from sloop.events import WOKE, Event, Finished, Planned, Woke
from sloop.runlog import MemoryLog
from sloop.sim.cluster import Cluster, ClusterTruths
from sloop.sim.engine import WAKES_MAX, play
from sloop.sim.truth.cold_start import AcquisitionSampler
from sloop.sim.truth.failure import FaultSampler
from sloop.units import FOREVER_NS, ms, s
from sloop.vocabulary import BatchId, Outcome, ReplicaId, Request, RequestId


def request(id: int, at_ns: int) -> Request:
    return Request(RequestId(id), at_ns, at_ns, at_ns + s(1))


def idle_cluster(*, plan_ms: float = 0.0, is_warm: bool = True) -> Cluster:
    truths = ClusterTruths({}, AcquisitionSampler(1, {}), FaultSampler(1), plan_ns=ms(plan_ms), is_warm=is_warm)
    return Cluster(truths)


@dataclass
class Script:
    """A core that answers as the test says and notes what it is told, and whether more of the same instant comes."""

    answer: Callable[[int, Event], Sequence[Action]] = lambda now_ns, event: []
    wakes_ns: list[int] = field(default_factory=list)
    told: list[tuple[int, Event]] = field(default_factory=list)
    more: list[bool] = field(default_factory=list)
    plan_input: PlanInput | None = None

    @property
    def wake_ns(self) -> int:
        return self.wakes_ns[0] if self.wakes_ns else FOREVER_NS

    @property
    def planner(self) -> Any:
        return self

    def plan(self, given: PlanInput) -> Planned:
        return Planned(given.number, {}, {"only": "it was asked"})

    def handle(self, now_ns: int, event: Event, more_at_this_instant: bool = False) -> Sequence[Action]:
        if event == WOKE and self.wakes_ns:
            self.wakes_ns.pop(0)
        self.told.append((now_ns, event))
        self.more.append(more_at_this_instant)
        return self.answer(now_ns, event)


def ending(now_ns: int, event: Event) -> Sequence[Action]:
    return [End(event.id, Outcome.SERVED)] if isinstance(event, Request) else []


def test_at_one_instant_the_wake_comes_first_then_the_cluster_then_the_ingress() -> None:
    cluster = idle_cluster()
    news = Finished(BatchId(1), ReplicaId(1), 5)
    cluster.pending.heap.insert(0, (ms(3), 7, news))
    core = Script(ending, wakes_ns=[0, ms(3)])
    played = play(core, cluster, iter([(ms(3), request(0, ms(3)))]), until_ns=ms(10))
    assert core.told == [(0, WOKE), (ms(3), WOKE), (ms(3), news), (ms(3), request(0, ms(3)))]
    assert core.more == [False, True, True, False]
    assert (played.requests, played.open, played.events, played.ended_ns) == (1, 0, 4, ms(3))


def test_all_requests_of_an_instant_are_told_together() -> None:
    core = Script(ending)
    burst = [(ms(at), request(id, ms(at))) for id, at in enumerate((1, 2, 2, 2, 3))]
    played = play(core, idle_cluster(), iter(burst), until_ns=ms(10))
    assert core.told == burst
    assert core.more == [False, True, True, False, False]
    assert (played.requests, played.open) == (5, 0)


def test_a_cancelled_entry_of_an_instant_does_not_announce_another_event() -> None:
    cluster = idle_cluster()
    first, never = Finished(BatchId(1), ReplicaId(1), 5), Finished(BatchId(2), ReplicaId(2), 5)
    cluster.pending.heap[:0] = [(ms(3), 7, first), (ms(3), 8, never)]
    cluster.pending.void.add(8)
    core = Script()
    play(core, cluster, iter([]), until_ns=ms(10))
    assert (core.told, core.more) == ([(ms(3), first)], [False])
    assert not cluster.pending.void


def test_what_the_orders_of_an_instant_cause_at_once_comes_a_nanosecond_later() -> None:
    """So the events of one instant in a log are those that were told together."""
    core = Script(wakes_ns=[ms(1)])

    def remind(now_ns: int, event: Event) -> Sequence[Action]:
        if isinstance(event, Request):
            core.wakes_ns.append(0)
        return ending(now_ns, event)

    core.answer = remind
    play(core, idle_cluster(), iter([(ms(5), request(0, ms(5)))]), until_ns=ms(10))
    assert [at_ns for at_ns, _ in core.told] == [ms(1), ms(5), ms(5) + 1]


def test_a_request_in_the_nanosecond_after_comes_with_it() -> None:
    core = Script(wakes_ns=[ms(1)])

    def remind(now_ns: int, event: Event) -> Sequence[Action]:
        if event == WOKE and len(core.told) == 1:
            core.wakes_ns.append(ms(1))
        return ending(now_ns, event)

    core.answer = remind
    play(core, idle_cluster(), iter([(ms(1) + 1, request(0, ms(1) + 1))]), until_ns=ms(10))
    assert core.told == [(ms(1), WOKE), (ms(1) + 1, WOKE), (ms(1) + 1, request(0, ms(1) + 1))]


def test_a_core_that_never_lets_time_go_on_is_stopped() -> None:
    core = Script(wakes_ns=[ms(2)] * (WAKES_MAX + 2))
    with pytest.raises(AssertionError, match="asks for ever to be woken at 2000000 ns"):
        play(core, idle_cluster(), iter([]), until_ns=s(1))


@pytest.mark.parametrize(("is_warm", "at_ms"), [(False, 5.0), (True, 0.0)])
def test_a_plan_comes_after_the_time_it_takes_the_first_of_a_warm_world_at_once(is_warm: bool, at_ms: float) -> None:
    given = PlanInput(1, 0, (), ())
    core = Script(wakes_ns=[0, ms(100)], plan_input=given)
    core.answer = lambda now_ns, event: [RequestPlan(1)] if event == WOKE else []
    play(core, idle_cluster(plan_ms=5, is_warm=is_warm), iter([]), until_ns=s(1))
    planned = Planned(1, {}, {"only": "it was asked"})
    assert core.told == [
        (0, WOKE),
        (max(1, ms(at_ms)), planned),
        (ms(100), WOKE),
        (ms(105), planned),
    ]


def test_the_loop_ends_with_the_duration_when_nothing_is_open() -> None:
    core = Script(wakes_ns=[0, ms(5), ms(9), ms(11)])
    played = play(core, idle_cluster(), iter([]), until_ns=ms(10))
    assert [at_ns for at_ns, _ in core.told] == [0, ms(5), ms(9)]
    assert played.ended_ns == ms(9)


def test_open_requests_are_waited_for_and_no_longer_than_patience() -> None:
    late = Script(lambda now_ns, event: [End(RequestId(0), Outcome.LATE)] if now_ns == ms(700) else [])
    late.wakes_ns = [ms(300), ms(700), ms(900)]
    answered = play(late, idle_cluster(), iter([(0, request(0, 0))]), until_ns=ms(10))
    assert (answered.open, answered.ended_ns) == (0, ms(700))
    never = Script(wakes_ns=[ms(300), ms(700), ms(900)])
    abandoned = play(never, idle_cluster(), iter([(0, request(0, 0))]), until_ns=ms(10), patience_ns=ms(800))
    assert (abandoned.open, abandoned.ended_ns) == (1, ms(700))


def test_the_ingress_is_read_one_event_at_a_time() -> None:
    drawn: list[int] = []
    ahead: list[int] = []

    def ingress() -> Iterator[tuple[int, Event]]:
        for number in range(5):
            drawn.append(number)
            yield ms(number), request(number, ms(number))

    def answer(now_ns: int, event: Event) -> Sequence[Action]:
        if isinstance(event, Request):
            ahead.append(len(drawn) - event.id)
        return ending(now_ns, event)

    play(Script(answer), idle_cluster(), ingress(), until_ns=0)
    assert max(ahead) <= 2


def test_faults_stop_after_the_last_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, stopped = idle_cluster(), []
    core = Script(ending)
    monkeypatch.setattr(cluster, "stop_faults", lambda now_ns: stopped.append(len(core.told)))
    play(core, cluster, iter([(0, request(0, 0)), (ms(1), request(1, ms(1)))]), until_ns=ms(5))
    assert stopped == [1], "once, when the last request has been drawn"


def test_the_sink_gets_each_event_before_its_actions() -> None:
    log = MemoryLog()
    play(Script(ending), idle_cluster(), iter([(ms(1), request(0, ms(1)))]), until_ns=0, appends=[log.append])
    assert log.records == [(ms(1), request(0, ms(1))), (ms(1), End(RequestId(0), Outcome.SERVED))]


def test_batches_for_replicas_that_do_not_exist_go_nowhere() -> None:
    core = Script(lambda now_ns, event: [StartBatch(BatchId(0), ReplicaId(9), "only", (RequestId(0),))])
    played = play(core, idle_cluster(), iter([(0, request(0, 0))]), until_ns=0, patience_ns=ms(1))
    assert played.open == 1
    assert not [event for _, event in core.told if isinstance(event, Woke)]
