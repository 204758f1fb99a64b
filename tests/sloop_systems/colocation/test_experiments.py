"""The colocation thesis: its stack in small, placements in its cells, and rows that follow from what they serve."""

import math
from collections.abc import Sequence

import pytest
from msgspec import structs

from sloop_systems.colocation import experiments as colocation
from sloop_systems.colocation.experiments import offline, results
from sloop_systems.colocation.experiments.router import achieved_rps, run_all, run_model
from sloop_systems.colocation.experiments.runs import (
    BASELINES,
    DRAWN,
    LARGE,
    MAIN,
    OURS,
    UNMEASURED,
    Cell,
    PlacementRuns,
    Placements,
    PlacementTrial,
    Policy,
    drawn,
    e1,
    e2,
    e3,
    e3b,
    placement,
    play,
    wanted,
)
from sloop_systems.colocation.experiments.scene import (
    MIXED,
    VISION,
    fitted_igniter,
    named,
    placed_models,
    share_slowdown,
    sm_use,
)
from sloop_systems.colocation.experiments.simulated import (
    APART,
    SimulatedRun,
    SimulatedTrial,
    play_simulated,
    sloop_rows,
    wanted_in_sloop,
)
from sloop_systems.colocation.milp import mean_batch
from sloop_systems.colocation.published import V100_ROWS
from sloop_systems.comparison import REPRODUCTIONS
from sloop_systems.comparison.harness import UNSEEN
from sloop_systems.comparison.rows import Row


def verdicts(rows: Sequence[Row]) -> set[str]:
    return {row.verdict for row in rows}


# The stack


@pytest.mark.parametrize("timer", [False, True])
def test_batches_leave_full_or_late(timer: bool) -> None:
    (model,) = placed_models(["efficientnet_b7"], 433.34, 200)
    run = run_model(model, [64], 1, requests=40_000, timer=timer)
    assert run.batch_mean == pytest.approx(mean_batch(64, 433.34, 100, timer=timer), rel=0.01)


def test_batches_go_round() -> None:
    (model,) = placed_models(["efficientnet_b7"], 433.34, 200)
    run = run_model(model, [9, 5, 5, 5], 1, requests=24_000, with_latencies=True)
    assert [count / 24_000 for count in run.by_replica] == pytest.approx([9 / 24, 5 / 24, 5 / 24, 5 / 24], abs=0.01)
    assert list(run.latencies_ms) == sorted(run.latencies_ms)
    in_time = sum(latency <= 200 for latency in run.latencies_ms) / len(run.latencies_ms)
    assert run.good_rps == pytest.approx(in_time * 433.34, rel=0.03)


def test_a_request_alone_takes_its_parts() -> None:
    """One request in batches of one: transfer, two calls, and the inference of the smallest batch, κ times as long."""
    (model,) = placed_models(["bert"], 0.1, 300)
    run = run_model(model, [1], 0, requests=3, slower=1.18, with_latencies=True)
    expected = 2 * 1.0 + 0.32 + 0.87e-6 * 4096 + 1.18 * 34.1
    assert run.latencies_ms == pytest.approx([expected] * 3)


def test_no_replica_serves_nothing() -> None:
    (model,) = placed_models(["bert"], 100, 300)
    assert run_model(model, [], 0).good_rps == 0


def test_shares_that_are_limits_make_batches_slower() -> None:
    assert share_slowdown("resnet50", 4, 100) == 1
    assert share_slowdown("resnet50", 4, 17.55) == pytest.approx((36.26 / 17.55) ** 1.65)
    assert sm_use("resnet50", 6) == pytest.approx((36.26 + 70.49) / 2)
    cell = e1(3)
    found = placement(cell, "usher-wao")
    free, limited = (
        run_all(cell.placed(), found.contents, 0, slower=1.0, requests=800, is_limited=is_limited)
        for is_limited in (False, True)
    )
    assert sum(run.good_rps for run in limited) < 0.5 * sum(run.good_rps for run in free)


def test_coefficients_of_igniter_are_as_close_as_they_say() -> None:
    for name in {*VISION, *MIXED}:
        model, error = fitted_igniter(name)
        apart = []
        for row in V100_ROWS[name]:
            for share in (10, 50, 100) if row.batch <= 32 else ():
                time_ms = row.latency_ms * share_slowdown(name, row.batch, share)
                transfer_ms = row.batch * model.load_bytes / 1e7
                apart.append(abs(model.active_ms(row.batch, share) / (time_ms - transfer_ms) - 1))
        assert sum(apart) / len(apart) == pytest.approx(error)
        assert error < 0.25


