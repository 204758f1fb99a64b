"""The figures of a run: of the story by hand, and of random and simulated runs against a plain count."""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.actions import AcquireNode, Decided, End, ResizeWorker, StartBatch, StartWorker, StopWorker, VersionState
from sloop.app.graph import Graph, GraphStage, When
from sloop.app.hardware import KINDS, Power
from sloop.app.load import load_application, load_scenario
from sloop.events import (
    WOKE,
    Deployed,
    Finished,
    WorkerCompleted,
    WorkerLost,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.profile.blocks import shared_rows
from sloop.profile.estimate import Estimate
from sloop.report import run_tables
from sloop.runlog import MemoryLog
from sloop.runlog.cost import NodeRow
from sloop.runlog.durations import durations_of
from sloop.runlog.run import RunState
from sloop.runlog.summary import LoadTime, RunSummary, ShadowRow
from sloop.runlog.versions import OnlyGraph
from sloop.sim import World, simulate
from sloop.systems.setup import beliefs_of, set_up
from sloop.units import NS_PER_S, ms, s
from sloop.vocabulary import (
    ALONE,
    BatchId,
    Node,
    Outcome,
    Path,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Shape,
    Slot,
    Worker,
    WorkerId,
    parts_at,
    shadow_in,
)
from tests.profile.test_blocks import EXAMPLE, PROFILE
from tests.runlog.story import (
    GRAPH,
    STORY,
    Parts,
    Rows,
    Told,
    arrived,
    asks,
    ended,
    finishes,
    goes_to,
    rolls,
    runs,
    started,
    starts,
    told,
)


class Known:
    """An estimate that never learns: 50 ms and 30 ms for each request."""

    def __init__(self, accuracy: float | None, batch_max: int) -> None:
        self.accuracy, self.batch_max = accuracy, batch_max

    def costs_ns(self, slot: Slot) -> Sequence[int]:
        return [0, *(ms(50.0 + 30.0 * batch) for batch in range(1, self.batch_max + 1))]

    def of(self, shape: Shape) -> "Known":
        return self


def known(accuracies: Mapping[str, float | None], batch_max: int = 4) -> OnlyGraph:
    """The parts of the story's application, with an estimate for each variant."""
    beliefs: dict[Any, Any] = {
        ("classify", variant, ""): Known(accuracy, batch_max) for variant, accuracy in accuracies.items()
    }
    return OnlyGraph(GRAPH, beliefs)


def test_the_story_in_one_row() -> None:
    node = Node("n0", "local", 8, 0, usd_per_h=3.6)
    summary = RunSummary([known({"small": 0.9})], nodes=[node], start_ns=0).fold(STORY)
    row = summary.row(system="static", seed=3, wall_s=0.5, assumed=["cold start", "cold start"])
    (stage,) = row.stages
    assert (stage.stage, stage.visits, stage.batches, stage.dropped, stage.rejected, stage.failed) == (
        *("classify", 5, 4),
        *(1, 1, 1),
    )
    expected = {
        "system": "static",
        "seed": 3,
        "requests": 6,
        "served": 1,
        "late": 2,
        "dropped": 1,
        "rejected": 1,
        "failed": 1,
        "attainment": 1 / 6,
        "goodput_rps": 1 / 2.5,
        "mean_ms": pytest.approx((120 + 220 + 220) / 3),
        "p50_ms": 220.0,
        "p99_ms": 220.0,
        "core_seconds": pytest.approx(2 * 1.0 + 4 * 0.2 + 2 * 0.8),
        "usd": pytest.approx((2 * 1.0 + 4 * 0.2 + 2 * 0.8) / 8 * 3.6 / 3600),
        "accuracy": pytest.approx(0.9),
        "cold_starts": 2,
        "node_usd": pytest.approx(2.5 * 3.6 / 3600),
        "nodes": [
            {
                "hardware": "local",
                "held_s": 2.5,
                "usd": pytest.approx(2.5 * 3.6 / 3600),
                "most": 1,
                "busy": None,
                "energy_wh": None,
            }
        ],
        "planner_errors": 0,
        "applications": [],
        "versions": [],
        "wall_s": 0.5,
        "assumed": ["cold start"],
        "routes": [],
    }
    found = msgspec.json.decode(msgspec.json.encode(row))
    assert {key: found[key] for key in expected} == expected
    assert row.violations == pytest.approx(5 / 6)


def test_the_story_by_second() -> None:
    first, second, third = RunSummary(GRAPH, start_ns=0).fold(STORY).seconds()
    assert (first.arrivals, first.served, first.late, first.rejected) == (4, 1, 2, 1)
    assert (first.cores, first.worst_ms) == (2.0, 220.0)
    assert first.violations == pytest.approx(3 / 4)
    assert (second.arrivals, second.dropped, second.failed, second.worst_ms) == (2, 1, 1, 0.0)
    assert second.cores == pytest.approx(4 * 0.2 + 2 * 0.8)
    assert (third.start_s, third.arrivals, third.cores, third.violations) == (2, 0, 0.0, 0.0)


def test_waits_batches_and_estimates() -> None:
    summary = RunSummary([known({"small": None})]).fold(STORY)
    assert summary.wait_mean_ms == pytest.approx((0 + 60 + 50 + 0 + 0) / 5)
    assert summary.wait_max_ms == 60
    assert summary.batch_sizes() == {1: 3, 2: 1}
    assert summary.batch_mean == pytest.approx(5 / 4)
    assert summary.accuracy is None
    (error,) = summary.estimate_errors()
    assert (error.stage, error.variant, error.hardware, error.batches) == ("classify", "small", "", 3)
    assert error.estimated_ms == pytest.approx((80 + 110 + 80) / 3)
    assert error.actual_ms == pytest.approx((80 + 150 + 100) / 3)
    assert error.mape == pytest.approx((0 / 80 + 40 / 110 + 20 / 80) / 3)
    assert error.bias == pytest.approx(330 / 270 - 1)


def test_batches_beyond_an_estimate_are_compared_with_nothing_and_weigh_in_the_accuracy() -> None:
    rows: Rows = [(0, StartWorker(ReplicaId(n), ReplicaSpec("classify", v, Slot(1.0)))) for n, v in enumerate("vw")]
    rows += [arrived(n, 0, 0) for n in range(4)]
    rows += [started(0, 0, 0, 0), started(0, 1, 1, 1, 2, 3)]
    rows += [(ms(120), Finished(BatchId(n), ReplicaId(n), 1)) for n in range(2)]
    summary = RunSummary([known({"v": 0.8, "w": 0.4}, batch_max=1)]).fold(rows)
    (error,) = summary.estimate_errors()
    assert (error.variant, error.batches, error.estimated_ms, error.actual_ms, error.mape) == ("v", 1, 80, 120, 0.5)
    assert summary.accuracy == pytest.approx((0.8 + 3 * 0.4) / 4)
    assert RunSummary(GRAPH).fold(rows).estimate_errors() == []


def test_a_run_without_records() -> None:
    summary = RunSummary(GRAPH)
    assert summary.seconds() == []
    row = summary.row(system="none", seed=None)
    assert (row.requests, row.attainment, row.goodput_rps, row.p99_ms, row.mean_ms) == (0, 1.0, 0.0, None, None)
    assert (summary.wait_mean_ms, summary.wait_max_ms, summary.batch_mean, summary.cores_mean) == (0, 0, 0, 0)
    assert (row.stages[0].mean_wait_ms, row.stages[0].mean_batch, row.accuracy) == (None, None, None)


def test_a_live_run_starts_when_its_log_does() -> None:
    summary = RunSummary(GRAPH).fold([(s(1_000_000), WOKE), (s(1_000_003), WOKE)])
    assert summary.duration_s == 3.0
    assert len(summary.seconds()) == 4


def test_growth_counts_from_its_order_and_shrinkage_from_its_effect() -> None:
    replica = ReplicaId(0)
    rows: Rows = [
        (0, StartWorker(replica, ReplicaSpec("classify", "v", Slot(1.0)))),
        (s(1), ResizeWorker(replica, 3.0)),
        (s(2), WorkerResized(replica, 3.0)),
        (s(3), ResizeWorker(replica, 1.0)),
        (s(4), WorkerResized(replica, 1.0)),
        (s(5), WorkerStopped(replica)),
        (s(6), WorkerResized(replica, 9.0)),
    ]
    summary = RunSummary(GRAPH, start_ns=0).fold(rows)
    assert [second.cores for second in summary.seconds()] == [1, 3, 3, 3, 1, 0, 0]
    assert summary.core_seconds == 11.0
    assert summary.cores_mean == pytest.approx(11 / 6)


def test_shadows_cost_their_cores_and_their_batches_are_counted_apart() -> None:
    """A body of 1 core, with a shadow of 2 from second 1 to second 4; one that dies at once costs nothing."""
    replica, shadow = ReplicaId(0), Worker(2.0, (0,))

    def run(number: int, at_s: float) -> Rows:
        start = StartBatch(BatchId(number), replica, "classify", (RequestId(number),))
        return [(s(at_s), start), (s(at_s) + ms(100), Finished(start.batch, replica, 1))]

    rows: Rows = [
        (0, StartWorker(replica, ReplicaSpec("classify", "v", Slot(1.0)))),
        (0, WorkerReady(replica)),
        *run(0, 0.1),
        (s(1), StartWorker(WorkerId(100), ReplicaSpec("classify", "v", Slot(1.0), shape=(shadow,)), replica)),
        *run(1, 1.1),
        (s(2), WorkerReady(WorkerId(100))),
        *run(2, 2.1),
        (s(2.5), StartBatch(BatchId(3), replica, "classify", (RequestId(3),))),
        (s(3), StopWorker(WorkerId(100), "why")),
        (s(3.1), Finished(BatchId(3), replica, 1)),
        (s(3.2), WorkerReady(WorkerId(100))),
        (s(4), WorkerStopped(WorkerId(100))),
        (s(5), StartWorker(WorkerId(101), ReplicaSpec("classify", "v", Slot(1.0), shape=(shadow,)), replica)),
        (s(5), WorkerLost(WorkerId(101), "it died")),
        (s(5), WorkerStopped(WorkerId(100))),
        *run(4, 5.1),
        (s(6), WorkerStopped(replica)),
    ]
    summary = RunSummary(GRAPH, start_ns=0).fold(rows)
    assert [second.cores for second in summary.seconds()] == [1, 3, 3, 3, 1, 1, 0]
    run_state = RunState(GRAPH, start_ns=0)
    for now_ns, record in rows:
        run_state.append(now_ns, record)
    assert (run_state.workers.shadows.count, run_state.workers.shadows.lost) == (2, 1)
    found = {shape: group for (_, _, _, shape), group in run_state.workers.groups.items()}
    assert {shadow_in(shape) for shape in found} == {None, shadow}
    assert len(found[ALONE].durations_ns[1]) == 3
    assert len(found[(shadow,)].durations_ns[1]) == 1
    assert sum(len(group.resized_ns[1]) for group in found.values()) == 1, "it ran with a shadow that was told to stop"
    assert durations_of(run_state, batches_min=1)["classify", "v", ""][1, 1.0] == [ms(100)] * 3
    shadows = summary.row(system="x", seed=None).shadows
    assert shadows == ShadowRow(attached=2, lost=1, batches=2, requests=2, rows=None), "no profile"
    assert ShadowRow(attached=2, lost=1, batches=2, requests=2, rows=None) == summary.figures()["shadows"]


@pytest.mark.parametrize("gone", [WorkerStopped(ReplicaId(0)), WorkerLost(ReplicaId(0), "it died")])
def test_a_pair_that_grows_costs_the_cores_of_both_until_its_body_is_gone(gone: WorkerStopped | WorkerLost) -> None:
    """A body of 1 core, of 3 from second 2 on, with a shadow of 2 from second 1 on."""
    replica, spec = ReplicaId(0), ReplicaSpec("classify", "v", Slot(1.0))
    rows: Rows = [
        (0, StartWorker(replica, spec)),
        (0, WorkerReady(replica)),
        (s(1), StartWorker(WorkerId(100), structs.replace(spec, shape=(Worker(2.0, (0,)),)), replica)),
        (s(2), ResizeWorker(replica, 3.0)),
        (s(3), WorkerResized(replica, 3.0)),
        (s(3), WorkerResized(replica, 3.0)),  # said twice
        (s(4), gone),
        (s(5), WOKE),
    ]
    summary, state = RunSummary(GRAPH, start_ns=0).fold(rows), RunState(GRAPH, start_ns=0)
    assert [second.cores for second in summary.seconds()] == [1, 3, 5, 5, 0, 0]
    for now_ns, record in rows:
        state.append(now_ns, record)
    assert list(state.workers.resize_ns["classify"]) == [s(1)]
    assert not state.workers.shadows.bodies


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (2, 1), (3, 2), (4, 3), (5, 0)])
def test_rows_that_shadows_compute_are_those_that_their_profile_gives_them(batch: int, rows: int) -> None:
    """A batch that is larger than the profile's largest runs on the body alone."""
    replica, shadow = ReplicaId(0), Worker(4.0, (0, 1))
    expected, _ = shared_rows(EXAMPLE, 2.0, shadow, 4)
    assert rows == (expected[batch] if batch <= 4 else 0)
    declared = OnlyGraph(GRAPH, {("classify", "v", ""): Estimate(PROFILE)})
    records: Rows = [
        (0, StartWorker(replica, ReplicaSpec("classify", "v", Slot(2.0)))),
        (0, WorkerReady(replica)),
        (0, StartWorker(WorkerId(100), ReplicaSpec("classify", "v", Slot(1.0), shape=(shadow,)), replica)),
        (0, WorkerReady(WorkerId(100))),
        (s(1), StartBatch(BatchId(0), replica, "classify", tuple(map(RequestId, range(batch))))),
        (s(2), Finished(BatchId(0), replica, 1)),
    ]
    row = RunSummary([declared], start_ns=0).fold(records).row(system="x", seed=None)
    assert row.shadows == ShadowRow(attached=1, lost=0, batches=1, requests=batch, rows=rows)
    assert row.pipelines is None
    [table] = run_tables.forms([("x", row)])
    assert table.rows == (("x", 1, 0, 1, batch, rows),)


