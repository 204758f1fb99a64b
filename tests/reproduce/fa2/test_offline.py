"""What needs no simulation: every row of it is at least of the right shape."""

from functools import cache

import pytest

from sloop.reproduce.fa2.application import CPU, GPU, VISION
from sloop.reproduce.fa2.offline import RATES, Sweep, graph_of, replicas, rows, swept, throughputs
from sloop.reproduce.rows import Row
from sloop.streams import stream


@cache
def sweeps() -> tuple[Sweep, Sweep]:
    return swept(CPU, VISION), swept(GPU, 6)


@cache
def quick_rows() -> tuple[Row, ...]:
    return tuple(rows(sweeps(), quick=True))


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
    machine = {"E9"}  # how quick this machine is, is not for a test to say
    off = [
        (row.experiment, row.metric) for row in quick_rows() if row.verdict == "off" and row.experiment not in machine
    ]
    assert not off
    assert {"E0", "E0b", "E5", "E6", "E8", "E9", "7.2"} == {row.experiment for row in quick_rows()}
    totals = [row for row in quick_rows() if "to the unit" in row.metric]
    assert all(row.verdict == "reproduced" for row in totals)


def test_small_replicas_do_most() -> None:
    most = {name: max(rate for _, rate in points) for name, points in throughputs().items()}
    assert most["4 × 1"] > most["2 × 2"] > most["1 × 4"]


def test_random_graphs_are_what_the_specification_draws() -> None:
    draw = stream(1, "test")
    for _ in range(20):
        stages, ways = graph_of(draw)
        assert 2 <= len(ways) <= 5
        assert all(2 <= len(way.stages) <= 5 for way in ways)
        assert replicas(stages, ways, mode="milp") >= len(stages)
