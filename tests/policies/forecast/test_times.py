"""Expect a multiple of what came last."""

from collections.abc import Callable

import pytest

from sloop.core.views import StageView
from sloop.errors import InputError
from sloop.policies.forecast.times import Times
from sloop.units import s


def test_is_a_multiple_of_the_last_window(arrivals: Callable[..., StageView]) -> None:
    ingress = arrivals(10, 20, 60)
    assert Times(factor=1.5).demand_rps(0, ingress) == 90
    assert Times(factor=2, window_ns=s(2)).demand_rps(0, ingress) == 80
    assert Times().demand_rps(0, arrivals()) == 0


def test_refuses_a_factor_of_nothing() -> None:
    with pytest.raises(InputError, match="factor = 0 is out of range"):
        Times(factor=0)
    with pytest.raises(InputError, match=r"factor = 1e\+308 is out of range"):
        Times(factor=1e308)
