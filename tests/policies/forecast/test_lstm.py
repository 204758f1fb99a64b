"""Expect what a network foresees."""

from collections.abc import Callable

import numpy as np
import pytest

from sloop.core.views import StageView
from sloop.errors import InputError
from sloop.policies.forecast.lstm import SHIPPED, Lstm
from sloop.solvers.lstm import Network
from sloop.units import ms

BUSIEST = Network(3, 2, 4, np.zeros(4 + 9 + 1))
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
