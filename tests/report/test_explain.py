"""Answers to why: from the run told by hand, from requests that fan out, and from simulated runs."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.actions import (
    AcquireNode,
    Decided,
    End,
    RequestPlan,
    Rollout,
    StartBatch,
    StartWorker,
    StopWorker,
    Transfer,
    VersionState,
)
from sloop.app.graph import Each, Graph, GraphStage, When
from sloop.errors import InputError
from sloop.events import (
    WOKE,
    BatchFailed,
    BatchLost,
    Deployed,
    Finished,
    NodeReady,
    Planned,
    WorkerCompleted,
    WorkerLost,
    WorkerProgressed,
    WorkerReady,
)
from sloop.profile.estimate import Estimate
from sloop.profile.profile import Profile, Quadratic
from sloop.report.explain.decision import DecisionStory, explain_decision, explain_deployment, rollouts
from sloop.report.explain.misses import miss_reasons
from sloop.report.explain.request import RequestStory, explain_request
from sloop.report.explain.texts import plan_text
from sloop.runlog import MemoryLog, Record
from sloop.runlog.fold import DeploymentState
from sloop.runlog.versions import OnlyGraph
from sloop.sim import simulate
from sloop.sim.worlds import random_world
from sloop.units import ms, s
from sloop.vocabulary import (
    BatchId,
    Canary,
    Group,
    Node,
    Outcome,
    Plan,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Slot,
    StagePlan,
    Worker,
    WorkerId,
    parts_at,
)
from sloop.workload import Work, trace_of
from tests.runlog.story import (
    GRAPH,
    STORY,
    Parts,
    Rows,
    arrived,
    asks,
    ended,
    finishes,
    fresh_state,
    goes_to,
    rolls,
    runs,
    started,
    starts,
    told,
)
from tests.sim.scene import WORK_CONSERVING, provisioned, with_clients, world


def request_story(
    records: Iterable[tuple[int, Record]], request: int, graph: Graph, beliefs: Any = None
) -> RequestStory:
    return explain_request(records, request, DeploymentState([OnlyGraph(graph, beliefs)]))


def decision_story(records: Iterable[tuple[int, Record]], at_ns: int, graph: Graph) -> DecisionStory:
    return explain_decision(records, at_ns, DeploymentState([OnlyGraph(graph)]))


def sum_of_parts(story: RequestStory) -> float:
    parts_ms = story.network_ms, story.edge_ms, story.wait_ms, story.service_ms, story.transport_ms, story.lost_ms
    return sum(parts_ms)


def test_a_late_request() -> None:
    story = request_story(STORY, 2, GRAPH)
    assert (story.outcome, story.why, story.total_ms) == ("late", "20 ms past its deadline", 220)
    assert (story.network_ms, story.edge_ms, story.wait_ms) == (10, 0, 60)
    assert (story.service_ms, story.transport_ms, story.lost_ms, story.unaccounted_ms) == (148, 2, 0, 0)
    assert story.summary == (
        "late: 20 ms past its deadline. "
        "It took 220.0 ms, 20.0 ms more than its 200 ms: "
        "10.0 ms in the network, 60.0 ms in queues, 148.0 ms in service, 2.0 ms in transport"
    )
    assert [(step.at_s, step.what, step.why) for step in story.steps] == [
        (0.11, "sent; an answer is due within 200.0 ms", ""),
        (
            0.12,
            "arrived after 10.0 ms in the network and 0.0 ms in the edge, 190.0 ms left; "
            "0 requests waiting, 1 replica ready, 1 busy",
            "",
        ),
        (
            0.12,
            "plan in force since 0.000 s: classify: 1 × small on 2 cores, batches up to 4",
            "1 replica holds 20 rps",
        ),
        (
            0.18,
            "started with request 3, in batch no. 1 at classify on replica 0 (small on 2 cores) "
            "after 60.0 ms in the queue",
            "",
        ),
        (0.33, "the batch finished after 150.0 ms", ""),
        (0.33, "late", "20 ms past its deadline"),
    ]


def test_a_request_whose_replica_was_lost() -> None:
    story = request_story(STORY, 5, GRAPH)
    assert (story.outcome, story.wait_ms, story.lost_ms, story.total_ms) == ("dropped", 300, 100, 400)
    assert [step.what for step in story.steps][-3:] == [
        "replica 0 was lost, and the batch with it",
        "while it waited, replica 1 became ready",
        "dropped while it waited; 1 replica ready",
    ]


def test_a_request_that_waits_for_a_cold_start_is_told_its_steps() -> None:
    rows: Rows = [
        *((0, StartWorker(ReplicaId(number), ReplicaSpec("a", "v", Slot(1.0), node="n0"))) for number in range(2)),
        (ms(100), WorkerProgressed(ReplicaId(0), "fetching")),
        (ms(200), Request(RequestId(1), ms(200), ms(200), ms(400))),
        (s(3), WorkerProgressed(ReplicaId(0), "loading")),
        (s(4), WorkerReady(ReplicaId(0))),
        ended(5000, 1, Outcome.DROPPED, "too late"),
    ]
    steps = [step.what for step in request_story(rows, 1, Graph([GraphStage("a")])).steps]
    assert steps[1].endswith("0 replicas ready, 2 starting (1 fetching, 1 queued)")
    assert steps[2:] == [
        "while it waited, replica 0 became ready (queued 0.1 s, fetching 2.9 s, loading 1 s)",
        "dropped while it waited; 1 replica ready, 1 starting (queued)",
    ]


def test_a_request_whose_replica_was_stuck() -> None:
    rows: Rows = [STORY[1], arrived(1, 0, 0), started(5, 0, 0, 1)]
    rows += [(ms(50), StopWorker(ReplicaId(0), "its batch has run too long")), ended(70, 1, Outcome.DROPPED)]
    story = request_story(rows, 1, GRAPH)
    assert (story.wait_ms, story.lost_ms, story.total_ms) == (25, 45, 70)
    assert story.steps[-2].what == "replica 0 was given up, and the batch with it"


def test_rejected_failed_and_cut_off() -> None:
    assert request_story(STORY, 4, GRAPH).steps[-1].why == "the queue is full"
    failed = request_story(STORY, 6, GRAPH)
    assert (failed.outcome, failed.service_ms) == ("failed", 50)
    assert failed.steps[-2].what == "the client went away"
    cut = request_story(STORY[:12], 2, GRAPH)
    assert (cut.outcome, cut.total_ms) == ("open", None)


def test_an_unknown_request_is_refused() -> None:
    with pytest.raises(InputError, match="request 99 is not in this log") as caught:
        request_story(STORY, 99, GRAPH)
    assert caught.value.help == "the log has requests 1 to 6"
    with pytest.raises(InputError) as caught:
        request_story([], 1, GRAPH)
    assert caught.value.help == "the log has no requests at all"


def test_estimated_and_actual_side_by_side() -> None:
    estimates = {
        ("classify", "small", ""): Estimate(Profile(latency_ms=Quadratic(0, 30, 50), max_batch=4, max_cores=8))
    }
    story = request_story(STORY, 2, GRAPH, estimates)
    assert "estimated P99 110.0 ms" in story.steps[3].what
    assert story.steps[4].what == "the batch finished after 150.0 ms, 36% longer than the estimated P99"
    assert "1 busy (the next one free in an estimated 60.0 ms)" in story.steps[1].what


def test_plans_and_shortages_while_it_waited() -> None:
    spec = ReplicaSpec("a", "v", Slot(1.0))
    rows: Rows = [
        (0, Request(RequestId(1), 0, 0, s(1))),
        (ms(1), Decided("plan", "a request waits", plan=Plan((), "a request waits"))),
        (ms(2), Decided("shortage", "no node has room", "a")),
        (ms(3), StartWorker(ReplicaId(0), spec)),
        (ms(9), WorkerReady(ReplicaId(0))),
        started(9, 0, 0, 1, stage="a"),
        (ms(19), BatchFailed(BatchId(0), ReplicaId(0), "nan", "ValueError: nan (a.py:3)")),
        ended(19, 1, Outcome.FAILED, "nan"),
    ]
    story = request_story(rows, 1, Graph([GraphStage("a")]))
    assert [step.what for step in story.steps] == [
        "sent; an answer is due within 1000.0 ms",
        "arrived after 0.0 ms in the network and 0.0 ms in the edge, 1000.0 ms left; "
        "0 requests waiting, 0 replicas ready",
        "while it waited, a new plan: nothing",
        "while it waited, the cluster fell short of the plan",
        "while it waited, replica 0 became ready",
        "started alone, in batch no. 0 at a on replica 0 (v on 1 core) after 9.0 ms in the queue",
        "the batch failed",
        "failed",
    ]
    assert story.steps[-2].why == "ValueError: nan (a.py:3)"
    assert (story.wait_ms, story.service_ms) == (9, 10)


def test_tries_of_a_request_that_shared_a_failed_batch() -> None:
    rows: Rows = [
        STORY[1],
        (ms(10), Request(RequestId(1), ms(10), ms(10), ms(210))),
        (ms(10), Request(RequestId(2), ms(10), ms(10), ms(210))),
        started(10, 0, 0, 1, 2),
        (ms(15), BatchFailed(BatchId(0), ReplicaId(0), "the model raised ValueError")),
        started(15, 1, 0, 1),
        (ms(20), Finished(BatchId(1), ReplicaId(0), ms(5))),
        ended(20, 1, Outcome.SERVED),
    ]
    story = request_story(rows, 1, GRAPH)
    assert [step.what for step in story.steps][-4:-2] == [
        "the batch failed: each half of its requests is tried again, in a batch of its own",
        "started alone, in batch no. 1 at classify on replica 0 (small on 2 cores) after 0.0 ms in the queue",
    ]
    assert (story.service_ms, story.total_ms) == (10, 10)


def test_time_in_the_edge_is_time() -> None:
    """Live, the core hears of a request at the end of the event loop's turn: some 0.9 ms after it arrived."""
    rows: Rows = [STORY[1], (ms(10.9), Request(RequestId(1), ms(10), ms(10), ms(210))), started(10.9, 0, 0, 1)]
    rows += [(ms(15), Finished(BatchId(0), ReplicaId(0), ms(3))), ended(15, 1, Outcome.SERVED)]
    story = request_story(rows, 1, GRAPH)
    assert (story.network_ms, story.edge_ms, story.total_ms) == (0, 0.9, 5)
    assert "0.0 ms in the network and 0.9 ms in the edge" in story.steps[1].what
    assert sum_of_parts(story) == pytest.approx(5)


