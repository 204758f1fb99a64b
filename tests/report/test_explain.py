"""Answers to why, from the run told by hand."""

import pytest

from sloop.actions import Decided, End, StartBatch, StartReplica
from sloop.errors import InputError
from sloop.events import BatchFailed, Finished, ReplicaReady
from sloop.profile.estimate import Estimate
from sloop.profile.forms import Quadratic
from sloop.profile.profile import Profile
from sloop.report.explain import explain_decision, explain_request, reasons
from sloop.runlog import Record
from sloop.units import ms, s
from sloop.vocabulary import BatchId, Outcome, Plan, ReplicaId, ReplicaSpec, Request, RequestId

Rows = list[tuple[int, Record]]


def test_a_late_request(story: Rows) -> None:
    told = explain_request(story, 2)
    assert (told.outcome, told.why, told.total_ms) == ("late", "20 ms past its deadline", 220)
    assert (told.way_ms, told.queue_ms, told.service_ms, told.lost_ms) == (10, 60, 150, 0)
    assert told.summary == (
        "late: 20 ms past its deadline. "
        "Of 200.0 ms it spent 10.0 ms on the way here, 60.0 ms in queues, 150.0 ms in service"
    )
    assert [(step.at_s, step.what, step.why) for step in told.steps] == [
        (0.11, "sent; an answer is due within 200.0 ms", ""),
        (
            0.12,
            "arrived after 10.0 ms on the way, 190.0 ms left; no request waiting, 1 replica ready, 1 busy",
            "",
        ),
        (
            0.12,
            "plan in force since 0.000 s: classify: 1 × small on 2 cores, batches up to 4",
            "1 replica holds 20 rps",
        ),
        (
            0.18,
            "started with request 3 in batch 1 at classify on replica 0 (small on 2 cores) after 60.0 ms in the queue",
            "",
        ),
        (0.33, "the batch finished after 150.0 ms", ""),
        (0.33, "late", "20 ms past its deadline"),
    ]


def test_a_request_whose_replica_was_lost(story: Rows) -> None:
    told = explain_request(story, 5)
    assert (told.outcome, told.queue_ms, told.lost_ms, told.total_ms) == ("dropped", 300, 100, 400)
    assert [step.what for step in told.steps][-3:] == [
        "replica 0 was lost and the batch with it",
        "while it waited, replica 1 became ready",
        "dropped while it waited; 1 replica ready",
    ]


def test_rejected_failed_and_cut_off(story: Rows) -> None:
    assert explain_request(story, 4).steps[-1].why == "the queue is full"
    failed = explain_request(story, 6)
    assert (failed.outcome, failed.service_ms) == ("failed", 50)
    assert failed.steps[-2].what == "the client went away"
    cut = explain_request(story[:12], 2)
    assert (cut.outcome, cut.total_ms) == ("open", None)


def test_a_stranger_is_refused(story: Rows) -> None:
    with pytest.raises(InputError, match="request 99 is not in this log") as caught:
        explain_request(story, 99)
    assert caught.value.help == "the log has requests 1 to 6"
    with pytest.raises(InputError) as caught:
        explain_request([], 1)
    assert caught.value.help == "the log has no requests at all"


def test_belief_and_outcome_side_by_side(story: Rows) -> None:
    beliefs = {("classify", "small"): Estimate(Profile(latency_ms=Quadratic(0, 30, 50), max_batch=4, max_cores=8))}
    told = explain_request(story, 2, beliefs)
    assert "believed to take 110.0 ms" in told.steps[3].what
    assert told.steps[4].what == "the batch finished after 150.0 ms, 36% longer than believed"
    assert "1 busy, the first for another 60.0 ms by belief" in told.steps[1].what


def test_plans_and_shortages_while_it_waited() -> None:
    spec = ReplicaSpec("a", "v", 1.0)
    rows: Rows = [
        (0, Request(RequestId(1), 0, 0, s(1))),
        (ms(1), Decided("plan", "a request waits", plan=Plan((), "a request waits"))),
        (ms(2), Decided("short", "no node has room", "a")),
        (ms(3), StartReplica(ReplicaId(0), spec)),
        (ms(9), ReplicaReady(ReplicaId(0))),
        (ms(9), StartBatch(BatchId(0), ReplicaId(0), "a", (RequestId(1),))),
        (ms(19), BatchFailed(BatchId(0), ReplicaId(0), "nan")),
        (ms(19), End(RequestId(1), Outcome.FAILED, "nan")),
    ]
    told = explain_request(rows, 1)
    assert [step.what for step in told.steps] == [
        "sent; an answer is due within 1000.0 ms",
        "arrived after 0.0 ms on the way, 1000.0 ms left; no request waiting, no replica ready",
        "while it waited, a new plan: nothing",
        "while it waited, the cluster fell short of the plan",
        "while it waited, replica 0 became ready",
        "started alone in batch 0 at a on replica 0 (v on 1 core) after 9.0 ms in the queue",
        "the model raised on the batch",
        "failed",
    ]
    assert (told.queue_ms, told.service_ms) == (9, 10)


def test_a_decision(story: Rows) -> None:
    told = explain_decision(story, ms(1100))
    assert told.summary == "since 1.000 s: classify: 1 × small on 4 cores, batches up to 4"
    assert told.why == "demand doubled"
    assert [(step.at_s, step.what, step.why) for step in told.steps] == [
        (
            1.0,
            "what was known: arrivals per second lately: 4; 3 of 4 that ended were missed; "
            "no request waiting; 1 replica ready",
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
            "arrivals per second lately: 4, 1; 3 of 4 that ended were missed",
            "",
        ),
    ]


def test_before_anything_was_decided(story: Rows) -> None:
    with pytest.raises(InputError, match="nothing had been decided") as caught:
        explain_decision(story[1:], ms(500))
    assert "the log runs from 0.000 s" in caught.value.help
    with pytest.raises(InputError) as caught:
        explain_decision([], 0)
    assert "the log is empty" in caught.value.help


def test_an_infeasible_plan_says_so() -> None:
    plan = Plan((), "no core count is enough", feasible=False)
    told = explain_decision([(0, Decided("plan", plan.why, plan=plan))], 0)
    assert told.summary.endswith("nothing met every deadline, this was the best there was")


def test_reasons_are_counted_numbers_aside(story: Rows) -> None:
    found = reasons(story)
    assert [(reason.outcome, reason.why, reason.count, reason.first_request) for reason in found] == [
        ("late", "# ms past its deadline", 2, 2),
        ("dropped", "its deadline passed # ms ago", 1, 5),
        ("failed", "the client went away", 1, 6),
        ("rejected", "the queue is full", 1, 4),
    ]


def test_events_about_strangers_do_no_harm(story: Rows) -> None:
    rows: Rows = [*story[:9], (ms(200), Finished(BatchId(77), ReplicaId(0), 1)), *story[12:]]
    assert explain_request(rows, 2).outcome == "late"
