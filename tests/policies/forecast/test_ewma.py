"""Expect a weighted mean of the past."""

from collections.abc import Callable

import pytest

from sloop.core.views import StageView
from sloop.errors import InputError
from sloop.policies.forecast.ewma import Ewma
from sloop.units import s


def test_weights_halve_with_age(arrivals: Callable[..., StageView]) -> None:
    stage = arrivals(40, 0, 10)
    assert Ewma(half_life_ns=s(1)).demand_rps(0, stage) == pytest.approx((40 / 4 + 0 + 10) / (1 / 4 + 1 / 2 + 1))
    assert Ewma().demand_rps(0, arrivals(*[30] * 50)) == pytest.approx(30)
    assert Ewma().demand_rps(0, arrivals()) == 0


def test_refuses_no_half_life() -> None:
    with pytest.raises(InputError, match="half_life_ms"):
        Ewma(half_life_ns=0)
