"""What stages saw of requests that part and meet again: a story by hand, and simulated runs against a plain count."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.actions import End, StartBatch, StartReplica
from sloop.app.graph import Each, Graph, Step, When
from sloop.app.load import load_scenario
from sloop.events import BatchFailed, Finished, ReplicaLost
from sloop.report.metrics import Metrics, fold
from sloop.report.visits import Visits
from sloop.runlog import MemoryLog, Record
from sloop.sim import World, simulate
from sloop.sim.swarm import world_from_seed
from sloop.systems.setup import beliefs_of
from sloop.units import ms, s
from sloop.vocabulary import BatchId, Outcome, Path, ReplicaId, ReplicaSpec, Request, RequestId

GRAPH = Graph(
    [
        Step("cut"),
        Step("read", ("cut",), each=Each("cut", "boxes", mean=2, most=3)),
        Step("join", ("read",), join=True),
        Step("face", ("cut",), when=(When("cut", "kind", (1,), 0.5),)),
    ],
    slo_ns=ms(500),
)
ACCURACIES = {("cut", "v"): 0.5, ("read", "good"): 1.0, ("read", "bad"): 0.5, ("join", "v"): 0.8, ("face", "v"): 0.1}


def asked(number: int) -> Request:
    return Request(RequestId(number), 0, 0, ms(500))


def batch(number: int, stage: str, *visits: tuple[int, int]) -> StartBatch:
    requests = tuple(RequestId(request) for request, _ in visits)
    return StartBatch(BatchId(number), ReplicaId(0), stage, requests, tuple(part for _, part in visits))


def after_cut(ways: Sequence[tuple[int, ...]]) -> Visits:
    """Requests 1, 2, … that were cut at 10 ms, in a batch that began at 4 ms."""
    visits = Visits(GRAPH, ACCURACIES)
    numbers = range(1, len(ways) + 1)
    for number in numbers:
        visits.begin(0, asked(number))
    first = batch(0, "cut", *((number, 0) for number in numbers))
    visits.start(ms(4), first)
    visits.finish(ms(10), first, ways, "v")
    return visits


def test_every_part_and_branch_waits_for_itself() -> None:
    visits = after_cut([(2, 1)])
    assert visits.waiting == 3
    one, other, face = batch(1, "read", (1, 0)), batch(2, "read", (1, 1)), batch(3, "face", (1, 0))
    visits.start(ms(10), one)
    visits.start(ms(13), other)
    visits.start(ms(11), face)
    assert visits.waiting == 0
    visits.finish(ms(20), one, (), "good")
    visits.finish(ms(22), face, (), "v")
    assert visits.waiting == 0, "the parts have not met"
    visits.finish(ms(30), other, (), "bad")
    assert visits.waiting == 1
    last = batch(4, "join", (1, 0))
    visits.start(ms(31), last)
    visits.finish(ms(40), last, (), "v")
    visits.end(End(RequestId(1), Outcome.SERVED), ms(40))
    rows = {row.stage: row for row in visits.stages()}
    assert [(r.visits, r.mean_wait_ms, r.max_wait_ms, r.batches) for r in rows.values()] == [
        (1, 4, 4, 1),
        (2, 1.5, 3, 2),
        (1, 1, 1, 1),
        (1, 1, 1, 1),
    ]
    assert (visits.waits, visits.wait_sum_ns, visits.wait_max_ns) == (5, ms(9), ms(4))
    assert visits.accuracy == pytest.approx(0.5 * 0.75 * 0.8 * 0.1)
    (route,) = visits.routes()
    assert (route.stages, route.slo_ms, route.answered, route.served) == (("cut", "read", "join", "face"), 500, 1, 1)
    assert (route.mean_ms, route.p99_ms) == (40, 40)


def test_accuracy_weighs_a_branch_as_requests_do() -> None:
    """Two requests without parts; one of them with a face."""
    visits = after_cut([(0, 0), (0, 1)])
    visits.end(End(RequestId(1), Outcome.SERVED), ms(10))
    face = batch(1, "face", (2, 0))
    visits.start(ms(10), face)
    visits.finish(ms(20), face, (), "v")
    visits.end(End(RequestId(2), Outcome.LATE), ms(20))
    assert visits.accuracy == pytest.approx((0.5 + 0.5 * 0.1) / 2)
    assert [(route.stages, route.served) for route in visits.routes()] == [(("cut",), 1), (("cut", "face"), 0)]


def test_an_accuracy_that_nobody_knows() -> None:
    visits = Visits(GRAPH, ACCURACIES | {("cut", "w"): None})
    visits.begin(0, asked(1))
    visits.start(0, batch(0, "cut", (1, 0)))
    visits.finish(0, batch(0, "cut", (1, 0)), [(0, 0)], "w")
    visits.end(End(RequestId(1), Outcome.SERVED), 0)
    assert visits.accuracy is None
    assert Visits(GRAPH, {}).accuracy is None


@pytest.mark.parametrize(
    ("outcome", "at"),
    [(Outcome.DROPPED, "face"), (Outcome.REJECTED, "cut"), (Outcome.FAILED, "read"), (Outcome.DROPPED, "")],
)
def test_ends_count_at_the_stage_they_name(outcome: Outcome, at: str) -> None:
    visits = after_cut([(2, 1)])
    visits.end(End(RequestId(1), outcome, "slack 3.0 ms at join, as prose has it", stage=at), ms(11))
    assert visits.waiting == 0
    counted = {row.stage: row.dropped + row.rejected + row.failed for row in visits.stages()}
    assert counted == {name: int(name == at) for name in GRAPH.steps}


def test_an_end_that_names_no_stage_counts_where_the_request_waited() -> None:
    visits = after_cut([(2, 0), (2, 1)])
    visits.end(End(RequestId(1), Outcome.DROPPED, "the client went away"), ms(11))
    visits.end(End(RequestId(2), Outcome.DROPPED, "the client went away"), ms(11))
    assert {row.stage: row.dropped for row in visits.stages()} == {"cut": 0, "read": 1, "join": 0, "face": 0}


def test_what_is_at_fault_waits_nowhere_and_what_failed_waits_for_its_end() -> None:
    visits = after_cut([(2, 1), (4, 0)])  # four parts are more than the graph allows
    assert visits.waiting == 3
    visits.end(End(RequestId(2), Outcome.FAILED, "4 parts", stage="cut"), ms(10))
    read = batch(1, "read", (1, 1))
    visits.start(ms(11), read)
    visits.lose(ms(12), read)
    assert visits.waiting == 3, "it waits again, until its end is told"
    visits.end(End(RequestId(1), Outcome.FAILED, "nan", stage="read"), ms(12))
    assert {row.stage: row.failed for row in visits.stages()} == {"cut": 1, "read": 1, "join": 0, "face": 0}
    assert visits.waiting == 0


def test_a_visit_whose_replica_is_lost_waits_twice() -> None:
    graph = Graph([Step("a"), Step("b", ("a",))])
    rows: list[tuple[int, Record]] = [
        (0, StartReplica(ReplicaId(0), ReplicaSpec("a", "v", 1.0))),
        (0, asked(1)),
        (ms(5), batch(0, "a", (1, 0))),
        (ms(9), ReplicaLost(ReplicaId(0), "killed")),
        (ms(9), StartReplica(ReplicaId(0), ReplicaSpec("a", "v", 1.0))),
        (ms(12), batch(1, "a", (1, 0))),
        (ms(14), Finished(BatchId(1), ReplicaId(0), 1)),
        (ms(15), batch(2, "b", (1, 0))),
        (ms(16), BatchFailed(BatchId(2), ReplicaId(0), "nan")),
        (ms(16), End(RequestId(1), Outcome.FAILED, "nan", stage="b")),
    ]
    metrics = fold(rows, Metrics(start_ns=0, graph=graph))
    first, second = metrics.stages()
    assert (first.visits, first.mean_wait_ms, first.batches, first.failed) == (2, 4, 2, 0)
    assert (second.visits, second.mean_wait_ms, second.failed) == (1, 1, 1)
    assert metrics.wait_mean_ms == pytest.approx(3)
    assert metrics.wait_max_ms == 5
    assert metrics.routes() == []


def test_paths_keep_their_deadlines() -> None:
    ways = [Path(("a", "b"), ms(50)), Path(("a", "c"), ms(90))]
    steps = [Step("a"), Step("b", ("a",), (When("a", "k", (1,)),)), Step("c", ("a",), (When("a", "k", (2,)),))]
    visits = Visits(Graph(steps, ways, ms(100)), {})
    for number, way in ((1, (1, 0)), (2, (0, 1)), (3, (0, 0))):
        visits.begin(0, asked(number))
        one = batch(number, "a", (number, 0))
        visits.start(0, one)
        visits.finish(0, one, [way], "v")
        if number < 3:
            other = batch(number + 10, "b" if way[0] else "c", (number, 0))
            visits.start(0, other)
            visits.finish(0, other, (), "v")
        visits.end(End(RequestId(number), Outcome.SERVED), ms(number))
    assert {row.stages: row.slo_ms for row in visits.routes()} == {("a", "b"): 50, ("a", "c"): 90, ("a",): 100}
    assert visits.latencies_ms([0.5, 1]) == {("a",): [3, 3], ("a", "b"): [1, 1], ("a", "c"): [2, 2]}


def scenario(seed: int, rate: float, share: float, mean: float) -> dict[str, Any]:
    form = {"form": "amdahl", "gamma": 4, "epsilon": 1, "delta": 0, "eta": 2}

    def stage(name: str, accuracy: float, **how: Any) -> dict[str, Any]:
        profile = {"latency_ms": form, "max_batch": 4, "max_cores": 2, "load_s": 0, "memory_bytes": 1000}
        return {"name": name, "variants": [{"name": "v", "accuracy": accuracy, "profile": profile}], **how}

    return {
        "name": "x",
        "slo_ms": 120,
        "stages": [
            stage("cut", 0.9),
            stage("read", 0.8, after="cut", each={"output": "boxes", "mean": mean, "most": 40}),
            stage("check", 0.5, after="read", when={"output": "odd", "share": share}),
            stage("join", 0.7, after=["read", "check"], join=True),
            stage("face", 0.6, after="cut", when={"output": "kind", "is": 1, "share": share}),
        ],
        "system": "static",
        "cluster": {"nodes": [{"hardware": "custom", "cores": 8, "memory_bytes": 1_000_000}]},
        "trace": {"kind": "poisson", "rate": rate},
        "duration_s": 3,
        "seed": seed,
    }


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([5, 40, 120]), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([1, 4]))
def test_simulated_runs_against_a_plain_count(seed: int, rate: float, share: float, mean: float) -> None:
    made = load_scenario(scenario(seed, rate, share, mean))
    application = made.application
    log = MemoryLog()
    metrics = Metrics(start_ns=0, graph=application.graph, beliefs=beliefs_of(application))
    simulate(World.from_scenario(made, made.systems[0]), [metrics, log])
    started = Counter[str]()
    for _, record in log:
        if isinstance(record, StartBatch):
            started[record.stage] += len(record.requests)
    row = metrics.row(system="static", seed=seed)
    assert {stage.stage: stage.visits for stage in row.stages} == {
        name: started[name] for name in application.graph.steps
    }
    assert sum(stage.dropped for stage in row.stages) == row.dropped
    assert sum(route.answered for route in row.routes) == row.served + row.late
    assert sum(route.served for route in row.routes) == row.served
    accuracy = {"cut": 0.9, "read": 0.8, "check": 0.5, "join": 0.7, "face": 0.6}
    if row.routes:
        total = 0.0
        for route in row.routes:
            product = 1.0
            for name in route.stages:
                product *= accuracy[name]
            total += product * route.answered
        assert row.accuracy == pytest.approx(total / (row.served + row.late))
    assert metrics.seconds()[-1].queue == 0
    assert metrics.last_ns >= s(0)


@pytest.mark.parametrize("seed", [11, 17, 49, 62])
def test_random_worlds_lose_no_request_on_the_way(seed: int) -> None:
    """Faults, lost replicas, clients that go away: what the stages say adds up to how requests ended."""
    world = world_from_seed(seed)
    metrics, log = Metrics(start_ns=0, graph=world.application.graph), MemoryLog()
    simulate(world, [metrics, log], checkers=False)
    row = metrics.row(system="static", seed=seed)
    gone = sum(isinstance(record, End) and record.why == "the client went away" for _, record in log)
    assert row.dropped - gone <= sum(stage.dropped for stage in row.stages) <= row.dropped
    assert sum(stage.failed for stage in row.stages) == row.failed
    assert sum(stage.rejected for stage in row.stages) == row.rejected
    if len(row.stages) > 1:
        assert sum(route.answered for route in row.routes) == row.served + row.late
