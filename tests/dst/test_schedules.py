"""Random schedules hold every invariant, each invariant can be broken, and what fails shrinks and replays exactly."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from sloop.actions import AdoptWorker, End, StartWorker, StopWorker
from sloop.core import Core, control, pipeline, provision
from sloop.core.control import ControlPath
from sloop.core.dispatch import DataPath
from sloop.core.ledger import Ledger
from sloop.core.life import WorkerState
from sloop.core.nodes import NodePool
from sloop.core.queue import Queue
from sloop.core.replica import LayerPipeline, ReplicaPool
from sloop.core.rollout import Rollouts
from sloop.core.stage import StageState
from sloop.core.state import State
from sloop.core.weights import WeightRegistry
from sloop.policies.admit import Bounded
from sloop.serve.cluster.agent import AgentSession
from sloop.serve.cluster.agents import AgentBackend
from sloop.serve.node.models import NodeModels
from sloop.serve.node.node import LiveNode, WorkerPhase
from sloop.serve.node.pipelines import ProcessPipeline
from sloop.sim.checkers import Checkers, Violation
from sloop.units import FOREVER_NS, s
from sloop.vocabulary import NodeState, Outcome
from tests.dst import schedules
from tests.dst.agents import OF_REQUESTS, FaultKind
from tests.dst.schedules import Doing, Schedule, failure_of, kind_of, play, schedule_of, shrink

SCHEDULES = 60

FAILED_ONCE = {
    203087: "a batch on a thousandth of a core takes minutes, which is slow and not a mistake",
    301616: "a replica outside the plan was kept until another had the cores that it was refused",
    40650: "a start on a node that was given up lived on without its transfer, and was adopted",
    701809: "parts of a first plan never got their other layers",
    810: "a part that was stopped for a batch elsewhere in its pipeline lived on, on cores that were given away",
    894: "a limit that the machine refused was reported as a resize that nobody had ordered",
    1000572: "the layers of a part were ordered again without a pause, from a store that refuses at once",
}
"""Seeds that failed once, and why. A seed loses its meaning when what is drawn changes: the tests of the core have each
mistake on its own."""


@pytest.fixture(autouse=True)
def _without_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("first", range(0, SCHEDULES, 20))
def test_every_invariant_holds_in_random_schedules(first: int) -> None:
    outcomes: Counter[Outcome] = Counter()
    for seed in range(first, first + 20):
        played = play(schedule_of(seed))
        assert played.requests >= 200
        assert played.faults >= 5
        assert sum(played.outcomes.values()) >= played.requests
        outcomes.update(played.outcomes)
    assert min(outcomes[each] for each in Outcome) > 10, outcomes


def test_a_core_that_dies_is_followed_by_one_that_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In many schedules; some replicas are adopted, and their requests still end exactly once."""
    adopted = 0
    for seed in range(SCHEDULES, SCHEDULES + 40):
        schedule = schedule_of(seed)
        if any(op.kind is FaultKind.CORE_DOWN for op in schedule.operations):
            adopted += sum(isinstance(record, AdoptWorker) for _, record in log_of(schedule, monkeypatch))
    assert adopted > 20


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_schedules_that_failed_once_hold_now(seed: int) -> None:
    play(schedule_of(seed))


def test_a_seed_is_a_schedule_and_each_operation_keeps_its_meaning_without_the_others() -> None:
    schedule = schedule_of(5)
    assert schedule == schedule_of(5)
    assert str(schedule) == str(schedule_of(5))
    few = schedule.only([3, 100])
    assert few.operations == (schedule.operations[3], schedule.operations[100])
    assert (few.numbers, few.scene, few.heals_ns) == ((3, 100), schedule.scene, schedule.heals_ns)


def log_of(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, object]]:
    """All records of a run."""
    records: list[tuple[int, object]] = []
    real = Checkers.append

    def append(self: Checkers, now_ns: int, record: Any) -> None:
        records.append((now_ns, record))
        real(self, now_ns, record)

    with monkeypatch.context() as patched:
        patched.setattr(Checkers, "append", append)
        play(schedule)
    return records


def test_a_schedule_replays_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert log_of(schedule_of(11), monkeypatch) == log_of(schedule_of(11), monkeypatch)


def test_schedules_are_of_every_shape() -> None:
    found: Counter[str] = Counter()
    for seed in range(300):
        schedule = schedule_of(seed)
        scene = schedule.scene
        found.update({op.kind for op in schedule.operations})
        found[f"{len(scene.applications)} applications"] += 1
        found["several stages"] += any(len(each.stages) > 1 for each in scene.applications)
        found["paths with deadlines"] += any(each.declared_paths for each in scene.applications)
        found["node on demand"] += any(node.on_demand for node in scene.nodes)
        found["accelerators"] += any(node.devices for node in scene.nodes)
        found["plans beside the loop"] += not scene.is_quick
        found["slow links"] += scene.delay_ns > 0
    assert all(found[kind] >= 20 for kind in FaultKind), found
    assert all(found[kind] >= 40 for kind in Doing), found
    assert min(found.values()) >= 15, found


