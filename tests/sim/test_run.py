import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from sloop.actions import (
    AcquireNode,
    End,
    ReleaseNode,
    RequestPlan,
    Rollout,
    StartBatch,
    StartWorker,
    VersionState,
)
from sloop.app.scenario import ServiceTruth, Truth
from sloop.errors import InputError
from sloop.events import Finished, NodeLost, NodeReady, NodeReleased, Planned, WorkerLost, WorkerReady, WorkerResized
from sloop.runlog import ACTIONS, EVENTS, MemoryLog, Record
from sloop.sim import Violation, World, simulate
from sloop.sim.worlds import random_world
from sloop.systems.replay import replay_log
from sloop.units import ms, s
from sloop.vocabulary import Outcome
from sloop.workload import trace_of
from tests.sim.scene import (
    WORK_CONSERVING,
    Broken,
    application,
    graph_world,
    once,
    records_of,
    several,
    with_clients,
    world,
)

SEEDS = (3, 12, 14, 27, 31, 71)
"""12 and 31 have parts; in 12 there are more than allowed, too."""


def log_bytes(played: World) -> bytes:
    return msgspec.json.encode(records_of(played))


def first_difference(one: Sequence[tuple[int, Record]], other: Sequence[tuple[int, Record]]) -> int:
    """Index of the first record in which two logs differ; the shorter one's length where neither does."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))


def test_a_run_says_how_it_went() -> None:
    run = simulate(world())
    assert 150 < run.requests < 250
    assert run.open == 0
    assert run.events > run.requests


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_seed_gives_the_same_bytes(seed: int) -> None:
    assert log_bytes(random_world(seed)) == log_bytes(random_world(seed))


def test_another_process_with_other_hashes_gives_the_same_bytes() -> None:
    program = (
        "import hashlib, msgspec; from sloop.runlog import MemoryLog; from sloop.sim import simulate;"
        "from sloop.sim.worlds import random_world; log = MemoryLog(); simulate(random_world(71), [log]);"
        "print(hashlib.sha256(msgspec.json.encode(log.records)).hexdigest())"
    )
    command = [sys.executable, "-c", program]
    prints = {
        subprocess.run(command, env={"PYTHONHASHSEED": hashes}, capture_output=True, check=True).stdout
        for hashes in ("1", "2")
    }
    assert len(prints) == 1
    assert prints.pop().strip()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_fresh_core_without_any_truth_replays_every_decision(seed: int) -> None:
    recorded = records_of(random_world(seed))
    replayed = replay_log(recorded, random_world(seed).setup().core())
    assert replayed.difference is None
    assert replayed.events + replayed.actions == len(recorded)


@pytest.mark.parametrize(
    "truth",
    [
        Truth(service=ServiceTruth(ratio=0.7)),
        Truth(service=ServiceTruth(cv=0.4)),
        Truth(profile_error=3.0),
        Truth(resize_ms=400.0),
        Truth(resize="rescale"),
    ],
)
@pytest.mark.parametrize("system", ["static", "elastic"])
def test_worlds_that_differ_in_truth_alone_look_the_same_until_it_shows(truth: Truth, system: str) -> None:
    seen = records_of(world(system={"name": system}))
    other = records_of(replace(world(system={"name": system}), truth=truth))
    index = first_difference(seen, other)
    for log in (seen, other):
        assert index == len(log) or isinstance(log[index][1], EVENTS), "a decision knew what could not be seen yet"


@pytest.mark.parametrize("truth", [{"fan_out": {"read": 7}}, {"shares": {"check": 0.9}}])
def test_where_requests_go_is_not_known_before_a_batch_is_done(truth: dict[str, Any]) -> None:
    stages: dict[str, dict[str, Any]] = {
        "find": {},
        "read": {"after": "find", "each": {"mean": 2}},
        "check": {"after": "read", "when": {"share": 0.2}},
    }
    logs = [records_of(graph_world(stages)), records_of(graph_world(stages, truth=truth))]
    index = first_difference(*logs)
    assert all(isinstance(log[index][1], Finished) for log in logs)


def test_a_core_that_reads_the_truth_is_found_out() -> None:
    """The blindness test's own test: beliefs that are the truth differ at the first plan, before anything is seen."""
    cold = {"cold_start": {"warm": False, "start_s": 3.0}}
    slow = {"form": "quadratic", "alpha": 0.0, "beta": 30.0, "gamma": 90.0}
    honest = world(system={"name": "static"}, truth=cold)
    leaking = world(system={"name": "static"}, truth=cold, latency_ms=slow)
    logs = [records_of(honest), records_of(leaking)]
    index = first_difference(*logs)
    assert any(isinstance(log[index][1], ACTIONS) for log in logs)


