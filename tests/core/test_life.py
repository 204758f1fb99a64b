"""The states of a worker, and what may follow each."""

import pytest

from sloop.core.life import FOLLOWING, INCOMPLETE, LIVES, WorkerState
from sloop.vocabulary import Life, WorkerId
from tests.core.scene import Scene, plan_of


def test_the_table_has_each_state() -> None:
    assert FOLLOWING.keys() == LIVES.keys() == set(WorkerState)


def test_a_worker_may_be_told_to_stop_in_every_state_and_does_not_come_back() -> None:
    assert [state for state in WorkerState if WorkerState.DRAINING not in FOLLOWING[state]] == [WorkerState.DRAINING]
    scene = Scene(plan_of(1))
    scene.warm_up()
    there = scene.core.state
    worker = there.workers[WorkerId(0)]
    there.enter(0, worker, WorkerState.DRAINING)
    for state in WorkerState:
        with pytest.raises(AssertionError, match=f"draining cannot be {state} next"):
            there.enter(0, worker, state)


def test_from_each_state_a_worker_can_come_to_serve_without_a_loop() -> None:
    def paths(state: WorkerState) -> list[list[WorkerState]]:
        further = [path for after in sorted(FOLLOWING[state]) for path in paths(after)]
        return [[state, *path] for path in further or [[]]]

    found = paths(WorkerState.STARTING)
    assert {state for path in found for state in path} == set(WorkerState)
    assert all(path[-1] is WorkerState.DRAINING and len(path) == len(set(path)) for path in found)
    for state in INCOMPLETE:
        assert any(WorkerState.SERVING in path[path.index(state) :] for path in found if state in path), state


def test_only_complete_workers_and_parts_of_pipelines_get_batches() -> None:
    ready = {state for state in WorkerState if LIVES[state] is Life.READY}
    assert ready == {WorkerState.SERVING, WorkerState.PIPELINED}
    assert WorkerState.SERVING not in INCOMPLETE