# Each invariant can be broken


def answer_twice(patch: pytest.MonkeyPatch) -> None:
    real = Core.handle

    def handle(self: Core, *given: Any) -> list[Any]:
        return [again for each in real(self, *given) for again in ([each, each] if type(each) is End else [each])]

    patch.setattr(Core, "handle", handle)


def forget_requests(patch: pytest.MonkeyPatch) -> None:
    def lose(self: DataPath, now_ns: int, replica: Any, *others: Any, **options: Any) -> None:
        replica.stage.pool.running.pop(replica.id, None)

    patch.setattr(DataPath, "lose", lose)


def overbook(patch: pytest.MonkeyPatch) -> None:
    def reserve(self: Ledger, replica: Any, wanted: Any) -> bool:
        self.reservations[replica] = wanted
        self._take(wanted, 1)
        return True

    real = Ledger.view
    patch.setattr(Ledger, "view", lambda self, name: replace(real(self, name), free_cores=1e3))
    patch.setattr(Ledger, "reserve", reserve)


def forget_a_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "release", lambda self, replica: None)


def release_by_half(patch: pytest.MonkeyPatch) -> None:
    def release(self: Ledger, replica: Any) -> None:
        reservation = self.reservations.pop(replica)
        self._take(structs.replace(reservation, millicores=reservation.millicores // 2), -1)

    patch.setattr(Ledger, "release", release)


def keep_the_room_of_shadows(patch: pytest.MonkeyPatch) -> None:
    real = State.forget

    def forget(self: State, now_ns: int, worker: Any, out: Any) -> None:
        reserved = self.ledger.reservations.get(worker.id)
        real(self, now_ns, worker, out)
        if worker.shadow is not None and reserved is not None:
            self.ledger.force(worker.id, reserved)

    patch.setattr(State, "forget", forget)


def free_a_shadow_that_still_runs(patch: pytest.MonkeyPatch) -> None:
    real = State.enter

    def enter(self: State, now_ns: int, worker: Any, state: WorkerState) -> None:
        real(self, now_ns, worker, state)
        if worker.shadow is not None and state is WorkerState.DRAINING:
            self.ledger.release(worker.id)

    patch.setattr(State, "enter", enter)


def use_before_ready(patch: pytest.MonkeyPatch) -> None:
    real = ReplicaPool.add

    def add(self: ReplicaPool, replica: Any) -> None:
        real(self, replica)
        self.add_idle(replica)

    patch.setattr(ReplicaPool, "add", add)


def use_while_it_drains(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaPool, "remove_idle", lambda self, replica: None)


def use_twice(patch: pytest.MonkeyPatch) -> None:
    real = DataPath.dispatch

    def dispatch(self: DataPath, now_ns: int, stage: StageState, out: list[Any]) -> int:
        idle = list(stage.pool.idle)
        wait_ns = real(self, now_ns, stage, out)
        stage.pool.idle.extend(each for each in idle if each not in stage.pool.idle)
        return wait_ns

    patch.setattr(DataPath, "dispatch", dispatch)


def move_a_deadline(patch: pytest.MonkeyPatch) -> None:
    real = Queue.push_again

    def push_again(self: Queue, now_ns: int, visits: Any) -> None:
        for visit in visits:
            visit.deadline_ns += s(1)
        real(self, now_ns, visits)

    patch.setattr(Queue, "push_again", push_again)


def admit_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bounded, "retry_after_ns", lambda *given: 0)


def replace_nothing(patch: pytest.MonkeyPatch) -> None:
    def lost(self: ControlPath, now_ns: int, event: Any, out: list[Any]) -> None:
        worker = self._state.workers.get(event.worker)
        if worker is not None:
            is_blamed = self._state.ledger.states[worker.replica.node] is not NodeState.LOST
            self._forget(now_ns, worker, event.error, is_blamed, out)
            self._advance_all(now_ns, worker.replica, out)

    patch.setattr(ControlPath, "lost", lost)


def wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StageState, "give_up_ns", lambda self, batch: FOREVER_NS)


def release_no_node(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NodePool, "release_unused", lambda *given: None)


def show_an_old_replica(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReplicaPool, "note_change", lambda self, replica: None)


def show_an_old_node(patch: pytest.MonkeyPatch) -> None:
    def set_state(self: Ledger, node: str, state: NodeState) -> None:
        self.states[node] = state

    patch.setattr(Ledger, "set_state", set_state)


