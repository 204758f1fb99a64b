"""Expect a bad second of the recent past."""

from collections.abc import Callable

import pytest

from sloop.core.views import StageView
from sloop.errors import InputError
from sloop.policies.forecast.p99_rate import P99Rate
from sloop.units import ms, s


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
