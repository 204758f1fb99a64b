"""Flashpoint's windows and Atoll's targets (section 7.5, checks 12 and 26), its averages (17), rows that follow."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from statistics import median

import pytest
from msgspec import structs

from sloop.actions import End, StartWorker
from sloop.events import WorkerReady, WorkerStopped
from sloop.options import written
from sloop.runlog import Record
from sloop.sim.run import simulate
from sloop.sim.world import World
from sloop.solvers.cuts import PieceCosts
from sloop.units import s
from sloop.vocabulary import LINK_MBPS, Outcome, ReplicaId, ReplicaSpec, Request, RequestId, Slot
from sloop.workload.trace import cut
from sloop_systems.comparison import data_folder, reproduce
from sloop_systems.comparison.harness import UNSEEN, Results, Wanted
from sloop_systems.comparison.rows import Row
from sloop_systems.flashpoint.experiments import offline, planner, published
from sloop_systems.flashpoint.experiments.planner import (
    ScalerResult,
    ScalerTrial,
    drawn_row,
    of_cells,
    of_tuned,
    planner_rows,
    scaler_rows,
    scalers_figure,
    wanted_at_ours,
    wanted_cells,
    wanted_scalers,
    wanted_tuned,
)
from sloop_systems.flashpoint.experiments.results import (
    BASE,
    COLD_S,
    MODELS,
    MOST_PIECES,
    TRACES,
    Found,
    Grid,
    grid_rows,
    simulated_rows,
    wanted,
)
from sloop_systems.flashpoint.experiments.runs import (
    KNOBS,
    PROVISION,
    REQUEST_NETWORK_S,
    SCALING,
    FlashpointResult,
    FlashpointTrial,
    StartsAndLatencies,
    policies_of,
    trace_of,
    world_of,
)
from sloop_systems.flashpoint.experiments.traces import (
    AZURE,
    DRAWN,
    FILE_HOURS,
    HOUR_S,
    HOURS,
    LLM,
    LOOKED_AT,
    MAIN,
    WINDOWS,
    generated_counts,
    requests_of,
)
from sloop_systems.flashpoint.published import FLASHPOINT_MODELS
from tests.sim.scene import with_clients

DATA = data_folder()
needs_trace = pytest.mark.skipif(
    not requests_of(HOURS[0], DATA).is_measured, reason="the Twitter trace is not in the folder of public data"
)


# Traces


@needs_trace
@pytest.mark.parametrize(
    ("name", "middle", "peak", "requests"),
    [
        ("470042", 57, 267, 250_885),
        ("1652593", 57, 267, 210_767),
        ("470470", 57, 267, 233_276),
        ("10800", 58, 273, 259_624),
    ],
)
def test_the_windows_have_the_printed_statistics(name: str, middle: int, peak: int, requests: int) -> None:
    counts = requests_of(name, DATA).counts
    assert (len(counts), median(counts), max(counts), sum(counts)) == (3600, middle, peak, requests)


@needs_trace
def test_the_window_of_ten_hours() -> None:
    counts = requests_of("10h", DATA).counts
    assert (len(counts), median(counts), max(counts)) == (36_000, 47, 291)


@pytest.mark.parametrize("seed", range(3))
def test_the_generated_hour_has_the_statistics_of_azure(seed: int) -> None:
    found = requests_of(AZURE, DATA, seed=seed)
    assert not found.is_measured
    assert median(found.counts) == 18
    assert max(found.counts) / 18 == pytest.approx(2.54, rel=0.01)
    assert (
        list(found.counts)
        == list(requests_of(AZURE, None, seed=seed).counts)
        != list(generated_counts("x", 3600, 18, 2.54))
    )


def test_without_the_file_an_hour_is_made_up() -> None:
    found = requests_of(MAIN, None)
    assert not found.is_measured
    assert (len(found.counts), median(found.counts)) == (3600, 57)
    assert max(found.counts) / 57 == pytest.approx(4.68, rel=0.01)


def test_fifteen_percent_of_an_hour() -> None:
    thinned = trace_of(structs.replace(BASE, scale=0.15, data=str(DATA or ""))).counts_per_s()
    assert 8 <= median(thinned) <= 9


# Atoll's policy


@needs_trace
@pytest.mark.parametrize("name", HOURS)
def test_the_targets_of_atoll_s_policy(name: str) -> None:
    targets = offline.atoll_targets(requests_of(name, DATA).counts)
    assert len(targets) == 240, "the first minute, and t = 15, 30, …, 3585"
    steps = [more for _, more in offline.growth_of(targets)]
    assert (targets[0], max(targets), len(steps), sum(steps), max(steps)) == offline.ATOLL[name]


@needs_trace
def test_scale_ups_are_a_seventh_of_what_runs() -> None:
    """Section 6, item 12: 0.14 to 0.16 on average, at most one of 27 to 31 above 1."""
    for name in HOURS:
        growth = offline.growth_of(offline.atoll_targets(requests_of(name, DATA).counts))
        ratios = [more / before for before, more in growth]
        assert 0.13 < sum(ratios) / len(ratios) < 0.165
        assert sum(ratio > 1 for ratio in ratios) <= 1


# Averages


def test_the_printed_table_gives_the_headline() -> None:
    found = [(published.mean_saved(ratios), published.mean_of_percents(ratios)) for ratios in map(column, range(4))]
    assert [saved for saved, _ in found] == pytest.approx([14.54, 20.63, 56.23, 75.42], abs=0.01)
    assert [plain for _, plain in found] == pytest.approx([14.01, 19.31, 44.97, 51.36], abs=0.01)


def column(place: int) -> dict[str, list[float]]:
    return {name: [1 / (1 - row[place] / 100)] for name, row in published.SAVED_PERCENT.items()}


def test_averages_are_taken_over_policies_first() -> None:
    assert published.mean_saved({"a": [1.0, 3.0], "b": [2.0] * 7}) == pytest.approx(50)
    assert published.mean_of_percents({"a": [1.0, 1.0], "b": [4.0]}) == pytest.approx(37.5)
    assert published.saved_percent(8 / 7) == pytest.approx(12.5)


# Queueing


def test_formulas_of_a_cold_start_under_excess() -> None:
    """Section 2.2: linear in the excess and in the cold start; a larger scale-up downloads more copies."""
    assert offline.backlog(100, 57, 50) == 2150
    assert offline.backlog(50, 57, 50) == 0
    assert offline.expected_wait_s(100, 57, 107.5, 50) == pytest.approx(20)
    assert offline.expected_wait_s(143, 57, 107.5, 50) == pytest.approx(40)
    assert offline.expected_wait_s(100, 57, 107.5, 100) == pytest.approx(40)
    assert offline.expected_cold_s(0.5, 41.4, 14.1, 1.2) == pytest.approx(56.7)
    assert offline.expected_cold_s(2.0, 41.4, 14.1, 1.2) == pytest.approx(98.1)


# Rows


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], Row]:
    found = offline.offline_rows(DATA)
    assert len({(row.experiment, row.metric) for row in found}) == len(found)
    return {(row.experiment, row.metric): row for row in found}


def test_contradictions_of_the_source_are_found(rows: dict[tuple[str, str], Row]) -> None:
    far = rows["E10 sources", "cold start from another host"]
    assert (far.verdict, far.paper) == ("source-inconsistent", 232.2)
    assert far.ours == pytest.approx(402.6, abs=0.1)
    mean = rows["E5 pieces", "the same, arithmetic mean of six models"]
    assert (mean.verdict, mean.paper) == ("source-inconsistent", 7.1)


def test_t5_in_pieces(rows: dict[tuple[str, str], Row]) -> None:
    row = rows["E5 pieces", "cold start of T5, whole / in pieces"]
    assert row.verdict == "reproduced"
    assert row.ours == pytest.approx(11_406.35 / 268.45, rel=1e-3), "the largest of its layers"


def test_plans_are_never_worse_than_those_they_are_compared_with() -> None:
    for name in FLASHPOINT_MODELS:
        for requests in offline.QUEUES:
            found = offline.benefits(name, requests)
            assert found.best >= max(found.gillis, found.serfer, 0.0) - 1e-12
            assert found.ours.pieces <= len(FLASHPOINT_MODELS[name].layers)


def test_costs_of_pieces_are_those_of_the_model() -> None:
    for name, model in FLASHPOINT_MODELS.items():
        costs: PieceCosts = offline.piece_costs(name)
        assert sum(costs.cold_s) == pytest.approx(sum(offline.stages_s(name, LINK_MBPS)))
        assert costs.exec_whole_s == pytest.approx(model.exec_ms.value / 1e3)
    assert offline.piece_costs(offline.T5).plan(range(1, 55)).request_s == pytest.approx(0.1406 * 1.4394, rel=1e-4)


def test_plain_transfers_share_the_source_and_a_chain_does_not() -> None:
    alone = offline.transfer_s(1, is_chain=False)
    assert alone == pytest.approx(11_408 * 8 / offline.TEN_GBIT_MBPS, rel=1e-6)
    assert [offline.transfer_s(k, is_chain=False) for k in (2, 3)] == pytest.approx([2 * alone, 3 * alone])
    assert [offline.transfer_s(k, is_chain=True) for k in (2, 4)] == pytest.approx([alone, alone])


# The simulated experiments, with results that are made up


SPEED = {
    "cheapest-start": 18.0,
    "baseline": 1.0,
    "mp": 2.5,
    "mc": 3.0,
    "lc": 15.0,
    "lc+mc": 16.0,
    "lc+mc+mp": 20.0,
    "gpu-faas": 5.0,
    "atoll": 2.0,
    "gillis": 2.0,
    "serfer": 2.5,
}


def made_up(trial: FlashpointTrial) -> FlashpointResult:
    """A cold start of 60 s without any technique, and a latency in proportion; larger models gain more."""
    faster = SPEED[trial.technique] ** ((1 + MODELS.index(trial.model)) / len(MODELS))
    return FlashpointResult(
        violations=0.0,
        cores=trial.resources or (26.0 if trial.matches_s else 13.0),
        mean_s=4.0 * trial.scale / faster,
        p99_s=40.0 / faster,
        longest_s=50.0 / faster,
        cold_s=60.0 / faster / max(1, trial.pieces_max),
        cold_least_s=56.771,
        cold_most_s=56.771,
        started=50,
        sent_only=0.1 * trial.per_host,
        runs=3 if trial.resources else 1,
    )


def made_up_scaler(trial: ScalerTrial) -> ScalerResult:
    """Twice as many late requests and a cold start ten times as long without a mechanism."""
    without = trial.mechanism == "baseline"
    return ScalerResult(violations=4.0 if without else 2.0, cores=5.0, cold_s=20.0 if without else 2.0, started=7)


@pytest.mark.parametrize("quick", [True, False])
def test_from_end_to_end(quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashpointTrial, "play", made_up)
    monkeypatch.setattr(ScalerTrial, "play", made_up_scaler)
    seen: list[float] = []
    found = reproduce(
        "flashpoint", quick=quick, data=tmp_path, processes=1, progress=lambda share, _: seen.append(share)
    )
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)
    assert [figure.name for figure in found.figures] == ["targets", "plans", "techniques", "scalers"]
    shown = {row.experiment for row in found.rows}
    assert {"E5 pieces", "E6 plans", "check 15", "check 27", "our planner", "published scalers"} <= shown
    assert ({"E3 autoscalers", "E14 techniques", "E17 headline", "E18 models", "E19 resources"} <= shown) is not quick
    assert "Atoll's targets" not in shown, "there is no recorded trace"
    assert all("generated trace" in row.note for row in found.rows if row.experiment.startswith(("check", "E17 headl")))
    assert sum(line.startswith("requests: assumed") for line in found.assumed) == 2
    assert any("scalers: assumed" in line for line in found.assumed) is not quick
    assert len({(row.experiment, row.metric) for row in found.rows}) == len(found.rows)


def found_of(wanted_trials: Wanted[FlashpointTrial]) -> Found:
    """Each trial with each of its seeds."""
    return Results(
        {
            each: made_up(each)
            for trial, seeds in wanted_trials
            for place in range(seeds)
            for each in [structs.replace(trial, seed=trial.seed + place)]
        }
    )


@pytest.fixture(scope="module")
def simulated() -> dict[tuple[str, str], Row]:
    results = found_of([*wanted(quick=False), *wanted_cells(quick=False)])
    tuned = found_of([*Grid(results).wanted(), *wanted_tuned(Grid(results))])
    first = Grid(results, tuned)
    grid = Grid(results, tuned, found_of([*first.wanted_matches(), *wanted_at_ours(first)]))
    found = [*simulated_rows(results, quick=False), *grid_rows(grid)]
    found += [*planner_rows([*of_cells(results, quick=False), *of_tuned(grid)]), drawn_row(results)]
    return {(row.experiment, row.metric): row for row in found}


def test_the_grid_has_every_cell_at_the_resources_of_its_baseline() -> None:
    results: Found = Results({trial: made_up(trial) for trial, _ in wanted(quick=False)})
    cells = [trial for trial, _ in Grid(results).wanted()]
    assert len(set(cells)) == len(cells) == 336 - 6 * 4 * 2, "and the baselines"
    assert all(trial.resources == 13.0 for trial in cells)


def test_rows_of_the_grid(simulated: dict[tuple[str, str], Row]) -> None:
    saved = simulated["E17 headline", "mean latency saved over the baseline, twitter"]
    ratios = [20.0 ** (place / 6) for place in range(1, 7)]
    assert saved.ours == pytest.approx(100 * (1 - 1 / (sum(ratios) / 6)))
    plain = sum(100 * (1 - 1 / ratio) for ratio in ratios) / 6
    assert f"mean of percentages {plain:.2f} %" in saved.note
    assert simulated["E18 models", "mean latency saved over the baseline, twitter, T5-3B"].ours == pytest.approx(95.0)
    assert simulated["E14 techniques", "cold start, the baseline / locality, azure"].ours == pytest.approx(
        sum(15.0 ** (place / 6) for place in range(1, 7)) / 6
    )
    assert (
        simulated["check 16", "larger models that save less over the baseline than the next smaller, azure"].ours == 0
    )
    assert simulated["E19 resources", "cells whose replicas are within 5 % of the baseline's, of 288"].ours == 100
    assert simulated["E15 pieces used", "mean latency that pieces save, T5-3B"].ours == pytest.approx(60)
    beyond = simulated["E16 together", "cold start saved beyond locality, all techniques, twitter"]
    assert beyond.ours == pytest.approx(100 * (1 - 6 / sum((20 / 15) ** (place / 6) for place in range(1, 7))))
    assert simulated["E19 resources", "runs for a cell, mean"].verdict == "within-bound"
    more = simulated["E19 resources", "more replicas for Flashpoint's latency of T5, the baseline"]
    assert more.ours == pytest.approx(100)
    assert "0 of 4 reach it" in more.note


def test_our_planner_is_compared_with_the_best_single_technique(simulated: dict[tuple[str, str], Row]) -> None:
    row = simulated["our planner", "mean latency, window 470470, ours - locality"]
    assert row.ours == pytest.approx(4 / 18 - 4 / 15)
    assert row.verdict == "shape"
    assert "one run, without an interval" in row.note
    assert ("our planner", "mean latency, torchserve, azure, equal resources, ours - locality") in simulated
    cells = len(planner.CELLS) + 6
    count = simulated["our planner", f"experiments in which ours is slower, of {cells} in which it differs"]
    assert (count.ours, count.verdict) == (0.0, "shape")


def test_techniques_are_tuned_to_our_planner_where_it_takes_less_than_the_baseline() -> None:
    results = found_of(wanted(quick=False))
    trials = [*Grid(results).wanted(), *wanted_tuned(Grid(results))]
    few = {trial for trial, _ in trials if trial.technique == "cheapest-start" and trial.policy == "torchserve"}
    traces = {trial.trace for trial in few}
    assert len(traces) == len(TRACES)
    tuned: Found = Results({
        trial: structs.replace(made_up(trial), cores=trial.resources / (2 if trial in few else 1))
        for trial, _ in trials
    })  # fmt: skip
    lower = [trial for trial, _ in wanted_at_ours(Grid(results, tuned))]
    assert {(trial.policy, trial.trace, trial.resources) for trial in lower} == {
        ("torchserve", trace, 6.5) for trace in traces
    }
    assert {trial.technique for trial in lower} == set(planner.SINGLE)
    matched: Found = Results({trial: structs.replace(made_up(trial), mean_s=9.0) for trial in lower})
    (row, *_) = planner_rows(of_tuned(Grid(results, tuned, matched)))
    assert row.note.endswith("1.000 × its replicas")
    assert "9 s" in row.note


def test_it_is_judged_in_hours_with_which_nothing_was_chosen() -> None:
    judged = [trial for trial, _ in wanted_cells(quick=False) if trial.seed == UNSEEN]
    assert {(trial.trace, trial.technique) for trial in judged} == set(product(DRAWN, planner.COMPARED))
    assert len(set(DRAWN)) == 10
    spans = sorted(WINDOWS[name] for name in (*DRAWN, *LOOKED_AT))
    drawn = {WINDOWS[name] for name in DRAWN}
    for one, other in pairwise(spans):
        assert one[1] <= other[0] or not drawn & {one, other}
    assert all(end <= FILE_HOURS * HOUR_S for _, end in drawn)
    assert UNSEEN not in {trial.seed for trial, _ in (*wanted(quick=False), *wanted_cells(quick=True))}


def test_it_is_off_if_the_hours_show_that_it_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    def row_with(slower: Callable[[int], float]) -> Row:
        """The row if requests take so many times as long with ours in each hour."""
        return drawn_row(
            Results({
                trial: structs.replace(made_up(trial), mean_s=slower(DRAWN.index(trial.trace)) / 5)
                if trial.technique == planner.OURS
                else structs.replace(made_up(trial), mean_s=0.2 * (1 + planner.SINGLE.index(trial.technique)))
                for trial, _ in wanted_cells(quick=False)
                if trial.seed == UNSEEN
            })
        )  # fmt: skip

    assert row_with(lambda place: 1.2 + 0.01 * place).verdict == "off"
    open_ = row_with(lambda place: 2.0 if place == 0 else 0.99)
    assert open_.verdict == "shape"
    assert open_.ours == pytest.approx((100 - 9) / 10)
    assert [open_.low, open_.high] == pytest.approx([-1, 100])
    assert "95 % interval" in open_.note
    assert f"{DRAWN[0]}: pieces 0.2 s, ours 0.4 s (+1e+02 %)" in open_.note


def test_all_experiments_of_the_reproduction_are_among_them() -> None:
    """Under Atoll's policy, except the step and the sweep of the most pieces, a parameter of one technique."""
    others = {structs.replace(trial, technique="baseline") for trial, _ in wanted(quick=False)}
    left = others - set(planner.CELLS.values())
    assert {each.pieces_max or each.trace for each in left if each.policy == "atoll-rate"} == {
        "step", *MOST_PIECES,
    }  # fmt: skip


