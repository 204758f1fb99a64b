"""Trials: the same one has the same outcome; who plans what; loads as described."""

from statistics import mean

import pytest
from msgspec import structs

from sloop.reproduce.fa2.application import CPU
from sloop.reproduce.fa2.trials import (
    LEAD_S,
    LOADS,
    TAIL_S,
    Results,
    Trial,
    chosen,
    lead_s,
    play,
    rates_of,
    trace_at,
    world_of,
)

SHORT = Trial(plan="fa2", load="steady 12", seconds=20)


def test_the_same_trial_has_the_same_outcome() -> None:
    assert play(SHORT) == play(SHORT)
    assert play(SHORT) != play(structs.replace(SHORT, seed=1))


def test_a_plan_is_kept_and_a_system_decides() -> None:
    kept = play(SHORT)
    assert set(kept.replicas_by_second) == {10.0}
    assert kept.violations == 0
    assert 30 < kept.utilisation < 90
    loop = play(Trial(system="fa2", load="fluctuating", seconds=60))
    assert len(set(loop.replicas_by_second)) > 1
    assert len(loop.by_second) == 60


def test_everybody_on_the_same_replicas_with_batches_of_their_own() -> None:
    world = world_of(Trial(plan="ds2", pools="optimal", load="steady 50", seconds=10))
    parameters = world.application.system.parameters
    stages = parameters["stages"]
    assert isinstance(stages, dict)
    assert sum(own["replicas"] for own in stages.values()) == 27
    assert {own["batch_max"] for own in stages.values()} == {1}
    assert parameters["order"] == "fifo"
    assert world_of(Trial(plan="grandslam", seconds=10)).application.system.parameters["order"] == "edf"


@pytest.mark.parametrize(
    ("plan", "total"), [("fa2", 17), ("optimal", 17), ("inferline", 20), ("ds2", 23), ("grandslam", 17)]
)
def test_planners(plan: str, total: int) -> None:
    assert sum(choice.replicas for choice in chosen(plan, CPU, 3, 30)) == total


def test_six_paths_are_a_graph_that_requests_enter_in_the_middle() -> None:
    application = world_of(Trial(plan="fa2", paths=6, seconds=10)).application
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
    loop = Trial(system="fa2", load="steady 9", seconds=30)
    assert (lead_s(loop), lead_s(SHORT)) == (LEAD_S, 0)
    assert world_of(loop).duration_ns == (LEAD_S + 30 + TAIL_S) * 10**9


def test_results_come_by_seed() -> None:
    outcome = play(SHORT)
    results = Results({SHORT: outcome, structs.replace(SHORT, seed=1): outcome}, (0, 1))
    assert results.each(SHORT, "replicas") == [10.0, 10.0]
    assert results.of(SHORT) == [outcome, outcome]
