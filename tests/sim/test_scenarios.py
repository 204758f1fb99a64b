from collections.abc import Iterator
from dataclasses import replace
from math import hypot
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from sloop.actions import StartBatch
from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.app.scenario import Scenario, ServiceTruth, Truth
from sloop.events import Finished, WorkerProgressed, WorkerReady
from sloop.profile.passes import MachineSpeed
from sloop.profile.profile import LatencyTable, Pass, Profile, sample_of, save_profile
from sloop.runlog import Record, read_log
from sloop.runlog.summary import RunRow, RunSummary
from sloop.sim.machine_speed import log_speed
from sloop.sim.ranges import MODEL_ERROR, PLACES, at_speed, attainment_range, speed_factors, worlds_around
from sloop.sim.scenarios import (
    ScenarioRun,
    chosen_systems,
    labels_of,
    run_scenario,
    run_systems,
)
from sloop.sim.truth.recorded import RecordedRun
from sloop.sim.world import World
from sloop.systems.replay import rebuild, replay_log, with_beginning
from sloop.units import NS_PER_S, ms
from sloop.vocabulary import Request
from tests.sim.scene import records_of

SCENARIO = {
    "name": "x",
    "slo_ms": 500,
    "stages": [{"name": "a", "profile": "ResNet-T"}],
    "systems": [{"name": "static", "cores": 8}, {"name": "static", "cores": 4}],
    "cluster": {"nodes": [{"hardware": "c5.4xlarge"}]},
    "trace": {"kind": "poisson", "rate": 30},
    "duration_s": 4,
}


def test_runs_of_one_system_are_told_apart() -> None:
    choices = [SystemChoice("static", {"cores": 8.0}), SystemChoice("static"), SystemChoice("elastic")]
    assert labels_of(choices) == ["static (cores 8.0)", "static (as published)", "elastic"]
    assert labels_of([SystemChoice("static")] * 2) == ["static (as published)", "static (as published), no. 2"]


def test_a_run_is_counted_as_its_log_says(tmp_path: Path) -> None:
    scenario = load_scenario(SCENARIO)
    run = run_scenario(scenario, scenario.systems[0], log=tmp_path / "run.jsonl")
    again = RunSummary(scenario.application.graph, start_ns=0).fold(read_log(tmp_path / "run.jsonl"))
    assert run.row.requests == again.requests > 60
    assert run.row.p99_ms == again.latency_ms([0.99])[0]
    assert run.row.core_seconds == again.core_seconds


def test_the_header_says_under_which_system_and_seed(tmp_path: Path) -> None:
    scenario = load_scenario(SCENARIO)
    list(run_systems(scenario, scenario.systems, seed=9, log=tmp_path / "run.jsonl"))
    header = read_log(tmp_path / "run-1-static.jsonl").header
    assert (header.origin, header.seed, header.system) == ("sim", 9, "static")
    assert header.definitions["x"]["system"]["parameters"] == {"cores": 4}


def test_a_named_system_keeps_the_scenarios_parameters_where_it_has_some() -> None:
    scenario = load_scenario(SCENARIO)
    assert chosen_systems(scenario, []) == scenario.systems
    assert chosen_systems(scenario, ["static"]) == scenario.systems
    assert chosen_systems(scenario, ["elastic"]) == (SystemChoice("elastic"),)


def test_requests_that_never_end_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    large = PROFILE | {"memory_bytes": 2_000_000_000}
    crowded = {
        "stages": [{"name": "a", "profile": large}, {"name": "b", "profile": large, "after": "a"}],
        "systems": [{"name": "static", "drop": "never"}],
        "cluster": {"nodes": [{"hardware": "custom", "cores": 2, "memory_bytes": 3_000_000_000}]},
        "trace": {"kind": "poisson", "rate": 5},
    }
    scenario = load_scenario(SCENARIO | crowded)
    run = run_scenario(scenario, scenario.systems[0])
    assert run.open == run.row.requests > 10, "no room for the second stage"
    assert f"static: {run.open} of {run.open} requests were never answered" in caplog.text
    caplog.clear()
    scenario = load_scenario(
        SCENARIO | crowded | {"systems": [{"name": "static", "drop": {"name": "age", "limit": 2}}]}
    )
    run = run_scenario(scenario, scenario.systems[0])
    assert (run.open, run.row.dropped) == (0, run.row.requests)
    assert not caplog.text