def test_cells_where_ours_falls_below_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPEED, "cheapest-start", 10.0)
    rows = planner_rows(of_cells(found_of(wanted_cells(quick=False)), quick=False))
    assert {row.verdict for row in rows} == {"off"}
    assert rows[-1].ours == len(planner.CELLS)
    quick = planner_rows(of_cells(found_of(wanted_cells(quick=True)), quick=True))
    assert [row.verdict for row in quick] == ["off", "off"]
    monkeypatch.setitem(SPEED, "cheapest-start", SPEED["lc"])
    same = planner_rows(of_cells(found_of(wanted_cells(quick=True)), quick=True))
    assert same[-1].metric.endswith("of 0 in which it differs"), "the same results are no comparison"


def scaler_results(changed: Callable[[ScalerTrial, ScalerResult], ScalerResult]) -> Results[ScalerResult]:
    return Results({each: changed(each, made_up_scaler(each)) for each, _ in wanted_scalers(quick=False)})


def test_rows_of_published_scalers() -> None:
    results = scaler_results(lambda _, found: found)
    rows = scaler_rows(results, quick=False)
    found = {row.metric: row for row in rows}
    assert len(found) == 2 * 2 * 2 * 2
    assert found["cold start, fa2, Twitter, with flashpoint - without"].ours == pytest.approx(-18.0)
    assert found["requests in time, biscale, Azure LLM, with flashpoint - without"].ours == pytest.approx(2.0)
    assert "98 and 96" in found["requests in time, biscale, Azure LLM, with flashpoint - without"].note
    assert {row.verdict for row in rows} == {"shape"}
    figure = scalers_figure(results, quick=False)
    assert [panel.y_label for panel in figure.panels] == ["cold start, s (log)", "in time, %", "cores"]
    assert figure.panels[0].ticks[:2] == ("fa2\nTwitter", "fa2\nAzure LLM")
    assert [series.y for series in figure.panels[1].series] == [(96.0,) * 4, (98.0,) * 4, (98.0,) * 4]


