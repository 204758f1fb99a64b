"""The limit is what an ideal server does, arrivals are the seed's alone, and sweeps choose on the right side."""

import msgspec
import numpy as np
import pytest

from benchmarks.peers.open_loop import SQUARE, STEADY, OpenLoopResults, Run, Wave, goodput, ideal_rps, nearest
from sloop.load.results import LoadResult


def result(goodput_rps: float) -> LoadResult:
    zeros = dict.fromkeys(LoadResult.__struct_fields__, 0)
    given = {"goodput_rps": goodput_rps, "error_kinds": {}, "seconds": [], "sizes": [], "note": ""}
    return msgspec.convert(zeros | given, LoadResult)


def run(setting: str, number: int, goodput_rps: float) -> Run:
    return Run("mosec", setting, SQUARE.name, 0.9, number, result(goodput_rps), 1.0)


def test_an_ideal_server_answers_what_fits() -> None:
    at_once = np.zeros(10, dtype=np.int64)
    assert ideal_rps(at_once, rps=100.0, slo_ms=50.0, seconds=1.0) == 5
    spaced = np.arange(10, dtype=np.int64) * 10_000_000
    assert ideal_rps(spaced, rps=100.0, slo_ms=10.0, seconds=1.0) == 10


def test_nothing_beyond_capacity_and_its_queue() -> None:
    due_ns = STEADY.instants_ns(150.0, 20.0, seed=1)
    assert 95 < ideal_rps(due_ns, rps=100.0, slo_ms=100.0, seconds=20.0) <= 100.5


@pytest.mark.parametrize("wave", [SQUARE, STEADY], ids=lambda wave: wave.name)
def test_arrivals_are_the_seeds_alone_and_keep_the_mean(wave: Wave) -> None:
    due_ns = wave.instants_ns(200.0, 30.0, seed=3)
    assert np.array_equal(due_ns, wave.instants_ns(200.0, 30.0, seed=3))
    assert 0.9 < len(due_ns) / 6000 < 1.1


def test_the_setting_of_a_load_is_the_nearest_on_its_side_of_saturation() -> None:
    assert [nearest((0.8, 1.0, 1.3), load) for load in (0.5, 0.9, 1.0, 1.5)] == [0.8, 0.8, 1.0, 1.3]
    assert nearest((0.9,), 1.5) == 0.9


def test_the_best_setting_is_judged_by_its_median_round() -> None:
    found = OpenLoopResults([run("a", 0, 90.0), run("a", 1, 10.0), run("a", 2, 20.0), run("b", 0, 50.0)], {})
    best = found.best("mosec", SQUARE.name, 0.9)
    assert best is not None
    assert (best.setting, goodput(best)) == ("b", 50.0)
    assert found.best("mosec", STEADY.name, 0.9) is None