PROFILE = {
    "latency_ms": {"form": "amdahl", "gamma": 20, "epsilon": 5, "delta": 1, "eta": 2},
    "max_batch": 8,
    "max_cores": 16,
    "origin": "published",
}


def cold_run(tmp_path: Path, profile: dict[str, Any], truth: dict[str, Any]) -> tuple[ScenarioRun, float]:
    """A run that begins with one cold start, and how long that took in seconds."""
    changes = {"stages": [{"name": "a", "profile": profile}], "systems": ["static"]}
    scenario = load_scenario(SCENARIO | changes | {"duration_s": 12, "truth": {"cold_start": {"warm": False} | truth}})
    run = run_scenario(scenario, scenario.systems[0], log=tmp_path / "run.jsonl")
    at_ns = {type(record): now_ns for now_ns, record in read_log(tmp_path / "run.jsonl")}
    return run, at_ns[WorkerReady] / NS_PER_S


def test_a_cold_start_takes_what_the_profile_says(tmp_path: Path) -> None:
    run, start_s = cold_run(tmp_path, PROFILE | {"load_s": 2.5}, {})
    assert start_s == 2.5
    assert run.row.assumed == ()


def test_a_declared_cold_start_overrides_the_profile(tmp_path: Path) -> None:
    run, start_s = cold_run(tmp_path, PROFILE | {"load_s": 2.5}, {"start_s": 1.25})
    assert start_s == 1.25
    assert run.row.assumed == ()


def test_a_cold_start_that_nobody_measured_or_declared_is_listed_as_assumed(tmp_path: Path) -> None:
    run, start_s = cold_run(tmp_path, PROFILE, {})
    assert start_s == 10.0
    (line,) = run.row.assumed
    assert read_log(tmp_path / "run.jsonl").header.assumed_starts == {"a/a": line}, "for reports of the log"
    assert line.startswith("a/a: cold starts take 10 s (its profile has no `load_s`")


def test_a_cold_start_that_never_happens_is_not_listed(tmp_path: Path) -> None:
    changes = {"stages": [{"name": "a", "profile": PROFILE}], "systems": ["static"]}
    scenario = load_scenario(SCENARIO | changes)
    assert run_scenario(scenario, scenario.systems[0]).row.assumed == ()


T5 = PROFILE | {"weights_bytes": 11_408_000_000, "startup": {"weights_s": 14.138, "first_batch_s": 1.206}}
"""Flashpoint specification, §3.1."""


def test_a_cold_start_fetches_the_weights_over_the_declared_network(tmp_path: Path) -> None:
    topology = {"store_mbps": 2203, "node_mbps": 50_000, "nodes_per_leaf": 20, "leaf_mbps": 100_000}
    stages = [{"name": "a", "profile": T5}]
    truth = {"cold_start": {"warm": False}, "network": {"topology": topology}}
    scenario = load_scenario(SCENARIO | {"stages": stages, "systems": ["static"], "truth": truth, "duration_s": 70})
    run = run_scenario(scenario, scenario.systems[0], log=tmp_path / "run.jsonl")
    steps = {
        record.step if isinstance(record, WorkerProgressed) else "ready": now_ns / NS_PER_S
        for now_ns, record in read_log(tmp_path / "run.jsonl")
        if isinstance(record, WorkerProgressed | WorkerReady)
    }
    assert steps == {
        "fetching": pytest.approx(0, abs=1e-6),
        "loading": pytest.approx(41.427, abs=1e-3),
        "warming": pytest.approx(41.427 + 14.138, abs=1e-3),
        "ready": pytest.approx(56.771, abs=1e-3),  # §7.5.27
    }
    assert run.row.assumed == ()
    taken_s = {
        step: sum(samples) / NS_PER_S for (_, _, step), samples in run.summary.runs[0].workers.cold_start_ns.items()
    }
    assert taken_s["fetching"] == pytest.approx(41.427, abs=1e-3)