def test_scalers_that_a_mechanism_makes_worse_are_off() -> None:
    def worse(trial: ScalerTrial, found: ScalerResult) -> ScalerResult:
        later = structs.replace(found, violations=9.0, cold_s=30.0)
        return later if trial.mechanism == "flashpoint" else found

    verdicts = {row.metric: row.verdict for row in scaler_rows(scaler_results(worse), quick=False)}
    assert verdicts["cold start, fa2, Twitter, with flashpoint - without"] == "off"
    assert verdicts["requests in time, fa2, Twitter, with flashpoint - without"] == "off"
    assert verdicts["requests in time, fa2, Twitter, with cheapest_start - without"] == "shape"


def test_requests_to_a_language_model(tmp_path: Path) -> None:
    made = requests_of(LLM, tmp_path)
    assert not made.is_measured
    assert (len(made.counts), max(made.counts)) == (300, 67)
    recorded = requests_of(LLM, DATA)
    if not recorded.is_measured:
        pytest.skip("the Azure LLM trace is not in the folder of public data")
    assert len(recorded.counts) == 300
    minutes = [sum(recorded.counts[at : at + 60]) for at in range(0, 300, 60)]
    assert max(minutes) > 10 * min(minutes), "bursts"


def test_a_user_declares_scaler_and_mechanism_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds of the scene: FA2's first replicas start from the store, with one download or one each."""
    monkeypatch.setattr(planner, "SCENE_S", 25)
    found = {how: ScalerTrial(system="fa2", mechanism=how).play() for how in ("baseline", "flashpoint")}
    assert found["flashpoint"].cold_s < found["baseline"].cold_s
    assert found["flashpoint"].started >= 1