def test_the_log_says_what_core_seconds_cost() -> None:
    """Cores × time from the order to start until the end of a replica, from the log alone."""
    log = MemoryLog()
    simulate(world(system={"name": "elastic"}, duration_s=3.0), [log])
    starts = [record for _, record in log if isinstance(record, StartWorker)]
    resizes = [record for _, record in log if isinstance(record, WorkerResized)]
    assert all(record.spec.cores > 0 and record.spec.node for record in starts)
    assert {record.worker for record in resizes} <= {record.worker for record in starts}


def test_service_times_do_not_depend_on_what_else_is_drawn() -> None:
    def services(played: World) -> list[int]:
        return [record.service_ns for _, record in records_of(played) if isinstance(record, Finished)][:20]

    plain = world(max_batch=1)
    slo_ns = plain.application.slo_ns
    assert services(plain) == services(with_clients(plain, slos_ns=(slo_ns, 2 * slo_ns)))


def test_unchecked_runs_decide_the_same() -> None:
    assert records_of(world(), check_first=0) == records_of(world())


def test_checkers_see_the_first_records_or_all() -> None:
    """A core that calls the twentieth answer late is found out only by a run that is checked for that long."""

    def run(check_first: int | None) -> None:
        played = world()
        late = once(End, lambda end: [msgspec.structs.replace(end, outcome=Outcome.LATE)])
        simulate(played, check_first=check_first, core=Broken(played.setup().core(), late))

    run(0)
    run(50)
    for check_first in (None, 1_000):
        with pytest.raises(Violation, match="late, before its deadline"):
            run(check_first)


def test_a_model_that_takes_longer_than_the_run_is_to_be_corrected() -> None:
    """No invariant is broken: the core waits, because the profile says so."""
    hours = world(
        latency_ms={"form": "quadratic", "alpha": 0.0, "beta": 0.0, "gamma": 1e8},
        system=WORK_CONSERVING,
        trace={"kind": "equal", "rate": 1},
    )
    with pytest.raises(InputError, match="batch 0 still runs long after the last arrival"):
        simulate(hours)


def test_a_sink_sees_every_record_after_the_checkers_have_left() -> None:
    played = world()
    assert records_of(played, check_first=7) == records_of(played)


def outcomes(records: Sequence[tuple[int, Record]]) -> Counter[str]:
    return Counter(str(record.outcome) for _, record in records if isinstance(record, End))


def of_type(records: Sequence[tuple[int, Record]], *kinds: type) -> list[tuple[int, Any]]:
    return [(now_ns, record) for now_ns, record in records if isinstance(record, kinds)]


def test_requests_of_one_instant_run_together() -> None:
    """As they do in a live server, where one turn of the event loop reads them all."""
    played = world(system={"name": "static", "batch_max": 8}, trace={"kind": "step", "rates": [8], "each_s": 5})
    eight = with_clients(played, trace=trace_of([s(1)] * 8, duration_ns=s(5), name="burst", provenance="assumed: test"))
    batches = [record for _, record in records_of(eight) if isinstance(record, StartBatch)]
    assert [len(batch.requests) for batch in batches] == [8]


# Plans beside the loop


def test_requests_are_served_while_a_plan_is_computed() -> None:
    """Plans that take longer than their period: the next is requested when the last is there."""
    played = world(system={"name": "mixed", "period_s": 1}, truth={"plan_ms": 1_700}, duration_s=10.0)
    records = records_of(played)
    requested, planned = of_type(records, RequestPlan), of_type(records, Planned)
    requested = requested[: len(planned)]  # the run ends during the last one
    assert [record.number for _, record in requested] == [record.number for _, record in planned]
    took_ms = [round((at_ns - order_ns) / 1e6) for (order_ns, _), (at_ns, _) in zip(requested, planned, strict=True)]
    assert took_ms == [0, *[1_700] * (len(took_ms) - 1)], "the first is there from the start, in a warm world"
    assert len(took_ms) >= 4
    ends_ns = [at_ns for at_ns, _ in of_type(records, End)]
    for (order_ns, _), (at_ns, _) in list(zip(requested, planned, strict=True))[1:]:
        assert any(order_ns < end_ns < at_ns for end_ns in ends_ns)


def test_a_log_with_plans_beside_the_loop_replays() -> None:
    played = several(("a", "b"), system="mixed", truth={"plan_ms": 40})
    records = records_of(played)
    assert of_type(records, RequestPlan)
    assert replay_log(records, played.setup().core()).difference is None


# Nodes