# Several batches at once

FANNED = Graph(
    [
        GraphStage("cut"),
        GraphStage("read", ("cut",), each=Each("cut", "boxes", mean=2, most=3)),
        GraphStage("join", ("read",), join=True),
        GraphStage("face", ("cut",), when=(When("cut", "kind", (1,), 0.5),)),
    ],
    slo_ns=ms(500),
)


def fanned(*rows: Any) -> Rows:
    """Request 1 is cut from 2 to 10 ms into two parts and a face."""
    starts = [StartWorker(ReplicaId(n), ReplicaSpec(stage, "v", Slot(1.0))) for n, stage in enumerate(FANNED.stages)]
    starts.append(StartWorker(ReplicaId(9), ReplicaSpec("read", "v", Slot(1.0))))
    return [
        *((0, start) for start in starts),
        (ms(1), Request(RequestId(1), 0, ms(1), ms(500))),
        started(2, 0, 0, 1, stage="cut"),
        (ms(10), Finished(BatchId(0), ReplicaId(0), ms(7), ((2, 1),))),
        *((ms(at_ms), record) for at_ms, record in rows),
    ]


def part(batch: int, replica: int, stage: str, *parts: int) -> StartBatch:
    return StartBatch(BatchId(batch), ReplicaId(replica), stage, (RequestId(1),) * len(parts), parts)


