"""Requests that make models raise or replicas die, in simulated worlds: only they fail, and checkers watch it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, log2
from typing import Any

import pytest

from sloop.actions import Action, End, StartBatch
from sloop.core.dispatch import DataPath
from sloop.core.queue import Queue
from sloop.core.stage import StageState
from sloop.events import BatchFailed
from sloop.runlog import Record
from sloop.sim import Violation, World, simulate
from sloop.sim.truth.failure import FaultRates, FaultSampler
from sloop.vocabulary import Outcome, Visit
from tests.sim.scene import Broken, graph_world, once, records_of, world

CALM: dict[str, Any] = {"name": "static", "drop": "never", "batch": "work_conserving", "cores": 8}


def faulty(**rates: Any) -> World:
    """Batches of up to eight requests, of which some are bad."""
    quick = {"cold_start": {"start_s": 0.01}}
    played = world(system=CALM, trace={"kind": "burst", "rate": 60}, slo_ms=5_000, truth=quick)
    return replace(played, faults=FaultRates(**rates))


EARLY = range(200)
"""Requests that end before the faults of the world do."""


def failed(records: Sequence[tuple[int, Record]]) -> set[int]:
    return {end.request for _, end in records if isinstance(end, End) and end.outcome is Outcome.FAILED}


def struck(played: World, kind: str, probability: float) -> set[int]:
    """The early requests that have this fault when they are in a batch alone."""
    sampler = FaultSampler(played.seed, played.faults)
    alone = (StartBatch(0, 0, "only", (id,)) for id in EARLY)  # type: ignore[arg-type]
    return {order.requests[0] for order in alone if sampler.strikes_any(kind, probability, order)}


def test_exactly_the_bad_requests_fail_and_nobody_is_tried_more_often_than_halving_needs() -> None:
    played = faulty(bad_request=0.05)
    records = records_of(played)
    assert failed(records) & set(EARLY) == struck(played, "bad_request", 0.05) != set()
    tries = Counter(id for _, batch in records if isinstance(batch, StartBatch) for id in batch.requests)
    assert max(tries.values()) == ceil(log2(8)) + 1
    outcomes = Counter(end.outcome for _, end in records if isinstance(end, End))
    assert outcomes.keys() == {Outcome.SERVED, Outcome.FAILED}


def test_exactly_the_deadly_requests_fail_and_each_costs_two_replicas_at_most() -> None:
    played = faulty(deadly_request=0.02)
    records = records_of(played)
    assert failed(records) & set(EARLY) == struck(played, "deadly_request", 0.02) != set()
    tries = Counter(id for _, batch in records if isinstance(batch, StartBatch) for id in batch.requests)
    assert max(tries.values()) == 2


def test_in_a_graph_a_request_fails_at_the_stage_where_it_is_bad() -> None:
    played = graph_world({"a": {}, "b": {"after": ["a"]}}, system={**CALM, "cores": 4})
    played = replace(played, faults=FaultRates(bad_request=0.05))
    ends = [end for _, end in records_of(played) if isinstance(end, End) and end.outcome is Outcome.FAILED]
    assert {end.stage for end in ends} == {"a", "b"}


def test_scenarios_declare_the_share_of_bad_requests() -> None:
    declared = world(truth={"failures": {"bad_requests": 0.1, "deadly_requests": 0.2}})
    assert (declared.faults.bad_request, declared.faults.deadly_request) == (0.1, 0.2)
    assert declared.faults.crash_mtbf_s == 0


def whole_batch_fails(self: DataPath, now_ns: int, event: BatchFailed, out: list[Action]) -> None:
    replica = self._state.replicas[event.replica]
    for visit in self._release(now_ns, replica).visits:
        self._end(now_ns, visit.request.id, Outcome.FAILED, event.error, out, visit.stage)
    self._reuse(replica, out)


def tried_together(self: DataPath, now_ns: int, event: BatchFailed, out: list[Action]) -> None:
    replica = self._state.replicas[event.replica]
    self._try_again(now_ns, replica.stage, self._release(now_ns, replica).visits)
    self._reuse(replica, out)


def mixed_with_others(self: Queue, now_ns: int, visits: Sequence[Visit]) -> None:
    for visit in visits:
        self.push(now_ns, visit)


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "complaint"),
    [
        (DataPath, "fail", whole_batch_fails, "failed, but never in a batch with no other request"),
        (DataPath, "fail", tried_together, r"requests are tried again together, of which at most \d may be"),
        (Queue, "push_again", mixed_with_others, "tried again together|overtook a visit"),
        (StageState, "give_up_ns", lambda self, batch: batch.started_ns + 1, ""),
    ],
)
def test_checkers_notice_a_core_that_is_unfair(
    owner: type, name: str, wrong: Any, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = faulty(bad_request=0.2)
    if not complaint:  # too early a give-up is unwise, but breaks nothing
        monkeypatch.setattr(owner, name, wrong)
        simulate(played)
        return
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(Violation, match=complaint):
        simulate(played)


def test_checkers_notice_a_request_that_is_dropped_out_of_a_running_batch() -> None:
    played = faulty()
    early = once(StartBatch, lambda order: [order, End(order.requests[0], Outcome.DROPPED, "so soon")])
    with pytest.raises(Violation, match="dropped while it ran"):
        simulate(played, core=Broken(played.setup().core(), early))