MS = 1_000_000
BATCH_MS = {1: 10.0, 2: 16.0, 4: 28.0}


def profile_in(folder: Path, *speeds: float) -> None:
    """A measured profile on one core, with a pass for each speed."""
    passes = tuple(
        Pass(
            date=f"2026-11-2{day}",
            samples=tuple(sample_of(b, 1.0, [round(ms * speed * MS)] * 50) for b, ms in BATCH_MS.items()),
        )
        for day, speed in enumerate(speeds)
    )
    pooled = tuple(
        sample_of(b, 1.0, [round(ms * speed * MS) for speed in speeds for _ in range(50)]) for b, ms in BATCH_MS.items()
    )
    table = LatencyTable({b: {1.0: ms * max(speeds)} for b, ms in BATCH_MS.items()})
    profile = Profile(
        latency_ms=table, max_batch=4, max_cores=1, load_s=0.1, origin="measured", samples=pooled, passes=passes
    )
    save_profile(profile, folder / "p.json")


def rows_of(folder: Path, *, truth: str = "", rate: float = 110, profile: str = "p.json") -> list[RunRow]:
    (folder / "scene.yaml").write_text(
        f"""
name: demo
slo_ms: 60
stages: [{{name: only, profile: {profile}}}]
systems: [{{name: static, cores: 1}}]
cluster: {{nodes: [{{hardware: custom, count: 1, cores: 1}}]}}
trace: {{kind: poisson, rate: {rate}}}
duration_s: 20
seed: 3
{truth}
"""
    )
    scenario = load_scenario(folder / "scene.yaml")
    return [run.row for run in run_systems(scenario, scenario.systems)]


def bounds(row: RunRow) -> tuple[float, float]:
    assert row.attainment_low is not None
    assert row.attainment_high is not None
    return row.attainment_low, row.attainment_high


def test_passes_that_differ_give_a_range_around_the_run(tmp_path: Path) -> None:
    profile_in(tmp_path, 0.97, 1.0, 1.03)
    (row,) = rows_of(tmp_path)
    low, high = bounds(row)
    assert low < row.attainment < high <= 1.0
    assert row.p99_ms_low is not None
    assert row.p99_ms_high is not None
    assert row.p99_ms is not None
    assert row.p99_ms_low < row.p99_ms < row.p99_ms_high
    assert row.goodput_rps_low is not None
    assert row.goodput_rps_high is not None
    assert row.goodput_rps_low < row.goodput_rps < row.goodput_rps_high
    profile_in(tmp_path, 0.9, 1.0, 1.1)
    (wide,) = rows_of(tmp_path)
    assert bounds(wide)[0] < low
    assert bounds(wide)[1] - bounds(wide)[0] > high - low


def test_the_run_itself_is_the_same_with_and_without_a_range(tmp_path: Path) -> None:
    profile_in(tmp_path, 0.97, 1.0, 1.03)
    (ranged,) = rows_of(tmp_path)
    (plain,) = rows_of(tmp_path, truth="truth: {service: {spread: 0}}")
    assert plain.attainment_low is plain.attainment_high is plain.p99_ms_low is None
    assert (plain.attainment, plain.p99_ms, plain.served) == (ranged.attainment, ranged.p99_ms, ranged.served)


@pytest.mark.parametrize("profile", ["ResNet18-human", "p.json"])
def test_a_published_profile_or_a_single_pass_has_no_range_unless_a_spread_is_declared(
    tmp_path: Path, profile: str
) -> None:
    profile_in(tmp_path, 1.0)
    assert rows_of(tmp_path, rate=20, profile=profile)[0].attainment_low is None
    (declared,) = rows_of(tmp_path, rate=20, profile=profile, truth="truth: {service: {spread: 0.05}}")
    low, high = bounds(declared)
    assert low <= declared.attainment <= high