IN_PARTS = fanned(
    (10, part(1, 1, "read", 0)),
    (11, part(2, 3, "face", 0)),
    (13, part(3, 9, "read", 1)),
    (20, Finished(BatchId(1), ReplicaId(1), ms(9))),
    (22, Finished(BatchId(2), ReplicaId(3), ms(10))),
    (30, Finished(BatchId(3), ReplicaId(9), ms(15))),
    (31, part(4, 2, "join", 0)),
    (40, Finished(BatchId(4), ReplicaId(2), ms(8))),
    (40, End(RequestId(1), Outcome.SERVED)),
)


def test_every_part_and_branch_has_its_own_times() -> None:
    """Batches that run at the same time used to overwrite each other, so that sums did not add up."""
    story = request_story(IN_PARTS, 1, FANNED)
    assert [(v.stage, v.part, v.wait_ms, v.service_ms, v.transport_ms, v.critical) for v in story.visits] == [
        ("cut", 0, 1, 7, 1, True),
        ("read", 0, 0, 9, 1, False),
        ("read", 1, 3, 15, 2, True),
        ("face", 0, 1, 10, 1, False),
        ("join", 0, 1, 8, 1, True),
    ]
    assert (story.network_ms, story.wait_ms, story.service_ms, story.transport_ms) == (1, 5, 30, 4)
    assert sum_of_parts(story) == story.total_ms == 40
    assert story.summary.endswith("4.0 ms in transport on its critical path; 2 visits ran at the same time")
    text = " ".join(step.what for step in story.steps)
    assert "started alone, in batch no. 3 at read, part 1 on replica 9 (v on 1 core)" in text


def test_a_drop_in_one_branch_counts_the_time_there() -> None:
    rows = fanned(
        (10, part(1, 1, "read", 0, 1)),
        (15, End(RequestId(1), Outcome.DROPPED, "too late", stage="face")),
    )
    story = request_story(rows, 1, FANNED)
    critical = [(visit.stage, visit.critical) for visit in story.visits]
    assert critical == [("cut", True), ("read", False), ("read", False), ("face", True)]
    assert (story.wait_ms, story.total_ms, sum_of_parts(story)) == (1 + 5, 15, 15)
    assert story.steps[-2].what.startswith(
        "started with other parts of it, in batch no. 1 at read, part 1 on replica 1"
    )


def test_what_the_log_does_not_explain_is_said() -> None:
    rows: Rows = [STORY[1], arrived(1, 0, 0), started(5, 0, 0, 1)]
    rows += [(ms(15), Finished(BatchId(0), ReplicaId(0), ms(10))), ended(19, 1, Outcome.SERVED)]
    story = request_story(rows, 1, GRAPH)
    assert story.unaccounted_ms == 4
    assert story.summary.endswith("4.0 ms are not accounted for: the log does not say where it was")


