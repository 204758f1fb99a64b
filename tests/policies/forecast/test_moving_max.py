"""Expect the busiest interval again."""

from collections.abc import Callable

import pytest

from sloop.core.views import StageView
from sloop.errors import InputError
from sloop.policies.forecast.moving_max import MovingMax
from sloop.units import ms, s


def test_remembers_a_peak_for_the_horizon(arrivals: Callable[..., StageView]) -> None:
    assert MovingMax(horizon_ns=s(3)).demand_rps(0, arrivals(99, 10, 50, 20)) == 50
    assert MovingMax(horizon_ns=s(3), window_ns=s(2)).demand_rps(0, arrivals(99, 10, 50, 20)) == 35
    assert MovingMax().demand_rps(0, arrivals()) == 0


def test_a_window_may_be_many_buckets_or_fewer_than_there_are(arrivals: Callable[..., StageView]) -> None:
    assert MovingMax().demand_rps(0, arrivals(4, bucket_ns=ms(100))) == 40
    assert MovingMax(window_ns=s(1)).demand_rps(0, arrivals(*[1] * 10, *[3] * 10, bucket_ns=ms(100))) == 30


def test_refuses_a_horizon_shorter_than_its_window() -> None:
    with pytest.raises(InputError, match="horizon_ms = 500 is out of range"):
        MovingMax(horizon_ns=ms(500))