def believe_that_each_resize_is_granted(patch: pytest.MonkeyPatch) -> None:
    real = ControlPath.resized

    def resized(self: ControlPath, now_ns: int, event: Any, out: list[Any]) -> None:
        real(self, now_ns, event, out)
        replica = self._state.replicas.get(event.worker)
        if replica is not None and not replica.resizing:
            self._state.ledger.resize(replica.id, replica.target_cores)

    patch.setattr(ControlPath, "resized", resized)


def adopt_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ControlPath, "_adopt", lambda *given: None)


def adopt_without_room(patch: pytest.MonkeyPatch) -> None:
    real = ControlPath._adopt

    def adopt(self: ControlPath, now_ns: int, node: Any, kept: Any, out: list[Any]) -> None:
        real(self, now_ns, node, kept, out)
        self._state.ledger.release(next(reversed(self._state.replicas)))

    patch.setattr(ControlPath, "_adopt", adopt)


def adopt_as_ready(patch: pytest.MonkeyPatch) -> None:
    real = ControlPath._adopt

    def adopt(self: ControlPath, now_ns: int, node: Any, kept: Any, out: list[Any]) -> None:
        real(self, now_ns, node, structs.replace(kept, is_ready=True), out)

    patch.setattr(ControlPath, "_adopt", adopt)


def number_from_the_start(patch: pytest.MonkeyPatch) -> None:
    real = ControlPath._adopt

    def adopt(self: ControlPath, *given: Any) -> None:
        real(self, *given)
        self._state.next_worker = 0

    patch.setattr(ControlPath, "_adopt", adopt)


def evict_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightRegistry, "make_room", lambda *given: [])


def wait_for_no_weights(patch: pytest.MonkeyPatch) -> None:
    def bare(id: Any, spec: Any, transfer: Any, **part: Any) -> StartWorker:
        return StartWorker(id, spec, **part)

    patch.setattr(provision, "StartWorker", bare)


def hold_no_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "hold", lambda *given: None)


def forget_who_uses_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightRegistry, "leave", lambda *given: [])


def cancel_no_transfer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightRegistry, "give_up", lambda *given: [])


def serve_with_a_part(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LayerPipeline, "is_ready", property(lambda self: True))


def stop_a_part_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(control, "break_up", lambda *given: None)


def complete_no_part(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pipeline, "order_other_layers", lambda *given: None)


def never_hear_of_weights(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WeightRegistry, "arrived", lambda *given: None)


def compare_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rollouts, "count", lambda *given: None)


def sort_nothing_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Queue, "reorder", lambda *given: None)


def lose_the_queue_of_another_system(patch: pytest.MonkeyPatch) -> None:
    real = Queue.reorder

    def reorder(self: Queue, now_ns: int, order: Any) -> None:
        self.remove(range(len(self.visits)))
        real(self, now_ns, order)

    patch.setattr(Queue, "reorder", reorder)


# What agents and nodes do


def answer_no_shrink(patch: pytest.MonkeyPatch) -> None:
    def finish(self: LiveNode, worker: Any) -> None:
        worker.shrink_to = None

    patch.setattr(LiveNode, "_finish_shrink", finish)


def await_a_batch_before_a_stop(patch: pytest.MonkeyPatch) -> None:
    real = vars(LiveNode)["order"]

    def order(self: LiveNode, order: Any, *peers: Any) -> None:
        worker = self.workers.get(order.worker) if isinstance(order, StopWorker) else None
        if worker is None or worker.phase is not WorkerPhase.BUSY:
            real.__get__(self, LiveNode)(order, *peers)

    patch.setattr(LiveNode, "order", order)


def keep_what_the_server_does_not(patch: pytest.MonkeyPatch) -> None:
    real = AgentSession.resume

    def resume(self: AgentSession, setup: Any, *given: Any) -> None:
        real(self, structs.replace(setup, keep=tuple(self.node.workers)), *given)

    patch.setattr(AgentSession, "resume", resume)


def lose_a_node_alone(patch: pytest.MonkeyPatch) -> None:
    real = AgentBackend._on_end

    def on_end(self: AgentBackend, agent: Any, why: str) -> None:
        for number in [number for number, placed in self._workers.items() if placed.agent is agent]:
            del self._workers[number]
        real(self, agent, why)

    patch.setattr(AgentBackend, "_on_end", on_end)


def count_on_transfers_of_a_dead_server(patch: pytest.MonkeyPatch) -> None:
    real = NodeModels.connect

    def connect(self: NodeModels, *given: Any, **named: Any) -> None:
        before = dict(self._receptions)
        real(self, *given, **named)
        self._receptions |= before

    patch.setattr(NodeModels, "connect", connect)