def test_rows_of_single_runs(simulated: dict[tuple[str, str], Row]) -> None:
    assert simulated["check 27", "mean latency, own links, window 470470"].verdict == "shape", "4 is not 4.16 ± 3 %"
    cold = simulated["check 27", "shortest and longest cold start, own links, window 10800"]
    assert cold.verdict == "derived"
    assert cold.ours == pytest.approx(56.771)
    order = simulated["check 15", "cold start, baseline / locality and chains, window 470470"]
    assert order.verdict == "shape"
    assert order.ours == pytest.approx(16)
    pieces = simulated["check 15", "mean latency, locality and chains / with pieces too, window 470470"]
    assert pieces.verdict == "shape"
    assert pieces.ours == pytest.approx(20 / 16)
    assert simulated["E3 autoscalers", "mean latency of T5 under torchserve"].ours == pytest.approx(4 / 0.1406)
    own = simulated["E17 headline", "mean latency saved over GPU-enabled FaaS, twitter, own links"]
    assert own.ours == pytest.approx(100 * (1 - 6 / sum(4.0 ** (place / 6) for place in range(1, 7))))
    assert "T5: 75.00 %" in own.note
    assert simulated["E7 testbed", "the same, of each hour"].verdict == "within-bound"
    assert simulated["E7 testbed", "mean latency that pieces save"].ours == pytest.approx(60)
    assert simulated["E8 bandwidth", "mean latency at a bandwidth / at the next larger one, least"].ours == 1
    assert simulated["E8 bandwidth", "mean latency, the baseline / pieces, 2,000 Mbit/s"].ours == pytest.approx(2.5)
    assert simulated["E9 most pieces", "mean cold start, at most 4, window 1652593"].ours == pytest.approx(6)
    assert simulated["E9 most pieces", "mean cold start with pieces / with the next larger number, least"].ours > 1
    slower = simulated["E6 plans", "ALBERT-xxlarge: mean latency, Gillis's pieces / Flashpoint's"]
    assert slower.ours == pytest.approx((2.5 / 2.0) ** (2 / 6))
    assert "it cuts the model in 0 % of the scale-ups" in slower.note
    grown = simulated["E11 locality", "growth of what locality gains on GPU-enabled FaaS, 0.5 to 2.5 × requests"]
    assert grown.ours == pytest.approx(4 * 2.0 * (1 / 5 - 1 / 15))
    assert simulated[
        "E11 locality", "starts from the same host, 8 - 1 accelerators each, locality"
    ].ours == pytest.approx(70)


