"""Expect what will come."""

import math
import re
from collections.abc import Callable

import pytest

from sloop.core.views import StageView
from sloop.errors import InputError
from sloop.policies.forecast.oracle import Oracle
from sloop.units import ms, s

COUNTS = (5.0, 1.0, 9.0, 2.0, 4.0, 3.0)


@pytest.mark.parametrize(
    ("now_ns", "expected_rps"), [(0, 5), (s(1), 9), (s(3), 4), (s(5), 3), (ms(1), 9), (ms(2999), 9), (s(4), 4)]
)
def test_is_the_busiest_second_that_the_horizon_touches(
    now_ns: int, expected_rps: float, arrivals: Callable[..., StageView]
) -> None:
    assert Oracle(counts=COUNTS, horizon_ns=s(2)).demand_rps(now_ns, arrivals(1)) == expected_rps


def test_beyond_its_list_it_expects_what_came_last(arrivals: Callable[..., StageView]) -> None:
    assert Oracle(counts=COUNTS).demand_rps(s(6), arrivals(7, 8)) == 8
    assert Oracle().demand_rps(0, arrivals()) == 0


@pytest.mark.parametrize("count", [-1.0, math.inf, math.nan, 1e300])
def test_refuses_what_nobody_can_send(count: float) -> None:
    """Wherever it stands: of a list with nan the least is what one makes of it."""
    for counts in ((3.0, count), (count, 3.0), (3.0, count, 3.0)):
        with pytest.raises(InputError, match=rf"counts = {re.escape(f'{count:g}')} is out of range"):
            Oracle(counts=counts)