def complete_no_part_of_a_broken_pipeline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProcessPipeline, "_begin_completion", lambda self: None)


BROKEN: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    answer_twice: "is answered twice",
    forget_requests: "where there are",
    overbook: "gives out|are reserved and",
    forget_a_release: "reservations of",
    believe_that_each_resize_is_granted: "m are reserved",
    release_by_half: "are reserved and",
    keep_the_room_of_shadows: "reservations of",
    free_a_shadow_that_still_runs: "reservations of",
    use_before_ready: "not ready|count as idle",
    use_while_it_drains: "count as idle|not ready|is not idle",
    use_twice: "count as idle|still runs",
    move_a_deadline: r"the deadline of request \d+ has moved",
    admit_all: "visits wait at .*, where at most",
    replace_nothing: "after 500 s and more, |goes round in a circle",
    wait_for_ever: "after 500 s and more, ",
    release_no_node: "after 200 s and more, node-. is ready",
    show_an_old_replica: "policies see",
    show_an_old_node: "policies see",
    compare_for_ever: "compared",
    sort_nothing_anew: "overtook a visit",
    lose_the_queue_of_another_system: "wait|where there are|never ended",
    adopt_nothing: "neither adopted nor stopped",
    adopt_without_room: "reservations of",
    adopt_as_ready: "not kept, or is another one",
    evict_nothing: "bytes of weights where|bytes and gives out",
    wait_for_no_weights: "waits for no transfer",
    hold_no_memory: "bytes, of which|bytes and gives out",
    forget_who_uses_weights: "weights are used by replicas",
    serve_with_a_part: "a worker that is starting cannot be pipelined next",
    stop_a_part_alone: "after 500 s and more, |not ready or drains|parts of pipelines",
    complete_no_part: "parts of pipelines",
    cancel_no_transfer: "no replica waits for it",
    never_hear_of_weights: "have not ended|after 500 s and more, |does not bring",
    number_from_the_start: "replica 0 after replica 0|counts|are idle|reserved twice",
    answer_no_shrink: "after 500 s and more, replicas of",
    await_a_batch_before_a_stop: "have .* cores, the node|after 500 s and more, ",
    keep_what_the_server_does_not: "after 500 s and more, node-. is lost",
    lose_a_node_alone: "after 500 s and more, ",
    count_on_transfers_of_a_dead_server: "does not exist|ordered twice|after 500 s and more, ",
    complete_no_part_of_a_broken_pipeline: "are still parts of pipelines",
}
"""What is broken in the core, in agents or in nodes, and what the schedules say of it."""


SEED_MIN: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    evict_nothing: 180,
    stop_a_part_alone: 390,
    believe_that_each_resize_is_granted: 100,
    complete_no_part: 215,
}
"""Where to begin: few schedules end with parts or lose one, fill a node with files, or refuse a resize that frees
cores."""


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_every_invariant_catches_what_breaks_it(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    first = SEED_MIN.get(broken, 0)
    for seed in range(first, first + 100):
        try:
            play(schedule_of(seed))
        except Exception as failure:
            pytest.MonkeyPatch.undo(monkeypatch)
            with pytest.raises(AssertionError, match=BROKEN[broken]):
                raise failure
            return
    pytest.fail("no schedule notices")


# Shrinking


def test_what_fails_is_shrunk_to_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_twice(monkeypatch)
    small = shrink(schedule_of(3))
    (only,) = small.operations
    assert only.kind is Doing.REQUEST or only.kind in OF_REQUESTS
    assert failure_of(small) == failure_of(schedule_of(3)) == "Violation: at # ms: request # is answered twice: End#"


def test_shrinking_keeps_the_failure_and_nothing_that_can_be_left_out() -> None:
    """Fails like the first if operations 7 and 90 are there, and in another way without 7."""

    def run_it(schedule: Schedule) -> None:
        if {7, 90} <= set(schedule.numbers):
            raise Violation("both are there, at 12.5 ms")
        raise KeyError("another")

    small = shrink(schedule_of(1), run_it)
    assert small.numbers == (7, 90)
    assert failure_of(small, run_it) == "Violation: both are there, at # ms"


def test_failures_that_differ_in_numbers_and_names_are_of_one_kind() -> None:
    one = Violation("at 3.5 ms: requests [1, 2] of 'a' wait (for 7)\nevent: …")
    other = Violation("at 99 ms: requests [3] of 'b/c' wait (for 1)\nevent: other")
    assert kind_of(one) == kind_of(other) == "Violation: at # ms: requests # of # wait #"
    assert kind_of(one) != kind_of(KeyError(1))


def test_a_core_that_goes_round_in_a_circle_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "EVENTS_MAX", 100)
    assert failure_of(schedule_of(1)) == "Violation: at # ms: more than # events: the core goes round in a circle"
