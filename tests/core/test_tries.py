"""Failed and lost batches: which requests are tried again, with whom and how often, and which ones fail."""

from collections import Counter, deque
from collections.abc import Sequence
from math import ceil, log2
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop.actions import Action, Decided, End, StartBatch, StartWorker, StopWorker
from sloop.app.application import Application
from sloop.events import (
    WOKE,
    BatchFailed,
    BatchSilent,
    Cancelled,
    Event,
    Finished,
    NodeLost,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from sloop.policies.drop import Never
from sloop.units import FOREVER_NS, ms, s
from sloop.vocabulary import Life, Node, Outcome, ReplicaId, RequestId
from tests.core.scene import APPLICATION, Scene, graph, one_each, plan_of, request

BIG = Node("n0", "local", cores=64, memory_bytes=10**9)
R0 = ReplicaId(0)


def warm(count: int = 1, *, batch_max: int = 8, **options: Any) -> Scene:
    scene = Scene(plan_of(count, batch_max=batch_max), nodes=(BIG,), **options)
    scene.warm_up()
    return scene


def together(scene: Scene, count: int, *, at_ms: float = 0, slo_ms: float = 1000) -> StartBatch:
    """The batch of `count` requests, from 1 on, that arrive at one instant."""
    for id in range(1, count + 1):
        new = scene.core.handle(ms(at_ms), request(id, at_ms=at_ms, slo_ms=slo_ms), id < count)
        scene.actions += new
    return batches(new)[0]


def batches(actions: Sequence[Action]) -> list[StartBatch]:
    return [action for action in actions if isinstance(action, StartBatch)]


def ends(actions: Sequence[Action]) -> dict[int, tuple[Outcome, str]]:
    found = [action for action in actions if isinstance(action, End)]
    assert len({end.request for end in found}) == len(found), "a request ended twice"
    return {end.request: (end.outcome, end.why) for end in found}


def failed(batch: StartBatch) -> BatchFailed:
    return BatchFailed(batch.batch, batch.replica, "boom")


def done(batch: StartBatch) -> Finished:
    return Finished(batch.batch, batch.replica, ms(5))


# Batches that fail


def test_a_failed_batch_is_halved_until_the_bad_request_is_alone() -> None:
    scene = warm()
    batch = together(scene, 8)
    tried = []
    for at in range(1, 20):
        tried.append(batch.requests)
        actions = scene.act(at, failed(batch) if 6 in batch.requests else done(batch))
        if not batches(actions):
            break
        (batch,) = batches(actions)
    assert tried == [
        (1, 2, 3, 4, 5, 6, 7, 8),
        *((1, 2, 3, 4), (5, 6, 7, 8)),
        *((5, 6), (7, 8)),
        *((5,), (6,)),
    ]
    outcomes = {id: outcome for id, (outcome, _) in ends(scene.actions).items()}
    assert outcomes == dict.fromkeys((1, 2, 3, 4, 5, 7, 8), Outcome.SERVED) | {6: Outcome.FAILED}
    assert ends(scene.actions)[6] == (Outcome.FAILED, "boom")
    assert [size for size, _, _ in scene.beliefs["only", "a", ""].observed] == [4, 2, 1], "only finished batches"


def test_a_request_that_its_model_refuses_is_rejected_and_its_neighbours_are_served() -> None:
    scene = warm()
    batch = together(scene, 2)
    (batch, *_) = batches(scene.act(1, structs.replace(failed(batch), is_refusal=True)))
    assert batch.requests == (1,)
    (batch,) = batches(scene.act(2, structs.replace(failed(batch), is_refusal=True)))
    scene.act(3, done(batch))
    assert ends(scene.actions) == {1: (Outcome.REJECTED, "boom"), 2: (Outcome.SERVED, "")}


def test_halves_run_on_idle_replicas_side_by_side() -> None:
    scene = warm(2)
    first, second = batches(scene.act(1, failed(together(scene, 5))))
    assert (first.requests, second.requests) == ((1, 2, 3), (4, 5))
    assert {first.replica, second.replica} == {0, 1}


def test_others_do_not_share_a_batch_with_requests_that_are_tried_again_and_come_after_them() -> None:
    scene = warm()
    batch = together(scene, 2)
    scene.act(1, request(3, at_ms=1, slo_ms=100), request(4, at_ms=1, slo_ms=100))
    order = []
    for at in range(2, 6):
        (batch,) = batches(scene.act(at, failed(batch) if at == 2 else done(batch))) or [batch]
        order.append(batch.requests)
    assert order[:3] == [(1,), (2,), (3, 4)]


def test_a_request_that_would_be_late_is_not_tried_again() -> None:
    scene = warm()
    batch = together(scene, 2, slo_ms=20)
    actions = scene.act(12, failed(batch))
    assert batches(actions) == []
    assert {id: outcome for id, (outcome, _) in ends(actions).items()} == dict.fromkeys((1, 2), Outcome.DROPPED)


def test_a_client_that_leaves_between_two_tries_is_forgotten() -> None:
    scene = warm()
    (batch,) = batches(scene.act(1, failed(together(scene, 2))))
    scene.act(2, Cancelled(RequestId(2)))
    assert batches(scene.act(3, done(batch))) == []
    assert ends(scene.actions)[2] == (Outcome.DROPPED, "the client went away")
    assert scene.is_idle


def test_a_smaller_limit_of_a_new_plan_holds_for_tries_as_well() -> None:
    scene = warm(drop=Never())
    batch = together(scene, 8)
    scene.script.target = plan_of(batch_max=3)
    scene.act(1000, WOKE)
    sizes = []
    for at in range(1001, 1005):
        (batch,) = batches(scene.act(at, failed(batch) if at == 1001 else done(batch)))
        sizes.append(len(batch.requests))
    assert sizes == [3, 1, 3, 1]


CHAIN = graph(a={}, b={"after": ("a",)})


def chain(**options: Any) -> Scene:
    scene = Scene(one_each(CHAIN, batch_max=8), application=CHAIN, nodes=(BIG,), **options)
    scene.warm_up()
    return scene


def test_in_a_graph_only_the_stage_that_failed_is_tried_again() -> None:
    scene = chain()
    (second,) = batches(scene.act(11, done(together(scene, 2))))
    (again,) = batches(scene.act(12, failed(second)))
    assert (again.stage, again.requests) == ("b", (1,))
    (last,) = batches(scene.act(13, done(again)))
    scene.act(14, failed(last))
    assert {id: outcome for id, (outcome, _) in ends(scene.actions).items()} == {
        1: Outcome.SERVED,
        2: Outcome.FAILED,
    }


# Replicas that die


def lost(batch: StartBatch, why: str = "killed") -> WorkerLost:
    return WorkerLost(batch.replica, why)


def restarted(actions: Sequence[Action]) -> WorkerReady:
    """The last replica that was started is ready."""
    return WorkerReady([action for action in actions if isinstance(action, StartWorker)][-1].worker)


def test_the_requests_of_a_lost_batch_are_tried_alone_and_the_deadly_one_fails() -> None:
    scene = warm()
    ready = restarted(scene.act(1, lost(together(scene, 3))))
    (batch,) = batches(scene.act(2, ready))
    assert batch.requests == (1,)
    (batch,) = batches(scene.act(3, done(batch)))
    assert batch.requests == (2,)
    actions = scene.act(4, lost(batch))
    assert ends(actions) == {
        2: (
            Outcome.FAILED,
            "2 replicas were lost while they ran it, the last one with nothing else: killed",
        )
    }
    (batch,) = batches(scene.act(5, restarted(actions)))
    scene.act(6, done(batch))
    assert [outcome for outcome, _ in ends(scene.actions).values()].count(Outcome.SERVED) == 2


def test_requests_that_are_found_out_do_not_delay_the_replicas_that_replace_the_lost_ones() -> None:
    """Three of them, one after the other, and no batch finishes in between."""
    scene, at = warm(), 0.0
    for id in (1, 2, 3):
        (batch,) = batches(scene.act(at, request(id, at_ms=at, slo_ms=10_000)))
        (batch,) = batches(scene.act(at + 1, restarted(scene.act(at + 1, lost(batch)))))
        actions = scene.act(at + 2, lost(batch))
        assert list(ends(actions)) == [id]
        scene.act(at + 2, restarted(actions))
        at += 3
    notes = [action.why for action in scene.actions if isinstance(action, Decided) and action.kind == "lost"]
    assert notes == ["killed; a replacement starts at once"] * 6


def test_a_model_that_dies_of_every_request_is_started_with_growing_pauses() -> None:
    scene, at = warm(), 0.0
    pauses = []
    for id in range(1, 14):
        scene.act(at, request(id, at_ms=at, slo_ms=1e6))
        for _ in range(2):
            (batch,) = batches(scene.actions)[-1:]
            actions = scene.act(at + 1, lost(batch))
            (note,) = [action.why for action in actions if isinstance(action, Decided) and action.kind == "lost"]
            pauses.append("at once" not in note)
            while not any(isinstance(action, StartWorker) for action in actions):
                at = max(at, scene.core.wake_ns / ms(1))
                actions = scene.act(at, WOKE)
            at += 2
            scene.act(at, restarted(actions))
    assert not any(pauses[:16])
    assert pauses[-4:] == [True] * 4


def test_a_batch_is_not_to_blame_for_a_lost_node_or_an_orderly_stop() -> None:
    spare = Node("n1", "local", cores=4, memory_bytes=10**9)
    for gone in (
        [NodeLost("n1", "it went down"), WorkerLost(R0, "node n1 went down")],
        [WorkerStopped(R0)],
    ):
        scene = Scene(plan_of(batch_max=8), nodes=(BIG, spare))
        scene.warm_up()
        assert scene.core.state.replicas[R0].node == "n1"
        start = together(scene, 3)
        (batch,) = batches(scene.act(2, restarted(scene.act(1, *gone))))
        assert batch.requests == start.requests, "together, as before"


def test_a_draining_replica_that_dies_blames_its_batch() -> None:
    scene = warm(drop=Never())
    batch = together(scene, 2)
    scene.script.target = plan_of(batch_max=8, variant="b", in_place=False)
    scene.act(1001, restarted(scene.act(1000, WOKE)))
    assert scene.core.state.replicas[R0].life is Life.DRAINING
    assert [each.requests for each in batches(scene.act(1002, lost(batch)))] == [(1,)]


# Batches that stall


def test_a_request_of_a_stalled_batch_ends_at_its_deadline_and_the_others_are_served() -> None:
    scene = warm()
    scene.core.handle(0, request(1, slo_ms=1_500), True)
    (batch,) = batches(scene.act(0, request(2, slo_ms=20_000)))
    wakes(scene, 1_499)
    assert ends(scene.actions) == {}
    wakes(scene, 1_501)
    outcome, why = ends(scene.actions)[1]
    assert outcome is Outcome.DROPPED
    assert why.endswith("its batch has run for 1500 ms, where 12.0 ms are expected")
    scene.act(3_000, done(batch))
    assert {id: outcome for id, (outcome, _) in ends(scene.actions).items()} == {
        1: Outcome.DROPPED,
        2: Outcome.SERVED,
    }
    assert scene.is_idle


def wakes(scene: Scene, until_ms: float) -> list[int]:
    """Wake the core whenever it asks for it; returns these instants."""
    found = []
    while scene.core.wake_ns <= ms(until_ms):
        found.append(scene.core.wake_ns)
        scene.act(found[-1] / ms(1), WOKE)
    return found


def test_a_request_that_is_late_before_its_batch_stalls_ends_when_it_stalls() -> None:
    scene = warm()
    scene.act(0, request(1, slo_ms=50))
    wakes(scene, 999)
    assert ends(scene.actions) == {}, "an answer would be late, but an answer"
    wakes(scene, 1_001)
    assert ends(scene.actions)[1][0] is Outcome.DROPPED


def test_a_policy_that_never_drops_waits_for_a_stalled_batch() -> None:
    scene = warm(drop=Never())
    (batch,) = batches(scene.act(0, request(1, slo_ms=50)))
    wakes(scene, 25_000)
    scene.act(25_000, done(batch))
    assert ends(scene.actions)[1][0] is Outcome.LATE


def test_requests_behind_a_stalled_batch_go_to_another_replica_or_end_at_their_deadline() -> None:
    scene = warm(2, batch_max=1)
    scene.act(0, request(1))
    assert batches(scene.act(1, request(2, at_ms=1)))[0].replica == 1
    scene = warm(1, batch_max=1)
    scene.act(0, request(1, slo_ms=5_000))
    scene.act(1, request(2, at_ms=1, slo_ms=100))
    wakes(scene, 103)
    assert list(ends(scene.actions)) == [2]


def test_a_stalled_batch_in_a_graph_ends_its_request_once() -> None:
    scene = chain()
    batch = together(scene, 2, slo_ms=1_500)
    wakes(scene, 1_600)
    assert {id: outcome for id, (outcome, _) in ends(scene.actions).items()} == dict.fromkeys((1, 2), Outcome.DROPPED)
    assert scene.act(1_700, done(batch)) == []
    assert scene.is_idle


@pytest.mark.parametrize(
    ("application", "timeout_s", "expected_s"),
    [
        (APPLICATION, 0, 30),  # the least
        (graph(only={}), 0, 30),
        (Application("slow", 45_000, APPLICATION.stages, APPLICATION.system), 0, 45),  # its deadline
        (APPLICATION, 2.5, 2.5),
        (APPLICATION, 600, 600),
    ],
)
def test_a_replica_is_given_up_after_the_response_timeout(
    application: Application, timeout_s: float, expected_s: float
) -> None:
    scene = Scene(plan_of(), application=application, drop=Never())
    scene.application.stages["only"].response_timeout_ns = s(timeout_s)
    scene.warm_up()
    scene.act(0, request(1, slo_ms=1e7))
    wakes(scene, expected_s * 1000 - 1)
    assert not [action for action in scene.actions if isinstance(action, StopWorker)]
    wakes(scene, expected_s * 1000)
    (stop,) = [action for action in scene.actions if isinstance(action, StopWorker)]
    assert stop == StopWorker(R0, f"its batch has run for {expected_s:g} s, longer than its response timeout")
    scene.act(expected_s * 1000 + 1, restarted(scene.actions))
    assert batches(scene.actions)[-1].requests == (1,)


def test_a_slow_belief_gives_a_batch_more_time_than_the_least() -> None:
    scene = warm(drop=Never(), times={"a": 200.0})  # a batch of one takes 2.2 s
    scene.act(0, request(1, slo_ms=1e7))
    wakes(scene, 43_999)
    assert not [action for action in scene.actions if isinstance(action, StopWorker)]
    wakes(scene, 44_000)
    assert [action for action in scene.actions if isinstance(action, StopWorker)]


def test_a_request_that_is_stuck_twice_fails() -> None:
    scene = warm(drop=Never())
    scene.act(0, request(1, slo_ms=1e7))
    wakes(scene, 30_000)
    scene.act(30_001, restarted(scene.actions))
    wakes(scene, 61_000)
    assert ends(scene.actions)[1][0] is Outcome.FAILED


# Workers that hang


def served_once(**options: Any) -> Scene:
    """A scene whose replicas have run a batch each."""
    scene = warm(drop=Never(), **options)
    for at, id in enumerate((901, 902, 903)):
        for batch in batches(scene.act(at * 100, request(id, at_ms=at * 100))):
            scene.act(at * 100 + 1, done(batch))
    return scene


def silent(batch: StartBatch, silent_s: float) -> BatchSilent:
    return BatchSilent(batch.batch, batch.replica, s(silent_s))


def stops(actions: Sequence[Action]) -> list[StopWorker]:
    return [action for action in actions if isinstance(action, StopWorker)]


def test_a_silent_worker_is_given_up_and_its_requests_run_elsewhere() -> None:
    scene = served_once(count=2)
    batch = together(scene, 2, at_ms=1_000)
    assert stops(scene.act(3_999, silent(batch, 2.9))) == []
    actions = scene.act(4_100, silent(batch, 3))
    why = "it hangs: its batch has run for 3.1 s, where 12.0 ms are expected, and nothing holds it up"
    assert stops(actions) == [StopWorker(batch.replica, why)]
    assert [each.requests for each in batches(actions)] == [(1,)], "on the other replica"
    (lost,) = [action for action in actions if isinstance(action, Decided) and action.kind == "lost"]
    assert lost.why == f"{why}; a replacement starts at once"
    assert any(isinstance(action, StartWorker) for action in actions)


def test_a_silent_worker_has_twenty_times_the_time_that_its_batch_should_take() -> None:
    scene = served_once(times={"a": 100.0})  # a batch of one takes 1.1 s
    (batch,) = batches(scene.act(10_000, request(1, at_ms=10_000, slo_ms=1e6)))
    assert stops(scene.act(31_900, silent(batch, 21.9))) == []
    assert stops(scene.act(32_000, silent(batch, 22)))


def test_a_first_batch_and_a_second_try_have_the_whole_response_timeout() -> None:
    scene = warm(drop=Never())
    batch = together(scene, 1)
    assert stops(scene.act(20_000, silent(batch, 20))) == [], "it may have to compile something"
    scene = served_once(count=2)
    batch = together(scene, 1, at_ms=1_000)
    (again,) = batches(scene.act(5_000, silent(batch, 4)))
    assert again.replica != batch.replica
    assert stops(scene.act(25_000, silent(again, 20))) == [], "the request may be slow everywhere"
    scene.act(26_000, done(again))
    assert ends(scene.actions)[1][0] is Outcome.LATE


def test_a_declared_response_timeout_is_all_that_counts() -> None:
    scene = served_once()
    scene.application.stages["only"].response_timeout_ns = s(60)
    batch = together(scene, 1, at_ms=1_000)
    assert stops(scene.act(41_000, silent(batch, 40))) == []


def test_silence_during_another_batch_or_of_a_replica_that_is_gone_is_ignored() -> None:
    scene = served_once()
    batch = together(scene, 1, at_ms=1_000)
    scene.act(1_005, done(batch))
    together(scene, 1, at_ms=1_010)
    assert stops(scene.act(9_000, silent(batch, 8))) == []
    scene.act(9_001, lost(batch))
    assert stops(scene.act(9_002, silent(batch, 8))) == []


# Any mixture

KINDS = st.sampled_from(("good", "good", "good", "bad", "deadly"))


@given(
    arrivals=st.lists(st.lists(KINDS, min_size=1, max_size=12), min_size=1, max_size=6),
    replicas=st.integers(1, 3),
    batch_max=st.integers(1, 8),
    is_chain=st.booleans(),
)
def test_every_good_request_is_served_and_every_other_fails_after_few_tries(
    arrivals: list[list[str]], replicas: int, batch_max: int, is_chain: bool
) -> None:
    if is_chain:
        scene = Scene(one_each(CHAIN, batch_max=batch_max), application=CHAIN, nodes=(BIG,), drop=Never())
    else:
        scene = Scene(plan_of(replicas, batch_max=batch_max), nodes=(BIG,), drop=Never())
    scene.warm_up()
    kinds = [kind for group in arrivals for kind in group]
    tries = play(scene, arrivals, kinds, last_stage="b" if is_chain else "only")
    outcomes = {id: outcome for id, (outcome, _) in ends(scene.actions).items()}
    answered = (Outcome.SERVED, Outcome.LATE)
    assert {id: outcome in answered for id, outcome in outcomes.items()} == {
        id: kind == "good" for id, kind in enumerate(kinds)
    }
    assert scene.is_idle
    assert max(tries.values()) <= ceil(log2(batch_max)) + 2 if batch_max > 1 else 2
    learnt = [size for belief in scene.beliefs.values() for size, _, _ in belief.observed]
    assert sum(learnt) == kinds.count("good") + is_chain * len(kinds)


def play(scene: Scene, arrivals: list[list[str]], kinds: list[str], *, last_stage: str) -> Counter[tuple[str, int]]:
    """Let the requests arrive in groups, and everything happen as their kinds say, at the last stage. Returns how often
    each was tried at each stage."""
    tries = Counter[tuple[str, int]]()
    events: deque[Event] = deque()
    at_ms, next_id, done_until = 0.0, 0, len(scene.actions)
    groups = deque(arrivals)
    for _ in range(10_000):
        at_ms += 1
        if groups and not events:
            for kind in (group := groups.popleft()):
                new = scene.core.handle(ms(at_ms), request(next_id, at_ms=at_ms, slo_ms=1e6), kind is not group[-1])
                scene.actions += new
                next_id += 1
            scene.act(at_ms, WOKE)
        elif events:
            scene.act(at_ms, events.popleft())
        elif scene.is_idle:
            return tries
        else:
            assert scene.core.wake_ns < FOREVER_NS
            at_ms = max(at_ms, scene.core.wake_ns / ms(1))
            scene.act(at_ms, WOKE)
        new, done_until = scene.actions[done_until:], len(scene.actions)
        for action in new:
            if isinstance(action, StartWorker):
                events.append(WorkerReady(action.worker))
            elif isinstance(action, StartBatch):
                tries.update((action.stage, id) for id in action.requests)
                held = {kinds[id] for id in action.requests} if action.stage == last_stage else {"good"}
                events.append(lost(action) if "deadly" in held else failed(action) if "bad" in held else done(action))
    raise AssertionError("it does not end")