NODES = [{"hardware": "custom", "count": 1, "most": 3, "cores": 2, "memory_bytes": 10**9}]
"""One that is always there, and two on demand."""


def renting(**truth: Any) -> World:
    """Two replicas of two cores: one on a node that is there, one on a node on demand."""
    system = {"name": "static", "replicas": 2, "cores": 2.0, "drop": "never"}
    return several(("a",), nodes=NODES, system=system, truth={"cold_start": {"warm": False}} | truth)


def test_a_plan_that_needs_a_node_gets_it_after_the_time_it_takes() -> None:
    records = records_of(renting(nodes={"acquire_s": 3}))
    ((ordered_ns, order),) = of_type(records, AcquireNode)
    ((ready_ns, ready),) = of_type(records, NodeReady)
    assert (order.node, ready.node.name) == ("custom-1", "custom-1")
    assert ready_ns - ordered_ns == s(3)
    starts = {record.spec.node: now_ns for now_ns, record in of_type(records, StartWorker)}
    assert starts == {"custom-0": ordered_ns, "custom-1": ready_ns}


def test_in_a_warm_world_the_nodes_of_the_first_plan_are_there() -> None:
    records = records_of(renting(cold_start={"warm": True}))
    assert [now_ns for now_ns, _ in of_type(records, NodeReady, WorkerReady)] == [1, 1, 2]


def test_a_node_that_fails_is_told_with_its_replicas_and_comes_back() -> None:
    records = records_of(several(truth={"nodes": {"mtbf_s": 2, "repair_s": 0.5}}, rates={"a": 50.0, "b": 50.0}))
    lost, back = of_type(records, NodeLost), of_type(records, NodeReady)
    assert len(lost) == len(back) > 0
    for (lost_ns, _), (back_ns, _) in zip(lost, back, strict=True):
        replicas_ns = [at_ns for at_ns, _ in of_type(records, WorkerLost) if at_ns == lost_ns]
        assert len(replicas_ns) == 2, "one of each application"
        assert back_ns - lost_ns == ms(500) or back_ns > s(4), "at the end all are repaired"
        assert not [at_ns for at_ns, _ in of_type(records, StartWorker) if lost_ns <= at_ns < back_ns]


def test_a_node_that_nobody_uses_is_given_back() -> None:
    records = records_of(renting_for_a_while())
    ((ready_ns, _),) = of_type(records, NodeReady)
    ((released_ns, order),) = of_type(records, ReleaseNode)
    assert order.node == "custom-1"
    assert [at_ns for at_ns, _ in of_type(records, NodeReleased)] == [released_ns + 1]
    assert released_ns - ready_ns > s(60)


def renting_for_a_while() -> World:
    """The second application leaves after a second; its node stays empty from then on."""
    return several(
        ("a", "b"),
        nodes=NODES,
        system={"name": "static", "cores": 2.0},
        changes=[{"at_s": 1, "remove": "b"}],
        duration_s=80.0,
        rates={"a": 1.0, "b": 1.0},
    )


# Versions


def test_a_model_replaced_fifty_times_loses_no_request() -> None:
    """At half of the capacity of one replica, which serves 100 requests a second in batches."""
    changes = [{"at_s": 2 + 2 * number, "deploy": application("a")} for number in range(50)]
    calm = records_of(several(("a",), duration_s=104.0, rates={"a": 50.0}))
    busy = records_of(several(("a",), duration_s=104.0, rates={"a": 50.0}, changes=changes))
    assert sum(record.state is VersionState.RETIRED for _, record in of_type(busy, Rollout)) == 50
    before, after = outcomes(calm), outcomes(busy)
    assert before.total() == after.total() > 5_000
    assert after["failed"] == after["rejected"] == 0
    assert after["served"] >= 0.99 * before["served"]


def test_requests_to_a_resting_application_wait_for_its_start_as_in_a_server() -> None:
    """A start takes 0.5 s, a deadline 0.1 s."""

    def ended(**options: float) -> Counter[str]:
        rare = {"rest_after_s": 1.0, "slo_ms": 100.0, **options}
        played = several(("b",), **rare, rates={"b": 0.3}, duration_s=60.0)  # type: ignore[arg-type]
        records = records_of(played)
        assert replay_log(records, played.setup().core()).difference is None
        return outcomes(records)

    without, patient, hasty = ended(wake_s=0.0), ended(), ended(wake_s=0.2)
    assert without["dropped"] > 5
    assert not without["late"]
    assert patient == {"served": without["served"], "late": without["dropped"]}
    assert hasty["rejected"] > 5, "0.2 s are too short for a start"
    assert not hasty["dropped"]
