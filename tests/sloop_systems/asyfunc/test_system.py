"""AsyFunc simulated: shadows meet bursts, and the log of such a run can be replayed and begun anew from a snapshot."""

from functools import cache
from pathlib import Path

import pytest

from sloop.actions import End, StartWorker, StopWorker
from sloop.app.load import load_application, load_scenario
from sloop.events import WorkerReady
from sloop.options import as_value
from sloop.policies.forecast import OracleForecast
from sloop.profile.published import PUBLISHED
from sloop.runlog import MemoryLog
from sloop.sim import World, simulate
from sloop.sim.truth.failure import FaultRates
from sloop.systems.replay import replay_log
from sloop.testing.restoring import restores
from sloop.units import s
from sloop.vocabulary import Outcome, WorkerId
from sloop.workload import trace_from

MODEL = "InceptionV3-asyfunc"
SLO_MS = round(PUBLISHED[MODEL].latency_ms.latency_ms(8, 16), 2)
TRACE = {"kind": "square", "rate": 30, "burst_rate": 75, "period_s": 30, "burst_s": 6}


def world(system: str, *, duration_s: float = 90.0, faults: FaultRates | None = None, **options: object) -> World:
    nodes = {"hardware": "custom", "count": 4, "cores": 26, "memory_bytes": 96 << 30}
    application = load_application(
        {
            "name": "inception",
            "slo_ms": SLO_MS,
            "stages": [{"name": "m", "profile": MODEL}],
            "system": {"name": system, **options},
            "cluster": {"nodes": [nodes]},
        }
    )
    trace = trace_from(as_value(TRACE), seed=3, duration_s=duration_s, folder=Path())
    return World.of(application, trace, seed=3, duration_ns=s(duration_s), faults=faults or FaultRates())


@cache
def run(system: str) -> MemoryLog:
    log = MemoryLog()
    simulate(world(system), [log])
    return log


def count(log: MemoryLog, kind: type) -> int:
    return sum(isinstance(record, kind) for _, record in log.records)


def shadows_in(log: MemoryLog) -> set[WorkerId]:
    """The numbers of all shadows that were started."""
    return {
        record.worker for _, record in log.records if isinstance(record, StartWorker) and record.replica is not None
    }


def missed(log: MemoryLog) -> float:
    ends = [record.outcome for _, record in log.records if isinstance(record, End)]
    return sum(outcome is not Outcome.SERVED for outcome in ends) / len(ends)


def test_shadows_come_at_bursts_and_go_afterwards() -> None:
    log = run("asyfunc")
    shadows = shadows_in(log)
    ready = {record.worker for _, record in log.records if isinstance(record, WorkerReady)}
    gone = {record.worker for _, record in log.records if isinstance(record, StopWorker)}
    assert len(shadows) >= 2
    assert shadows <= ready
    assert len(shadows & gone) >= len(shadows) - 1


def test_shadows_miss_fewer_requests_at_no_more_bodies() -> None:
    """Check 6 of section 7.4, on one trace."""
    with_shadows, without = run("asyfunc"), run("asyfunc-nolls")
    assert missed(with_shadows) < missed(without)
    assert count(with_shadows, StartWorker) - len(shadows_in(with_shadows)) <= count(without, StartWorker)


def test_adaptive_batches_miss_fewer_requests_than_fixed_ones() -> None:
    """Check 7."""
    assert missed(run("asyfunc")) < missed(run("asyfunc-noadapt"))
    assert missed(run("batch-plus")) < missed(run("batch"))


@pytest.mark.parametrize("system", ["asyfunc", "asyfunc-noadapt"])
def test_a_run_with_shadows_goes_on_from_a_snapshot(system: str) -> None:
    assert restores(world(system, duration_s=40.0), 0.55)


def test_a_run_with_shadows_is_replayed() -> None:
    assert replay_log(run("asyfunc").records, world("asyfunc").setup().core()).difference is None


def test_shadows_that_die_are_replaced_and_every_request_ends() -> None:
    """The checkers look at every record."""
    log = MemoryLog()
    simulate(world("asyfunc", duration_s=60.0, faults=FaultRates(shadow_mtbf_s=0.7, failed_shadow=0.3)), [log])
    assert len(shadows_in(log)) > len(shadows_in(run("asyfunc")))
    ends = [record.request for _, record in log.records if isinstance(record, End)]
    assert len(ends) == len(set(ends))


OPTIMUM = {
    "name": "inception",
    "slo_ms": SLO_MS,
    "stages": [{"name": "m", "profile": MODEL}],
    "systems": ["opt", "on-demand", "last-value"],
    "cluster": {"nodes": [{"hardware": "custom", "count": 12, "cores": 26, "memory_bytes": 96 << 30}]},
    "trace": {**TRACE, "rate": 60, "burst_rate": 180},
    "duration_s": 60,
    "seed": 5,
    "truth": {"cold_start": {"start_s": 8, "warm": True}},
}


def test_the_optimum_starts_before_the_burst() -> None:
    """Replicas take 8 s; on-demand asks for them when the burst is there."""
    scenario = load_scenario(OPTIMUM)
    found, logs = [], []
    for choice in scenario.systems:
        log = MemoryLog()
        simulate(World.from_scenario(scenario, choice), [log])
        found.append(missed(log))
        logs.append(log)
    optimum, on_demand, last = found
    assert optimum < 0.5 * min(on_demand, last)
    assert replay_log(logs[0].records, World.from_scenario(scenario).setup().core()).difference is None


def test_the_optimum_gets_its_trace() -> None:
    world = World.from_scenario(load_scenario(OPTIMUM))
    forecast = world.setup().system.policies.forecast
    assert isinstance(forecast, OracleForecast)
    assert forecast.counts == tuple(map(float, world.trace.counts_per_s()))
    assert forecast.horizon_ns == s(10)
    declared = {**OPTIMUM, "systems": [{"name": "opt", "forecast": {"counts": [7.0], "horizon_s": 3}}]}
    own = World.from_scenario(load_scenario(declared)).setup().system.policies.forecast
    assert own == OracleForecast((7.0,), horizon_ns=s(3)), "as declared"