# Single runs


SHORT = FlashpointTrial(trace=AZURE, model="CodeBERT")


def short_world(trial: FlashpointTrial, seconds: int) -> World:
    made = replace(world_of(trial), duration_ns=s(seconds))
    return with_clients(made, trace=cut(trace_of(trial), duration_ns=s(seconds)))


def played(trial: FlashpointTrial, seconds: int) -> tuple[FlashpointResult, list[Record]]:
    world, seen, log = short_world(trial, seconds), StartsAndLatencies(), LogList()
    totals = simulate(world, [seen, log])
    assert totals.open == 0
    return seen.result(s(seconds), totals.ended_ns, send_s=FLASHPOINT_MODELS[trial.model].send_s.value), log.records


class LogList:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def append(self, now_ns: int, record: Record) -> None:
        self.records.append(record)


def test_no_request_is_faster_than_its_execution_and_network() -> None:
    """Check 13: with enough replicas from the start, all take exactly that."""
    trial = structs.replace(SHORT, scale=0.2)
    found, records = played(trial, 60)
    ends = [record for record in records if isinstance(record, End)]
    assert len(ends) == sum(isinstance(record, Request) for record in records) > 100
    assert found.mean_s == pytest.approx(0.006 + REQUEST_NETWORK_S, rel=0.05)
    assert found.mean_s >= 0.006 + REQUEST_NETWORK_S
    assert found.started == 0


