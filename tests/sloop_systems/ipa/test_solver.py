"""IPA's problem: the published golden tables and properties; measures of accuracy; base allocation."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from sloop.solvers.budget import IndexedPath
from sloop_systems.ipa import label_setting
from sloop_systems.ipa.solver import (
    Candidate,
    IpaGoal,
    IpaSolution,
    IpaStage,
    Latency,
    VariantSizes,
    base_allocation,
    base_cores,
    derived_slo_ms,
    fraction,
    is_feasible,
    objective,
    options_of,
    quickest_cores,
    ranks,
    scores,
)
from tests.sloop_systems.ipa.scene import (
    AUDIO,
    CLASSIFICATION,
    DETECTION,
    QA,
    SENTIMENT,
    VIDEO_GOAL,
    audio,
    drawn,
    enumerated,
    names,
    video,
)

Solver = Callable[[Sequence[IpaStage], IpaGoal], IpaSolution | None]
SOLVERS: dict[str, Solver] = {
    "enumerated": enumerated,
    "labels": lambda stages, goal: label_setting.solve(stages, goal).solution,
}


@pytest.fixture(name="solve", params=SOLVERS)
def solve_fixture(request: pytest.FixtureRequest) -> Solver:
    """The definition, and the one that runs."""
    return SOLVERS[request.param]


def accuracy(found: list[tuple[str, int, int]]) -> float:
    """100 × PAS of a choice in R1."""
    return 100 * DETECTION[found[0][0]][0] * CLASSIFICATION[found[1][0]][0]


@pytest.mark.parametrize(
    ("rate_rps", "expected", "cores", "percent", "f", "low", "high"),
    [
        (5, [("s", 1, 1), ("R101", 8, 1)], 2, 43.95, -1.121086, 2, 2),
        (7, [("n", 1, 1), ("R50", 1, 1)], 2, 34.79, -1.304174, 2, 4),
        (10, [("n", 1, 1), ("R34", 2, 1)], 2, 33.50, -1.329950, 2, 4),
        (20, [("n", 1, 2), ("R18", 8, 1)], 3, 31.88, -2.362494, 3, 8),
        (30, [("n", 4, 2), ("R18", 2, 2)], 4, 31.88, -3.362491, 4, 11),
    ],
)
def test_the_video_pipeline_as_specified(
    solve: Solver,
    rate_rps: float,
    expected: list[tuple[str, int, int]],
    cores: int,
    percent: float,
    f: float,
    low: int,
    high: int,
) -> None:
    """IPA specification, table 7.3, to its last digit."""
    answer = solve(video(rate_rps), VIDEO_GOAL)
    assert answer is not None
    found = names(answer, tuple(DETECTION), tuple(CLASSIFICATION))
    assert found == expected
    assert answer.cores == cores
    assert accuracy(found) == pytest.approx(percent, abs=0.005)
    assert round(answer.objective, 6) == f
    for variants, expected_cores in (((0, 0), low), ((1, 3), high)):
        fixed = [
            replace(stage, candidates=(stage.candidates[index],))
            for stage, index in zip(video(rate_rps), variants, strict=True)
        ]
        restricted = solve(fixed, VIDEO_GOAL)
        assert restricted is not None
        assert restricted.cores == expected_cores
        assert restricted.objective <= answer.objective


@pytest.mark.parametrize(
    ("rate_rps", "expected", "percent"),
    [
        (5, [("s", 1, 3), ("R101", 1, 3)], 43.95),
        (7, [("s", 1, 3), ("R101", 1, 3)], 43.95),
        (10, [("s", 1, 3), ("R101", 1, 3)], 43.95),
        (20, [("n", 1, 3), ("R50", 1, 3)], 34.79),
        (30, [("n", 1, 3), ("R34", 2, 3)], 33.50),
    ],
)
def test_rim_on_the_video_pipeline(
    solve: Solver, rate_rps: float, expected: list[tuple[str, int, int]], percent: float
) -> None:
    """Three replicas of each stage whatever the rate (7.3)."""
    answer = solve(video(rate_rps, replicas=3), VIDEO_GOAL)
    assert answer is not None
    found = names(answer, tuple(DETECTION), tuple(CLASSIFICATION))
    assert found == expected
    assert answer.cores == 6
    assert accuracy(found) == pytest.approx(percent, abs=0.005)


@pytest.mark.parametrize(
    ("alpha", "beta", "expected", "cores", "percent"),
    [
        (10, 0.125, [("m", 2, 3), ("R101", 8, 2)], 8, 49.59),
        (1000, 1, [("x", 2, 3), ("R152", 1, 2)], 28, 53.96),
    ],
)
def test_other_weights_on_the_video_pipeline(
    solve: Solver, alpha: float, beta: float, expected: list[tuple[str, int, int]], cores: int, percent: float
) -> None:
    answer = solve(video(10), replace(VIDEO_GOAL, alpha=alpha, beta=beta))
    assert answer is not None
    found = names(answer, tuple(DETECTION), tuple(CLASSIFICATION))
    assert (found, answer.cores) == (expected, cores)
    assert accuracy(found) == pytest.approx(percent, abs=0.005)


@pytest.mark.parametrize(
    ("rate_rps", "expected", "cores", "low", "high", "f"),
    [
        (7, [("medium", 1, 7), ("sst2", 1, 2)], 16, 7, 16, 7.749998),
        (12, [("medium", 1, 11), ("sst2", 1, 3)], 25, 12, 25, 3.249998),
        (30, [("small", 1, 21), ("sst2", 1, 8)], 29, 29, 62, -13.000002),
        (34, [("small", 1, 23), ("sst2", 1, 9)], 32, 32, 69, -14.500002),
    ],
)
def test_audio_with_sentiment_as_specified(
    solve: Solver, rate_rps: float, expected: list[tuple[str, int, int]], cores: int, low: int, high: int, f: float
) -> None:
    """IPA specification, table 7.4: the artefact's variants and the product of ranks."""
    goal = IpaGoal(slo_ms=9420, alpha=30, beta=0.5)
    stages = audio(SENTIMENT, rate_rps)
    answer = solve(stages, goal)
    assert answer is not None
    assert names(answer, tuple(AUDIO), tuple(SENTIMENT)) == expected
    assert answer.cores == cores
    assert round(answer.objective, 6) == f
    for variants, expected_cores in (((0, 0), low), ((1, 3), high)):
        fixed = [replace(s, candidates=(s.candidates[i],)) for s, i in zip(stages, variants, strict=True)]
        restricted = solve(fixed, goal)
        assert restricted is not None
        assert restricted.cores == expected_cores