@settings(max_examples=6)
@given(st.integers(0, 60))
def test_in_random_worlds_parts_add_up_to_the_total(seed: int) -> None:
    world, log = random_world(seed), MemoryLog()
    simulate(world, [log])
    ends = [record.request for _, record in log if isinstance(record, End)]
    for request in ends[:: max(1, len(ends) // 8)]:
        story = request_story(log, request, world.application.graph)
        assert story.unaccounted_ms == pytest.approx(0, abs=1e-6), (seed, request)
        assert sum_of_parts(story) == pytest.approx(story.total_ms), (seed, request)


# Decisions and reasons


def test_a_decision() -> None:
    story = decision_story(STORY, ms(1100), GRAPH)
    assert story.summary == "since 1.000 s: classify: 1 × small on 4 cores, batches up to 4"
    assert story.why == "demand doubled"
    assert [(step.at_s, step.what, step.why) for step in story.steps] == [
        (
            1.0,
            "what was known: arrivals in the last seconds: 4; 3 of the 4 that have ended were missed; "
            "0 requests waiting; 1 replica ready",
            "",
        ),
        (
            1.0,
            "decided: classify: 1 × small on 4 cores, batches up to 4 "
            "(was classify: 1 × small on 2 cores, batches up to 4)",
            "demand doubled",
        ),
        (1.0, "resize replica 0", "the plan asks for 4 cores"),
        (
            1.1,
            "in force at the instant asked for: 1 replica ready, 1 busy; "
            "arrivals in the last seconds: 4; 3 of the 4 that have ended were missed",
            "",
        ),
    ]


def test_before_anything_was_decided() -> None:
    with pytest.raises(InputError, match="nothing had been decided") as caught:
        decision_story(STORY[1:], ms(500), GRAPH)
    assert "the log runs from 0.000 s" in caught.value.help
    with pytest.raises(InputError) as caught:
        decision_story([], 0, GRAPH)
    assert "the log is empty" in caught.value.help


def test_an_infeasible_plan_says_so() -> None:
    plan = Plan((), "no core count is enough", feasible=False)
    story = decision_story([(0, Decided("plan", plan.why, plan=plan))], 0, GRAPH)
    assert story.summary.endswith("no plan met every deadline, this was the best one found")


def test_plans_and_their_differences_in_words() -> None:
    one = StagePlan("a", (Group(ReplicaSpec("a", "v", Slot(2.0, "x", "T4", 0.25)), 3),), 8)
    assert plan_text(Plan((one,), "")) == "a: 3 × v on 2 cores and 25% of a T4 of x, batches up to 8"
    spec = ReplicaSpec("a", "v", Slot(1.0, "x", "T4", 0.0), "x-0", "T4-1")
    placed = StagePlan("a", (Group(spec, 1), Group(structs.replace(spec, slot=Slot(1.0, "x", "T4", 0.025)), 1)), 4)
    assert plan_text(Plan((placed,), "")) == (
        "a: 1 × v on 1 core and a shared T4 of x, T4-1 of x-0 + 1 × v on 1 core and 2.5% of a T4 of x, T4-1 of x-0, "
        "batches up to 4"
    )
    assert plan_text(Plan((StagePlan("a", (), 1),), "")) == "a: no replica, batches up to 1"
    assert plan_text(Plan((), "")) == "nothing"
    plans = [Plan((one,), "x"), Plan((one,), "y"), Plan((one, StagePlan("b", (), 1)), "z")]
    rows: Rows = [(s(at), Decided("plan", plan.why, plan=plan)) for at, plan in enumerate(plans)]
    changes = [decision_story(rows, s(at), GRAPH).steps[1].what.split("(")[1] for at in range(3)]
    assert changes == ["the first plan)", "nothing changed)", "new: b)"]


def test_reasons_are_counted_numbers_aside() -> None:
    found = miss_reasons(STORY)
    assert [(reason.outcome, reason.why, reason.count, reason.first_request) for reason in found] == [
        ("late", "20 ms past its deadline", 2, 2),
        ("dropped", "its deadline passed 200 ms ago", 1, 5),
        ("failed", "the client went away", 1, 6),
        ("rejected", "the queue is full", 1, 4),
    ]


def test_numbers_that_differ_become_ranges() -> None:
    """Digits of a name are no numbers: `read2` and `read3` are different reasons."""
    texts = [
        "1,100 requests wait at read2, about 110.5 ms of work",
        "11 requests wait at read2, about 90 ms of work",
        "14 requests wait at read2, about 150 ms of work",
        "14 requests wait at read3, about 150 ms of work",
    ]
    rows = [(ms(at), End(RequestId(at), Outcome.DROPPED, why)) for at, why in enumerate(texts)]
    assert [(reason.why, reason.count) for reason in miss_reasons(rows)] == [
        ("11–1,100 requests wait at read2, about 90–150 ms of work", 3),
        ("14 requests wait at read3, about 150 ms of work", 1),
    ]
    rows = [(ms(at), End(RequestId(at), Outcome.DROPPED, f"slack {slack} ms")) for at, slack in enumerate((-8.5, 2))]
    assert miss_reasons(rows)[0].why == "slack -8.5 to 2 ms"


def test_in_time_and_open_requests_say_how_much_of_the_deadline_they_used() -> None:
    rows: Rows = [(0, Request(RequestId(1), 0, 0, ms(100))), ended(2, 1, Outcome.SERVED, "")]
    story = request_story(rows, 1, Graph([GraphStage("a")]))
    assert story.summary == "served. It took 2.0 ms of its 100 ms: 2.0 ms in queues"
    assert "So far, of its 200 ms: 10.0 ms in the network" in request_story(STORY[:12], 2, GRAPH).summary


def test_a_batch_that_has_run_as_long_as_estimated_says_so() -> None:
    estimates = {("classify", "small", ""): Estimate(Profile(latency_ms=Quadratic(0, 0, 1), max_batch=4, max_cores=8))}
    assert "free at any moment" in request_story(STORY, 2, GRAPH, estimates).steps[1].what


def test_events_about_unknown_batches_do_no_harm() -> None:
    rows: Rows = [*STORY[:9], (ms(200), Finished(BatchId(77), ReplicaId(0), 1)), *STORY[12:]]
    assert request_story(rows, 2, GRAPH).outcome == "late"


# Several applications, versions and kinds of hardware

NODES = [Node("n-fast", "fast", 8, 0), Node("n-slow", "slow", 4, 0, on_demand=True)]


def state_of(*names: str) -> DeploymentState:
    return DeploymentState([Parts(name) for name in names], nodes=NODES, build=Parts)


def planned(at_ms: float, key: str, count: int, why: str, kind: str = "fast") -> tuple[float, Decided]:
    groups = (Group(ReplicaSpec(f"{key}/only", "v", Slot(2.0, kind)), count),)
    plan = Plan((StagePlan(f"{key}/only", groups, 1),), why)
    return at_ms, Decided("plan", why, plan=plan, application=key)


CANARY: Rows = told(
    planned(0, "a", 1, "it is the first"),
    *(starts(0, 0, "a"), (0, WorkerReady(ReplicaId(0)))),
    (1000, Deployed("a", "2", {}, Canary(0.25))),
    rolls(1000, "2", VersionState.STARTING, 0.0, "deployed"),
    planned(1000, "a@2", 1, "for a quarter"),
    *(starts(1000, 1, "a@2", "slow"), (1500, WorkerReady(ReplicaId(1)))),
    rolls(2000, "2", VersionState.CANARY, 0.25, "it is ready"),
    *(asks(1, 2100, "a"), goes_to(2100, 1, "a"), runs(2100, 1, 0, "a", 1), *finishes(2140, 1, 0, 1)),
    *(asks(2, 2200, "a"), goes_to(2200, 2, "a@2"), runs(2200, 2, 1, "a@2", 2)),
    *(asks(3, 2210, "a"), goes_to(2210, 3, "a@2"), asks(4, 2215, "b"), asks(5, 2220, "a", version="2")),
    goes_to(2220, 5, "a@2"),
    *finishes(2280, 2, 1, 2),
    (2290, Decided("shortage", "no node has room for a replica of b", application="b")),
    (2295, Decided("node", "acquires 1 node of slow")),
    (2300, NodeReady(NODES[1])),
    rolls(2305, "2", VersionState.RETIRING, 0.0, "rolled back: 0.0% of 9 requests in time"),
    (2311, End(RequestId(3), Outcome.DROPPED, "slack -1.0 ms at a@2/only", stage="a@2/only")),
    (2316, End(RequestId(4), Outcome.REJECTED, "3 requests wait at b/only", stage="b/only")),
    (2321, End(RequestId(5), Outcome.DROPPED, "slack -1.5 ms at a@2/only", stage="a@2/only")),
    *(asks(6, 2400, "c"), (2400, End(RequestId(6), Outcome.REJECTED, "application 'c' is not served"))),
)


def test_a_request_names_its_application_and_its_version_and_why_it_went_there() -> None:
    story = explain_request(CANARY, 3, state_of("a", "b"))
    assert (story.application, story.version, story.outcome, story.wait_ms) == ("a", "2", "dropped", 101)
    assert [(step.what, step.why) for step in story.steps] == [
        ("sent; an answer is due within 100.0 ms", ""),
        (
            "arrived after 0.0 ms in the network and 0.0 ms in the edge, 100.0 ms left, for application a; "
            "0 requests waiting, 1 replica ready, 1 busy (the next one free in an estimated 70.0 ms)",
            "",
        ),
        ("goes to version 2", "it is a canary that serves 25% of the requests"),
        ("plan in force since 1.000 s: a@2/only: 1 × v on 2 cores of fast, batches up to 1", "for a quarter"),
        ("while it waited, nodes changed", "acquires 1 node of slow"),
        ("while it waited, node n-slow became ready", ""),
        ("while it waited, version 2 is retiring", "rolled back: 0.0% of 9 requests in time"),
        ("dropped while it waited; 1 replica ready", "slack -1.0 ms at a@2/only"),
    ]
    served = explain_request(CANARY, 2, state_of("a", "b"))
    assert (
        "on replica 1 (v on 2 cores of slow) after 0.0 ms in the queue; estimated P99 80.0 ms" in served.steps[4].what
    )
    steady = explain_request(CANARY, 1, state_of("a", "b"))
    assert (steady.version, steady.steps[2].why) == ("1", "it is the version that serves 75% of the requests")
    chosen = explain_request(CANARY, 5, state_of("a", "b"))
    assert chosen.steps[2].why == "the client asked for this version"


def test_a_request_of_an_application_that_nobody_serves() -> None:
    story = explain_request(CANARY, 6, state_of("a", "b"))
    assert (story.application, story.version, story.why) == ("c", "", "application 'c' is not served")
    assert [step.what.partition(" ")[0] for step in story.steps] == ["sent;", "arrived", "rejected"]
    assert sum_of_parts(story) == story.total_ms == 0


def test_what_happens_to_others_is_no_reason() -> None:
    """The shortage of b is not told with requests of a, and the other way round."""
    of_b = explain_request(CANARY, 4, state_of("a", "b"))
    told_of_b = " ".join(step.what for step in of_b.steps)
    assert "fell short" in told_of_b
    assert "retiring" not in told_of_b
    assert (of_b.application, of_b.version) == ("b", "1")


def test_a_request_that_comes_when_the_old_version_ends() -> None:
    rows = told(
        (0, Deployed("a", "2", {})),
        rolls(0, "2", VersionState.SERVING, 1.0),
        *(asks(1, 5, "a"), rolls(5, "1", VersionState.RETIRED, 0.0), starts(5, 0, "a@2"), runs(5, 0, 0, "a@2", 1)),
        *finishes(15, 0, 0, 1),
    )
    story = explain_request(rows, 1, state_of("a"))
    assert (story.version, story.wait_ms, story.total_ms, story.unaccounted_ms) == ("2", 0, 10, 0)


def test_numbers_of_requests_have_gaps_with_several_applications() -> None:
    rows = told(asks(1, 0, "a"), asks(7, 0, "a"))
    with pytest.raises(InputError) as caught:
        explain_request(rows, 4, state_of("a"))
    assert caught.value.help == "the log has requests 1 to 7, but not every number between them"


SHARED: Rows = told(
    *(planned(0, "a", 1, "one"), planned(0, "b", 1, "one"), starts(0, 0, "a")),
    (500, asks(1, 500, "a")[1]),
    (900, RequestPlan(1)),
    (950, asks(2, 950, "a")[1]),
    (1000, Planned(1, {})),
    planned(1000, "a", 3, "limited to 6 cores of fast by the other applications: 5 hold 99 rps"),
    planned(1000, "b", 1, "two hold it", kind="slow"),
    (1100, Decided("shortage", "no node has room for a replica of v", stage="a/only", application="a")),
    (1150, Decided("shortage", "no node has room for b", stage="b/only", application="b")),
    *((1200, Decided("node", "acquires 1 node of slow: 1 replica has no room")), (1200, AcquireNode("n-slow"))),
    (1300, Rollout("a", "1", VersionState.SERVING, 1.0, "said again")),
)


def test_nodes_that_are_not_rented_are_called_so() -> None:
    story = explain_decision(SHARED, ms(1100), state_of("a", "b"), "a")
    assert "nodes: fast: 1 ready; slow: 1 not rented" in [step.what for step in story.steps]


def test_a_decision_among_several_applications() -> None:
    story = explain_decision(SHARED, ms(1500), state_of("a", "b"), "a")
    assert (story.application, story.version) == ("a", "1")
    assert story.summary == "since 1.000 s: a/only: 3 × v on 2 cores of fast, batches up to 1"
    assert story.why.startswith("limited to 6 cores of fast by the other applications")
    assert [(step.at_s, step.what, step.why) for step in story.steps if step.at_s != 1.0] == [
        (
            0.9,
            "what was known when the plan was requested: arrivals in the first second so far: 1; none has ended; 1 "
            "request waiting; 0 replicas ready, 1 starting (queued)",
            "",
        ),
        (1.1, "shortage at a/only", "no node has room for a replica of v"),
        (1.2, "node", "acquires 1 node of slow: 1 replica has no room"),
        (1.3, "version 1 is serving with 100% of the requests", "said again"),
        (
            1.5,
            "in force at the instant asked for: 0 replicas ready, 1 starting (queued); arrivals in the last seconds: "
            "2; none has ended",
            "",
        ),
        (1.5, "nodes: fast: 1 ready; slow: 1 acquiring", ""),
        (1.5, "the plans in force together: a 6 of at most 8 cores of fast; b 2 of at most 4 cores of slow", ""),
    ]


def test_a_decision_of_which_application() -> None:
    with pytest.raises(InputError, match="there are several applications") as caught:
        explain_decision(SHARED, ms(1500), state_of("a", "b"))
    assert caught.value.help == "name one of a and b"
    with pytest.raises(InputError, match="no application 'c'"):
        explain_decision(SHARED, ms(1500), state_of("a", "b"), "c")
    with pytest.raises(InputError, match="nothing had been decided for a@2"):
        explain_decision(SHARED, ms(1500), state_of("a", "b"), "a@2")
    of_canary = explain_decision(CANARY, ms(2200), state_of("a", "b"), "a@2")
    assert (of_canary.version, of_canary.why) == ("2", "for a quarter")
    of_most = explain_decision(CANARY, ms(2200), state_of("a", "b"), "a")
    assert (of_most.version, of_most.why) == ("1", "it is the first")
    assert [step.what for step in of_most.steps][2:4] == [
        *("version 2 is starting", "version 2 is canary with 25% of the requests"),
    ]


def test_all_applications_at_an_instant() -> None:
    story = explain_deployment([*SHARED, (s(9), WOKE)], ms(1500), state_of("a", "b"))
    assert [(v.application, v.version, v.state, v.share, v.since_s, v.plan, v.waiting) for v in story.versions] == [
        ("a", "1", "serving", 1.0, 1.0, "a/only: 3 × v on 2 cores of fast, batches up to 1", 2),
        ("b", "1", "serving", 1.0, 1.0, "b/only: 1 × v on 2 cores of slow, batches up to 1", 0),
    ]
    assert story.versions[1].why == "two hold it"
    assert story.nodes == "fast: 1 ready; slow: 1 acquiring"
    assert story.together.startswith("a 6 of at most 8 cores of fast")
    first = explain_deployment(CANARY, ms(1000), state_of("a"))
    assert [(v.version, v.state, v.why) for v in first.versions] == [
        *(("1", "serving", "it is the first"), ("2", "starting", "for a quarter")),
    ]


def test_rollouts_and_reasons_by_application() -> None:
    steps = rollouts(CANARY)
    assert [(step.at_s, step.version, step.state, step.share) for step in steps] == [
        *((1.0, "2", "starting", 0.0), (2.0, "2", "canary", 0.25), (2.305, "2", "retiring", 0.0)),
    ]
    assert steps[-1].why == "rolled back: 0.0% of 9 requests in time"
    assert [
        (reason.application, reason.why, reason.count, reason.first_request) for reason in miss_reasons(CANARY)
    ] == [
        ("a", "slack -1.5 to -1.0 ms at a@2/only", 2, 3),
        ("b", "3 requests wait at b/only", 1, 4),
        ("c", "application 'c' is not served", 1, 6),
    ]


def test_groups_say_their_batch_and_rate_and_slots_their_accelerator() -> None:
    whole, part = Slot(4.0, "g4dn.xlarge", "T4"), Slot(1.0, "local", "T4", 0.5)
    groups = (
        Group(ReplicaSpec("a", "v", whole), 2, batch_max=16, rate_rps=120.0),
        Group(ReplicaSpec("a", "w", part, node="n0", device="cuda:1"), 1),
    )
    assert plan_text(Plan((StagePlan("a", groups, 4),), "")) == (
        "a: 2 × v on 4 cores and a T4 of g4dn.xlarge (batches up to 16, 120 rps) + 1 × w on 1 core and 50% of a T4, "
        "cuda:1 of n0, batches up to 4"
    )


def test_cores_that_are_no_cap_are_called_reserved() -> None:
    group = Group(ReplicaSpec("a", "v", Slot(0.5, "local", is_capped=False)), 3)
    assert plan_text(Plan((StagePlan("a", (group,), 4),), "")) == "a: 3 × v on 0.5 cores reserved, batches up to 4"


def test_shadows_are_told_while_a_request_waits() -> None:
    replica, shadow = ReplicaId(0), Worker(16.0, (0, 1, 2))
    group = Group(ReplicaSpec("a", "v", Slot(4.0), shape=(shadow,)), 1)
    plan = Plan((StagePlan("a", (group,), 8),), "a burst")
    lost = "its shadow is lost: it died; another one starts at once"
    rows: Rows = [
        (0, StartWorker(replica, ReplicaSpec("a", "v", Slot(4.0)))),
        (0, WorkerReady(replica)),
        (ms(1), Request(RequestId(1), ms(1), ms(1), ms(100))),
        (ms(2), Decided("plan", "a burst", plan=plan)),
        (ms(2), StartWorker(WorkerId(100), group.spec, replica)),
        (ms(3), Decided("shadow", lost, "a", replica)),
        (ms(3), StartWorker(WorkerId(101), group.spec, replica)),
        (ms(9), WorkerReady(WorkerId(101))),
        (ms(9), StartBatch(BatchId(1), replica, "a", (RequestId(1),))),
        (ms(20), Finished(BatchId(1), replica, ms(11))),
        (ms(20), End(RequestId(1), Outcome.SERVED)),
    ]
    story = request_story(rows, 1, Graph([GraphStage("a")]))
    said = [(step.what, step.why) for step in story.steps]
    assert (
        "while it waited, a new plan: a: 1 × v on 4 cores with a shadow of 16 cores and 3 blocks, batches up to 8",
        "a burst",
    ) in said
    assert (
        "while it waited, replica 0 had no shadow",
        "its shadow is lost: it died; another one starts at once",
    ) in said
    assert ("while it waited, a shadow of replica 0 became ready", "") in said
    assert any("on replica 0 (v on 4 cores with a shadow of 16 cores and 3 blocks)" in what for what, _ in said)


def test_places_and_sources_of_starts_and_the_transfers_under_way() -> None:
    made, log = provisioned(), MemoryLog()
    simulate(made, [log])
    first_ns = next(now_ns for now_ns, each in log if isinstance(each, Transfer) and each.source)
    story = explain_decision(log, first_ns + s(1), fresh_state(made.setup()))
    told = [f"{step.what}: {step.why}" for step in story.steps]
    assert any(each.startswith("provision at only: ") and "; custom-0 sends them to custom-1" in each for each in told)
    assert "weights under way: 'only/t5' from custom-0 to custom-1 since 1 s: " in told
    late = next(record.request for _, record in log if isinstance(record, End) and record.outcome is Outcome.LATE)
    request = explain_request(log, late, fresh_state(made.setup()))
    waited = [(step.what, step.why) for step in request.steps]
    assert any(what == "while it waited, replicas were started" and "weights are on" in why for what, why in waited)
    assert any("became ready (" in what and "sending 1.206 s" in what for what, _ in waited)


def test_parts_and_lost_pipelines_are_told_while_a_request_waits() -> None:
    r0, r1, spec = ReplicaId(0), ReplicaId(1), ReplicaSpec("a", "v", Slot(4.0))
    lost = "a part of its pipeline is lost: 1 serve when they have all layers"
    rows: Rows = [
        *(
            (0, StartWorker(id, structs.replace(spec, shape=parts_at((0, 1, 3))), pipeline=r0, place=id))
            for id in (r0, r1)
        ),
        (ms(1), Request(RequestId(1), ms(1), ms(1), ms(100))),
        (ms(2), WorkerReady(r0)),
        (ms(3), WorkerReady(r1)),
        (ms(3), StartBatch(BatchId(1), r1, "a", (RequestId(1),))),
        (ms(8), WorkerLost(r0, "it died")),
        (ms(8), Decided("pipeline", lost, "a", r0)),
        (ms(8), BatchLost(BatchId(1), r1, "replica 0 is lost")),
        (ms(15), WorkerCompleted(r1)),
        (ms(15), StartBatch(BatchId(2), r1, "a", (RequestId(1),))),
        (ms(20), Finished(BatchId(2), r1, ms(5))),
        (ms(20), End(RequestId(1), Outcome.SERVED)),
    ]
    story = request_story(rows, 1, Graph([GraphStage("a")]))
    said = [(step.what, step.why) for step in story.steps]
    assert any(what.startswith("while it waited, replica 0 had layers 0 to 0 of its model") for what, _ in said)
    assert any(what.startswith("while it waited, replica 1 had layers 1 to 2 of its model") for what, _ in said)
    assert ("the batch was lost in the pipeline of replica 1", "replica 0 is lost") in said
    assert ("while it waited, replica 1 had all layers of its model", "") in said
    assert sum_of_parts(story) == pytest.approx(19.0)


def test_a_request_tells_its_rows_and_with_which_it_was_padded() -> None:
    """16 and 264 wait for the replica, and run as two rows of the class up to 512, each as large as the larger."""
    works = [Work(1, 512), Work(1, 16), Work(1, 264), Work(20, 16)]
    trace = trace_of(range(0, 4 * ms(1), ms(1)), name="some", provenance="assumed: a test", works=works.__iter__)
    stage = {
        "profile": {"latency_ms": {"table": {1: {1: 20.0}, 8: {1: 60.0}}}, "max_batch": 8},
        "pad": {"ids": 0},
        "sizes": [512],
    }
    system = WORK_CONSERVING | {"replicas": 1, "cores": 1.0}
    made = with_clients(world(stage=stage, system=system, slo_ms=10_000), trace=trace)
    log = MemoryLog()
    simulate(made, [log])
    first, second, _, large = (
        explain_request(log, number, DeploymentState(made.setup().parts(), start_ns=0)) for number in range(4)
    )
    assert (second.rows, second.size) == (1, 16)
    (visit,) = second.visits
    assert (visit.batch_rows, visit.batch_size) == (2, 512)
    assert visit.padding == pytest.approx(248 / 528)
    told = "\n".join(step.what for step in second.steps)
    assert "sent with 1 row of size 16; an answer is due" in told
    assert "started with request 2, in batch no. 1 of 2 rows of sizes up to 512 at" in told
    assert "47% of it was padding" in told
    assert "padding" not in "".join(step.what for step in first.steps)
    assert (large.rows, [(each.batch_rows, each.padding) for each in large.visits]) == (20, [(8, 0), (8, 0), (4, 0)])
    told = "\n".join(step.what for step in large.steps)
    for rows in ("0 to 7", "8 to 15", "16 to 19"):
        assert f"rows {rows} of 20 on replica 0" in told
    assert large.unaccounted_ms == pytest.approx(0)