def test_full_attainment_is_not_certain(tmp_path: Path) -> None:
    profile_in(tmp_path, 1.0, 1.0, 1.0)
    (row,) = rows_of(tmp_path, rate=5)
    assert row.attainment == 1.0
    assert 0.9 < bounds(row)[0] < 1.0
    assert bounds(row)[1] == 1.0


def test_a_recorded_run_has_no_range(tmp_path: Path) -> None:
    profile_in(tmp_path, 0.9, 1.1)
    rows_of(tmp_path)
    world = World.from_scenario(load_scenario(tmp_path / "scene.yaml"))
    factors = speed_factors(world)
    assert factors is not None
    fast, slow = factors
    assert [factor < 1 for factor in fast.values()] == [True]
    assert slow == {key: pytest.approx(1 / factor) for key, factor in fast.items()}
    recorded = RecordedRun({0: {("only", "only", "custom"): {(1, 1.0): [10 * MS] * 20}}})
    assert speed_factors(replace(world, recorded=recorded)) is None


# Several applications

SEVERAL = {
    "name": "both",
    "applications": [
        {"name": "quick", "slo_ms": 100, "stages": [{"name": "a", "profile": PROFILE}]},
        {"name": "slow", "slo_ms": 50, "stages": [{"name": "a", "profile": PROFILE}]},
    ],
    "systems": [{"name": "static", "cores": 2}],
    "cluster": {"nodes": [{"hardware": "c5.4xlarge"}]},
    "traces": {"quick": {"kind": "poisson", "rate": 30}, "slow": {"kind": "poisson", "rate": 60}},
    "duration_s": 10,
}


def test_a_run_of_several_applications_has_a_row_for_each_and_in_total(tmp_path: Path) -> None:
    scenario = load_scenario(SEVERAL | {"truth": {"service": {"spread": 0.2}}})
    (run,) = run_systems(scenario, scenario.systems, log=tmp_path / "run.jsonl")
    row, rows = run.row, run.row.applications
    assert [each.name for each in rows] == ["quick", "slow"]
    assert [each.slo_ms for each in rows] == [100, 50]
    for figure in ("requests", "served", "late", "dropped", "core_seconds"):
        assert getattr(row, figure) == pytest.approx(sum(getattr(each, figure) for each in rows))
    for each in (row, *rows):
        assert each.attainment_low is not None
        assert each.attainment_high is not None
        assert each.attainment_low <= each.attainment <= each.attainment_high
    assert rows[0].attainment_low != rows[1].attainment_low
    replayed = replay_log(read_log(tmp_path / "run.jsonl"), rebuild(read_log(tmp_path / "run.jsonl").header).core())
    assert replayed.difference is None


def test_the_log_of_a_run_with_changes_replays_from_its_file(tmp_path: Path) -> None:
    changes = [{"at_s": 2, "deploy": SEVERAL["applications"][0] | {"slo_ms": 90}}, {"at_s": 5, "remove": "slow"}]  # type: ignore[index]
    scenario = load_scenario(SEVERAL | {"changes": changes})
    run = run_scenario(scenario, scenario.systems[0], log=tmp_path / "run.jsonl")
    assert [(each.name, each.version) for each in run.row.versions] == [("quick", "1"), ("quick", "2")]
    assert sum(each.requests for each in run.row.versions) == run.row.applications[0].requests
    log = read_log(tmp_path / "run.jsonl")
    assert replay_log(log, rebuild(log.header).core()).difference is None


def test_a_profile_that_counts_for_several_kinds_is_listed_as_assumed() -> None:
    mixed = {"nodes": [{"hardware": "c5.4xlarge"}, {"hardware": "m5.2xlarge"}]}
    scenario = load_scenario(SEVERAL | {"cluster": mixed})
    assumed = run_scenario(scenario, scenario.systems[0]).row.assumed
    assert any("one profile is taken as its speed on c5.4xlarge and m5.2xlarge" in line for line in assumed), assumed