@pytest.mark.parametrize(
    ("alpha", "rate_rps", "speech", "cores"),
    [(10, 7, "medium", 16), (10, 8, "small", 8), (10, 9, "medium", 19), (10, 10, "small", 10), (10, 36, "small", 34)]
    + [(20, 3, "large", None), (20, 16, "small", None), (20, 18, "small", None), (20, 30, "small", None)]
    + [(20, rate, "medium", None) for rate in (*range(4, 16), 17)],
)
def test_audio_with_questions_as_specified(
    solve: Solver, alpha: float, rate_rps: float, speech: str, cores: int | None
) -> None:
    """7.4, below the table: steps of whole replicas, exact ties at 16 and 18 going to fewer cores."""
    answer = solve(audio(QA, rate_rps), IpaGoal(slo_ms=9230, alpha=alpha, beta=0.5))
    assert answer is not None
    found = names(answer, tuple(AUDIO), tuple(QA))
    assert (found[0][0], found[1][0]) == (speech, "roberta")
    assert cores is None or answer.cores == cores


def test_an_option_keeps_up_and_waits_for_its_batch() -> None:
    stage = IpaStage(10.0, (1, 2), (Candidate(0.5, 2.0, (150.0, 200.0)),))
    assert [(o.batch, o.replicas, o.cores, o.latency_ms) for o in options_of(stage)] == [
        (1, 2, 4.0, 150.0),
        (2, 1, 2.0, 300.0),
    ]
    busy = IpaStage(10.0, (1,), (Candidate(0.5, 2.0, (150.0,), (300.0,)),))
    assert options_of(busy)[0].replicas == 3
    assert options_of(busy, replicas_max=2) == []


def test_without_requests_one_replica_and_no_batch_is_enough() -> None:
    answer = enumerated(video(0), VIDEO_GOAL)
    assert answer is not None
    assert [(option.replicas, option.batch) for option in answer.options] == [(1, 1), (1, 1)]


def test_given_replicas_are_neither_more_nor_less() -> None:
    stage = IpaStage(10.0, (1,), (Candidate(0.9, 1.0, (500.0,)), Candidate(0.5, 1.0, (100.0,))), replicas=3)
    assert [(option.candidate, option.replicas) for option in options_of(stage)] == [(1, 3)]


