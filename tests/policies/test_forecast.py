"""Forecast policies: the rate that each expects of known arrivals."""

import math
import re
from collections.abc import Callable

import numpy as np
import pytest

from sloop.core.views import StageView
from sloop.errors import InputError
from sloop.policies.forecast import SHIPPED, Ewma, Holt, Last, Lstm, MovingMax, OracleForecast, P99Rate, Times
from sloop.solvers.forecasting import LstmNetwork
from sloop.units import ms, s


def test_is_the_rate_of_the_window(arrivals: Callable[..., StageView]) -> None:
    stage = arrivals(10, 20, 60)
    assert Last().demand_rps(0, stage) == 60
    assert Last(window_ns=s(2)).demand_rps(0, stage) == 40
    assert Last().demand_rps(0, arrivals()) == 0


def test_refuses_an_empty_window() -> None:
    with pytest.raises(InputError, match="window_ms"):
        Last(window_ns=0)


# times


def test_is_a_multiple_of_the_last_window(arrivals: Callable[..., StageView]) -> None:
    ingress = arrivals(10, 20, 60)
    assert Times(factor=1.5).demand_rps(0, ingress) == 90
    assert Times(factor=2, window_ns=s(2)).demand_rps(0, ingress) == 80
    assert Times().demand_rps(0, arrivals()) == 0


def test_refuses_a_factor_of_nothing() -> None:
    with pytest.raises(InputError, match="factor must be a number above 0 and at most 1,000,000, not 0"):
        Times(factor=0)
    with pytest.raises(InputError, match=r"factor must be .*, not 1e\+308"):
        Times(factor=1e308)


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
        Ewma(half_life_ns=0)


# holt


def test_by_hand(arrivals: Callable[..., StageView]) -> None:
    """Level 10; then 10 + 0.5 * 10 = 15 with trend 0.2 * 5 = 1; then 16 + 0.5 * 14 = 23, trend 1 + 0.2 * 7 = 2.4."""
    assert Holt(level=0.5, trend=0.2, horizon_ns=s(2)).demand_rps(0, arrivals(10, 20, 30)) == pytest.approx(27.8)


def test_a_ramp_is_met_and_a_level_kept(arrivals: Callable[..., StageView]) -> None:
    assert Holt().demand_rps(0, arrivals(*range(0, 600, 2))) == pytest.approx(598 + 8, rel=1e-3)
    assert Holt().demand_rps(0, arrivals(*[50] * 60)) == 50
    assert Holt().demand_rps(0, arrivals(*range(300, 0, -10))) == 0, "no less than nothing comes"
    assert Holt().demand_rps(0, arrivals()) == 0


@pytest.mark.parametrize("rates", [[True, False], [False] * 3 + [True] * 4, []])
def test_short_buckets_are_seconds(rates: list[bool], arrivals: Callable[..., StageView]) -> None:
    """Ten buckets of a tenth are one second."""
    counts = [4 + 4 * rate for rate in rates]
    tenths = [count for each in counts for count in (each, *[0] * 9)]
    assert Holt().demand_rps(0, arrivals(*tenths, bucket_ns=ms(100))) == Holt().demand_rps(0, arrivals(*counts))


@pytest.mark.parametrize(("key", "value"), [("level", 0.0), ("trend", 1.5)])
def test_refuses_weights_beyond_one(key: str, value: float) -> None:
    with pytest.raises(InputError, match=key):
        Holt(**{key: value})  # type: ignore[arg-type]  # both are floats


# p99_rate


def test_is_a_nearest_rank_of_the_window(arrivals: Callable[..., StageView]) -> None:
    assert P99Rate().demand_rps(0, arrivals(999, *range(60))) == 59
    assert P99Rate(share=0.5).demand_rps(0, arrivals(*range(60))) == 29
    assert P99Rate(share=0.5, window_ns=s(2)).demand_rps(0, arrivals(90, 7, 8)) == 7
    assert P99Rate(window_ns=s(200)).demand_rps(0, arrivals(999, 999, *[5] * 198)) == 5, (
        "one in a hundred may exceed it"
    )
    assert P99Rate().demand_rps(0, arrivals()) == 0


def test_it_is_seconds_that_are_ranked(arrivals: Callable[..., StageView]) -> None:
    assert P99Rate().demand_rps(0, arrivals(*[9, *[0] * 9] * 20, bucket_ns=ms(100))) == 9


@pytest.mark.parametrize("share", [0.0, 1.01])
def test_refuses_a_share_that_is_none(share: float) -> None:
    with pytest.raises(InputError, match="share"):
        P99Rate(share=share)


# lstm


BUSIEST = LstmNetwork(3, 2, 4, np.zeros(4 + 9 + 1))
"""One unit without weights: the factor on the busiest of three bins of two seconds is always one."""


def test_it_asks_the_network_for_its_bins(arrivals: Callable[..., StageView]) -> None:
    policy = Lstm(weights=BUSIEST.encoded(), margin=0.5)
    assert policy.demand_rps(0, arrivals(99, 1, 2, 3, 4, 8, 6)) == 12, "the 99 is older than three bins"
    tenths = [count for each in (99, 1, 2, 3, 4, 8, 6) for count in (each, *[0] * 9)]
    assert policy.demand_rps(0, arrivals(*tenths, bucket_ns=ms(100))) == 12


def test_before_it_has_seen_enough_it_expects_the_busiest_second_again(arrivals: Callable[..., StageView]) -> None:
    assert Lstm().demand_rps(0, arrivals(9, 40, *[10] * 117)) == 40
    assert Lstm(margin=0.2).demand_rps(0, arrivals(10)) == 12
    assert Lstm().demand_rps(0, arrivals()) == 0


@pytest.mark.parametrize("weights", SHIPPED)
def test_what_ships_foresees_a_level_near_itself(weights: str, arrivals: Callable[..., StageView]) -> None:
    level = [18, 21, 20, 22, 19, 20, 21, 19] * 20
    foreseen = Lstm(weights=weights).demand_rps(0, arrivals(*level))
    assert 19 < foreseen < 25
    tenfold = Lstm(weights=weights).demand_rps(0, arrivals(*[10 * count for count in level]))
    assert tenfold == pytest.approx(10 * foreseen, rel=1e-4)


def test_what_ships_is_what_was_published() -> None:
    ipa, biscale = (Lstm(weights=weights)._network for weights in SHIPPED)
    assert (ipa.bins, ipa.bin_s, ipa.horizon_s, ipa.units) == (12, 10, 20, 25)
    assert (biscale.bins, biscale.bin_s, biscale.horizon_s, biscale.units) == (6, 10, 10, 25)


@pytest.mark.parametrize(
    ("key", "value"), [("weights", "ipaa"), ("weights", "1:2:3:" + "A" * 99), ("margin", -1.0), ("margin", 1e308)]
)
def test_refuses_what_cannot_be(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        Lstm(**{key: value})  # type: ignore[arg-type]  # one of its own keys


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
        with pytest.raises(InputError, match=rf"counts must be a number of .*, not {re.escape(f'{count:g}')}"):
            OracleForecast(counts=counts)
