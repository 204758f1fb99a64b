"""The batch policy: PALDIA's split of what waits, as it is executed by the core on a simulated device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.actions import End, StartBatch
from sloop.app.load import load_scenario
from sloop.core.batching import AssumedDevice, AssumedQueue
from sloop.core.protocols import BatchDecision, deciding
from sloop.core.views import BatchDevice, QueueView, SharedBatch
from sloop.errors import InputError
from sloop.events import Finished
from sloop.options import check_ranges
from sloop.profile.interference import BandwidthLaw, DeviceDemand
from sloop.report.explain.request import explain_request
from sloop.runlog import MemoryLog
from sloop.sim import World
from sloop.sim.run import simulate
from sloop.testing.views import make_visit
from sloop.units import NS_PER_MS, ms, s
from sloop.vocabulary import Outcome
from sloop.workload import trace_of
from sloop_systems.paldia.experiments.results import ON_M60, trial_of
from sloop_systems.paldia.experiments.runs import world_of as trial_world
from sloop_systems.paldia.policy import Hybrid
from tests.runlog.story import fresh_state
from tests.sim.scene import records_of, with_clients

Deciding = Callable[[int, QueueView, BatchDevice], BatchDecision]
RESIDENT = "work_conserving", "resident"


@dataclass(frozen=True)
class Row:
    """A row of PALDIA's specification, section 2.1.1: times of the executed plans in ms."""

    count: int
    solo_ms: float
    batch: int
    bandwidth: float
    alpha: float
    serial_ms: float
    work_conserving_ms: float
    plan: str


ROWS = (
    Row(575, 50, 128, 0.5, 0.45, 157.88, 149.38, "128 128 128 28 / 128 35"),
    Row(225, 80, 64, 0.65, 0.5, 236.34, 191.66, "64 38 / 64 59"),
    Row(700, 50, 128, 0.45, 0.6, 193.07, 170.59, "128 128 128 48 / 128 128 12"),
    Row(450, 56, 64, 0.62, 0.35, 347.37, 308.06, "64 64 14 / 64 64 64 64 52"),
    Row(575, 50, 128, 0.8, 0.6, 212.11, 215.40, "128 32 / 128 128 128 31"),
)


def world_of(row: Row, batch: object, *, replicas: int = 20, times_ns: Sequence[int] = (), **system: Any) -> World:
    """Replicas on one GPU, and by default one clump of requests a second after the start; durations are exact."""
    profile = {
        "latency_ms": {"form": "quadratic", "alpha": 0.0, "beta": row.solo_ms / row.batch, "gamma": 0.0},
        "max_batch": row.batch,
        "max_cores": 1,
        "accelerator": "M60",
        "device_share": 0.05,
        "sharing": {
            "full_batch": row.batch,
            "bandwidth": row.bandwidth,
            "law": {"form": "bandwidth", "alpha": row.alpha},
        },
    }
    scenario = {
        "name": "clump",
        "slo_ms": 10_000,
        "stages": [{"name": "only", "variants": [{"name": "a", "profile": profile}]}],
        "system": {
            "name": "static",
            "replicas": replicas,
            "cores": 1.0,
            "batch_max": row.batch,
            "order": "fifo",
            "drop": "never",
            "batch": batch,
            **system,
        },
        "cluster": {
            "nodes": [
                {
                    "hardware": "custom",
                    "count": 1,
                    "cores": 32,
                    "memory_bytes": 10**10,
                    "devices": [{"kind": "M60", "memory_gib": 8}],
                }
            ]
        },
        "trace": {"kind": "poisson", "rate": 1},
        "duration_s": 3,
        "truth": {"service": {"shape": "deterministic", "ratio": 1.0}},
    }
    trace = trace_of(list(times_ns) or [s(1)] * row.count, name="clump", provenance="assumed: a test")
    return with_clients(World.from_scenario(load_scenario(scenario)), trace=trace)


def makespan_ms(world: World) -> float:
    """From the clump to the last answer."""
    ends = [now_ns for now_ns, record in records_of(world) if isinstance(record, End)]
    return (max(ends) - s(1)) / NS_PER_MS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.plan)
def test_executed_plans_take_what_the_specification_says(row: Row) -> None:
    assert makespan_ms(world_of(row, {"name": "hybrid", "lane": "serial"})) == pytest.approx(row.serial_ms, abs=0.01)
    assert makespan_ms(world_of(row, "hybrid")) == pytest.approx(row.work_conserving_ms, abs=0.01)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.plan)
