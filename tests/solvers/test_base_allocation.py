"""Base allocation: the fewest cores that carry the threshold and keep the stage's deadline."""

import pytest

from sloop.solvers.base_allocation import Latency, Sizes, base, base_cores, derived_slo_ms, quickest_cores

CORES = (1.0, 2.0, 4.0, 8.0)


def parallel(one_ms: float, serial: float = 0.0) -> Latency:
    return lambda batch, cores: batch * one_ms * (serial + (1 - serial) / cores)


def sized(*variants: Latency) -> list[Sizes]:
    return [Sizes(latency, CORES) for latency in variants]


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
    found = base(sized(parallel(100), parallel(300)), threshold_rps=5, batch_max=4)
    assert found.cores == (1.0, 2.0)
    assert found.slo_ms == pytest.approx(5 * (100 + 150) / 2)


def test_a_tight_deadline_takes_more_cores() -> None:
    """Eight at once take eight times as long as one, and the deadline is five times one: two cores where one is
    for the rate alone."""
    found = base(sized(parallel(100), parallel(150)), threshold_rps=1, batch_max=8, slo_ms=625.0)
    assert found.cores == (2.0, 2.0)


def test_the_more_accurate_has_no_fewer_cores() -> None:
    found = base(sized(parallel(300), parallel(100)), threshold_rps=5, batch_max=1, slo_ms=1000)
    assert found.cores == (2.0, 2.0)


def test_what_no_count_suits_is_left_out() -> None:
    found = base(sized(parallel(100), parallel(9000)), threshold_rps=5, batch_max=1)
    assert found.cores == (1.0, None)
    assert found.slo_ms == pytest.approx(500.0)
    assert base(sized(parallel(9000)), threshold_rps=5, batch_max=1).cores == (None,)


def test_fractions_of_a_core_will_do() -> None:
    assert base_cores(parallel(10), (0.25, 0.5, 1.0), threshold_rps=30, batch_max=1, slo_ms=40) == 0.5


def test_nobody_gets_cores_that_it_has_no_use_for() -> None:
    """The more accurate one would have two, as the one before it, and has use for one."""
    small = Sizes(parallel(100), CORES[:1])
    found = base([Sizes(parallel(300), CORES), small], threshold_rps=5, batch_max=1, slo_ms=1000)
    assert found.cores == (2.0, 1.0)
    assert base([small], threshold_rps=11, batch_max=1, slo_ms=1000).cores == (None,)


def test_where_no_count_keeps_the_deadline_the_quickest_with_the_fewest_cores() -> None:
    assert quickest_cores(Sizes(parallel(300), CORES)) == max(CORES)
    assert quickest_cores(Sizes(lambda batch, cores: 9000 / min(cores, 3), CORES)) == 4.0
    assert quickest_cores(Sizes(lambda batch, cores: 9000, CORES)) == min(CORES)
