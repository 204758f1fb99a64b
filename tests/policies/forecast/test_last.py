"""Expect what came last."""

from collections.abc import Callable

import pytest

from sloop.core.views import StageView
from sloop.errors import InputError
from sloop.policies.forecast.last import Last
from sloop.units import s


def test_is_the_rate_of_the_window(arrivals: Callable[..., StageView]) -> None:
    stage = arrivals(10, 20, 60)
    assert Last().demand_rps(0, stage) == 60
    assert Last(window_ns=s(2)).demand_rps(0, stage) == 40
    assert Last().demand_rps(0, arrivals()) == 0


def test_refuses_an_empty_window() -> None:
    with pytest.raises(InputError, match="window_ms"):
        Last(window_ns=0)
