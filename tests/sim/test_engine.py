from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from sloop.actions import Action, End, StartBatch
from sloop.events import WOKE, Event, Finished, Woke
from sloop.runlog import MemoryLog
from sloop.sim.cluster import Cluster, Truths
from sloop.sim.engine import play
from sloop.sim.truth.cold_start import ColdStartSampler, ResizeSampler
from sloop.sim.truth.failure import FaultSampler
from sloop.sim.truth.service import ServiceSampler
from sloop.units import FOREVER_NS, ms, s
from sloop.vocabulary import BatchId, Outcome, ReplicaId, Request, RequestId


def request(id: int, at_ns: int) -> Request:
    return Request(RequestId(id), at_ns, at_ns, at_ns + s(1))


def idle_cluster() -> Cluster:
    return Cluster(
        Truths(ServiceSampler(1, {}), ColdStartSampler(1, {}, start_s=0.0), ResizeSampler(1), FaultSampler(1))
    )


@dataclass
class Script:
    """A core that answers as the test says and notes what it is told."""

    answer: Callable[[int, Event], Sequence[Action]] = lambda now_ns, event: []
    wakes_ns: list[int] = field(default_factory=list)
    told: list[tuple[int, Event]] = field(default_factory=list)

    @property
    def wake_ns(self) -> int:
        return self.wakes_ns[0] if self.wakes_ns else FOREVER_NS

    def handle(self, now_ns: int, event: Event) -> Sequence[Action]:
        if event == WOKE and self.wakes_ns:
            self.wakes_ns.pop(0)
        self.told.append((now_ns, event))
        return self.answer(now_ns, event)


def ending(now_ns: int, event: Event) -> Sequence[Action]:
    return [End(event.id, Outcome.SERVED)] if isinstance(event, Request) else []


def test_at_one_instant_the_wake_comes_first_then_the_cluster_then_the_ingress() -> None:
    cluster = idle_cluster()
    news = Finished(BatchId(1), ReplicaId(1), 5)
    cluster.pending.insert(0, (ms(3), 7, news))
    core = Script(ending, wakes_ns=[0, ms(3)])
    played = play(core, cluster, iter([(ms(3), request(0, ms(3)))]), until_ns=ms(10))
    assert core.told == [(0, WOKE), (ms(3), WOKE), (ms(3), news), (ms(3), request(0, ms(3)))]
    assert (played.requests, played.open, played.events, played.ended_ns) == (1, 0, 4, ms(3))


def test_a_wake_in_the_past_does_not_turn_time_back() -> None:
    core = Script(ending, wakes_ns=[ms(1)])

    def remind(now_ns: int, event: Event) -> Sequence[Action]:
        if isinstance(event, Request):
            core.wakes_ns.append(0)
        return ending(now_ns, event)

    core.answer = remind
    play(core, idle_cluster(), iter([(ms(5), request(0, ms(5)))]), until_ns=ms(10))
    assert [at_ns for at_ns, _ in core.told] == [ms(1), ms(5), ms(5)]


def test_a_core_that_never_lets_time_go_on_is_stopped() -> None:
    class Restless:
        wake_ns = ms(2)

        def handle(self, now_ns: int, event: Event) -> Sequence[Action]:
            return []

    with pytest.raises(AssertionError, match="asks for ever to be woken at 2000000 ns"):
        play(Restless(), idle_cluster(), iter([]), until_ns=s(1))


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
    monkeypatch.setattr(cluster, "stop_faults", lambda: stopped.append(len(core.told)))
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