def test_the_sizes_of_batches_are_those_of_the_plan(row: Row) -> None:
    records = records_of(world_of(row, {"name": "hybrid", "lane": "serial"}))
    starts = [(now_ns, len(record.requests)) for now_ns, record in records if isinstance(record, StartBatch)]
    at_once = " ".join(str(size) for now_ns, size in starts if now_ns == starts[0][0])
    later = " ".join(str(size) for now_ns, size in starts if now_ns > starts[0][0])
    assert f"{at_once} / {later}" == row.plan


@pytest.mark.parametrize(("row", "fixed_ms"), list(zip(ROWS, (124.6, 199.6, 136.0, 281.8, 224.6), strict=True)))
def test_the_best_residency_takes_what_the_specification_says(row: Row, fixed_ms: float) -> None:
    assert makespan_ms(world_of(row, {"name": "hybrid", "sharing": "resident"})) == pytest.approx(fixed_ms, abs=0.05)


def test_a_split_that_gains_too_little_is_not_made() -> None:
    row = ROWS[0]  # predicted: 166.21 ms, and all together 175.28; 5.2 % less
    together_ms = makespan_ms(world_of(row, {"name": "hybrid", "sharing": "together"}))
    assert makespan_ms(world_of(row, {"name": "hybrid", "gain_min": 0.05})) == pytest.approx(149.38, abs=0.01)
    assert makespan_ms(world_of(row, {"name": "hybrid", "gain_min": 0.06})) == pytest.approx(together_ms, abs=0.01)


def test_options_that_do_not_fit_together() -> None:
    with pytest.raises(InputError, match="sharing cannot be resident in the serial lane"):
        Hybrid(sharing="resident", lane="serial")
    with pytest.raises(InputError, match="gain_min must be a number"):
        check_ranges(Hybrid(gain_min=1.5))


def test_the_ablations_run_all_together_or_one_after_the_other() -> None:
    row = ROWS[0]
    queue_ms = makespan_ms(world_of(row, {"name": "hybrid", "sharing": "queue"}))
    assert queue_ms == pytest.approx(row.solo_ms * row.count / row.batch, abs=0.01)
    together = makespan_ms(world_of(row, {"name": "hybrid", "sharing": "together"}))
    assert together == pytest.approx(makespan_ms(world_of(row, "work_conserving")), abs=0.01)
    assert together > row.serial_ms


@given(
    times_ms=st.lists(st.integers(0, 1500), min_size=1, max_size=60),
    mode=st.sampled_from([*product(("serial", "work_conserving"), ("hybrid", "together", "queue")), RESIDENT]),
    replicas=st.integers(1, 5),
    even=st.booleans(),
)
def test_no_request_is_forgotten(times_ms: list[int], mode: tuple[str, str], replicas: int, even: bool) -> None:
    lane, sharing = mode
    batch = {"name": "hybrid", "lane": lane, "sharing": sharing, "even": even}
    row = replace(ROWS[1], batch=8)
    times_ns = sorted(ms(at_ms) for at_ms in times_ms)
    running, most = 0, 1 if sharing == "queue" else replicas
    ended = 0
    for _, record in records_of(world_of(row, batch, replicas=replicas, times_ns=times_ns)):
        if isinstance(record, StartBatch):
            running += 1
            assert running <= most
            assert 1 <= len(record.requests) <= row.batch
        running -= isinstance(record, Finished)
        if isinstance(record, End):
            ended += record.outcome is Outcome.SERVED
    assert ended == len(times_ns)


def test_requests_of_failed_batches_run_again_alone() -> None:
    """Each is tried in halves until it is alone; the batch policy is not asked about them."""
    made = world_of(replace(ROWS[1], batch=8), "hybrid", times_ns=[*[s(1)] * 20, s(3)])
    made = replace(made, faults=replace(made.faults, bad_request=0.5))
    outcomes = [record.outcome for _, record in records_of(made) if isinstance(record, End)]
    assert len(outcomes) == 21
    assert set(outcomes) == {Outcome.SERVED, Outcome.FAILED}