def test_what_pipelines_did() -> None:
    """The first answers after 3 s and is whole after 4 and 6; the second is lost before its first answer, and one of
    its parts is whole after 5 s; the third completes without any batch."""

    def pair(number: int, at_s: float) -> Rows:
        spec = ReplicaSpec("classify", "v", Slot(1.0), shape=parts_at((0, 1, 3)))
        ids = [ReplicaId(2 * number + place) for place in range(2)]
        starts: Rows = [(s(at_s), StartWorker(id, spec, pipeline=ids[0], place=place)) for place, id in enumerate(ids)]
        return [*starts, *((s(at_s + 1), WorkerReady(id)) for id in ids)]

    def run(number: int, id: int, at_s: float, size: int) -> Rows:
        requests = tuple(map(RequestId, range(size)))
        start = StartBatch(BatchId(number), ReplicaId(id), "classify", requests)
        return [(s(at_s), start), (s(at_s + 1), Finished(start.batch, start.replica, 1))]

    rows: Rows = [
        *pair(0, 0),
        *run(0, 1, 2, 2),
        *run(1, 0, 3, 3),
        (s(4), WorkerCompleted(ReplicaId(0))),
        (s(6), WorkerCompleted(ReplicaId(1))),
        *run(2, 0, 6, 4),
        *pair(1, 10),
        (s(11), StartBatch(BatchId(3), ReplicaId(2), "classify", (RequestId(9),))),
        (s(12), WorkerLost(ReplicaId(2), "it died")),
        (s(15), WorkerCompleted(ReplicaId(3))),
        *run(4, 3, 15, 1),
        *pair(2, 20),
        *((s(22), WorkerCompleted(ReplicaId(id))) for id in (4, 5)),
    ]
    row = RunSummary(GRAPH, start_ns=0).fold(rows).row(system="x", seed=None)
    whole_s = (4 + 6 + 5 + 2 + 2) / 5
    assert row.pipelines is not None
    assert structs.asdict(row.pipelines) == {
        "pipelines": 3,
        "parts": 6,
        "lost": 1,
        "first_answer_s": 3.0,
        "whole_s": whole_s,
        "batches": 3,
        "requests": 6,
    }
    assert row.shadows is None
    [table] = run_tables.forms([("x", row)])
    assert table.rows == (("x", 3, 6, 1, 3.0, whole_s, 3, 6),)
    assert run_tables.forms([("y", RunSummary(GRAPH).row(system="y", seed=None))]) == []