def test_a_higher_rate_may_be_worth_more_where_batches_fill_quicker() -> None:
    """7.5, property 2: the queueing delay shrinks as the rate grows."""
    goal = IpaGoal(slo_ms=2900, alpha=2, beta=1)
    slow, quick = (
        enumerated([IpaStage(rate, (1, 8), (Candidate(0.5, 1.0, (1000.0, 1200.0)),))], goal) for rate in (4, 4.5)
    )
    assert slow is not None
    assert quick is not None
    assert (slow.options[0].batch, slow.options[0].replicas, round(slow.objective, 6)) == (1, 4, -3.000001)
    assert (quick.options[0].batch, quick.options[0].replicas, round(quick.objective, 6)) == (8, 1, -0.000008)


@pytest.mark.parametrize("seed", range(60))
def test_what_is_looser_is_never_worse(seed: int) -> None:
    stages, goal = drawn(seed, coarse=seed % 2 == 0)
    answer = enumerated(stages, goal)
    looser = enumerated(stages, replace(goal, slo_ms=goal.slo_ms * 1.5))
    dearer = enumerated(
        [replace(s, candidates=tuple(replace(c, cores=c.cores * 2) for c in s.candidates)) for s in stages],
        replace(goal, cores_max=float("inf")),
    )
    free = enumerated(stages, replace(goal, cores_max=float("inf")))
    if answer is None:
        return
    assert is_feasible(answer.options, goal)
    assert answer.objective == objective(answer.options, goal)
    assert looser is not None
    assert looser.objective >= answer.objective - 1e-9
    assert dearer is not None
    assert free is not None
    assert dearer.objective <= free.objective + 1e-9


def test_weights_without_bound_choose_by_one_thing_alone(solve: Solver) -> None:
    accurate = solve(video(10), replace(VIDEO_GOAL, alpha=1e9))
    thrifty = solve(video(10), replace(VIDEO_GOAL, alpha=0.0, beta=1e9))
    assert accurate is not None
    assert thrifty is not None
    assert names(accurate, tuple(DETECTION), tuple(CLASSIFICATION))[0][0] == "x"
    assert thrifty.cores == 2


def test_a_batch_is_no_larger_than_it_needs_to_be() -> None:
    """7.5, property 4: δ only breaks ties."""
    for rate_rps in range(1, 40):
        small = enumerated(video(rate_rps), VIDEO_GOAL)
        any_size = enumerated(video(rate_rps), replace(VIDEO_GOAL, delta=0.0))
        assert small is not None
        assert any_size is not None
        assert small.cores <= any_size.cores


def test_each_way_has_its_own_deadline() -> None:
    stage = IpaStage(1.0, (1,), (Candidate(0.5, 1.0, (10.0,)), Candidate(0.9, 1.0, (60.0,))))
    paths = (IndexedPath((0, 1), 200.0), IndexedPath((0, 2), 60.0))
    answer = enumerated([stage] * 3, IpaGoal(slo_ms=0.0, alpha=10, beta=1, paths=paths))
    assert answer is not None
    assert [option.candidate for option in answer.options] == [0, 1, 0]


def test_percent_and_fractions_mean_the_same() -> None:
    assert fraction(68.9) == pytest.approx(0.689)
    assert fraction(0.689) == 0.689
    assert fraction(1.0) == 1.0


def test_ranks_are_evenly_spaced_whatever_the_gaps() -> None:
    assert ranks((0.5, 0.9, 0.51), (1, 1, 1), ("a", "b", "c")) == [0.0, 1.0, 0.5]
    assert ranks((0.8,), (1,), ("alone",)) == [1.0]


def test_of_equally_accurate_variants_the_cheaper_ranks_higher() -> None:
    assert ranks((0.8, 0.8, 0.7), (1, 4, 1), ("a", "b", "c")) == [1.0, 0.5, 0.0]
    assert ranks((0.8, 0.8), (1, 1), ("a", "b")) == [0.0, 1.0]


def test_two_variants_in_the_middle_of_three_rank_one_together() -> None:
    """The published example of PAS'."""
    assert scores("pas_rank", (0.1, 0.2, 0.9), (1, 1, 1), ("a", "b", "c")) == [0.0, 0.5, 1.0]


def test_the_product_of_ranks_tells_the_worst_from_the_impossible() -> None:
    found = scores("norm_prod", (0.58, 0.64, 0.66), (1, 2, 4), ("s", "m", "l"))
    assert found == pytest.approx([0.05, 0.525, 1.0])


