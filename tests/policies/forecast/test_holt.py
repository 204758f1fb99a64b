"""Expect the present level and trend to go on."""

from collections.abc import Callable

import pytest

from sloop.core.views import StageView
from sloop.errors import InputError
from sloop.policies.forecast.holt import Holt
from sloop.units import ms, s


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