def random_run(seed: int) -> Rows:
    """Requests of one stage through random batches; every end there is."""
    chance = random.Random(seed)
    rows: Rows = [(0, StartWorker(ReplicaId(0), ReplicaSpec("classify", "v", Slot(1.0))))]
    now_ns, waiting = 0, list[Request]()
    for number in range(chance.randint(1, 60)):
        now_ns += chance.randint(0, ms(400))
        request = Request(RequestId(number), now_ns - chance.randint(0, ms(50)), now_ns, now_ns + ms(200))
        rows.append((now_ns, request))
        waiting.append(request)
        if chance.random() < 0.5:
            batch = StartBatch(BatchId(number), ReplicaId(0), "classify", tuple(request.id for request in waiting))
            rows.append((now_ns, batch))
            now_ns += chance.randint(0, ms(300))
            rows.append((now_ns, Finished(batch.batch, batch.replica, 1)))
            rows.extend((now_ns, End(request.id, chance.choice(list(Outcome)))) for request in waiting)
            waiting.clear()
    return rows


@settings(max_examples=50)
@given(st.integers(0, 2**32))
def test_against_a_plain_count(seed: int) -> None:
    rows = random_run(seed)
    summary = RunSummary(GRAPH, start_ns=0).fold(rows)
    came = {record.id: (at_ns, record) for at_ns, record in rows if isinstance(record, Request)}
    ends = {record.request: (at_ns, record.outcome) for at_ns, record in rows if isinstance(record, End)}
    answered = sorted(
        at_ns - came[number][1].sent_ns
        for number, (at_ns, outcome) in ends.items()
        if outcome in {Outcome.SERVED, Outcome.LATE}
    )
    row = summary.row(system="x", seed=seed)
    assert row.requests == len(came)
    for outcome in Outcome:
        assert getattr(row, outcome) == sum(end is outcome for _, end in ends.values())
    for second in summary.seconds():
        here = {number for number, (at_ns, _) in came.items() if at_ns // NS_PER_S == second.start_s}
        assert second.arrivals == len(here)
        assert second.late == sum(ends[number][1] is Outcome.LATE for number in here & ends.keys())
    for quantile in (0.01, 0.5, 0.9, 0.99, 1.0):
        if answered:
            rank = max(0, math.ceil(round(quantile * len(answered), 6)) - 1)
            assert summary.latency_ms([quantile]) == [answered[rank] / 1e6]
    if answered:
        assert row.mean_ms == pytest.approx(sum(answered) / len(answered) / 1e6)


# Applications of several stages


def test_paths_keep_their_deadlines() -> None:
    paths = [Path(("a", "b"), ms(50)), Path(("a", "c"), ms(90))]
    steps = [
        GraphStage("a"),
        GraphStage("b", ("a",), (When("a", "k", (1,)),)),
        GraphStage("c", ("a",), (When("a", "k", (2,)),)),
    ]
    rows: Rows = [(0, StartWorker(ReplicaId(n), ReplicaSpec(stage, "v", Slot(1.0)))) for n, stage in enumerate("abc")]
    for id, counts in ((1, (1, 0)), (2, (0, 1)), (3, (0, 0))):
        rows += [arrived(id, 0, 0), started(id, id, 0, id, stage="a")]
        rows += [(ms(id), Finished(BatchId(id), ReplicaId(0), 1, (counts,)))]
        if id < 3:
            rows += [started(id, 10 + id, id, id, stage="b" if id == 1 else "c")]
            rows += [(ms(id), Finished(BatchId(10 + id), ReplicaId(id), 1))]
        rows += [ended(id, id, Outcome.SERVED)]
    summary = RunSummary(Graph(steps, paths, ms(100)), start_ns=0).fold(rows)
    assert {row.stages: row.slo_ms for row in summary.routes()} == {("a", "b"): 50, ("a", "c"): 90, ("a",): 100}
    latencies_ms = summary.route_latencies_ms([0.5, 1])
    assert latencies_ms == {("a",): [3, 3], ("a", "b"): [1, 1], ("a", "c"): [2, 2]}
    assert summary.slo_ms == 100


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


@settings(max_examples=12)
@given(st.integers(0, 1000), st.sampled_from([5, 40, 120]), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([1, 4]))
def test_simulated_runs_against_a_plain_count(seed: int, rate: float, share: float, mean: float) -> None:
    made = load_scenario(scenario(seed, rate, share, mean))
    log = MemoryLog()
    summary = RunSummary(set_up(made.deployment).parts(), start_ns=0)
    simulate(World.from_scenario(made, made.systems[0]), [summary, log])
    visits = Counter[str]()
    for _, record in log:
        if isinstance(record, StartBatch):
            visits[record.stage] += len(record.requests)
    row = summary.row(system="static", seed=seed)
    assert {stage.stage: stage.visits for stage in row.stages} == {
        name: visits[name] for name in made.application.graph.stages
    }
    assert sum(stage.dropped for stage in row.stages) == row.dropped
    assert sum(route.answered for route in row.routes) == row.served + row.late
    assert sum(route.served for route in row.routes) == row.served
    accuracy = {"cut": 0.9, "read": 0.8, "check": 0.5, "join": 0.7, "face": 0.6}
    if row.routes:
        total = sum(math.prod(accuracy[name] for name in route.stages) * route.answered for route in row.routes)
        assert row.accuracy == pytest.approx(total / (row.served + row.late))
    assert summary.deployment.only.waiting == 0


# Assumptions

AMDAHL = {"form": "amdahl", "gamma": 10, "epsilon": 0, "delta": 0, "eta": 1}


def assumed(profile: object, *batches: tuple[int, float]) -> tuple[str, ...]:
    """What a run leaned on that had batches of these sizes, on so many cores, of a variant with this profile."""
    application = load_application({"name": "x", "slo_ms": 9, "stages": [{"name": "a", "profile": profile}]})
    summary = RunSummary([OnlyGraph(application.graph, beliefs_of(application))])
    summary.append(0, StartWorker(ReplicaId(0), ReplicaSpec("a", "a", Slot(8.0, "local"))))
    for size, cores in batches:
        summary.append(0, WorkerResized(ReplicaId(0), cores))
        summary.append(0, StartBatch(BatchId(0), ReplicaId(0), "a", tuple(map(RequestId, range(size)))))
    return summary.row(system="x", seed=0).assumed


def test_an_assumed_profile_is_named_once_it_has_run() -> None:
    guess = {"latency_ms": AMDAHL, "max_batch": 4, "source": "a guess"}
    assert assumed(guess) == ()
    assert assumed(guess, (1, 1), (2, 1)) == ("a/a: assumed profile (a guess)",)


def test_a_fitted_profile_within_its_measurements_is_no_assumption() -> None:
    assert assumed("ResNet-T", (8, 8)) == ()


def test_what_lies_beyond_the_measurements_is_named_with_its_span() -> None:
    assert assumed("ResNet-T", (8, 8), (12, 8), (8, 16)) == (
        "a/a: extrapolated to batch 8–12 on 8–16 cores, measured batch 1–8 on 1–8 cores",
    )


# Several applications, versions and kinds of hardware


def one_batch(key: str, replica: int, kind: str, ids: Sequence[int], from_ms: float, to_ms: float) -> list[Told]:
    """A replica that starts with the run, and one batch on it; requests of `b` are late."""
    outcome = Outcome.LATE if key == "b" else Outcome.SERVED
    return [
        starts(0, replica, key, kind),
        *(asks(id, from_ms, key.partition("@")[0]) for id in ids),
        *(goes_to(from_ms, id, key) for id in ids),
        runs(from_ms, replica, replica, key, *ids),
        *finishes(to_ms, replica, replica, *ids, outcome=outcome),
    ]


NODES = [
    Node("n-fast", "fast", 4, 0, usd_per_h=7.2),
    Node("n-slow", "slow", 4, 0, usd_per_h=3.6, on_demand=True),
]


def of_two() -> RunSummary:
    """Two applications: `a` on both kinds, `b` on the slow one."""
    rows = told(
        (0, AcquireNode("n-slow")),
        (500, Decided("planner", "no new plan", application="b")),
        *one_batch("a", 0, "fast", [1, 2], 100, 150),
        *one_batch("a", 1, "slow", [3], 200, 280),
        *one_batch("b", 2, "slow", [4], 1100, 1200),
        (2000, WOKE),
    )
    return RunSummary([Parts("a"), Parts("b")], nodes=NODES, start_ns=0).fold(rows)


def test_a_row_of_several_applications_has_one_for_each() -> None:
    row = of_two().row(system="x", seed=1)
    a, b = row.applications
    assert [(r.name, r.version, r.slo_ms, r.requests, r.served, r.late, r.attainment) for r in (a, b)] == [
        *(("a", "", 100, 3, 3, 0, 1.0), ("b", "", 50, 1, 0, 1, 0.0)),
    ]
    assert (row.requests, row.served, row.late, row.attainment, row.p99_ms) == (4, 3, 1, 0.75, 100)
    assert (a.accuracy, b.accuracy, row.accuracy) == (0.9, 70, None), "their scales differ"
    assert (a.core_seconds, b.core_seconds, row.core_seconds) == (8, 4, 12)
    assert a.usd == pytest.approx((2 * 3.6 + 2 * 1.8) / 3600)
    assert b.usd == pytest.approx(2 * 1.8 / 3600)
    assert row.usd == pytest.approx(a.usd + b.usd)
    assert [(n.hardware, n.held_s, n.most) for n in row.nodes] == [("fast", 2, 1), ("slow", 2, 1)]
    assert row.node_usd == pytest.approx(2 * (7.2 + 3.6) / 3600)
    assert (row.planner_errors, row.versions, a.cold_starts, row.cold_starts) == (1, (), 2, 3)
    assert [stage.stage for stage in row.stages] == ["a/only", "b/only"]


def test_seconds_and_kinds_of_hardware_add_up_over_applications() -> None:
    summary = of_two()
    first, second, last = summary.seconds()
    assert (first.arrivals, first.cores, first.worst_ms) == (3, 6.0, 80)
    assert (second.arrivals, second.late, second.cores, last.arrivals) == (1, 1, 6.0, 0)
    assert summary.hardware_cores() == {"fast": [(0, 2), (1, 2)], "slow": [(0, 4), (1, 4)]}
    of_a = summary.applications["a"]
    assert [second.cores for second in of_a.seconds()][:2] == [4, 4]
    assert (of_a.wait_mean_ms, of_a.batch_mean, of_a.duration_s, of_a.cores_mean) == (0, 1.5, 2, 4)
    assert summary.wait_max_ms == 0


def test_energy_where_the_power_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    powers = {"fast": Power(10, 110)}
    monkeypatch.setattr("sloop.runlog.summary.power_of", lambda node: powers.get(node.hardware))
    fast, slow = of_two().row(system="x", seed=1).nodes
    assert fast.busy == pytest.approx(0.05 * 2 / (2 * 4))  # 50 ms on 2 of the 4 cores, in 2 s
    assert slow.busy == pytest.approx((0.08 + 0.1) * 2 / (2 * 4))
    assert fast.energy_wh == pytest.approx((10 + 100 * 0.0125) * 2 / 3600)
    assert slow.energy_wh is None


def test_an_accelerator_is_busy_while_any_batch_runs_on_it() -> None:
    node = KINDS["g3s.xlarge"].node("g")
    on_gpu = ReplicaSpec("classify", "small", Slot(0.5, "g3s.xlarge", "M60", 0.0), "g", "M60")
    rows: Rows = [
        *((0, StartWorker(ReplicaId(id), on_gpu)) for id in (0, 1)),
        *(arrived(id, 0, 0) for id in (1, 2)),
        *(started(0, id, id - 1, id) for id in (1, 2)),
        *((ms(1500), Finished(BatchId(id), ReplicaId(id - 1), 0)) for id in (1, 2)),
        (s(4), WOKE),
    ]

    def busy(records: Rows) -> NodeRow:
        [found] = RunSummary([known({})], nodes=[node], start_ns=0).fold(records).node_rows()
        return found

    alone = busy([row for row in rows if not isinstance(row[1], Finished | StartBatch) or row[1].replica == 0])
    assert (alone.busy, alone.energy_wh) == pytest.approx((0.375, (55 + 120 * 0.375) * 4 / 3600))
    assert busy(rows) == alone, "two at once"
    assert busy([row for row in rows if not isinstance(row[1], Finished)]).busy == 1, "they still run"
    lost: Rows = [row for row in rows if not (isinstance(row[1], Finished) and row[1].replica == 1)]
    lost.insert(-1, (s(3), WorkerLost(ReplicaId(1), "it died")))
    assert busy(lost).busy == 0.75
    row = RunSummary([known({})], nodes=[node], start_ns=0).fold(rows).row(system="x", seed=None)
    assert "the power of g3s.xlarge, from which the energy is estimated" in row.assumed


def test_cores_without_a_cap_are_all_busy_while_a_batch_runs_on_them() -> None:
    node = Node("n", "box", 4, 1 << 30, power_w=(30, 90))
    spec = ReplicaSpec("classify", "small", Slot(1.0, "box", is_capped=False), "n")
    rows: Rows = [
        *((0, StartWorker(ReplicaId(id), spec)) for id in (0, 1)),
        *(arrived(id, 0, 0) for id in (1, 2)),
        started(0, 1, 0, 1),
        started(s(1), 2, 1, 2),
        *((s(2), Finished(BatchId(id), ReplicaId(id - 1), 0)) for id in (1, 2)),
        (s(4), WOKE),
    ]
    (row,) = RunSummary([known({})], nodes=[node], start_ns=0).fold(rows).node_rows()
    assert (row.busy, row.energy_wh) == pytest.approx((0.5, (30 + 60 * 0.5) * 4 / 3600))


def test_the_power_of_a_users_kind_is_declared_and_not_assumed() -> None:
    node = Node("n", "box", 4, 1 << 30, power_w=(30, 90))
    spec = ReplicaSpec("classify", "small", Slot(2.0, "box"), "n")
    rows: Rows = [
        (0, StartWorker(ReplicaId(0), spec)),
        arrived(1, 0, 0),
        started(0, 1, 0, 1),
        (s(1), Finished(BatchId(1), ReplicaId(0), 0)),
        (s(2), WOKE),
    ]
    row = RunSummary([known({})], nodes=[node], start_ns=0).fold(rows).row(system="x", seed=None)
    assert row.nodes[0].energy_wh == pytest.approx((30 + 60 * 0.25) * 2 / 3600)
    assert not [line for line in row.assumed if "power" in line]


def test_estimates_and_assumptions_name_the_kind_of_hardware() -> None:
    summary = of_two()
    assert [(e.stage, e.hardware, e.batches, e.estimated_ms, e.actual_ms) for e in summary.estimate_errors()] == [
        *(("a/only", "fast", 1, 40, 50), ("a/only", "slow", 1, 80, 80), ("b/only", "slow", 1, 80, 100)),
    ]
    assert summary.assumed() == ("a/only/v on fast: assumed profile (us)",)
    started = summary.assumed_starts({"a/only/v": "a", "b/only/v on slow": "b"})
    assert started == (), "none of them was ready after a while"


def test_versions_of_an_application_have_rows_of_their_own() -> None:
    rows = told(
        (0, Deployed("a", "2", {})),
        rolls(0, "2", VersionState.CANARY, 0.5, "it is ready"),
        *one_batch("a", 0, "fast", [1], 100, 150),
        *one_batch("a@2", 1, "fast", [2, 3], 200, 240),
        rolls(1000, "1", VersionState.RETIRED, 0.0),
        (5000, WOKE),
    )
    summary = RunSummary([Parts("a")], nodes=NODES, start_ns=0, build=Parts).fold(rows)
    row = summary.row(system="x", seed=1)
    assert [(r.name, r.version, r.requests, r.p50_ms, r.core_seconds) for r in row.versions] == [
        *(("a", "1", 1, 50, 2), ("a", "2", 2, 40, 10)),
    ]
    assert (row.applications, row.requests) == ((), 3)
    assert row.accuracy == pytest.approx(0.9)
    assert [second.arrivals for second in summary.seconds()] == [3, 0, 0, 0, 0, 0]
    assert [second.cores for second in summary.seconds()] == [4, 2, 2, 2, 2, 2]


def test_requests_for_what_was_not_deployed_count_in_the_total() -> None:
    summary = RunSummary([Parts("a"), Parts("b")], start_ns=0, build=Parts)
    summary.fold([(0, Request(RequestId(1), 0, 0, 9, (), "c")), (0, End(RequestId(1), Outcome.REJECTED, "not served"))])
    row = summary.row(system="x", seed=1)
    assert (row.requests, row.rejected, [each.requests for each in row.applications]) == (1, 1, [0, 0])


# How long there was load


def load_of(rows: Rows) -> float:
    """In seconds."""
    load = LoadTime()
    for now_ns, record in rows:
        load.append(now_ns, record)
    return load.total_ns / NS_PER_S


def answered(id: int, at_ms: float, taken_ms: float) -> Rows:
    return [arrived(id, at_ms, at_ms), ended(at_ms + taken_ms, id, Outcome.SERVED)]


def test_load_lasts_from_the_first_request_to_the_end_of_the_last() -> None:
    assert load_of([]) == 0
    rows: Rows = [(0, WOKE), *answered(1, 5_000, 100), *answered(2, 14_900, 600), (ms(90_000), WOKE)]
    assert load_of(rows) == 10.5
    assert load_of(answered(1, 5_000, 4)) == 1.0, "a single request is no load of 250 a second"


def test_pauses_of_a_minute_are_no_load() -> None:
    """One call to try it, and a load of ten seconds an hour later; shorter pauses belong to the load."""
    rows = [*answered(1, 0, 10), *answered(2, 3_600_000, 10), *answered(3, 3_609_000, 1_000)]
    assert load_of(rows) == 11.0
    assert load_of([*answered(1, 0, 10), *answered(2, 59_000, 10)]) == 59.01
    waits: Rows = [arrived(1, 0, 0), arrived(2, 70_000, 70_000), ended(80_000, 1, Outcome.LATE)]
    assert load_of(waits) == 80.0, "a request was open all the time"
    assert load_of([ended(80_000, 1, Outcome.LATE)]) == 0, "it arrived before the log begins"