def test_the_product_takes_accuracies_as_they_are() -> None:
    assert scores("pas", (0.3, 0.2), (1, 1), ("a", "b")) == [0.3, 0.2]


CORES = (1.0, 2.0, 4.0, 8.0)


def parallel(one_ms: float, serial: float = 0.0) -> Latency:
    return lambda batch, cores: batch * one_ms * (serial + (1 - serial) / cores)


def sized(*variants: Latency) -> list[VariantSizes]:
    return [VariantSizes(latency, CORES) for latency in variants]


def table(rps: dict[float, float]) -> Latency:
    """Only single requests are known."""
    return lambda batch, cores: 1000.0 / rps[cores]


def test_the_published_tables_as_far_as_the_rule_explains_them() -> None:
    """IPA specification, 2.4: YOLOv5m, YOLOv5x and s2t-large from the artefact's throughputs."""

    def fewest(rps: dict[float, float], threshold_rps: float) -> float | None:
        return base_cores(table(rps), sorted(rps), threshold_rps=threshold_rps, batch_max=1, slo_ms=1e9)

    assert fewest({1: 3.37, 2: 4.4}, 4) == 2
    assert fewest({4: 2.7, 8: 4.2}, 4) == 8
    assert fewest({1: 0.446, 2: 0.753, 4: 1.32, 8: 1.94}, 1) == 4


def test_the_largest_batch_must_keep_the_deadline() -> None:
    latency = parallel(100)
    assert base_cores(latency, CORES, threshold_rps=5, batch_max=8, slo_ms=1000) == 1
    assert base_cores(latency, CORES, threshold_rps=5, batch_max=8, slo_ms=799) == 2
    assert base_cores(latency, CORES, threshold_rps=5, batch_max=8, slo_ms=99) is None


def test_a_deadline_is_five_times_the_mean_latency() -> None:
    assert derived_slo_ms([100.0, 300.0]) == 1000.0


def test_cores_and_deadline_are_found_together() -> None:
    found = base_allocation(sized(parallel(100), parallel(300)), threshold_rps=5, batch_max=4)
    assert found.cores == (1.0, 2.0)
    assert found.slo_ms == pytest.approx(5 * (100 + 150) / 2)


def test_a_tight_deadline_takes_more_cores() -> None:
    """Eight at once take eight times as long as one, and the deadline is five times one: two cores where one is
    for the rate alone."""
    found = base_allocation(sized(parallel(100), parallel(150)), threshold_rps=1, batch_max=8, slo_ms=625.0)
    assert found.cores == (2.0, 2.0)


def test_the_more_accurate_has_no_fewer_cores() -> None:
    found = base_allocation(sized(parallel(300), parallel(100)), threshold_rps=5, batch_max=1, slo_ms=1000)
    assert found.cores == (2.0, 2.0)


def test_what_no_count_suits_is_left_out() -> None:
    found = base_allocation(sized(parallel(100), parallel(9000)), threshold_rps=5, batch_max=1)
    assert found.cores == (1.0, None)
    assert found.slo_ms == pytest.approx(500.0)
    assert base_allocation(sized(parallel(9000)), threshold_rps=5, batch_max=1).cores == (None,)


def test_fractions_of_a_core_will_do() -> None:
    assert base_cores(parallel(10), (0.25, 0.5, 1.0), threshold_rps=30, batch_max=1, slo_ms=40) == 0.5


def test_nobody_gets_cores_that_it_has_no_use_for() -> None:
    """The more accurate one would have two, as the one before it, and has use for one."""
    small = VariantSizes(parallel(100), CORES[:1])
    found = base_allocation([VariantSizes(parallel(300), CORES), small], threshold_rps=5, batch_max=1, slo_ms=1000)
    assert found.cores == (2.0, 1.0)
    assert base_allocation([small], threshold_rps=11, batch_max=1, slo_ms=1000).cores == (None,)


def test_where_no_count_keeps_the_deadline_the_quickest_with_the_fewest_cores() -> None:
    assert quickest_cores(VariantSizes(parallel(300), CORES)) == max(CORES)
    assert quickest_cores(VariantSizes(lambda batch, cores: 9000 / min(cores, 3), CORES)) == 4.0
    assert quickest_cores(VariantSizes(lambda batch, cores: 9000, CORES)) == min(CORES)