def test_every_uncongested_start_takes_download_load_and_send() -> None:
    trial = structs.replace(BASE, trace=AZURE, store="per_node", accelerators=80)
    found, _ = played(trial, 400)
    assert found.started > 0
    assert found.cold_least_s == pytest.approx(COLD_S, abs=1e-3)
    assert found.cold_most_s == pytest.approx(COLD_S, abs=1e-3)


def test_the_techniques_start_from_where_they_say() -> None:
    """The made-up hour 10800 has a jump after two minutes, at 20 % from two to six replicas."""
    trial = structs.replace(BASE, trace="10800", scale=0.2, accelerators=80)
    found = {technique: played(structs.replace(trial, technique=technique), 240)[0] for technique in PROVISION}
    assert found["lc"].sent_only == found["gpu-faas"].sent_only == 1.0, "the first host has room"
    assert found["atoll"].cold_least_s == found["atoll"].cold_most_s == pytest.approx(14.138 + 1.206)
    assert found["baseline"].cold_least_s >= COLD_S - 1e-3
    assert found["lc"].mean_s < found["atoll"].mean_s < found["baseline"].mean_s
    alone = structs.replace(trial, accelerators=10, per_host=1)
    apart = {name: played(structs.replace(alone, technique=name), 240)[0] for name in ("gpu-faas", "lc+mc")}
    assert apart["lc+mc"].cold_most_s == pytest.approx(27.501, abs=1e-3), "from another host"
    assert apart["gpu-faas"].cold_most_s > 42, "from the store; it may not be ready when the run ends"