# Cells


def test_the_rates_of_cells() -> None:
    assert e1(3).rates_rps == pytest.approx([433.34] * 5)
    assert e2(3).rates_rps == pytest.approx([276] * 4)
    assert e3(4000, 150).rates_rps[0] == achieved_rps(800)
    assert e3b(1000, 150).targets_rps == (250, 250, 250, 125, 125)
    assert e3b(1000, 150).requests == (2000, 2000, 2000, 1000, 1000)
    assert len(MAIN) == 29
    assert (str(e1(3)), str(e3(4000, 150))) == ("E1@3", "E3@4000 150 ms")


def test_placements_of_six_gpus() -> None:
    cell = e1(6)
    small, large = (placement(cell, policy).contents for policy in ("ao-milp", LARGE))
    assert ["efficientnet_b7 b8"] in named(cell.placed(), small)
    assert ["efficientnet_b7 b64"] in named(cell.placed(), large), "as the thesis reports"
    igniter = [placement(e1(gpus), "igniter") for gpus in (2, 6)]
    assert [len(found.contents) for found in igniter] == [2, 5]
    assert igniter[0].contents == igniter[1].contents[:2], "the first GPUs of one plan"
    ours = placement(cell, OURS)
    assert ours.expected_rps == pytest.approx(sum(cell.rates_rps), rel=0.01)


def test_a_trial_by_seed_and_factor() -> None:
    cell = Cell("E2", MIXED, (30.0,) * 4, 0.0, 300.0, 4)
    runs = play(PlacementTrial(cell, "usher", (1.0, 8.0), 2))
    assert [len(each) for each in runs.good_rps] == [2, 2]
    assert len(runs.good_rps[0][0]) == len(MIXED)
    fast, slow = (sum(by_model) for (by_model, _) in runs.good_rps)
    assert slow < 0.8 * fast
    assert runs.good_rps == play(PlacementTrial(cell, "usher", (1.0, 8.0), 2)).good_rps


def test_quick_trials_have_one_seed_and_the_main_cells() -> None:
    quick, full = (wanted(quick=quick) for quick in (True, False))
    assert {trial.seeds for trial in quick} == {1}
    assert {trial.seeds for trial in full} == {10}
    assert {trial.cell for trial in quick} == set(MAIN) < {trial.cell for trial in full}
    assert {trial.first_seed for trial in full if trial.cell in DRAWN} == {UNSEEN}


def test_drawn_cells_are_of_many_kinds_and_always_the_same() -> None:
    assert len({cell.names for cell in DRAWN}) > 25
    assert len({cell.slo_ms for cell in DRAWN}) > 3
    assert len({cell.gpus for cell in DRAWN}) > 5
    assert all(rate > 0 for cell in DRAWN for rate in cell.targets_rps)
    assert all(cell.rates_rps == pytest.approx(cell.targets_rps) for cell in DRAWN)
    assert drawn(1) == DRAWN[0] != drawn(2)


# Rows


def served(trial: PlacementTrial, share: float) -> PlacementRuns:
    """Each model serves this part of its rate, and a little more with each seed."""
    good = tuple(
        tuple(tuple(share * rate + seed for rate in trial.cell.rates_rps) for seed in range(trial.seeds))
        for _ in trial.slower
    )
    expected = (share * sum(trial.cell.rates_rps),) * len(trial.slower)
    return PlacementRuns(good, good, expected, (("",),) * len(trial.slower))


def found_with(ours: float, others: float) -> Placements:
    trials = wanted(quick=False)
    return Placements.of(
        trials, [served(trial, ours if trial.policy in {OURS, UNMEASURED} else others) for trial in trials]
    )


def row_of(rows: Sequence[Row], metric: str) -> Row:
    return next(row for row in rows if row.metric.startswith(metric))


def test_a_placement_that_serves_more_everywhere() -> None:
    rows = results.our_rows(found_with(0.9, 0.6))
    assert row_of(rows, "cells clearly below the best of 5 baselines").verdict == "shape"
    assert row_of(results.drawn_rows(found_with(0.9, 0.6)), "cells clearly below").verdict == "shape"
    assert row_of(rows, "cells of 29 within 1 %").ours == 29
    assert row_of(rows, "E2@5").verdict == "shape"
    assert row_of(rows, "sum over 29 cells").verdict == "off", "1.5 is not 1.08"


