"""Forecast policies: the rate that each expects of known arrivals."""

import math
import re
from collections.abc import Callable

import pytest

from sloop.core.views import StageView
from sloop.errors import InputError
from sloop.options import check_ranges
from sloop.policies.forecast import Ewma, Last, MovingMax, OracleForecast, Times
from sloop.units import ms, s


def test_is_the_rate_of_the_window(arrivals: Callable[..., StageView]) -> None:
    stage = arrivals(10, 20, 60)
    assert Last().demand_rps(0, stage) == 60
    assert Last(window_ns=s(2)).demand_rps(0, stage) == 40
    assert Last().demand_rps(0, arrivals()) == 0


def test_refuses_an_empty_window() -> None:
    with pytest.raises(InputError, match="window_ms"):
        check_ranges(Last(window_ns=0))


# times


def test_is_a_multiple_of_the_last_window(arrivals: Callable[..., StageView]) -> None:
    ingress = arrivals(10, 20, 60)
    assert Times(factor=1.5).demand_rps(0, ingress) == 90
    assert Times(factor=2, window_ns=s(2)).demand_rps(0, ingress) == 80
    assert Times().demand_rps(0, arrivals()) == 0


def test_refuses_a_factor_of_nothing() -> None:
    with pytest.raises(InputError, match="factor must be a number above 0 and at most 1,000,000, not 0"):
        check_ranges(Times(factor=0))
    with pytest.raises(InputError, match=r"factor must be .*, not 1e\+308"):
        check_ranges(Times(factor=1e308))


# moving_max


def test_remembers_a_peak_for_the_horizon(arrivals: Callable[..., StageView]) -> None:
    assert MovingMax(horizon_ns=s(3)).demand_rps(0, arrivals(99, 10, 50, 20)) == 50
    assert MovingMax(horizon_ns=s(3), window_ns=s(2)).demand_rps(0, arrivals(99, 10, 50, 20)) == 35
    assert MovingMax().demand_rps(0, arrivals()) == 0


def test_a_window_may_be_many_buckets_or_fewer_than_there_are(arrivals: Callable[..., StageView]) -> None:
    assert MovingMax().demand_rps(0, arrivals(4, bucket_ns=ms(100))) == 40
    assert MovingMax(window_ns=s(1)).demand_rps(0, arrivals(*[1] * 10, *[3] * 10, bucket_ns=ms(100))) == 30


def test_refuses_a_horizon_shorter_than_its_window() -> None:
    with pytest.raises(InputError, match="horizon_ms must be a time of at least 1,000 ms, not 500 ms"):
        MovingMax(horizon_ns=ms(500))


# ewma


def test_weights_halve_with_age(arrivals: Callable[..., StageView]) -> None:
    stage = arrivals(40, 0, 10)
    assert Ewma(half_life_ns=s(1)).demand_rps(0, stage) == pytest.approx((40 / 4 + 0 + 10) / (1 / 4 + 1 / 2 + 1))
    assert Ewma().demand_rps(0, arrivals(*[30] * 50)) == pytest.approx(30)
    assert Ewma().demand_rps(0, arrivals()) == 0


def test_a_step_up_is_followed_at_once_if_so_wanted(arrivals: Callable[..., StageView]) -> None:
    paldia = Ewma(half_life_ns=s(1), at_least_last=True)
    assert paldia.demand_rps(0, arrivals(10, 10, 90)) == 90
    assert paldia.demand_rps(0, arrivals(40, 0, 10)) == Ewma(half_life_ns=s(1)).demand_rps(0, arrivals(40, 0, 10)) > 10
    assert paldia.demand_rps(0, arrivals(1, 5, bucket_ns=ms(100))) == 50


def test_refuses_no_half_life() -> None:
    with pytest.raises(InputError, match="half_life_ms"):
        check_ranges(Ewma(half_life_ns=0))


# oracle


COUNTS = (5.0, 1.0, 9.0, 2.0, 4.0, 3.0)


@pytest.mark.parametrize(
    ("now_ns", "expected_rps"), [(0, 5), (s(1), 9), (s(3), 4), (s(5), 3), (ms(1), 9), (ms(2999), 9), (s(4), 4)]
)
def test_is_the_busiest_second_that_the_horizon_touches(
    now_ns: int, expected_rps: float, arrivals: Callable[..., StageView]
) -> None:
    assert OracleForecast(counts=COUNTS, horizon_ns=s(2)).demand_rps(now_ns, arrivals(1)) == expected_rps


def test_beyond_its_list_it_expects_what_came_last(arrivals: Callable[..., StageView]) -> None:
    assert OracleForecast(counts=COUNTS).demand_rps(s(6), arrivals(7, 8)) == 8
    assert OracleForecast().demand_rps(0, arrivals()) == 0


@pytest.mark.parametrize("count", [-1.0, math.inf, math.nan, 1e300])
def test_refuses_what_nobody_can_send(count: float) -> None:
    """Wherever it stands: of a list with nan the least is what one makes of it."""
    for counts in ((3.0, count), (count, 3.0), (3.0, count, 3.0)):
        with pytest.raises(InputError, match=rf"counts\[\d\] must be a number of .*, not {re.escape(f'{count:g}')}"):
            check_ranges(OracleForecast(counts=counts))