def test_starts_that_are_given_up_are_counted_apart() -> None:
    """Two starts, one of which is stopped before it is ready: only the other one has a cold start."""
    seen, spec = StartsAndLatencies(), ReplicaSpec("model", "v", Slot(1.0, "gpu"))
    seen.append(0, Request(RequestId(0), 0, 0, s(9)))
    seen.append(s(1), End(RequestId(0), Outcome.SERVED))
    for place in range(2):
        seen.append(s(10), StartWorker(ReplicaId(place), spec))
    seen.append(s(20), WorkerStopped(ReplicaId(0)))
    seen.append(s(40), WorkerReady(ReplicaId(1)))
    seen.append(s(50), WorkerStopped(ReplicaId(1)))
    found = seen.result(s(60), s(60), send_s=1.0)
    assert (found.cold_s, found.started, found.given_up) == (30.0, 1, 1)


def test_the_same_seed_gives_the_same_result() -> None:
    trial = structs.replace(SHORT, technique="lc+mc")
    assert played(trial, 60)[0] == played(trial, 60)[0]
    assert played(trial, 60)[0] != played(structs.replace(trial, seed=1), 60)[0]


def test_the_knob_raises_resources_in_every_policy() -> None:
    for policy in SCALING:
        key, default, _ = KNOBS[policy]
        trial = structs.replace(BASE, policy=policy, data=str(DATA or ""))
        less, more = (written(policies_of(trial, knob).scale)[key] for knob in (0.5, 2.0))
        assert {less, more} == {0.5 * default, 2 * default}
        assert (less < more) is (policy == "atoll-rate")


def test_trials_are_tuned_to_resources_or_a_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(trial: FlashpointTrial, knob: float) -> FlashpointResult:
        return structs.replace(made_up(trial), cores=13.0 * knob)

    monkeypatch.setattr(FlashpointTrial, "run", run)
    found = structs.replace(BASE, resources=20.0).play()
    assert found.cores == pytest.approx(20.0, rel=0.05)
    assert found.runs > 1

    def faster(trial: FlashpointTrial, knob: float) -> FlashpointResult:
        return structs.replace(made_up(trial), mean_s=4.0 / knob**2)

    monkeypatch.setattr(FlashpointTrial, "run", faster)
    found = structs.replace(BASE, matches_s=0.5).play()
    assert 0.499 <= found.mean_s <= 0.555