def test_a_placement_that_serves_less_is_named() -> None:
    rows = results.our_rows(found_with(0.59, 0.6))
    below = row_of(rows, "cells clearly below the best of 5 baselines")
    assert (below.ours, below.verdict) == (29, "off")
    assert "E1@3" in below.note
    assert "95 % interval" in below.note
    assert row_of(results.drawn_rows(found_with(0.59, 0.6)), "cells clearly below").verdict == "off"
    assert row_of(rows, "E2@5").verdict == "off"
    assert row_of(rows, "cells of 29 within 1 %").verdict == "off"
    assert "below: E1@1" in row_of(rows, "cells of 29 within 1 %").note


def test_rows_of_equal_policies_say_that_orders_do_not_hold() -> None:
    found = found_with(0.6, 0.6)
    e1_rows = results.e1_rows(found)
    assert row_of(e1_rows, "Usher on 4 over 3 GPUs").verdict == "off"
    assert row_of(e1_rows, "WAO-Usher on 1 to 6 GPUs").verdict == "within-bound"
    assert row_of(results.e2_rows(found, quick=True), "WSM-MILP on 6 over 5").verdict == "off"
    e3_rows = results.e3_rows(found, quick=True)
    assert row_of(e3_rows, "WSM-MILP at 4000 over 3000").verdict == "off"
    assert row_of(e3_rows, "WSM-MILP, largest difference").verdict == "off"
    assert row_of(results.batch_rows(found), "goodput of b8 over b64").verdict == "off"


def test_figures_show_all_policies() -> None:
    found = found_with(0.9, 0.6)
    by_gpus = colocation.gpus_figure(found, "E1", 1.0)
    assert [len(series.x) for series in by_gpus.panels[0].series] == [6] * 7
    assert len(colocation.rates_figure(found).panels) == 3
    ratios = [y for series in colocation.ours_figure(found).panels[0].series for y in series.y]
    assert len(ratios) == 3 * 29
    assert ratios == pytest.approx([1.5] * len(ratios), rel=0.05)
    factors = {1.0: ([430.0, 432.0], [200.0, 202.0]), 1.2: ([370.0, 380.0], [119.0, 121.0])}
    assert colocation.factor_figure(factors).alt == "b8 × 2: 431, 375; b64 × 2: 201, 120"
    assert math.isclose(colocation.latency_figure(quick=True).panels[0].marks[0].at, 200)


# In core and simulator


def small_cell(gpus: int = 3) -> Cell:
    """A second of E1, for two models."""
    return Cell("E1", ("efficientnet_b7", "resnet50"), (60.0, 60.0), 0.0, 200.0, gpus)


@pytest.mark.parametrize("policy", [*BASELINES, OURS])
def test_the_simulator_agrees_with_the_small_stack(policy: Policy) -> None:
    """The same requests, and a placement of the catalogue's system."""
    cell = small_cell()
    run = play_simulated(SimulatedTrial(cell, policy, 1.18, 0))
    contents = placement(cell, policy).contents
    assert run.contents == tuple(sorted(" + ".join(each) for each in named(cell.placed(), contents)))
    is_limited = policy in {"usher", "usher-wao", "igniter"}
    small = run_all(cell.placed(), contents, 0, slower=1.18, requests=cell.requests, is_limited=is_limited)
    # iGniter's replicas are overloaded: what waits for a busy one fills up the next batch, and not in the small stack.
    apart, rel = (2.5, 0.06) if policy == "igniter" else (APART, 0.01)
    assert sum(run.good_rps) == pytest.approx(sum(each.good_rps for each in small), abs=apart / 100 * cell.total_rps)
    assert run.batches == pytest.approx([each.batch_mean for each in small], rel=rel)


@pytest.mark.parametrize("slower", [1.0, 1.3])
def test_ours_measures_how_slow_the_machine_is_and_plans_again(slower: float) -> None:
    """In a cell in which the placement for a fast machine is another one than for the machine that it expects."""
    cell = Cell("E1", ("efficientnet_b7", "resnet50"), (220.0, 300.0), 0.0, 200.0, 2)
    before, after = (named(cell.placed(), placement(cell, OURS, factor).contents) for factor in (1.18, slower))
    assert (before != after) == (slower == 1.0)
    run = play_simulated(SimulatedTrial(cell, OURS, slower, 0))
    assert run.contents == tuple(sorted(map(" + ".join, after)))
    assert run.measured == pytest.approx([slower] * len(run.measured), rel=0.01)
    assert run.measured


