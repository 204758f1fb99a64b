"""FA2's application, planners and loads are those described; rows and figures follow from results."""

from datetime import UTC, datetime
from functools import cache
from statistics import mean

import pytest
from msgspec import structs

from sloop.streams import stream
from sloop_systems.comparison import REPRODUCTIONS
from sloop_systems.comparison.harness import Results
from sloop_systems.comparison.rows import Row
from sloop_systems.fa2 import experiments as fa2
from sloop_systems.fa2.experiments.application import (
    CPU,
    GPU,
    ORDER,
    PATHS,
    VISION,
    Hardware,
    models,
    problem,
    profile_of,
)
from sloop_systems.fa2.experiments.offline import (
    PLANNERS,
    RATES,
    Sweep,
    graph_of,
    offline_rows,
    replicas,
    swept,
    throughputs,
)
from sloop_systems.fa2.experiments.runs import (
    FULL,
    LEAD_S,
    LOADS,
    QUICK,
    TAIL_S,
    Fa2Evaluation,
    Fa2Result,
    Fa2Trial,
    chosen,
    rates_of,
    trace_at,
    world_of,
)

SHORT = Fa2Trial(plan="fa2", load="steady 12", seconds=20)


def made_up(trial: Fa2Trial) -> Fa2Result:
    """A result without a run: good for those who plan with deadlines, bad for others on few replicas."""
    poor = trial.pools == "optimal" and trial.plan in {"ds2", "inferline"}
    late, dropped = (14.0, 60.0 if trial.plan == "ds2" else 20.0) if poor else (0.5, 0.0)
    third = trial.seconds // 3
    shares = [100.0 if third <= at < third + 20 else 0.0 for at in range(trial.seconds)]
    return Fa2Result(
        violations=late + dropped,
        cores=10.0,
        late=late,
        dropped=dropped,
        utilisation=70.0,
        violations_by_second=tuple(shares),
        cores_by_second=(10.0,) * trial.seconds,
        arrivals_by_second=(8,) * trial.seconds,
    )


def results_of(evaluation: Fa2Evaluation) -> Results[Fa2Result]:
    trials = [structs.replace(trial, seed=seed) for trial, seeds in evaluation.wanted() for seed in range(seeds)]
    return Results({trial: made_up(trial) for trial in trials})


@pytest.mark.parametrize("evaluation", [QUICK, FULL])
def test_rows_follow_from_results(evaluation: Fa2Evaluation) -> None:
    rows = evaluation.rows(results_of(evaluation))
    by_metric = {row.metric: row for row in rows if row.experiment not in {"E1 steady", "check 7.3"}}
    experiments = {row.experiment for row in rows}
    assert {"E1 steady", "E2 moving", "E4 fixed", "E7 slices", "check 7.3"} <= experiments
    assert ("E3 long" in experiments) is (evaluation is FULL)
    kept = ["fitted", "within-bound"] if evaluation is FULL else ["shape"] * 2  # one seed keeps no bound
    assert [by_metric[metric].verdict for metric in ("violations of FA2", "dropped by DS2")] == kept
    assert by_metric["late with DS2"].ours == 14.0
    assert by_metric["time in which FA2 recovers from 8 → 27/s"].ours == 20.0
    assert not any("optim" in row.metric for row in rows if row.experiment in {"E1 steady", "E4 fixed"}), (
        "FA2's own plan"
    )


def test_every_trial_once() -> None:
    trials = [trial for trial, _ in QUICK.wanted()]
    assert len(trials) == len(set(trials))
    assert QUICK.fixed("ds2") in trials
    assert QUICK.moving("ds2", "fluctuating") in trials
    assert [seeds for trial, seeds in FULL.wanted() if trial.seconds == FULL.long_s] == [1] * 8


def test_fa2_is_the_optimum_wherever_the_optimum_is_not_played() -> None:
    """The evaluation plays FA2 alone, because the optimum's plan is the same."""
    for paths, rate in ((3, 8), (3, 27), (6, 8), (6, 27), (3, 50)):
        assert chosen("fa2", CPU, paths, rate) == chosen("optimal", CPU, paths, rate)