def sizes(decide: Deciding, now_ns: int, waiting: int, idle: int, *running: int) -> tuple[int, ...]:
    """The batches that start at an instant on a device where batches of these sizes run; one of n takes n ms alone,
    four fill the bandwidth."""
    visits, busy = [make_visit(number) for number in range(waiting)], [SharedBatch("stage", size) for size in running]
    law, largest, costs_ns, started = (
        BandwidthLaw(4.0),
        DeviceDemand(bandwidth=0.25),
        [ms(n) for n in range(9)],
        list[int](),
    )
    while visits and idle > len(started):
        now_idle, now_running = idle - len(started), [*busy, *(SharedBatch("stage", size) for size in started)]
        device = AssumedDevice(8, costs_ns, law, largest, now_idle, now_running, ("n0", "d0"))
        decision = decide(now_ns, AssumedQueue(visits), device)
        if not decision.count:
            break
        started.append(decision.count)
        del visits[: decision.count]
    return tuple(started)


def test_a_split_is_kept_until_its_batches_have_started() -> None:
    policy = deciding(Hybrid(lane="work_conserving"))
    assert sizes(policy, 0, 60, 5) == (8, 8, 8, 8), "four fill the bandwidth; the other 28 are queued"
    assert sizes(policy, 1, 28, 1, 8, 8, 8, 8) == ()
    assert sizes(policy, 2, 30, 2, 8, 8, 8) == (8,), "two that came belong to the next split"
    assert sizes(policy, 3, 22, 5) == (8, 8, 4), "the rest of the queue"
    assert sizes(policy, 4, 2, 2, 8, 8, 4) == ()
    assert sizes(policy, 5, 9, 5) == (8, 1), "nothing was kept of the split that could not begin"


def test_a_split_takes_what_is_there_if_requests_were_dropped() -> None:
    policy = deciding(Hybrid())
    assert sizes(policy, 0, 60, 5) == (8, 8, 8, 8)
    assert sizes(policy, 1, 3, 5) == (3,)


def test_what_was_planned_for_requests_that_are_gone_does_not_hold_for_others() -> None:
    policy = deciding(Hybrid(lane="serial"))
    assert sizes(policy, 0, 60, 5) == (8, 8, 8, 8), "28 are queued"
    assert sizes(policy, 1, 1, 5) == (1,), "the others were dropped"
    assert sizes(policy, 2, 60, 5) == (8, 8, 8, 8), "not one after the other"


def test_in_the_serial_lane_a_group_that_finds_the_device_busy_is_queued() -> None:
    policy = deciding(Hybrid(lane="serial"))
    assert sizes(policy, 0, 20, 4, 8) == ()
    assert sizes(policy, 1, 24, 5) == (8,)
    assert sizes(policy, 2, 16, 4, 8) == ()
    assert sizes(policy, 3, 16, 5) == (8,)
    assert sizes(policy, 4, 8, 5) == (4,), "of the first group"
    assert sizes(policy, 5, 4, 5) == (4,)


def test_a_wait_for_a_shared_device_says_how_many_batches_ran_together() -> None:
    """575 requests at once, of which PALDIA's split runs 412 in four batches on an M60 and queues 163."""
    trial = trial_of("SENet18, figure 1", "offline-hybrid", (*ON_M60, ("initial_rps", 575)))
    trace = trace_of([ms(1_001)] * 575, duration_ns=s(2), name="one clump", provenance="assumed")
    world = replace(with_clients(trial_world(trial), trace=trace), duration_ns=s(2))
    log = MemoryLog()
    simulate(world, [log])
    story = explain_request(log, 574, fresh_state(world.setup()))
    told = [(step.what, step.why) for step in story.steps if "ran together" in step.what]
    assert told[0] == (
        "while it waited, 4 batches of model ran together on g3s.xlarge-0/M60; 163 requests stayed queued",
        "all replicas there were busy",
    )
    assert story.wait_ms > 0
    first = explain_request(log, 0, fresh_state(world.setup()))
    assert not [step for step in first.steps if "ran together" in step.what]
    world = trial_world(trial_of("SENet18, figure 1", "mps-only", (*ON_M60, ("initial_rps", 575))))
    log = MemoryLog()
    simulate(replace(with_clients(world, trace=trace), duration_ns=s(2)), [log])
    story = explain_request(log, 574, fresh_state(world.setup()))
    assert not [step for step in story.steps if "ran together" in step.what], "all run at once"