FAILING = """
from dataclasses import dataclass, replace
from sloop.core.protocols import Scale
from sloop.systems import build_system
from sloop.units import s

STATIC = build_system("static")

@dataclass(frozen=True)
class Once(Scale):
    period_ns: int = s(1)

    def plan(self, now_ns, view, memory):
        if now_ns > 0 and "quick/a" in [stage.name for stage in view.stages]:
            raise ZeroDivisionError("too quick")
        return STATIC.policies.scale.plan(now_ns, view, memory)

SYSTEM = replace(STATIC, name="mine", policies=replace(STATIC.policies, scale=Once()))
"""


def test_a_policy_that_cannot_plan_is_counted_and_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mine.py").write_text(FAILING)
    scenario = load_scenario(SEVERAL | {"systems": [str(tmp_path / "mine.py")]})
    run = run_scenario(scenario, scenario.systems[0])
    assert run.row.planner_errors >= 9
    assert run.row.served > 0, "the plan before stays in force"
    (warning,) = [record.message for record in caplog.records]
    assert warning == f"mine: quick: no new plan: ZeroDivisionError: too quick ({run.row.planner_errors} times)"


def one_core(rate: float, sizes: list[int] | None = None, seconds: float = 20) -> Scenario:
    """One core, a batch of n rows takes 10 + 2n ms; of size 512, where there are sizes, 10 + 8n."""
    latency = {"form": "quadratic", "alpha": 0.0, "beta": 2.0, "gamma": 10.0}
    known = {"sizes": [{"size": 16, "latency_ms": latency}, {"size": 512, "latency_ms": latency | {"beta": 8.0}}]}
    profile = {"latency_ms": latency, "max_batch": 8} | (known if sizes else {})
    return load_scenario(
        {
            "name": "core",
            "slo_ms": 60,
            "stages": [{"name": "only", "profile": profile, **({"sizes": sizes} if sizes else {})}],
            "system": "early-drop",
            "cluster": {"nodes": [{"hardware": "custom", "cores": 1, "memory_bytes": 10**9}]},
            "trace": {"kind": "poisson", "rate": rate, **({"sizes": sizes} if sizes else {})},
            "duration_s": seconds,
        }
    )


def test_a_known_speed_leaves_only_what_its_measurement_leaves_open() -> None:
    scenario = one_core(200)
    any_run = replace(scenario, truth=Truth(ServiceTruth(spread=0.2), profile_error=1.25))
    well, badly = (at_speed(scenario, MachineSpeed(0.8, error)) for error in (0.0, 0.04))
    rows = [next(run_systems(each, each.systems)).row for each in (any_run, badly, well)]
    assert len({row.attainment for row in rows}) == 1, "the same machine"
    widths = [high - low for low, high in map(bounds, rows)]
    assert widths[0] > widths[1] > widths[2] > 0
    for low, high in map(bounds, rows):
        assert low < rows[0].attainment < high


@pytest.mark.parametrize("speed", [0.7, 1.0, 1.4])
@pytest.mark.parametrize("sizes", [None, [16, 512]])
def test_the_speed_of_a_log_is_that_of_the_machine_that_it_comes_from(
    tmp_path: Path, speed: float, sizes: list[int] | None
) -> None:
    scenario, log = one_core(30, sizes), tmp_path / "run.jsonl"
    run_scenario(at_speed(scenario, MachineSpeed(speed)), scenario.systems[0], log=log)
    found = log_speed(log, scenario.deployment)
    assert found is not None
    assert found.factor == pytest.approx(speed, rel=0.02)
    assert 0 < found.error < 0.01 * speed
    assert log_speed(log, load_scenario(SCENARIO).deployment) is None, "a log of other stages"