def test_figures_show_every_rival() -> None:
    results = results_of(QUICK)
    sweep = Sweep(CPU, 3, {name: tuple(range(10, 10 + len(RATES))) for name in PLANNERS})
    names = [series.name for series in fa2.sweep_figure(sweep, "x").panels[0].series]
    assert names == ["ds2", "inferline", "optimal", "fa2"]
    assert len(fa2.moving_figure(QUICK, results).panels) == 3
    assert fa2.fixed_figure(QUICK, results).panels[0].ticks[0] == "fa2"
    assert "d/1.15 0.50 %" in fa2.headroom_figure(QUICK, results).alt
    assert len(fa2.sizes_figure().panels[0].series) == 3


def test_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fa2Trial, "play", made_up)
    seen: list[float] = []
    found = REPRODUCTIONS["fa2"](quick=True, data=None, processes=1, progress=lambda share, _: seen.append(share))
    assert seen[-1] == 1.0
    assert {figure.name for figure in found.figures} >= {"sweep-cores", "fluctuating", "fixed"}
    assert any("fitted" in line for line in found.assumed)
    assert found.page(made=datetime.now(UTC)).count("\\u003csvg") == len(found.figures)


# What needs no simulation.


@cache
def sweeps() -> tuple[Sweep, Sweep]:
    return swept(CPU, VISION), swept(GPU, 6)


@cache
def quick_rows() -> tuple[Row, ...]:
    return tuple(offline_rows(sweeps(), quick=True))


def test_fa2_is_the_optimum_at_all_55_rates_of_three_paths() -> None:
    assert len(RATES) == 55
    assert sweeps()[0].exact == 100.0
    assert sweeps()[1].exact >= 90.0


def test_surpluses() -> None:
    cores, slices = sweeps()
    assert sum(cores.over("inferline")) / 55 == pytest.approx(16.5, abs=0.1)
    assert max(cores.over("ds2")) == pytest.approx(40.9, abs=0.1)
    assert max(slices.over("ds2")) == pytest.approx(53.3, abs=0.1)
    assert 0 < cores.saved("inferline") < 16.5, "a saving is less than the surplus it is of"


def test_rows_hold() -> None:
    rows = [row for row in quick_rows() if row.experiment != "E9 decision"]  # how quick this machine is, is not tested
    off = [(row.experiment, row.metric) for row in rows if row.verdict == "off" and row.experiment != "check 7.2"]
    assert off == [("E6 slices", f"replicas of inferline beyond FA2's, {which}") for which in ("mean", "largest")]
    assert {row.experiment.split()[0] for row in rows} == {"E0", "E0b", "E5", "E6", "E8", "check"}
    totals = [row for row in rows if "derived number of replicas" in row.metric]
    assert len(totals) == 7
    assert all(row.verdict == "derived" for row in totals)
    largest = next(row for row in rows if row.metric == "replicas of inferline beyond FA2's, largest")
    assert (largest.paper, largest.verdict) == (48, "shape"), "27 % is not 48 %"


def test_small_replicas_do_most() -> None:
    most = {name: max(rate for _, rate in points) for name, points in throughputs().items()}
    assert most["4 × 1"] > most["2 × 2"] > most["1 × 4"]


def test_random_graphs_are_what_the_specification_draws() -> None:
    draw = stream(1, "test")
    for _ in range(20):
        stages, paths = graph_of(draw)
        assert 2 <= len(paths) <= 5
        assert all(2 <= len(path.stages) <= 5 for path in paths)
        assert replicas(stages, paths, mode="milp") >= len(stages)


# The application.


@pytest.mark.parametrize("hardware", [CPU, GPU])
def test_deadlines_are_five_times_the_time_alone(hardware: Hardware) -> None:
    alone = {name: form.latency_ms(1, 1.0) for name, form in models(hardware).items()}
    for chain, slo_ms in zip(PATHS, hardware.slos_ms, strict=True):
        assert 5 * sum(alone[name] for name in chain) == pytest.approx(slo_ms)


def test_stages_are_in_topological_order() -> None:
    for chain in PATHS:
        assert [ORDER.index(name) for name in chain] == sorted(ORDER.index(name) for name in chain)