def test_shares_that_are_limits_leave_no_room_for_crowding() -> None:
    """By occupancy three models fit on a GPU; each is slow by its own share, which the small stack has, too."""
    cell = Cell("E1", ("alexnet", "resnet50", "vgg19"), (300.0, 300.0, 300.0), 0.0, 200.0, 1)
    run = play_simulated(SimulatedTrial(cell, "usher-wao", 1.0, 0))
    contents = placement(cell, "usher-wao").contents
    assert run.contents == tuple(" + ".join(each) for each in named(cell.placed(), contents))
    assert len(contents[0]) == 3
    limited, free = (
        sum(
            each.good_rps
            for each in run_all(cell.placed(), contents, 0, slower=1.0, requests=2400, is_limited=is_limited)
        )
        for is_limited in (True, False)
    )
    assert sum(run.good_rps) == pytest.approx(limited, rel=0.01)
    assert limited < 0.7 * free


def test_rows_of_the_simulator_say_where_it_differs() -> None:
    found, trials = found_with(0.9, 0.6), wanted_in_sloop(quick=True)
    assert set(trials) <= set(wanted_in_sloop(quick=False))
    even = {
        trial: SimulatedRun(
            (found.good(trial.cell, trial.policy, trial.slower)[0],),
            (4.0,),
            ("",),
            (trial.slower,) if trial.policy == OURS else (),
        )
        for trial in trials
    }
    rows = sloop_rows(found, even)
    kept = ("placements that are those of the solvers", "goodput, largest", "κ as ours measures it")
    assert [row_of(rows, metric).verdict for metric in kept] == ["within-bound"] * 3
    assert row_of(rows, "cells of 3 in which usher-wao is the worst").verdict == "shape"
    assert row_of(rows, "cells of 3 with harbor below").ours == 0
    lower = {trial: structs.replace(run, good_rps=(1.0,)) for trial, run in even.items()}
    mixed = {trial: (lower if trial.policy == OURS else even)[trial] for trial in trials}
    assert row_of(sloop_rows(found, mixed), "goodput, largest").verdict == "off"
    assert row_of(sloop_rows(found, mixed), "cells of 3 with harbor below").ours == 3
    moved = {trial: structs.replace(run, contents=("elsewhere",)) for trial, run in even.items()}
    part = {trial: (moved if trial.policy == "wsm-milp" else even)[trial] for trial in trials}
    placed = row_of(sloop_rows(found, part), "placements that are")
    assert (placed.ours, placed.verdict) == (len(trials) - 3, "off")
    assert "E2@5: wsm-milp" in placed.note
    unsure = {trial: structs.replace(run, measured=tuple(1.1 * x for x in run.measured)) for trial, run in even.items()}
    assert row_of(sloop_rows(found, unsure), "κ as ours measures it").verdict == "off"


# Offline


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("worked examples", {"reproduced", "derived", "fitted"}),
        ("estimates", {"derived", "fitted"}),
        ("groups and pairs", {"derived"}),
        ("the program beside Usher", {"within-bound"}),
    ],
)
def test_offline_parts_come_out(part: str, expected: set[str]) -> None:
    rows = [row for row in offline.offline_part(part, quick=True) if not row.metric.startswith("processor time")]
    assert verdicts(rows) == expected


def test_igniters_fixtures_are_reproduced_and_its_fitted_plans_are_near() -> None:
    rows = offline.offline_part("iGniter and kernels", quick=True)
    fitted = [row for row in rows if row.metric.startswith("GPUs of its plan")]
    assert verdicts([row for row in rows if row not in fitted]) == {"derived"}
    assert verdicts(fitted) <= {"reproduced", "shape"}
    assert row_of(fitted, "GPUs of its plan, E1").verdict == "reproduced"


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([["a b4"], ["b b8", "a b4"]], "derived"),
        ([["b b8", "a b4"], ["a b4"]], "derived"),
        ([["a b4"], ["a b8", "b b8"]], "off"),
        ([["a b4"], ["a b4", "b b8"], ["c b4"]], "off"),
    ],
)
def test_contents_count_in_any_order_and_none_may_be_more(found: list[list[str]], verdict: str) -> None:
    assert offline._placement("e", "m", [["a b4", "b b8"], ["a b4"]], found).verdict == verdict


def test_a_batch_that_is_not_printed_may_be_any() -> None:
    assert offline._agreeing([["a"], ["b b4"]], [["b b4"], ["a b64"]]) == 2
    assert offline._agreeing([["a"], ["b b4"]], [["b b8"], ["a b64"]]) == 1


def test_it_is_registered() -> None:
    assert REPRODUCTIONS["colocation"] is colocation.reproduce
