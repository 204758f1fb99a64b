"""DS2, InferLine and GrandSLAm: the specification's totals, and what each does not look at."""

import pytest

from sloop.reproduce.fa2.application import CPU, GPU, Hardware, problem
from sloop.solvers.fa2 import Choice, Stage, keeps
from sloop.solvers.fa2_baselines import ds2, grandslam, inferline, inferline_full
from sloop.solvers.graph import Way

THREE = (6, 12, 18, 24, 27, 30, 36, 42, 48, 54, 60)
SIX = (6, 8, 12, 18, 24, 27)
SLICES = (6, 8, 10, 12, 18, 24, 27, 30, 36, 42, 48, 54, 60)


def total(choices: tuple[Choice, ...]) -> int:
    return sum(choice.replicas for choice in choices)


@pytest.mark.parametrize(
    ("hardware", "paths", "rates", "by_inferline", "by_ds2"),
    [
        (CPU, 3, THREE, (7, 10, 15, 17, 20, 20, 24, 29, 31, 34, 37), (8, 11, 16, 19, 21, 23, 27, 32, 34, 38, 43)),
        (CPU, 6, SIX, (16, 19, 24, 34, 42, 47), (19, 23, 30, 43, 54, 60)),
        (
            GPU,
            6,
            SLICES,
            (10, 10, 11, 11, 12, 13, 15, 16, 17, 19, 19, 23, 24),
            (11, 11, 12, 13, 15, 16, 19, 21, 23, 25, 26, 30, 33),
        ),
    ],
)
def test_totals_of_the_specification(
    hardware: Hardware, paths: int, rates: tuple[int, ...], by_inferline: tuple[int, ...], by_ds2: tuple[int, ...]
) -> None:
    """§7.2-5, every number."""
    given = [problem(hardware, paths, rate_rps) for rate_rps in rates]
    assert tuple(total(ds2(own.stages)) for own in given) == by_ds2
    assert tuple(total(inferline(own.stages, own.ways)) for own in given) == by_inferline


def test_inferline_gives_the_time_to_the_first() -> None:
    early = Stage("early", 20.0, (50.0, 60.0, 70.0, 80.0))
    late = Stage("late", 20.0, (50.0, 60.0, 70.0, 80.0))
    chosen = inferline([early, late], [Way((0, 1), 330.0)])
    assert [own.batch for own in chosen] == [4, 1]
    assert [own.batch for own in inferline([early, late], [Way((0, 1), 5_000.0)])] == [4, 4]


def test_the_fuller_inferline_grows_where_it_saves() -> None:
    idle = Stage("idle", 1.0, (50.0, 60.0, 70.0, 80.0))
    busy = Stage("busy", 49.0, (50.0, 60.0, 70.0, 80.0))
    chosen = inferline_full([idle, busy], [Way((0, 1), 400.0)])
    assert [own.batch for own in chosen] == [1, 4]
    for rate_rps in range(6, 61, 9):
        given = problem(CPU, 6, rate_rps)
        full = inferline_full(given.stages, given.ways)
        assert keeps(full, given.ways)
        assert total(full) <= total(ds2(given.stages))


def test_grandslam_splits_once_and_takes_anybodys_replicas() -> None:
    first = Stage("first", 10.0, (100.0, 150.0, 210.0))
    second = Stage("second", 10.0, (50.0, 80.0, 101.0))
    chosen = grandslam([first, second], [Way((0, 1), 300.0), Way((1,), 90.0)], [4, 2])
    assert [(own.batch, own.replicas) for own in chosen] == [(2, 4), (2, 2)]
    assert chosen[0].wait_ms == pytest.approx(100.0)


def test_grandslam_without_requests_or_time_takes_one() -> None:
    quiet = Stage("quiet", 0.0, (100.0, 150.0))
    slow = Stage("slow", 5.0, (100.0, 150.0))
    assert [own.batch for own in grandslam([quiet, slow], [Way((0, 1), 20.0)], [1, 1])] == [1, 1]