def test_rates_divide_evenly_between_paths() -> None:
    given = problem(CPU, 6, 12)
    rates = {stage.name: stage.rate_rps for stage in given.stages}
    assert rates["OBJD"] == rates["QUAN"] == 6
    assert rates["SUMR"] == rates["AUTT"] == 4
    assert rates["TCLS"] == 2
    assert problem(CPU, 3, 12).names == ("OBJD", "ALPR", "NSFW", "FACR", "OBJR", "IMGS", "QUAN")


def test_a_system_without_batches_can_just_serve_27_requests() -> None:
    busy = sum(stage.rate_rps * stage.latency_ms[0] / 1000 for stage in problem(CPU, 6, 27).stages)
    assert busy == pytest.approx(55.0, abs=0.1)


def test_profiles_name_their_source() -> None:
    profile = profile_of(GPU, "SUMR")
    assert profile.origin == "fitted"
    assert profile.latency_ms.latency_ms(1, 1.0) == pytest.approx(362)


# Trials.


def test_the_same_trial_has_the_same_result() -> None:
    assert SHORT.play() == SHORT.play()
    assert SHORT.play() != structs.replace(SHORT, seed=1).play()


def test_a_plan_is_kept_and_a_system_decides() -> None:
    kept = SHORT.play()
    assert set(kept.cores_by_second) == {10.0}
    assert kept.violations == 0
    assert 30 < kept.utilisation < 90
    loop = Fa2Trial(system="fa2", load="fluctuating", seconds=60).play()
    assert len(set(loop.cores_by_second)) > 1
    assert len(loop.violations_by_second) == 60


def test_every_planner_on_the_same_replicas_with_batches_of_its_own() -> None:
    world = world_of(Fa2Trial(plan="ds2", pools="optimal", load="steady 50", seconds=10))
    parameters = world.application.system.parameters
    stages = parameters["stages"]
    assert isinstance(stages, dict)
    assert sum(own["replicas"] for own in stages.values()) == 27
    assert {own["batch_max"] for own in stages.values()} == {1}
    assert parameters["order"] == "fifo"
    assert world_of(Fa2Trial(plan="grandslam", seconds=10)).application.system.parameters["order"] == "edf"


@pytest.mark.parametrize(
    ("plan", "total"), [("fa2", 17), ("optimal", 17), ("inferline", 20), ("ds2", 23), ("grandslam", 17)]
)
def test_planners(plan: str, total: int) -> None:
    assert sum(choice.replicas for choice in chosen(plan, CPU, 3, 30)) == total


def test_six_paths_are_a_graph_that_requests_enter_in_the_middle() -> None:
    application = world_of(Fa2Trial(plan="fa2", paths=6, seconds=10)).application
    assert application.graph.entries == ("OBJD", "AUTT", "SUMR")
    assert application.by_name["QUAN"].after == ("ALPR", "AUTT", "SUMR")
    assert application.visits["QUAN"] == pytest.approx(0.5)


def test_loads_are_as_described() -> None:
    assert rates_of("steady 9", 3, 0) == [9.0] * 3
    assert rates_of("fluctuating", 9, 0) == [8.0] * 3 + [27.0] * 3 + [8.0] * 3
    for kind in LOADS:
        rates = rates_of(kind, 3600, 5)
        assert len(rates) == 3600
        assert 1 <= min(rates) <= max(rates) <= 40
        assert rates == rates_of(kind, 3600, 5)
    assert len(set(rates_of("random", 100, 0))) == 10
    assert set(rates_of("square", 7200, 0)) == {8.0, 20.0}
    assert max(rates_of("diurnal", 18_000, 0)) == 27.0


def test_a_trace_has_its_rates() -> None:
    trace = trace_at([5.0] * 500 + [50.0] * 500, 0, "x")
    counts = trace.counts_per_s()
    assert mean(counts[:500]) == pytest.approx(5.0, rel=0.1)
    assert mean(counts[500:]) == pytest.approx(50.0, rel=0.1)


def test_before_and_after_what_counts_there_is_load_too() -> None:
    loop = Fa2Trial(system="fa2", load="steady 9", seconds=30)
    assert (loop.lead_s, SHORT.lead_s) == (LEAD_S, 0)
    assert world_of(loop).duration_ns == (LEAD_S + 30 + TAIL_S) * 10**9