def test_batches_after_a_pause_say_nothing_of_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless there are too few others."""

    def slower_after_pauses(recorded: Any) -> Iterator[tuple[int, Record]]:
        """Batches that begin after a pause, and end before one, take 3 ms longer."""
        records, ended_ns = list(with_beginning(recorded)), 0
        started = {at for at, record in records if isinstance(record, StartBatch)}
        late_ns: dict[int, int] = {}
        begun_ns = 0
        for now_ns, record in records:
            if isinstance(record, StartBatch):
                begun_ns = now_ns
            elif isinstance(record, Finished):
                if begun_ns > ended_ns and not any(now_ns <= at < now_ns + ms(5) for at in started):
                    late_ns[now_ns] = ms(3)
                ended_ns = now_ns
        return iter(sorted(((at + late_ns.get(at, 0), record) for at, record in records), key=lambda each: each[0]))

    monkeypatch.setattr("sloop.sim.machine_speed.with_beginning", slower_after_pauses)
    found = list[float]()
    for rate in (30, 3):
        scenario, log = one_core(rate), tmp_path / f"{rate}.jsonl"
        run_scenario(scenario, scenario.systems[0], log=log)
        speed = log_speed(log, scenario.deployment)
        assert speed is not None
        found.append(speed.factor)
    assert found[0] == pytest.approx(1, rel=0.02)
    assert found[1] == pytest.approx(12 / 15, rel=0.05)


def test_the_error_of_a_speed_is_as_large_as_the_speeds_of_equal_logs_differ(tmp_path: Path) -> None:
    """The error that logs give, beside how much they truly differ from each other; each is estimated from few."""
    log, speeds = tmp_path / "run.jsonl", list[MachineSpeed]()
    for seed in range(24):
        scenario = replace(one_core(60, seconds=5), seed=seed, truth=Truth(ServiceTruth(shape="exponential")))
        run_scenario(scenario, scenario.systems[0], log=log)
        found = log_speed(log, scenario.deployment)
        assert found is not None
        speeds.append(found)
    assert fmean([each.error for each in speeds]) == pytest.approx(stdev([each.factor for each in speeds]), rel=0.35)


def test_batches_of_sizes_that_a_profile_does_not_know_say_nothing_of_speed(tmp_path: Path) -> None:
    known, log = one_core(30, [16, 512]), tmp_path / "run.jsonl"
    run_scenario(known, known.systems[0], log=log)
    assert log_speed(log, one_core(30).deployment) is None


def test_other_draws_of_durations_have_the_same_requests() -> None:
    made = World.from_scenario(one_core(100))
    around = worlds_around(replace(made, truth=Truth(ServiceTruth(spread=0.1))))

    def arrivals(each: World) -> list[tuple[int, int]]:
        return [(record.id, now_ns) for now_ns, record in records_of(each) if isinstance(record, Request)]

    assert len(around) == len(PLACES)
    assert all(arrivals(each) == arrivals(made) for each in around)
    assert len({tuple(records_of(each)) for each in around}) == len(around)
    assert worlds_around(made) == [], "a profile that was declared has no range"


def test_what_averages_out_within_a_run_and_what_does_not() -> None:
    """Durations that vary a tenth as much narrow the part of a range that is theirs, and leave that of the speed."""
    few, many = (
        [0.88 - 0.05 * place + each for place, each in zip((0.0, *PLACES), draws, strict=True)]
        for draws in (SPREAD, [x / 10 for x in SPREAD])
    )
    (low, high), (narrow_low, narrow_high) = attainment_range(few), attainment_range(many)
    line = hypot(0.05, MODEL_ERROR)
    assert low < narrow_low == pytest.approx(0.88 - line, abs=0.001)
    assert high > narrow_high == pytest.approx(0.88 + line, abs=0.001)
    assert attainment_range([0.88] * 7) == pytest.approx((0.88 - MODEL_ERROR, 0.88 + MODEL_ERROR))
    assert attainment_range([1.0] * 7) == (1.0 - MODEL_ERROR, 1.0)


SPREAD = (0.0, 0.02, -0.01, -0.01, -0.01, -0.01, 0.02)
"""Beside any straight line through `PLACES`."""
