"""A demonstration made of simulated runs, for whatever only shows one."""

from pathlib import Path

import pytest

from sloop.app.load import load_scenario
from sloop.demo.live import count_run
from sloop.demo.run import ComparedRun, Demonstration, candidates, scenario_of
from sloop.load import LoadResult
from sloop.profile.profile import Amdahl, Profile, Sample
from sloop.sim.scenarios import run_scenario

QUARTERS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
PROFILE = Profile(
    latency_ms=Amdahl(10.0, 0.0, 0.0, 1.0),
    max_batch=4,
    max_cores=1.75,
    hardware="a <machine>",
    samples=(Sample(1, 1.75, 10.0, 11.0, 50),),
)


@pytest.fixture
def demonstration(tmp_path: Path) -> Demonstration:
    settings = next(candidates(PROFILE, QUARTERS, duration_s=10, seed=1))[0]
    inline = {"form": "amdahl", "gamma": 10.0, "epsilon": 0.0, "delta": 0.0, "eta": 1.0}
    stages = [{"name": "classify", "profile": {"latency_ms": inline, "max_batch": 4, "max_cores": 1.75}}]
    declared = scenario_of(settings, "", "") | {"stages": stages, "trace": {"kind": "burst", "rate": 20}}
    scenario = load_scenario(declared)
    runs = []
    for choice in scenario.systems:
        log = tmp_path / f"{choice.name}.jsonl"
        run_scenario(scenario, choice, log=log)
        counted = count_run(log, first_ns=0, duration_s=10)
        runs.append(ComparedRun(choice.name, counted, clients(), counted))
    return Demonstration(settings, PROFILE, tuple(runs), "by decree")


def clients() -> LoadResult:
    """200 requests, all in time."""
    counts = {"sent": 200, "ok": 200, "late": 0, "dropped": 0, "rejected": 0, "errors": 0, "late_by_server": 0}
    figures = dict.fromkeys(
        ("p50_ms", "p90_ms", "p99_ms", "max_ms", "mean_ms", "response_p50_ms", "response_p99_ms"), 9.0
    )
    lags = dict.fromkeys(("lag_p50_ms", "lag_p99_ms", "lag_max_ms"), 0.1)
    rates = dict.fromkeys(("goodput_rps", "offered_rps", "answered_rps"), 20.0)
    rest = {"note": "", "error_kinds": {}, "connections": 4, "duration_s": 10.0, "wall_s": 11.0, "seconds": []}
    return LoadResult(attainment=1.0, **counts, **figures, **lags, **rates, **rest)  # type: ignore[arg-type]
